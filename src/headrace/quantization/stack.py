"""Packed weights of many experts, one stack for each projection, and the experts modules of Transformers made to run on them.

Only the experts that a batch of tokens hits are expanded, one at a time. Nothing is shared between experts, nor between gate and up: each keeps its own scales, global and of
the input, as they are stored. Transformers itself is not imported: an experts module is known by what its decorator ``use_experts_implementation`` (5.24) leaves on it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from headrace.errors import UnsupportedQuantization
from headrace.quantization.input_slices import InputSlice
from headrace.quantization.parameters import FixedTypes, add_parts, drop_parts, parts_of, round_scaled, scale_inputs
from headrace.quantization.rounding import check_inputs, describe_inputs, round_inputs
from headrace.quantization.scheme import Role, WeightQuantization
from headrace.quantization.weight_cuts import WeightCut

_FLAGS = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "is_concatenated")
_SPLIT = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Names of gate, up and down where they are three. Mixtral's are w1, w3 and w2."""
_FUSED = ("gate_up_proj", "down_proj")
_UNGATED = (("up_proj", "down_proj"), ("w1", "w2"))

_Hit = tuple[int, Tensor, Tensor]
"""An expert, the tokens that want it, and where it stands among their choices."""
_Out = tuple[int, Tensor, Tensor, Tensor]
"""The same with what the expert makes of these tokens, without a bias."""


