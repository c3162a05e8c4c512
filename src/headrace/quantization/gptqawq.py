"""GPTQ, AWQ, and auto-round, which writes both layouts: integers packed into words, under one section that may make exceptions by module.

Sources: GPTQModel 5 (``checkpoint_format``, ``dynamic``), AutoAWQ 0.2 (``version``), auto-round 0.15.1 (``packing_format``, ``extra_config``, ``act_*``).

Whether ``qweight`` is GPTQ's or AWQ's is told from its shape, which is ``[K / 8, N]`` or ``[K, N / 8]``. That GPTQ's zero points are stored less one (version 1) is in
the configuration alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from headrace.errors import UnsupportedQuantization
from headrace.quantization.awq import Awq
from headrace.quantization.family import Family, Reading, names_in, unknown, whole_number
from headrace.quantization.gptq import Gptq
from headrace.quantization.inputs import (
    FP8_PER_TOKEN,
    FP8_STATIC,
    INT8_PER_TOKEN,
    INT8_STATIC,
    MXFP4_GROUPS,
    MXFP8_GROUPS,
    nvfp4_groups,
)
from headrace.quantization.int4 import PackedInt
from headrace.quantization.layouts import nvfp4_inputs, require_scale, scheme_of
from headrace.quantization.matching import NamePatterns
from headrace.quantization.scheme import InputQuantization, Role, Scheme, StoredPart
from headrace.quantization.section import QuantizationSection

_GPTQ_VERSIONS = {"gptq": 1, "gptq_v2": 2}
_AWQ_VERSIONS = ("gemm", "exllama", "ipex")
"""Kernels that take AWQ's own packing; the others have one of theirs."""
_REGEX_SIGNS = re.compile(r"[\\^$+(|*]")


@dataclass(frozen=True, slots=True, kw_only=True)
class IntegerRule:
    """What the section says of one module."""

    is_awq: bool
    bits: int
    group_size: int | None
    """None: one scale per row (written as -1)."""
    symmetric: bool
    version: int
    """Of GPTQ's zero points: 1 stores them less one."""


class IntegerFamily(Family[IntegerRule]):
    """A section of GPTQ's, AWQ's or auto-round's."""

    def __init__(self, section: QuantizationSection) -> None:
        self._rule = _read_rule(section)
        self._exceptions: dict[str, IntegerRule] = {}
        plain = names_in(section, "modules_to_not_convert")
        for pattern, content in _exceptions(section):
            changed = None if content is None else _changed(section, self._rule, content)
            if changed is None:
                plain.append(pattern)
            else:
                self._exceptions[pattern] = changed
        super().__init__(section, excluded=plain)
        self._targets = NamePatterns(self._exceptions, place=section.place)

    def rule_for(self, module: str, kind: str) -> IntegerRule:
        found = self._targets.find(module, kind=kind) if self._exceptions else None
        return self._rule if found is None else self._exceptions[found]

    def expects(self, module: str, kind: str) -> bool:
        # Only linear layers of decoder blocks are meant, and no list says which these are.
        return False

    def read(self, module: str, parts: Mapping[Role, StoredPart], rule: IntegerRule | None) -> Reading:
        assert rule is not None
        scheme, remarks = self._scheme(module, parts, rule)
        return Reading(scheme, _inputs(self.section, parts), remarks)

    def _scheme(
        self, module: str, parts: Mapping[Role, StoredPart], rule: IntegerRule
    ) -> tuple[Scheme, tuple[str, ...]]:
        codes, scale = parts[Role.CODES], require_scale(module, parts)
        if codes.suffix == "weight_packed" and codes.dtype is torch.int32:
            return PackedInt(bits=rule.bits, group_size=rule.group_size, symmetric=rule.symmetric), ()
        if codes.suffix != "qweight":
            return scheme_of(module, parts, group_size=rule.group_size), ()
        is_awq = _has_awq_shape(codes.shape, scale.shape, rule)
        remarks: tuple[str, ...] = ()
        if is_awq is not rule.is_awq:
            said, stored = ("AWQ", "GPTQ") if rule.is_awq else ("GPTQ", "AWQ")
            remarks = (
                f"{self.section.place} says {said}, but qweight has the shape of {stored}, and is taken as such",
            )
        if is_awq:
            has_zero_point = Role.ZERO_POINT in parts or not rule.symmetric
            return Awq(bits=rule.bits, group_size=rule.group_size, has_zero_point=has_zero_point), remarks
        return Gptq(bits=rule.bits, group_size=rule.group_size, version=rule.version, symmetric=rule.symmetric), remarks


def _has_awq_shape(codes: tuple[int, ...], scale: tuple[int, ...], rule: IntegerRule) -> bool:
    """Say whether ``qweight`` is packed along N; where its shape and that of ``scales`` (``[G, N]``) do not tell, what ``rule`` says."""
    if len(codes) == 2 and len(scale) == 2:
        if codes[1] == scale[1]:
            return False
        if codes[1] * 32 == scale[1] * rule.bits:
            return True
    return rule.is_awq


