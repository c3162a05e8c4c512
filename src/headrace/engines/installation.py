"""Brings what is known of a checkpoint's quantization to a model on the meta device: which layers become packed ones, and how their tensors reach them.

Two ways. `install_packed` puts our layers in the places of the model's own, so that weights stay packed. `expand` leaves the model as it is and turns each packed weight into
plain values on its way. Both say what is fed to the model in the end, as assemblies.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from headrace.checkpoint import Entry
from headrace.engines.kvrouting import route_attention
from headrace.engines.placement import list_names
from headrace.engines.renaming import Renamer, StackSlot
from headrace.engines.values import Assembly, Expansion, Output, Plain, Stack, StackPiece
from headrace.errors import UnsupportedQuantization
from headrace.quantization import CheckpointQuantization, QuantizedModule, Role, WeightQuantization
from headrace.quantization.attention import SCALES, KvRounding, install_kv
from headrace.quantization.linear import QuantizedLinear, ScaledLinear
from headrace.quantization.stack import PackedStack, install_experts
from headrace.streaming import torch_dtype

logger = logging.getLogger("headrace")

_MOST_IN_A_WORD = 8
"""Four-bit values that a word of 32 bits holds."""
_MEND = "Load it with dequantize=True (--dequantize), or use the unquantized form of the model."


@dataclass(slots=True)
class Installation:
    """What was installed in one model, and what feeds it."""

    assemblies: list[Assembly] = field(default_factory=list)
    """For all tensors that belong to the quantization; everything else is taken as it is stored."""
    left_out: set[str] = field(default_factory=set)
    """Entries that are knowingly not read."""
    notes: list[str] = field(default_factory=list)
    """What is found to be odd about expanded weights while they arrive."""

    def with_plain(self, entries: Mapping[str, Entry]) -> list[Assembly]:
        """Return the assemblies, and each entry that no assembly takes by itself, under its name in ``entries`` and in their order."""
        taken = {entry.name for assembly in self.assemblies for entry, _ in assembly.pieces} | self.left_out
        return [*self.assemblies, *(Plain(entry, name) for name, entry in entries.items() if entry.name not in taken)]


@dataclass(frozen=True, slots=True)
class _Stacked:
    """A quantized module that is one expert's part of a stacked parameter."""

    module: QuantizedModule
    slot: StackSlot

    @property
    def projection(self) -> str:
        return self.module.name.rpartition(".")[2]


def install_packed(
    model: Any, quantization: CheckpointQuantization, renamer: Renamer, *, weight_only: bool, dtype: torch.dtype
) -> Installation:
    """Replace the layers of ``model`` that ``quantization`` names by packed ones, and say what fills them.

    Raises `UnsupportedQuantization` where a packed weight belongs to a parameter that no layer of ours can hold. ``dtype`` is that of biases.
    """
    installation = Installation(left_out=set(quantization.unused))
    by_experts: dict[str, list[_Stacked]] = defaultdict(list)
    fused: dict[str, list[tuple[str, QuantizedModule]]] = defaultdict(list)
    for module in quantization.modules.values():
        if module.num_experts is not None:
            target, _ = renamer(module.name)
            fused[target.rpartition(".")[0]].append((target, module))
            continue
        slot = renamer.slot(f"{module.name}.weight")
        if slot is not None:
            by_experts[slot.target.rpartition(".")[0]].append(_Stacked(module, slot))
            continue
        _install_linear(model, module, renamer, installation, weight_only=weight_only, dtype=dtype)
    for path, stacked in by_experts.items():
        _install_stacks(model.get_submodule(path), path, stacked, installation, weight_only=weight_only)
    for path, projections in fused.items():
        _install_fused(model, path, projections, renamer, installation, weight_only=weight_only)
    _install_kv(model, quantization, renamer, installation, weight_only=weight_only)
    _untie(model)
    return installation


def _untie(model: Any) -> None:
    """Take packed layers out of the ties of ``model``: a head that is stored packed is not the plain embeddings, whatever the configuration says."""
    ties = model.all_tied_weights_keys
    kept = {
        target: origin for target, origin in ties.items() if not any(_is_packed(model, it) for it in (target, origin))
    }
    if kept != ties:
        model.all_tied_weights_keys = kept
        model._tied_weights_keys = dict(kept)
        model.config.tie_word_embeddings = False


def _is_packed(model: Any, parameter: str) -> bool:
    return isinstance(model.get_submodule(parameter.rpartition(".")[0]), QuantizedLinear)


