"""Answers, before the first weight byte, what every quantized module of a checkpoint is: from what the side files say and from the tensors that are there.

Pure: it takes parsed configuration and entries, and returns values. Where the files contradict each other, the tensors decide: what is packed and has its scales is quantized,
whatever a list says; what has a plain weight is plain. Each such contradiction is a warning; one that has no safe reading is an error.

The work is linear in the number of tensors: modules whose parts look alike, under one rule of the configuration, are read once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from headrace.checkpoint import Entry
from headrace.errors import UnsupportedQuantization
from headrace.quantization.blockfp8 import BlockFp8Family
from headrace.quantization.compressed import CompressedFamily
from headrace.quantization.disagreement import compare_sections
from headrace.quantization.family import Family
from headrace.quantization.findings import Findings, list_names
from headrace.quantization.gptoss import GptOssFamily
from headrace.quantization.gptqawq import IntegerFamily
from headrace.quantization.kvscales import find_kv
from headrace.quantization.matching import module_kind
from headrace.quantization.modelopt import ModeloptFamily
from headrace.quantization.modules import CheckpointQuantization, QuantizedModule, SchemeCount
from headrace.quantization.rounding import describe_inputs
from headrace.quantization.scheme import Role, WeightQuantization
from headrace.quantization.section import QuantizationSection
from headrace.quantization.stored import (
    FLOAT8_DTYPES,
    STACKED_ROLES,
    StoredTensors,
    count_experts,
    find_codes,
    find_parts,
    role_of,
    sort_tensors,
)

_FAMILIES: dict[str, Callable[[QuantizationSection], Family[Any]]] = {
    "compressed-tensors": CompressedFamily,
    "fp8": BlockFp8Family,
    "mxfp8": BlockFp8Family,
    "gptq": IntegerFamily,
    "awq": IntegerFamily,
    "auto-round": IntegerFamily,
    "mxfp4": GptOssFamily,
    "modelopt": ModeloptFamily,
}
METHODS = frozenset(_FAMILIES)
"""The methods that are read here. All others are left to the engine."""

_INTEGER_METHODS = ("gptq", "awq", "auto-round")
_INTEGER_HELPERS = frozenset({"scales", "qzeros", "g_idx"})
"""Suffixes that other modules may have for reasons of their own, unless the method is one of `_INTEGER_METHODS`."""
_PLAIN_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
_HARMLESS = frozenset({"input_scale", "input_global_scale", "activation_scale", "input_zero_point"})
"""What may be left over without a weight being lost."""


def detect(
    section: QuantizationSection | None,
    entries: Mapping[str, Entry],
    *,
    modelopt_section: QuantizationSection | None = None,
    dtype: str | None = None,
    source: str = "",
) -> CheckpointQuantization | None:
    """Return what is quantized in a checkpoint of ``entries``, and how; None where nothing is, or where ``section``'s method is not one of `METHODS`.

    ``section`` is the one that counts (`find_quantization`), ``modelopt_section`` what hf_quant_config.json says beside it (`find_modelopt`): both are read, and their
    differences are warnings. ``dtype`` is the one that config.json names: a float8 type says that float8 weights without scales are plain numbers. ``source`` names
    the checkpoint in errors.

    Raises `UnsupportedQuantization` for an algorithm or a layout that is not known, for a packed weight without its scale, a scale without its weight, a part of the wrong
    dtype or shape, a fused module that is excluded in part, and packed weights that nothing explains.
    """
    section = section or modelopt_section
    if section is not None and section.method not in METHODS:
        return None
    stored = sort_tensors(entries)
    if section is None:
        _refuse_unexplained(stored, has_plain_float8=_is_float8(dtype), source=source)
        return None
    other = modelopt_section if modelopt_section is not None and modelopt_section != section else None
    findings = Findings()
    if other is not None:
        compare_sections(section, other, findings)
    family = _family(section, other)
    if stored.low_rank:
        raise _low_rank(stored.low_rank)
    for remark in family.remarks:
        findings.add(remark)
    reader = _Reader(family, findings, has_plain_float8=_is_float8(dtype))
    for name, parts in stored.modules.items():
        reader.read(name, parts, entries)
    kv, unused = find_kv([section, *([other] if other else [])], stored.kv_scales, stored.modules, findings)
    if not reader.modules and kv is None:
        findings.add(f"{section.place} says {section.label}, but no weight is packed; all are taken as plain")
    found = CheckpointQuantization(
        section=section,
        modules=reader.modules,
        kv=kv,
        warnings=findings.sentences(),
        unused=(*reader.unused, *unused),
    )
    return replace(found, counts=_count(found, entries))


class _Reader:
    """Reads modules one after the other, each look of them once."""

    def __init__(self, family: Family[Any], findings: Findings, *, has_plain_float8: bool) -> None:
        self.modules: dict[str, QuantizedModule] = {}
        self.unused: list[str] = []
        self._family = family
        self._findings = findings
        self._place = family.section.place
        self._has_plain_float8 = has_plain_float8
        self._helpers_to_ignore = frozenset() if family.section.method in _INTEGER_METHODS else _INTEGER_HELPERS
        self._seen: dict[Any, tuple[WeightQuantization, int | None, tuple[str, ...]]] = {}

    def read(self, name: str, parts: Mapping[str, Entry], entries: Mapping[str, Entry]) -> None:
        codes = find_codes(parts)
        if codes is None or self._is_plain_float8(name, codes, parts):
            self._read_plain(name, parts, entries)
        else:
            self._read_packed(name, parts, codes)

    def _read_packed(self, name: str, parts: Mapping[str, Entry], codes: Entry) -> None:
        # What is packed is no router that was left alone; lists that say Linear mean it.
        kind = "Embedding" if module_kind(name, 2) == "Embedding" else "Linear"
        rule = self._family.rule_for(name, kind)
        look = (rule, *((suffix, entry.dtype, entry.shape) for suffix, entry in parts.items()))
        if look not in self._seen:
            self._seen[look] = self._understand(name, parts, codes, rule)
        weight, num_experts, remarks = self._seen[look]
        for remark in remarks:
            self._findings.add(remark, name)
        if self._family.excludes and self._family.excludes.find(name, kind=kind) is not None:
            self._findings.add(f"{self._place} excludes modules that are stored quantized, and they are taken so", name)
        by_role = {role_of(suffix): entry for suffix, entry in parts.items()}
        self.modules[name] = QuantizedModule(name=name, weight=weight, entries=by_role, num_experts=num_experts)

    def _understand(
        self, name: str, entries: Mapping[str, Entry], codes: Entry, rule: Any
    ) -> tuple[WeightQuantization, int | None, tuple[str, ...]]:
        num_experts = count_experts(codes, entries)
        parts = find_parts(name, entries, num_experts=num_experts)
        reading = self._family.read(name, parts, rule)
        shape = reading.scheme.check(parts, module=name)
        weight = WeightQuantization(scheme=reading.scheme, shape=shape, parts=parts, inputs=reading.inputs)
        return weight, num_experts, reading.remarks

    def _read_plain(self, name: str, parts: Mapping[str, Entry], entries: Mapping[str, Entry]) -> None:
        weight = parts.get("weight")
        helpers = [suffix for suffix in parts if suffix not in self._helpers_to_ignore and suffix not in ("weight", "")]
        if "pre_quant_scale" in helpers or (weight is None and name not in entries and self._misses_weight(helpers)):
            raise _without_weight(name, helpers, weight)
        if (
            weight is not None
            and weight.dtype not in _PLAIN_DTYPES
            and any(role_of(it) is Role.SCALE for it in helpers)
        ):
            raise UnsupportedQuantization(
                f"{weight.name} is {weight.dtype}, and has scales beside it ({list_names(helpers)}).",
                "No known layout stores codes so, and without the scales they would be taken for plain numbers.",
                "Take the file from where the model was made.",
            )
        if helpers:
            self.unused.extend(parts[suffix].name for suffix in helpers)
            names = [parts[suffix].name for suffix in helpers]
            self._findings.add("Scales that belong to no packed weight are not used", *names)
        if weight is not None and self._family.expects(name, module_kind(name, len(weight.shape))):
            self._findings.add(
                f"Modules that {self._place} means to be quantized have plain weights, and are taken as plain", name
            )

    def _misses_weight(self, helpers: Iterable[str]) -> bool:
        is_stacked_method = self._family.section.method == "mxfp4"
        return any(
            suffix not in _HARMLESS and (suffix not in STACKED_ROLES or (suffix == "_scales" and is_stacked_method))
            for suffix in helpers
        )

    def _is_plain_float8(self, name: str, codes: Entry, parts: Mapping[str, Entry]) -> bool:
        """Say whether float8 values are plain numbers: they have no scale, and the configuration says so or leaves the module out."""
        if codes.dtype not in FLOAT8_DTYPES or any(role_of(suffix) is Role.SCALE for suffix in parts):
            return False
        return self._has_plain_float8 or (bool(self._family.excludes) and self._family.excludes.find(name) is not None)


def _family(section: QuantizationSection, other: QuantizationSection | None) -> Family[Any]:
    if section.method == "modelopt" and other is not None and other.method == "modelopt":
        return ModeloptFamily(section, layers=other.raw.get("quantized_layers"))
    return _FAMILIES[section.method](section)


def _is_float8(dtype: str | None) -> bool:
    return "float8" in (dtype or "")


def _count(found: CheckpointQuantization, entries: Mapping[str, Entry]) -> tuple[SchemeCount, ...]:
    """Return one row for each scheme, and one for each dtype of what is not packed, those with the most bytes first."""
    alike: dict[tuple[int, int | None], list[QuantizedModule]] = {}
    for module in found.modules.values():
        alike.setdefault((id(module.weight), module.num_experts), []).append(module)
    packed: dict[tuple[str, str], list[int]] = {}
    for (_, num_experts), modules in alike.items():
        weight = modules[0].weight
        row = packed.setdefault((weight.scheme.describe(), describe_inputs(weight.inputs)), [0, 0])
        row[0] += len(modules)
        row[1] += len(modules) * weight.packed_bytes * (1 if num_experts is None else num_experts)
    taken = found.entry_names()
    holders: dict[str, set[str]] = {}
    plain: dict[str, int] = {}
    for name, entry in entries.items():
        if name in taken:
            continue
        plain[entry.dtype] = plain.get(entry.dtype, 0) + entry.size_bytes
        module_name = name.rpartition(".")[0]
        named = holders.setdefault(entry.dtype, set())
        # The bias of a packed weight is plain, but makes no module of its own.
        if module_name not in found.modules:
            named.add(module_name)
    rows = [
        SchemeCount(scheme=label, inputs=inputs, num_modules=count, num_bytes=size)
        for (label, inputs), (count, size) in packed.items()
    ]
    others = [
        SchemeCount(scheme=f"plain {name}", inputs="as they are", num_modules=len(holders[name]), num_bytes=size)
        for name, size in plain.items()
    ]
    return (*sorted(rows, key=_largest_first), *sorted(others, key=_largest_first))


def _largest_first(row: SchemeCount) -> tuple[int, str, str]:
    return -row.num_bytes, row.scheme, row.inputs


def _refuse_unexplained(stored: StoredTensors, *, has_plain_float8: bool, source: str) -> None:
    """Raise `UnsupportedQuantization` where weights are packed though no side file says so."""
    names = []
    for parts in stored.modules.values():
        codes = find_codes(parts)
        has_scale = any(role_of(suffix) is Role.SCALE for suffix in parts)
        if codes is not None and (has_scale or (codes.dtype in FLOAT8_DTYPES and not has_plain_float8)):
            names.append(codes.name)
    if names:
        raise UnsupportedQuantization(
            f"{source or 'The checkpoint'} holds packed weights, but no side file says how they are quantized: {list_names(names)}.",
            "Neither config.json (quantization_config, at the top or for the language model) nor hf_quant_config.json names a method.",
            "Take both files from where the model was made.",
        )


def _without_weight(name: str, helpers: Iterable[str], weight: Entry | None) -> UnsupportedQuantization:
    listed = ", ".join(sorted(suffix.lstrip("_") for suffix in helpers))
    if weight is not None:
        return UnsupportedQuantization(
            f"{name} has a plain weight ({weight.dtype}) and a pre_quant_scale.",
            "The layer's input would have to be multiplied by it, which is done for packed weights only.",
            "Export the model with the scale folded into the layer before, or quantize this layer too.",
        )
    return UnsupportedQuantization(
        f"{name} has {listed}, but no weight.",
        "Scales without the values that they scale are of no use, and the layer would be left without its weight.",
        "Upload the checkpoint's files again, and check that its index names them all.",
    )


def _low_rank(entries: list[Entry]) -> UnsupportedQuantization:
    return UnsupportedQuantization(
        f"The checkpoint holds low-rank branches of SVDQuant, which cannot be computed here: {list_names(entry.name for entry in entries)}.",
        "SVDQuant adds b(a(x)) to each layer; without that branch the model's output would be wrong.",
        "Export the model with NVFP4 or NVFP4_AWQ instead, or use its unquantized form.",
    )