def _read_rule(section: QuantizationSection) -> IntegerRule:
    raw = section.raw
    bits = whole_number(section, raw, "bits", whole_number(section, raw, "w_bit", 4))
    group_size = whole_number(section, raw, "group_size", whole_number(section, raw, "q_group_size", 128))
    assert bits is not None
    is_awq, version = _layout(section)
    symmetric = raw.get("sym", raw.get("zero_point") is False)
    return IntegerRule(
        is_awq=is_awq,
        bits=bits,
        group_size=group_size if group_size and group_size > 0 else None,
        symmetric=bool(symmetric),
        version=version,
    )


def _layout(section: QuantizationSection) -> tuple[bool, int]:
    """Return whether the layout is AWQ's, and the version of GPTQ's zero points. Raises `UnsupportedQuantization` for packings of single kernels."""
    if section.method == "auto-round":
        # auto_round:auto_gptq stores zero points less one; auto_round and auto_round:gptqmodel store them as they are.
        packing = str(section.raw.get("packing_format") or section.raw.get("backend") or "auto_round:auto_gptq")
        return "awq" in packing, 1 if "auto_gptq" in packing or packing.endswith(":gptq") else 2
    if section.method == "awq":
        version = str(section.raw.get("version") or "gemm").lower()
        if version not in _AWQ_VERSIONS:
            raise unknown(section, "version of AWQ", version, _AWQ_VERSIONS)
        return True, 1
    checkpoint_format = str(section.raw.get("checkpoint_format") or "gptq").lower()
    if section.raw.get("is_marlin_format"):
        checkpoint_format = "marlin"
    if checkpoint_format not in _GPTQ_VERSIONS:
        raise unknown(section, "checkpoint_format", checkpoint_format, _GPTQ_VERSIONS)
    return False, _GPTQ_VERSIONS[checkpoint_format]


def _exceptions(section: QuantizationSection) -> Iterable[tuple[str, Mapping[str, Any] | None]]:
    """Yield patterns with what differs for the modules that they mean: None where these are not quantized at all."""
    for key in ("dynamic", "extra_config"):
        listed = section.raw.get(key)
        if not isinstance(listed, Mapping):
            continue
        for name, content in listed.items():
            if not isinstance(content, Mapping):
                raise UnsupportedQuantization(
                    f"{section.place} has {content!r} under {key}: {name}.",
                    "It must be an object that says what differs for such modules.",
                    "Take config.json from where the model was made.",
                )
            if key == "dynamic":
                yield f"re:{name.removeprefix('+:').removeprefix('-:')}", None if name.startswith("-:") else content
            else:
                yield f"re:.*(?:{name})" if _REGEX_SIGNS.search(name) else name, content


def _changed(section: QuantizationSection, rule: IntegerRule, content: Mapping[str, Any]) -> IntegerRule | None:
    """Return ``rule`` with what ``content`` changes of it; None where that is a width that is no packing."""
    bits = whole_number(section, content, "bits", rule.bits)
    group_size = whole_number(section, content, "group_size", rule.group_size)
    assert bits is not None
    if bits >= 16:
        return None
    size = group_size if group_size and group_size > 0 else None
    return replace(rule, bits=bits, group_size=size, symmetric=bool(content.get("sym", rule.symmetric)))


def _inputs(section: QuantizationSection, parts: Mapping[Role, StoredPart]) -> InputQuantization | None:
    """Return how auto-round's section says that inputs are rounded: by ``act_bits``, ``act_data_type``, ``act_dynamic``."""
    bits = whole_number(section, section.raw, "act_bits", 16)
    kind = str(section.raw.get("act_data_type") or section.raw.get("data_type") or "int").lower()
    is_dynamic = section.raw.get("act_dynamic") is not False
    if bits is None or bits >= 16:
        return None
    has_scale = Role.INPUT_SCALE in parts
    if kind.startswith("nv_fp") and bits == 4:
        return nvfp4_inputs(16, parts) if has_scale else replace(nvfp4_groups(16), is_dynamic=True)
    if kind.startswith("mx_fp") and bits in (4, 8):
        return MXFP4_GROUPS if bits == 4 else MXFP8_GROUPS
    if bits == 8 and (is_dynamic or has_scale):
        if kind.startswith("fp"):
            return FP8_PER_TOKEN if is_dynamic else FP8_STATIC
        return INT8_PER_TOKEN if is_dynamic else INT8_STATIC
    raise UnsupportedQuantization(
        f"{section.place} rounds inputs to {bits}-bit {kind} values, which is not done here.",
        "Known are 8-bit integers and floats, MXFP4, MXFP8 and NVFP4.",
        "Use another quantization of the model, or its unquantized form.",
    )