def expand(model: Any, quantization: CheckpointQuantization, renamer: Renamer, *, dtype: torch.dtype) -> Installation:
    """Say how every packed weight of ``quantization`` becomes a plain one of ``dtype``, and give layers whose input is scaled a place for that scale.

    Where no layer can hold that scale (stacks of experts, layers that ranks share), it is multiplied into the weight. The scales of inputs, keys and values are not read: a plain model rounds none.
    """
    installation = Installation(left_out=set(quantization.unused))
    for module in quantization.modules.values():
        pre_scale = module.entries.get(Role.PRE_SCALE)
        holder = _scaled_holder(model, module, renamer) if pre_scale is not None else None
        if pre_scale is not None and holder is not None:
            installation.assemblies.append(Plain(pre_scale, f"{holder}.pre_quant_scale"))
        is_stacked = module.num_experts is not None
        expansion = Expansion(
            name=module.name if is_stacked else f"{module.name}.weight",
            weight=_trimmed(module, _wanted_shape(renamer, module)),
            entries=module.entries,
            dtype=dtype,
            num_experts=module.num_experts,
            is_transposed=is_stacked and _is_transposed(model, renamer(module.name)[0]),
            fold_input_scale=pre_scale is not None and holder is None,
            notes=installation.notes,
        )
        installation.assemblies.append(expansion)
        installation.left_out |= {entry.name for entry in module.entries.values()}
    for pair in (quantization.kv.scales if quantization.kv else {}).values():
        installation.left_out |= {entry.name for entry in pair if entry is not None}
    installation.left_out -= {entry.name for assembly in installation.assemblies for entry, _ in assembly.pieces}
    return installation


def _wanted_shape(renamer: Renamer, module: QuantizedModule) -> tuple[int, ...]:
    """Return the shape of the parameter that ``module`` fills by itself; empty where it is none."""
    target, pattern = renamer(f"{module.name}.weight")
    return tuple(renamer.wanted[target].shape) if pattern is None and target in renamer.wanted else ()


def _scaled_holder(model: Any, module: QuantizedModule, renamer: Renamer) -> str | None:
    """Put a layer that scales its input in the place of the plain one that ``module`` fills, and return its path; None where that is no linear layer, or one of several ranks' (each has
    other columns, and Transformers has given the layer hooks already)."""
    if (getattr(model, "_tp_size", None) or 1) > 1:
        return None
    target, pattern = renamer(f"{module.name}.weight")
    if pattern is not None or target not in renamer.wanted:
        return None
    path = target.removesuffix(".weight")
    layer = model.get_submodule(path)
    if type(layer) is not nn.Linear:
        return None
    _replace(model, path, _scaled(layer))
    return path


def _install_linear(
    model: Any,
    module: QuantizedModule,
    renamer: Renamer,
    installation: Installation,
    *,
    weight_only: bool,
    dtype: torch.dtype,
) -> None:
    target, pattern = renamer(f"{module.name}.weight")
    if target not in renamer.wanted:
        # A part that this class has no place for (MTP layers, a vision tower): the placement says so, or ignores it.
        path = target.removesuffix(".weight")
        installation.assemblies += [
            Plain(module.entries[role], f"{path}.{part.suffix}") for role, part in module.weight.parts.items()
        ]
        return
    path = target.removesuffix(".weight")
    layer = model.get_submodule(path) if pattern is None and path != target else None
    if type(layer) is not nn.Linear:
        held = "is made of several tensors or changed" if pattern is not None else f"belongs to {_kind(model, path)}"
        raise UnsupportedQuantization(
            f"{module.name} is packed as {module.weight.scheme.describe()}, and {type(model).__name__} cannot hold it packed.",
            f"Its parameter {target} {held}; packed weights go into linear layers and stacks of experts.",
            _MEND,
        )
    weight = _trimmed(module, (layer.out_features, layer.in_features))
    _check_shape(module, weight, (layer.out_features, layer.in_features), path)
    packed = QuantizedLinear(
        weight, has_bias=layer.bias is not None, dtype=dtype, quantize_inputs=not weight_only, device="meta"
    )
    _replace(model, path, packed)
    installation.assemblies += [
        Plain(module.entries[role], f"{path}.{part.suffix}") for role, part in module.weight.parts.items()
    ]


