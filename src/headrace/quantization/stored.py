"""Sorts a checkpoint's tensors by the module that they belong to, and tells which of them are a packed weight. Pure; it knows names and dtypes, no method.

Sources of the names: NVIDIA ModelOpt 0.47, compressed-tensors 0.19, auto-round 0.15, DeepSeek V3's, Qwen3's and gpt-oss's published files, Transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from headrace.checkpoint import DTYPES, Entry
from headrace.errors import UnsupportedQuantization
from headrace.quantization.scheme import Role, StoredPart

ROLES: Mapping[str, Role] = {
    "weight": Role.CODES,
    "weight_packed": Role.CODES,
    "qweight": Role.CODES,
    "weight_scale": Role.SCALE,
    "weight_scale_inv": Role.SCALE,
    "scales": Role.SCALE,
    "weight_scale_2": Role.GLOBAL_SCALE,
    "weight_global_scale": Role.GLOBAL_SCALE,
    "weight_zero_point": Role.ZERO_POINT,
    "qzeros": Role.ZERO_POINT,
    "weight_g_idx": Role.GROUP_INDEX,
    "g_idx": Role.GROUP_INDEX,
    "weight_shape": Role.SHAPE,
    "input_scale": Role.INPUT_SCALE,
    "input_global_scale": Role.INPUT_SCALE,
    "activation_scale": Role.INPUT_SCALE,
    "input_zero_point": Role.INPUT_ZERO_POINT,
    "pre_quant_scale": Role.PRE_SCALE,
}
"""Last part of a tensor's name to what the tensor is to its module's weight."""

STACKED_ROLES: Mapping[str, Role] = {
    "": Role.CODES,
    "_blocks": Role.CODES,
    "_scales": Role.SCALE,
    "_scale_inv": Role.SCALE,
    "_weight_scale": Role.SCALE,
    "_weight_scale_inv": Role.SCALE,
    "_weight_scale_2": Role.GLOBAL_SCALE,
    "_input_scale": Role.INPUT_SCALE,
    "_activation_scale": Role.INPUT_SCALE,
}
"""The same for experts that are stored as parameters instead of modules (``experts.gate_up_proj_blocks``): the end of the last part."""

KV_SUFFIXES = frozenset({"k_scale", "v_scale", "kv_scale", "output_scale"})
FLOAT8_DTYPES = frozenset({"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"})
PACKED_DTYPES = FLOAT8_DTYPES | {"U8", "I8", "F4", "F6_E2M3", "F6_E3M2"}
"""Of a tensor called ``weight``: what no plain weight has."""

_STACKED_ENDS = tuple(sorted(filter(None, STACKED_ROLES), key=len, reverse=True))
_LOW_RANK = ("svdquant_lora_a", "svdquant_lora_b")


@dataclass(slots=True, kw_only=True)
class StoredTensors:
    """All entries of a checkpoint that have to do with weights, sorted."""

    modules: dict[str, dict[str, Entry]] = field(default_factory=dict)
    """Module to suffix to entry, in file order. Suffixes are the keys of `ROLES` and `STACKED_ROLES`."""
    kv_scales: list[Entry] = field(default_factory=list)
    low_rank: list[Entry] = field(default_factory=list)
    """Halves of the branch that SVDQuant adds to a weight."""


def sort_tensors(entries: Mapping[str, Entry]) -> StoredTensors:
    """Return ``entries`` by module. What is neither a weight nor anything of one (biases, norms' statistics) is left out."""
    found = StoredTensors()
    for name, entry in entries.items():
        parent, dot, last = name.rpartition(".")
        if last in ROLES:
            found.modules.setdefault(parent, {})[last] = entry
        elif last in KV_SUFFIXES:
            found.kv_scales.append(entry)
        elif last.endswith(_LOW_RANK):
            found.low_rank.append(entry)
        elif last.endswith(_STACKED_ENDS):
            end = next(end for end in _STACKED_ENDS if last.endswith(end))
            found.modules.setdefault(f"{parent}{dot}{last.removesuffix(end)}", {})[end] = entry
        elif entry.dtype in PACKED_DTYPES and len(entry.shape) == 3:
            found.modules.setdefault(name, {})[""] = entry
    return found


def find_codes(parts: Mapping[str, Entry]) -> Entry | None:
    """Return the entry that holds a module's packed values; None where its weight is plain, or where it has none."""
    for suffix in ("weight_packed", "qweight", "_blocks"):
        if suffix in parts:
            return parts[suffix]
    if "" in parts and (len(parts) > 1 or parts[""].dtype in FLOAT8_DTYPES):
        return parts[""]
    plain = parts.get("weight")
    return plain if plain is not None and plain.dtype in PACKED_DTYPES else None


def count_experts(codes: Entry, parts: Mapping[str, Entry]) -> int | None:
    """Return how many experts the first dimension of a module's parts counts; None for a module that is one matrix."""
    num_dims = 4 if "_blocks" in parts else 3
    return codes.shape[0] if len(codes.shape) == num_dims else None


def find_parts(module: str, entries: Mapping[str, Entry], *, num_experts: int | None) -> dict[Role, StoredPart]:
    """Return a packed module's parts by role; of stacked experts those of one expert.

    Raises `UnsupportedQuantization` where two tensors claim one role, where torch has no such dtype, and where experts cannot be told apart.
    """
    found: dict[Role, StoredPart] = {}
    for suffix, entry in entries.items():
        role = role_of(suffix)
        if role in found:
            raise UnsupportedQuantization(
                f"{module} has both {found[role].suffix} and {suffix}.",
                "One of them is enough, and nothing says which counts.",
                "Take the files from where the model was made.",
            )
        shape = _torch_shape(entry)
        if num_experts is not None:
            if not shape or shape[0] != num_experts:
                raise UnsupportedQuantization(
                    f"{entry.name} has shape {list(shape)}, which holds nothing for each of {num_experts} experts.",
                    "The experts of this module are stored as one tensor, and every part of it must be as well.",
                    "Use a checkpoint that stores each expert as a module of its own.",
                )
            shape = shape[1:]
        found[role] = StoredPart(suffix, _torch_dtype(entry), shape)
    return found


def role_of(suffix: str) -> Role:
    """Return what a tensor of such a suffix (a key of `ROLES` or `STACKED_ROLES`) is to its weight."""
    return ROLES[suffix] if suffix in ROLES else STACKED_ROLES[suffix]


def _torch_dtype(entry: Entry) -> torch.dtype:
    dtype = getattr(torch, DTYPES[entry.dtype].torch_name or "", None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedQuantization(
            f"{entry.name} has dtype {entry.dtype}.",
            f"torch {torch.__version__} has no such dtype.",
            "Use another quantization of the model.",
        )
    return dtype


def _torch_shape(entry: Entry) -> tuple[int, ...]:
    return DTYPES[entry.dtype].torch_shape(entry.shape) or entry.shape