class PackedStack(FixedTypes):
    """One projection of ``num_experts`` experts, all packed alike.

    Its parameters are the stored parts with the experts as a dimension before all others: ``weight_packed`` ``[num_experts, N, K / 2]``, a global scale ``[num_experts]``.
    They are made with undefined values, and keep their types whatever the module is cast to.
    """

    def __init__(
        self,
        weight: WeightQuantization,
        num_experts: int,
        *,
        quantize_inputs: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        """Make a stack for ``weight``, which is that of one expert. ``quantize_inputs=False``: inputs are not rounded.

        Raises `UnsupportedQuantization` for a rounding of inputs that is not known.
        """
        super().__init__()
        self.quantization = self.stored = weight
        self.num_experts = self.num_stored = num_experts
        self.cut: WeightCut | None = None
        self.first_expert = 0
        self.input_slice: InputSlice | None = None
        self.out_features, self.in_features = weight.shape
        self.quantize_inputs = quantize_inputs and weight.inputs is not None
        if self.quantize_inputs and weight.inputs is not None:
            check_inputs(weight.inputs, has_scale=Role.INPUT_SCALE in weight.parts)
        add_parts(self, weight, stack=(num_experts,), device=device)

    def keep_slice(self, cut: WeightCut, experts: tuple[int, int], input_slice: InputSlice | None = None) -> None:
        """Become one rank's part of the stack: of the experts ``[start, stop)`` what ``cut`` keeps of each. Parts are made anew, with undefined values.

        ``out_features``, ``in_features``, ``stored`` and ``num_stored`` stay the whole stack's. For ``input_slice`` see `QuantizedLinear.keep_slice`.
        """
        device = self.get_parameter(self.fixed_names[0]).device
        drop_parts(self)
        self.cut, self.input_slice = cut, input_slice
        self.first_expert, self.num_experts = experts[0], experts[1] - experts[0]
        self.quantization = cut.narrowed(self.quantization)
        add_parts(self, self.quantization, stack=(self.num_experts,), device=device)

    def linear(self, x: Tensor, expert: int) -> Tensor:
        """Return ``x`` ``[num_tokens, in_features]`` times the weight of ``expert``, as ``[num_tokens, out_features]`` in ``x``'s dtype; there is no bias."""
        parts = parts_of(self, self.quantization, of_input=True, index=expert)
        x = scale_inputs(x, parts)
        if self.quantize_inputs:
            x = round_scaled(x, self.quantization, parts, self.input_slice)
        return self.product(x, expert)

    def product(self, x: Tensor, expert: int) -> Tensor:
        """Return `linear` of an ``x`` that is scaled and rounded already."""
        return functional.linear(x, self.dequantized(expert, x.dtype))

    def scaled(self, x: Tensor, expert: int) -> Tensor:
        """Return ``x`` times the pre-scale of ``expert``, where it has one."""
        return scale_inputs(x, parts_of(self, self.quantization, of_input=True, index=expert))

    @property
    def rounds_together(self) -> bool:
        """Whether rounding inputs asks other ranks, so that it is done for all experts at once: see `round_together`."""
        inputs = self.quantization.inputs
        if not self.quantize_inputs or inputs is None or self.input_slice is None:
            return False
        return self.input_slice.asks_others(inputs)

    def round_together(self, x: Tensor, experts: Tensor) -> Tensor:
        """Return ``x`` ``[num_tokens, k, features]``, scaled, rounded for the ``experts`` ``[num_tokens, k]`` that it goes to, those of other ranks among them.

        Other ranks are asked once, for a tensor whose shape does not depend on which experts these are.
        """
        inputs, scale = self.quantization.inputs, None
        assert inputs is not None
        if Role.INPUT_SCALE in self.quantization.parts:
            stored = self.get_parameter(self.quantization.parts[Role.INPUT_SCALE].suffix).reshape(self.num_experts, -1)
            scale = stored[experts.clamp(max=self.num_experts - 1), :1].unsqueeze(-1)
        return round_inputs(x, inputs, scale, None, self.input_slice)

    def dequantized(self, expert: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight of ``expert`` as ``[out_features, in_features]`` in ``dtype``, of a rank's stack its slice: a new tensor, without the pre-scale."""
        weight = self.quantization
        with torch.no_grad():
            parts = parts_of(self, weight, of_input=False, index=expert)
            return weight.scheme.dequantize(parts, shape=weight.shape, dtype=dtype)

    def extra_repr(self) -> str:
        """Return sizes, scheme and the rounding of inputs, for ``print(model)``."""
        inputs = describe_inputs(self.quantization.inputs if self.quantize_inputs else None)
        return (
            f"num_experts={self.num_experts}, in_features={self.in_features}, out_features={self.out_features}, "
            f"scheme={self.quantization.scheme.describe()}, inputs={inputs}"
            + (f", of which {list(self.quantization.shape)} of each are this rank's" if self.cut is not None else "")
        )


def install_experts(experts: nn.Module, stacks: Mapping[str, PackedStack]) -> None:
    """Make ``experts`` run on ``stacks``, which become its children under the names given; the plain weights that they stand for are dropped.

    Names: gate_proj, up_proj and down_proj; or w1, w3 and w2; or gate_up_proj and down_proj, where the file holds gate and up in one (their rows in the order that the
    model wants); without a gate up_proj and down_proj, or w1 and w2. The module keeps its biases, and its class becomes a subclass of its own, so that
    ``isinstance`` and the class's own ``_apply_gate`` keep working. Nothing is changed where this raises `UnsupportedQuantization`: for a module that is built otherwise than
    this knows, has a norm after each expert, or whose sizes the stacks do not fit.
    """
    module: Any = experts
    ups, down = _choose_names(module, stacks)
    _check_sizes(module, stacks, ups, down)
    for name in ("gate_up_proj", "up_proj", "down_proj"):
        experts._parameters.pop(name, None)
    for name, stack in stacks.items():
        experts.register_module(name, stack)
    module.packed_ups, module.packed_down = ups, down
    module.__class__ = _packed_class(module.__class__)


class PackedExperts(nn.Module):
    """What `install_experts` puts before a class of experts: the forward. Flags, biases and ``_apply_gate`` are the class's own."""

    packed_ups: tuple[str, ...]
    packed_down: str
    num_experts: int
    has_gate: bool
    has_bias: bool
    is_concatenated: bool
    act_fn: Any
    _apply_gate: Any

    @property
    def is_sliced(self) -> bool:
        """Whether this is one of several ranks' part of the experts."""
        return self.down.cut is not None

    @property
    def ups(self) -> tuple[PackedStack, ...]:
        """The stacks whose outputs make the inner activations, in their order."""
        return tuple(self._stack(name) for name in self.packed_ups)

    @property
    def down(self) -> PackedStack:
        """The stack behind these."""
        return self._stack(self.packed_down)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of what each token's experts make of it: ``hidden_states`` ``[num_tokens, hidden]``, the other two ``[num_tokens, k]``.

        As the eager forward of Transformers. Sums are in the dtype of ``hidden_states``; without a gate (Nemotron-H) in that of the weights, as its class has it.
        Experts beyond ``num_experts`` (those of other ranks) are left out.
        """
        sums = torch.zeros_like(hidden_states, dtype=hidden_states.dtype if self.has_gate else top_k_weights.dtype)
        hits = _hits(top_k_index, self.num_experts)
        outs = self._outs_together if self.down.rounds_together else self._outs
        for expert, tokens, places, out in outs(hidden_states, top_k_index, hits):
            if self.has_bias:
                out = out + self.get_parameter("down_proj_bias")[expert]
            out = out * top_k_weights[tokens, places, None]
            sums.index_add_(0, tokens, out.to(sums.dtype))
        return sums.to(hidden_states.dtype)

    def _outs(self, x: Tensor, top_k_index: Tensor, hits: Iterable[_Hit]) -> Iterator[_Out]:
        """Yield what each expert makes of its tokens, one at a time."""
        for expert, tokens, places in hits:
            yield expert, tokens, places, self.down.linear(self._inner(x[tokens], expert), expert)

    def _outs_together(self, x: Tensor, top_k_index: Tensor, hits: Iterable[_Hit]) -> Iterator[_Out]:
        """Yield the same, the inner activations of all having been rounded at once."""
        hits = list(hits)
        inner = x.new_zeros(*top_k_index.shape, self.down.quantization.shape[1])
        for expert, tokens, places in hits:
            inner[tokens, places] = self.down.scaled(self._inner(x[tokens], expert), expert)
        inner = self.down.round_together(inner, top_k_index)
        for expert, tokens, places in hits:
            yield expert, tokens, places, self.down.product(inner[tokens, places], expert)

    def _inner(self, x: Tensor, expert: int) -> Tensor:
        """Return the activations between the projections."""
        projections = [stack.linear(x, expert) for stack in self.ups]
        if len(projections) == 1:
            [inner] = projections
        elif self.is_concatenated:
            inner = torch.cat(projections, dim=-1)
        else:
            inner = torch.stack(projections, dim=-1).flatten(-2)
        if self.has_bias:
            inner = inner + self.get_parameter("gate_up_proj_bias" if self.has_gate else "up_proj_bias")[expert]
        activated: Tensor = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
        return activated

    def _stack(self, name: str) -> PackedStack:
        stack = self._modules[name]
        assert isinstance(stack, PackedStack)
        return stack


@functools.cache
def _packed_class(plain: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of ``plain`` that runs on stacks: one for each class. It says it is of the same module, for all else in it is."""
    return type(f"Packed{plain.__name__}", (PackedExperts, plain), {"__module__": plain.__module__})


def _hits(top_k_index: Tensor, num_experts: int) -> Iterator[_Hit]:
    """Yield each expert of ``top_k_index`` ``[num_tokens, k]`` below ``num_experts``, with the tokens that want it and where it stands among their choices."""
    num_tokens = len(top_k_index)
    # By place, then by token, in which order the eager loop takes its rows.
    choices = top_k_index.T.reshape(-1)
    order = choices.argsort(stable=True)
    counts = torch.bincount(choices, minlength=num_experts)[:num_experts].tolist()
    start = 0
    for expert, count in enumerate(counts):
        if count:
            chosen = order[start : start + count]
            yield expert, chosen % num_tokens, chosen // num_tokens
            start += count


def _choose_names(experts: Any, stacks: Mapping[str, PackedStack]) -> tuple[tuple[str, ...], str]:
    """Return the names of the stacks whose outputs make the inner activations, and that of the one behind them."""
    missing = [flag for flag in (*_FLAGS, "num_experts") if not hasattr(experts, flag)]
    if missing:
        raise _refusal(experts, f"It is not built as such modules are in Transformers: it has no {', '.join(missing)}.")
    if experts.has_post_expert_norm:
        raise _refusal(experts, "It has a norm after each expert, which is not known here.")
    known = [*_SPLIT, _FUSED] if experts.has_gate else [*_UNGATED]
    for names in known:
        if set(names) == set(stacks):
            return tuple(names[:-1]), names[-1]
    expected = "; ".join(", ".join(names) for names in known)
    raise _refusal(experts, f"The checkpoint packs {', '.join(sorted(stacks))} of its experts; known are: {expected}.")


def _check_sizes(experts: Any, stacks: Mapping[str, PackedStack], ups: tuple[str, ...], down: str) -> None:
    """Raise where a stack has not the sizes of the plain weight that it stands for."""
    plain_up = experts._parameters.get("gate_up_proj" if experts.has_gate else "up_proj")
    plain_down = experts._parameters.get("down_proj")
    if plain_up is None or plain_down is None or plain_up.dim() != 3 or plain_down.dim() != 3:
        raise _refusal(experts, "It does not hold its projections as one tensor for all experts.")
    rows, columns = (2, 1) if experts.is_transposed else (1, 2)
    wanted = {name: (plain_up.shape[rows] // len(ups), plain_up.shape[columns]) for name in ups}
    wanted[down] = (plain_down.shape[rows], plain_down.shape[columns])
    for name, stack in stacks.items():
        found = (stack.num_experts, *stack.quantization.shape)
        if found != (experts.num_experts, *wanted[name]):
            raise UnsupportedQuantization(
                f"The packed weights do not fit {type(experts).__name__}.",
                f"Its {name} is {_by(experts.num_experts, *wanted[name])}; the checkpoint's is {_by(*found)}.",
                "Take config.json from where the model was made.",
            )


def _by(num_experts: int, rows: int, columns: int) -> str:
    return f"{num_experts} experts of {rows} × {columns}"


def _refusal(experts: nn.Module, why: str) -> UnsupportedQuantization:
    return UnsupportedQuantization(
        f"{type(experts).__name__} cannot hold packed weights.",
        why,
        "Load with dequantize=True: the weights are then expanded as they arrive.",
    )