def _install_stacks(
    experts: Any, path: str, stacked: list[_Stacked], installation: Installation, *, weight_only: bool
) -> None:
    """Give ``experts`` a packed stack for each of its projections, in the order in which the model puts them one below the other."""
    by_projection: dict[str, dict[int, _Stacked]] = defaultdict(dict)
    for item in sorted(stacked, key=lambda one: (one.slot.target, one.slot.position)):
        by_projection[item.projection][item.slot.expert] = item
    stacks: dict[str, PackedStack] = {}
    outputs: dict[str, Output] = {}
    pieces: list[StackPiece] = []
    for projection, by_expert in by_projection.items():
        first = next(iter(by_expert.values()))
        num_experts = _num_experts(experts, first, by_expert, path)
        _check_alike(by_expert, path)
        weight = first.module.weight
        stacks[projection] = PackedStack(weight, num_experts, quantize_inputs=not weight_only, device="meta")
        for role, part in weight.parts.items():
            name = f"{path}.{projection}.{part.suffix}"
            outputs[name] = Output((num_experts, *part.shape), part.dtype)
            pieces += [
                StackPiece(Plain(item.module.entries[role], item.module.entries[role].name), name, (expert,))
                for expert, item in by_expert.items()
            ]
    _install_experts(experts, path, stacks)
    installation.assemblies.append(Stack(outputs=outputs, stacked=pieces))


def _install_fused(
    model: Any,
    path: str,
    projections: list[tuple[str, QuantizedModule]],
    renamer: Renamer,
    installation: Installation,
    *,
    weight_only: bool,
) -> None:
    """Give the experts at ``path`` the stacks that the file itself holds."""
    stacks: dict[str, PackedStack] = {}
    for target, module in projections:
        if target not in renamer.wanted or module.num_experts is None:
            installation.assemblies += [Plain(entry, entry.name) for entry in module.entries.values()]
            continue
        projection = target.rpartition(".")[2]
        if any(not part.suffix for part in module.weight.parts.values()):
            raise UnsupportedQuantization(
                f"{module.name} is packed as {module.weight.scheme.describe()} under the name of the whole stack.",
                "A layer of packed experts has no place of that name for it.",
                _MEND,
            )
        stacks[projection] = PackedStack(
            module.weight, module.num_experts, quantize_inputs=not weight_only, device="meta"
        )
        installation.assemblies += [
            Plain(module.entries[role], f"{path}.{projection}.{part.suffix}")
            for role, part in module.weight.parts.items()
        ]
    if stacks:
        _install_experts(model.get_submodule(path), path, stacks)


def _install_experts(experts: Any, path: str, stacks: Mapping[str, PackedStack]) -> None:
    try:
        install_experts(experts, stacks)
    except UnsupportedQuantization as error:
        raise UnsupportedQuantization(f"{path}: {error.what}", error.why, error.mend) from error
    # Transformers would initialise the parameters that the class has when it is not packed.
    experts._is_hf_initialized = True


def _install_kv(
    model: Any,
    quantization: CheckpointQuantization,
    renamer: Renamer,
    installation: Installation,
    *,
    weight_only: bool,
) -> None:
    kv = quantization.kv
    if kv is None:
        return
    paths = {name: _attention_path(name, renamer) for name in kv.scales}
    if paths and not weight_only and not any(paths.values()):
        # (Some are found where a pipeline's other stages have the rest.)
        logger.warning(
            "Keys and values are not rounded to %s, although the checkpoint asks for it: of %s, for which it has scales, the model has none whose projections are known.",
            kv.format,
            list_names(list(paths)),
        )
    for name, (key, value) in kv.scales.items():
        path = paths[name]
        stored = [entry for entry in (key, value) if entry is not None]
        if weight_only or path is None:
            installation.left_out |= {entry.name for entry in stored}
            continue
        attention = model.get_submodule(path)
        dtype = torch_dtype(stored[0]) if stored else torch.float32
        shape = stored[0].shape if stored else ()
        rounding = KvRounding(format=kv.format, group_size=kv.group_size)
        install_kv(attention, rounding, device="meta", dtype=dtype, shape=shape)
        route_attention(attention)
        names = tuple(f"{path}.{scale}" for scale in SCALES)
        if key is not None and key is value:
            installation.assemblies.append(_Twice(key, (names[0], names[1])))
            continue
        installation.assemblies += [
            Plain(entry, scale) if entry is not None else _One(scale, Output(shape, dtype))
            for scale, entry in zip(names, (key, value), strict=True)
        ]


@dataclass(frozen=True, slots=True)
class _One:
    """A scale that is not stored, and so is 1."""

    name: str
    output: Output

    @property
    def pieces(self) -> list[tuple[Entry, str]]:
        return []

    @property
    def outputs(self) -> dict[str, Output]:
        return {self.name: self.output}

    def build(self, take: Any, block: Any) -> dict[str, torch.Tensor]:
        return {self.name: torch.ones(self.output.shape, dtype=self.output.dtype)}


