"""Experts over packed stacks compute what the eager loop of Transformers does with the weights expanded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.support.byte_scheme import ByteScheme, byte_weight, fill
from tests.support.closeness import assert_computed_alike
from tests.support.shared_largest import SharedLargest
from torch import Tensor, nn
from torch.nn import functional

from headrace.errors import UnsupportedQuantization
from headrace.quantization.fp8 import Fp8Channel
from headrace.quantization.input_slices import InputSlice
from headrace.quantization.rounding import round_inputs
from headrace.quantization.scheme import InputQuantization, Role, StoredPart, WeightQuantization
from headrace.quantization.slices import slice_weight
from headrace.quantization.stack import PackedExperts, PackedStack, install_experts
from headrace.quantization.weight_cuts import WeightCut

NUM_EXPERTS, HIDDEN, INNER, NUM_TOKENS = 5, 8, 6, 7
STATIC = InputQuantization(format="e4m3", granularity="tensor", is_dynamic=False)
TOKEN = InputQuantization(format="e4m3", granularity="token")
NVFP4 = InputQuantization(format="nvfp4", granularity="group", group_size=16, is_dynamic=False)


class Experts(nn.Module):
    """Experts as Transformers has them, in every layout that its decorator knows, with the loop of its eager forward."""

    def __init__(
        self, *, gate: bool = True, bias: bool = False, transposed: bool = False, concatenated: bool = True
    ) -> None:
        super().__init__()
        self.num_experts, self.act_fn = NUM_EXPERTS, functional.silu
        self.has_gate, self.has_bias, self.is_transposed, self.is_concatenated = gate, bias, transposed, concatenated
        self.has_post_expert_norm = False
        self.up_name = "gate_up_proj" if gate else "up_proj"
        rows = 2 * INNER if gate else INNER
        for name, shape in ((self.up_name, (rows, HIDDEN)), ("down_proj", (HIDDEN, INNER))):
            stored = shape[::-1] if transposed else shape
            self.register_parameter(name, nn.Parameter(torch.empty(NUM_EXPERTS, *stored, device="meta")))
            if bias:
                self.register_parameter(f"{name}_bias", nn.Parameter(torch.randn(NUM_EXPERTS, shape[0])))

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        # Not what any default would be, to see that it is this one that is called.
        gate, up = gate_up.chunk(2, dim=-1) if self.is_concatenated else (gate_up[..., ::2], gate_up[..., 1::2])
        return (up + 1) * gate.clamp(max=2) * torch.sigmoid(gate)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        raise AssertionError("The plain weights are gone.")

    def eager(self, weights: dict[str, Tensor], x: Tensor, index: Tensor, shares: Tensor) -> Tensor:
        """Return the sum of the experts in ``index``, with ``weights`` ``[num_experts, rows, columns]`` instead of the module's own.

        Nemotron-H, which has no gate, adds up in the dtype of the shares; others in that of the inputs.
        """
        sums = torch.zeros_like(x, dtype=x.dtype if self.has_gate else shares.dtype)
        for expert in range(NUM_EXPERTS):
            places, tokens = torch.where(expert == index.T)
            inner = functional.linear(x[tokens], weights["up"][expert])
            if self.has_bias:
                inner = inner + self.get_parameter(f"{self.up_name}_bias")[expert]
            inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
            out = functional.linear(inner, weights["down"][expert])
            if self.has_bias:
                out = out + self.get_parameter("down_proj_bias")[expert]
            sums.index_add_(0, tokens, (out * shares[tokens, places, None]).to(sums.dtype))
        return sums.to(x.dtype)


def stack(rows: int, columns: int, *extra: Role, seed: int = 0, **options: Any) -> PackedStack:
    inputs = options.pop("inputs", None)
    made = PackedStack(byte_weight(rows, columns, *extra, inputs=inputs), NUM_EXPERTS, **options)
    fill(made, seed)
    return made


def stacks(*names: str, **options: Any) -> dict[str, PackedStack]:
    """Return one stack for each name, as large as it must be, with values of its own."""
    sizes = {"down_proj": (HIDDEN, INNER), "w2": (HIDDEN, INNER), "gate_up_proj": (2 * INNER, HIDDEN)}
    return {
        name: stack(*sizes.get(name, (INNER, HIDDEN)), seed=seed, **options) for seed, name in enumerate(names, start=1)
    }


def expand(made: PackedStack) -> Tensor:
    return torch.stack([made.dequantized(expert) for expert in range(NUM_EXPERTS)])


def routed(num_tokens: int = NUM_TOKENS, k: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs, two different experts for each token, never expert 3, and their shares in float32."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(num_tokens, HIDDEN, generator=generator)
    chances = torch.rand(num_tokens, NUM_EXPERTS, generator=generator)
    chances[:, 3] = -1
    index = chances.topk(k, dim=-1).indices
    return x, index, torch.rand(num_tokens, k, generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("layout", "names"),
    [
        ({}, ("gate_proj", "up_proj", "down_proj")),
        ({}, ("w1", "w3", "w2")),
        ({}, ("gate_up_proj", "down_proj")),
        ({"transposed": True}, ("gate_proj", "up_proj", "down_proj")),
        ({"bias": True, "transposed": True, "concatenated": False}, ("gate_up_proj", "down_proj")),
        ({"bias": True, "transposed": True, "concatenated": False}, ("gate_proj", "up_proj", "down_proj")),
        ({"bias": True}, ("gate_proj", "up_proj", "down_proj")),
        ({"gate": False}, ("up_proj", "down_proj")),
        ({"gate": False, "bias": True}, ("w1", "w2")),
    ],
)
def test_experts_are_as_the_eager_loop_has_them(
    layout: dict[str, bool], names: tuple[str, ...], dtype: torch.dtype
) -> None:
    experts, packed = Experts(**layout), stacks(*names)
    x, index, shares = routed()
    projections = [expand(packed[name]) for name in names[:-1]]
    if len(projections) == 2 and not experts.is_concatenated:
        projections = [torch.stack(projections, dim=2).flatten(1, 2)]
    weights = {"up": torch.cat(projections, dim=1).to(dtype), "down": expand(packed[names[-1]]).to(dtype)}
    install_experts(experts, packed)
    experts.to(dtype)
    expected = experts.eager(weights, x.to(dtype), index, shares)
    result = experts(x.to(dtype), index, shares)
    assert_computed_alike(result, expected)  # products side by side there, one after the other here
    assert expected.abs().sum() > 0


def test_only_the_experts_that_are_hit_are_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    experts, packed = Experts(), stacks("gate_proj", "up_proj", "down_proj")
    install_experts(experts, packed)
    expanded: list[tuple[int, ...]] = []
    plain = ByteScheme.dequantize

    def count(self: ByteScheme, parts: Any, **options: Any) -> Tensor:
        expanded.append(tuple(parts[Role.CODES].shape))
        return plain(self, parts, **options)

    monkeypatch.setattr(ByteScheme, "dequantize", count)
    x, _, shares = routed()
    experts(x, torch.tensor([[4, 1]] * NUM_TOKENS), shares)
    assert expanded == [(INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)] * 2
    assert not experts(x[:0], torch.empty(0, 2, dtype=torch.int64), shares[:0]).numel() and len(expanded) == 6


def test_experts_of_other_ranks_are_left_out() -> None:
    experts = Experts()
    install_experts(experts, stacks("gate_proj", "up_proj", "down_proj"))
    x, index, shares = routed()
    index[:, 1] = NUM_EXPERTS
    assert torch.equal(experts(x, index, shares), experts(x, index[:, :1], shares[:, :1]))


def test_every_expert_has_its_own_scales_of_weight_and_input() -> None:
    inputs = InputQuantization(format="e4m3", granularity="tensor", is_dynamic=False)
    made = stack(1, 2, Role.GLOBAL_SCALE, Role.INPUT_SCALE, Role.PRE_SCALE, inputs=inputs)
    for name, values in (("weight", 1), ("weight_scale", 1), ("pre_quant_scale", 1)):
        made.get_parameter(name).data.fill_(values)
    made.get_parameter("weight_scale_2").data.copy_(torch.tensor([1.0, 2.0, 1.0, 1.0, 1.0]))
    made.get_parameter("input_scale").data.copy_(torch.tensor([1.0, 1.0, 0.001, 1.0, 1.0]))
    made.get_parameter("pre_quant_scale").data[3] = 0.5
    x = torch.tensor([[17.0, 0.0]])
    # Expert 2 saturates at 448 times its input scale; 17 is rounded to 16, and 8.5 to 8.
    results = [round(made.linear(x, expert).item(), 5) for expert in range(NUM_EXPERTS)]
    assert results == [16.0, 32.0, 0.448, 8.0, 16.0]


def test_gate_and_up_keep_their_own_global_scales() -> None:
    experts = Experts()
    extra = (Role.GLOBAL_SCALE, Role.INPUT_SCALE)
    packed = {
        "gate_proj": stack(INNER, HIDDEN, *extra, inputs=NVFP4),
        "up_proj": stack(INNER, HIDDEN, *extra, inputs=NVFP4),
        "down_proj": stack(HIDDEN, INNER),
    }
    packed["gate_proj"].get_parameter("weight_scale_2").data.fill_(3.85e-5)
    packed["up_proj"].get_parameter("weight_scale_2").data.fill_(4.83e-5)
    packed["gate_proj"].get_parameter("input_scale").data.fill_(0.004)
    packed["up_proj"].get_parameter("input_scale").data.fill_(0.0002)
    install_experts(experts, packed)
    seen: list[Tensor] = []
    experts._apply_gate = lambda gate_up: seen.append(gate_up) or gate_up[..., :INNER]  # type: ignore[assignment]
    x, _, _ = routed()
    experts(x, torch.zeros(NUM_TOKENS, 1, dtype=torch.int64), torch.ones(NUM_TOKENS, 1))
    ones = {
        name: packed[name].get_parameter("weight")[0].float() * packed[name].get_parameter("weight_scale")[0].float()
        for name in packed
    }
    gate = round_inputs(x, NVFP4, torch.tensor(0.004)) @ (ones["gate_proj"] * 3.85e-5).T
    up = round_inputs(x, NVFP4, torch.tensor(0.0002)) @ (ones["up_proj"] * 4.83e-5).T
    torch.testing.assert_close(seen[0], torch.cat([gate, up], dim=-1))


def test_inputs_are_rounded_unless_it_runs_weight_only() -> None:
    x = torch.tensor([[17.0] * HIDDEN])
    rounding, plain = (
        stack(INNER, HIDDEN, Role.INPUT_SCALE, inputs=STATIC, quantize_inputs=quantize) for quantize in (True, False)
    )
    scale = rounding.get_parameter("input_scale")[0]
    assert torch.equal(rounding.linear(x, 0), functional.linear(round_inputs(x, STATIC, scale), plain.dequantized(0)))
    assert torch.equal(plain.linear(x, 0), functional.linear(x, plain.dequantized(0)))
    assert not torch.equal(plain.linear(x, 0), rounding.linear(x, 0))
    with pytest.raises(UnsupportedQuantization, match="The checkpoint has none"):
        stack(INNER, HIDDEN, inputs=STATIC)


def test_the_module_stays_of_its_class_and_holds_the_stacks_instead() -> None:
    experts, packed = Experts(bias=True), stacks("gate_proj", "up_proj", "down_proj")
    install_experts(experts, packed)
    other = Experts()
    install_experts(other, stacks("gate_up_proj", "down_proj"))
    assert isinstance(experts, Experts) and type(experts) is type(other) and type(experts) is not Experts
    assert (type(experts).__name__, type(experts).__module__) == ("PackedExperts", Experts.__module__)
    assert sorted(experts.state_dict()) == sorted(
        ["gate_up_proj_bias", "down_proj_bias"]
        + [f"{name}.{part}" for name in packed for part in ("weight", "weight_scale")]
    )
    assert experts.gate_proj is packed["gate_proj"]
    shown = "(up_proj): PackedStack(num_experts=5, in_features=8, out_features=6, scheme=BYTES per tensor, inputs=as they are)"
    assert shown in repr(experts)


def test_a_copy_is_its_own_and_equal() -> None:
    experts = Experts()
    install_experts(experts, stacks("gate_proj", "up_proj", "down_proj"))
    copied = copy.deepcopy(nn.ModuleList([experts]))[0]
    x, index, shares = routed()
    expected = experts(x, index, shares)
    assert type(copied) is type(experts) and torch.equal(copied(x, index, shares), expected)
    copied.get_submodule("down_proj").get_parameter("weight").data.zero_()
    assert not copied(x, index, shares).any() and torch.equal(experts(x, index, shares), expected)


def test_a_cast_leaves_the_parts_alone() -> None:
    experts = Experts(bias=True)
    install_experts(experts, stacks("gate_proj", "up_proj", "down_proj"))
    before = expand(experts.get_submodule("gate_proj"))  # type: ignore[arg-type]
    experts.half()
    dtypes = {parameter.dtype for parameter in experts.parameters()}
    assert dtypes == {torch.int8, torch.float8_e5m2, torch.float16}
    assert torch.equal(expand(experts.get_submodule("gate_proj")), before)  # type: ignore[arg-type]


def with_norm(experts: Experts) -> None:
    experts.has_post_expert_norm = True


def without_flags(experts: Experts) -> None:
    del experts.is_concatenated


def without_weights(experts: Experts) -> None:
    del experts.gate_up_proj


@pytest.mark.parametrize(
    ("change", "names", "says"),
    [
        (with_norm, ("gate_proj", "up_proj", "down_proj"), "a norm after each expert"),
        (without_flags, ("gate_proj", "up_proj", "down_proj"), "no is_concatenated"),
        (without_weights, ("gate_proj", "up_proj", "down_proj"), "as one tensor for all experts"),
        (
            None,
            ("gate_proj", "down_proj"),
            "packs down_proj, gate_proj of its experts; known are: gate_proj, up_proj, down_proj;",
        ),
        (
            None,
            ("up_proj", "down_proj"),
            "known are: gate_proj, up_proj, down_proj; w1, w3, w2; gate_up_proj, down_proj",
        ),
    ],
)
def test_what_is_built_otherwise_is_refused_and_left_as_it_is(change: Any, names: tuple[str, ...], says: str) -> None:
    experts = Experts()
    if change:
        change(experts)
    before = sorted(experts.state_dict())
    with pytest.raises(UnsupportedQuantization, match=says) as caught:
        install_experts(experts, stacks(*names))
    assert caught.value.what == "Experts cannot hold packed weights." and "dequantize=True" in caught.value.mend
    assert type(experts) is Experts and sorted(experts.state_dict()) == before


@pytest.mark.parametrize("transposed", [False, True])
def test_stacks_that_do_not_fit_are_refused(transposed: bool) -> None:
    packed = stacks("gate_proj", "up_proj", "down_proj") | {"up_proj": stack(INNER + 1, HIDDEN)}
    with pytest.raises(
        UnsupportedQuantization, match="Its up_proj is 5 experts of 6 × 8; the checkpoint's is 5 experts of 7 × 8"
    ):
        install_experts(Experts(transposed=transposed), packed)
    few = PackedStack(byte_weight(INNER, HIDDEN), 4)
    with pytest.raises(
        UnsupportedQuantization, match="Its gate_proj is 5 experts of 6 × 8; the checkpoint's is 4 experts"
    ):
        install_experts(Experts(), packed | {"gate_proj": few})


def fp8_stack(rows: int, columns: int, seed: int, inputs: InputQuantization | None) -> PackedStack:
    """Return a stack with a scale for each row, and one for the input of each expert."""
    parts = {
        Role.CODES: StoredPart("weight", torch.float8_e4m3fn, (rows, columns)),
        Role.SCALE: StoredPart("weight_scale", torch.float32, (rows, 1)),
        Role.INPUT_SCALE: StoredPart("input_scale", torch.float32, ()),
        Role.PRE_SCALE: StoredPart("pre_quant_scale", torch.float32, (columns,)),
    }
    weight = WeightQuantization(scheme=Fp8Channel(), shape=(rows, columns), parts=parts, inputs=inputs)
    made = PackedStack(weight, NUM_EXPERTS)
    fill(made, seed)
    made.get_parameter("weight").data.copy_(torch.randn(NUM_EXPERTS, rows, columns))
    made.get_parameter("input_scale").data.mul_(0.01)
    return made


def keep(
    made: PackedStack, rows: tuple[int, int], columns: tuple[int, int], experts: tuple[int, int], part: Any = None
) -> None:
    """Let ``made`` keep a slice, filled with the slices of what it holds."""
    whole = {role: made.get_parameter(one.suffix).data for role, one in made.quantization.parts.items()}
    made.keep_slice(WeightCut.of(made.quantization, rows, columns), experts, part)
    for place, expert in enumerate(range(*experts)):
        parts = {role: one[expert] for role, one in whole.items()}
        cut = slice_weight(made.stored.scheme, parts, shape=made.stored.shape, rows=rows, columns=columns)
        for role, one in made.quantization.parts.items():
            made.get_parameter(one.suffix).data[place] = cut.parts[role]


@pytest.mark.parametrize("inputs", [TOKEN, NVFP4, STATIC, None])
def test_ranks_that_divide_the_inner_features_sum_up_to_the_whole(inputs: InputQuantization | None) -> None:
    """Where the rounding of inner activations asks other ranks, it does so once for all experts, for a tensor of one shape whatever the routing is."""
    names = ("gate_proj", "up_proj", "down_proj")
    sizes = ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
    whole = {name: fp8_stack(*size, seed, inputs) for seed, (name, size) in enumerate(zip(names, sizes, strict=True))}
    x, index, shares = routed()
    experts = Experts()
    install_experts(experts, whole)
    expected = experts(x, index, shares)
    ranks = SharedLargest((0, 4), INNER)

    def run(part: InputSlice, features: slice) -> Tensor:
        own = copy.deepcopy(experts)
        assert isinstance(own, PackedExperts) and not own.is_sliced
        inner, everyone = (features.start, features.stop), (0, NUM_EXPERTS)
        for up in own.ups:
            keep(up, inner, (0, HIDDEN), everyone)
        keep(own.down, (0, HIDDEN), inner, everyone, part)
        assert own.is_sliced and own.down.in_features == INNER
        return own(x, index, shares)

    assert_computed_alike(sum(ranks.run(run)), expected)
    assert ranks.num_asked == (inputs in (TOKEN, NVFP4))


def test_ranks_that_divide_the_experts_sum_up_to_the_whole() -> None:
    names = ("gate_up_proj", "down_proj")
    whole = {"gate_up_proj": fp8_stack(2 * INNER, HIDDEN, 1, TOKEN), "down_proj": fp8_stack(HIDDEN, INNER, 2, TOKEN)}
    x, index, shares = routed()
    experts = Experts()
    install_experts(experts, whole)
    expected, found = experts(x, index, shares), torch.zeros_like(x)
    for first, stop in ((0, 2), (2, NUM_EXPERTS)):
        own = copy.deepcopy(experts)
        for name in names:
            made = own.get_submodule(name)
            assert isinstance(made, PackedStack)
            keep(made, (0, made.out_features), (0, made.in_features), (first, stop))
        own.num_experts = stop - first
        here = (index >= first) & (index < stop)
        found += own(x, torch.where(here, index - first, own.num_experts), shares * here)
    assert_computed_alike(found, expected)
