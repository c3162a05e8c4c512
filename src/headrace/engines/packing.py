"""Keeps packed tensors out of plain parameters: a quantized weight without its scale, taken for plain numbers, is a model that answers garbage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from headrace.checkpoint import Entry
from headrace.engines.placement import Placement, list_names
from headrace.errors import UnsupportedQuantization

_PACKED_PREFIXES = ("F8_", "F6_", "F4")
_PACKED = frozenset(["U8", "I8", "U16", "I16", "U32", "I32"])
_PLAIN_HOMES = ("torch.nn.", "transformers.models.", "transformers_modules.")
"""Where classes of modules are from that know no packed parameters. A quantizer's own modules are from elsewhere."""


def find_bare(targets: Mapping[str, str], entries: Mapping[str, Entry], plain: frozenset[str]) -> list[str]:
    """Return the packed entries that would each become a plain parameter by themselves, with their stored types.

    ``targets`` says which parameter each entry goes to, and ``plain`` which of those are ordinary floating-point ones. An entry is not bare where another one
    of the same module goes to the same parameter: then something unpacks the one with the other. Pure.
    """
    by_target: dict[str, list[str]] = defaultdict(list)
    for name, target in targets.items():
        by_target[target].append(name)
    bare = []
    for name, target in targets.items():
        if target in plain and is_packed(entries[name].dtype):
            module = name.rpartition(".")[0] + "."
            if not any(other != name and other.startswith(module) for other in by_target[target]):
                bare.append(f"{name} ({entries[name].dtype})")
    return bare


def is_packed(dtype: str) -> bool:
    """Say whether weights are stored in this type only where a scale belongs to them."""
    return dtype.startswith(_PACKED_PREFIXES) or dtype in _PACKED


def check_packing(model: Any, placement: Placement, *, source: str, method: str | None) -> None:
    """Raise `UnsupportedQuantization` where packed entries would land in plain parameters of ``model`` (on the meta device)."""
    entries = {entry.name: entry for entry in placement.order}
    targets = {name: target for name, target in placement.targets.items() if name in entries}
    bare = find_bare(targets, entries, _plain_parameters(model))
    if not bare:
        return
    named = f"the configuration names {method}" if method else "the configuration names no quantization"
    raise UnsupportedQuantization(
        f"{source} holds packed weights that {type(model).__name__} would take for plain numbers. No weight byte was read.",
        f"Packed, and no scale goes with them ({len(bare)}): {list_names(bare)}; {named}.",
        "Take config.json (and hf_quant_config.json, where there is one) from where the model was made, and check that its scales were uploaded.",
    )


def check_unread(placement: Placement, entries: Mapping[str, Entry], *, source: str, model_class: str) -> None:
    """Raise `UnsupportedQuantization` where a parameter is missing and packed entries of its name, which no parameter wants, are there: they are that parameter.

    Whoever lets missing parameters be initialised does not mean these: ``experts.gate_up_proj`` would be random beside a stored ``experts.gate_up_proj_packed``.
    """
    missing = frozenset(placement.missing)
    pairs = [
        f"{name} ({entries[name].dtype}) is not read, and {parameter} would be initialised at random"
        for name in placement.unexpected
        if name in entries and is_packed(entries[name].dtype) and (parameter := _namesake(name, missing)) is not None
    ]
    if pairs:
        raise UnsupportedQuantization(
            f"{source} holds packed weights that {model_class} has no reader for. No weight byte was read.",
            f"What is missing and what is unexpected belong together ({len(pairs)}): {list_names(pairs)}.",
            "Use another quantization of the model, or its unquantized form; strict=False does not help here.",
        )


def _namesake(name: str, parameters: frozenset[str]) -> str | None:
    """Return which of ``parameters`` a stored ``name`` is a packed form of: ``a.weight`` of ``a.weight_packed`` and ``a.qweight``, ``a.b`` of ``a.b_packed``; None for none."""
    module, _, last = name.rpartition(".")
    words = last.split("_")
    stems = (f"{module}.{'_'.join(words[:count])}" for count in range(len(words) - 1, 0, -1))
    return next((stem for stem in (*stems, f"{module}.weight", module) if stem in parameters), None)


def packed_modules(model: Any) -> list[Any]:
    """Return the modules of a quantizer's own that hold packed tensors, each for itself: not its children's."""
    return [
        module
        for module in model.modules()
        if not type(module).__module__.startswith(_PLAIN_HOMES)
        and any(_is_code(value) for value in (*module.parameters(recurse=False), *module.buffers(recurse=False)))
    ]


def _is_code(value: torch.Tensor) -> bool:
    return (value.dtype != torch.bool and value.dtype.itemsize == 1) or (
        value.dtype == torch.int32 and value.dim() >= 2
    )


def _plain_parameters(model: Any) -> frozenset[str]:
    """Return the names of the ordinary floating-point parameters and buffers in modules that are no quantizer's own."""
    found = set()
    for prefix, module in model.named_modules():
        if not type(module).__module__.startswith(_PLAIN_HOMES):
            continue
        for name, value in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if value.is_floating_point() and value.dtype.itemsize >= torch.bfloat16.itemsize:
                found.add(f"{prefix}.{name}" if prefix else name)
    return frozenset(found)