@dataclass(frozen=True, slots=True)
class _Twice:
    """One stored tensor that fills two parameters."""

    entry: Entry
    names: tuple[str, str]

    @property
    def pieces(self) -> list[tuple[Entry, str]]:
        return [(self.entry, self.names[0])]

    @property
    def outputs(self) -> dict[str, Output]:
        return dict.fromkeys(self.names, Plain(self.entry, self.names[0]).output)

    def build(self, take: Any, block: Any) -> dict[str, torch.Tensor]:
        tensor = take(self.entry)
        return {self.names[0]: tensor, self.names[1]: tensor.clone()}


def _attention_path(name: str, renamer: Renamer) -> str | None:
    """Return the path of the attention module that is stored as ``name``: by what its output projection is called in the model."""
    for projection in ("o_proj", "out_proj", "dense", "q_proj", "q_b_proj"):
        target, pattern = renamer(f"{name}.{projection}.weight")
        if pattern is None and target in renamer.wanted:
            return target.removesuffix(f".{projection}.weight")
    return None


def _num_experts(experts: Any, first: _Stacked, by_expert: Mapping[int, _Stacked], path: str) -> int:
    parameter = getattr(experts, first.slot.target.rpartition(".")[2])
    num_experts = int(parameter.shape[0])
    absent = sorted(set(range(num_experts)) - set(by_expert))
    extra = sorted(set(by_expert) - set(range(num_experts)))
    if absent or extra:
        what = (
            f"lacks the packed {first.projection} of experts {list_names([str(item) for item in absent])}"
            if absent
            else (f"holds {first.projection} for experts {list_names([str(item) for item in extra])}")
        )
        raise UnsupportedQuantization(
            f"The checkpoint {what} of {path}.",
            f"The model has {num_experts} experts there, and a stack is packed as a whole.",
            _MEND if not extra else "Check config.json against the weights.",
        )
    return num_experts


def _check_alike(by_expert: Mapping[int, _Stacked], path: str) -> None:
    weights = {expert: item.module.weight for expert, item in by_expert.items()}
    first = next(iter(weights.values()))
    different = [str(expert) for expert, weight in sorted(weights.items()) if weight != first]
    if different:
        raise UnsupportedQuantization(
            f"The experts of {path} are not packed alike.",
            f"Experts {list_names(different)} differ from the others in scheme, shape or parts.",
            _MEND,
        )


def _trimmed(module: QuantizedModule, wanted: tuple[int, ...]) -> WeightQuantization:
    """Return how ``module``'s weight is packed, with the columns that the model wants where the last word of each row is padded.

    Only ``weight_shape`` knows how many columns there are then, and that is a tensor that has not been read.
    """
    weight = module.weight
    rows, columns = weight.shape
    is_padded = len(wanted) == 2 and wanted[0] == rows and wanted[1] < columns < wanted[1] + _MOST_IN_A_WORD
    if Role.SHAPE not in weight.parts or not is_padded:
        return weight
    return replace(weight, shape=(rows, wanted[1]))


def _check_shape(module: QuantizedModule, weight: WeightQuantization, wanted: tuple[int, int], path: str) -> None:
    stored = weight.shape
    if stored != wanted:
        raise UnsupportedQuantization(
            f"{module.name} is stored as {list(stored)}, the model's {path} wants {list(wanted)}.",
            f"The packed tensors were read as {module.weight.scheme.describe()}.",
            "Check config.json against the weights; headrace inspect --tensors lists them.",
        )


def _is_transposed(model: Any, target: str) -> bool:
    try:
        experts = model.get_submodule(target.rpartition(".")[0])
    except AttributeError:
        return False
    return bool(getattr(experts, "is_transposed", False))


def _scaled(layer: nn.Linear) -> ScaledLinear:
    return ScaledLinear(
        layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta", dtype=layer.weight.dtype
    )


def _replace(model: Any, path: str, layer: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    layer.train(False)
    setattr(model.get_submodule(parent) if parent else model, name, layer)


def _kind(model: Any, path: str) -> str:
    try:
        return f"a {type(model.get_submodule(path)).__name__}"
    except AttributeError:
        return "a parameter of its own"


def odd_values(model: Any) -> list[str]:
    """Return a sentence for every packed weight of the filled ``model`` whose values contradict the configuration. Raises `UnsupportedQuantization` where they cannot be right."""
    found = []
    for path, layer in model.named_modules():
        if isinstance(layer, QuantizedLinear):
            parts = {role: layer.get_parameter(part.suffix).detach() for role, part in layer.quantization.parts.items()}
            found.append(layer.quantization.scheme.check_values(parts, path))
    return [note for note in found if note is not None]
