"""NVIDIA ModelOpt's checkpoints: what each ``quant_algo`` means. The scheme is told from the tensors, which say it in full; the algorithm says how inputs are rounded.

Source: the exporter of nvidia-modelopt 0.47.0 (names of algorithms, of tensors, and their shapes); names marked so are TensorRT-LLM 1.0's.

Of one algorithm the files do not say whether inputs are rounded: ``mxfp4`` stands for weights alone as well. Inputs are taken as rounded, as its default recipe has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.errors import UnsupportedQuantization
from headrace.quantization.family import Family, Reading, names_in, unknown, whole_number
from headrace.quantization.fp4 import Nvfp4
from headrace.quantization.fp8 import Fp8Block, Fp8Channel, Fp8Tensor
from headrace.quantization.inputs import (
    FP8_PER_TOKEN,
    FP8_STATIC,
    INT8_PER_TOKEN,
    INT8_STATIC,
    MXFP4_GROUPS,
    MXFP8_GROUPS,
    fp8_groups,
    nvfp4_groups,
)
from headrace.quantization.int4 import ModeloptInt4
from headrace.quantization.layouts import INT8_SCHEMES, inputs_of, nvfp4_inputs, scheme_of
from headrace.quantization.matching import NamePatterns
from headrace.quantization.mx import Mxfp4, Mxfp8
from headrace.quantization.scheme import InputQuantization, Role, Scheme, StoredPart
from headrace.quantization.section import QuantizationSection

MIXED = "MIXED_PRECISION"
EXCLUDE_KEYS = ("ignore", "exclude_modules")


@dataclass(frozen=True, slots=True)
class Algorithm:
    """What one ``quant_algo`` says of a module."""

    schemes: tuple[type[Scheme], ...]
    inputs: InputQuantization | None = None


ALGORITHMS: Mapping[str, Algorithm] = {
    "FP8": Algorithm((Fp8Tensor,), FP8_STATIC),
    "FP8_PER_CHANNEL_PER_TOKEN": Algorithm((Fp8Channel, Fp8Tensor), FP8_PER_TOKEN),
    "FP8_PB_WO": Algorithm((Fp8Block,)),
    "FP8_PB_REAL": Algorithm((Fp8Block,)),
    "FP8_BLOCK_SCALES": Algorithm((Fp8Block,), fp8_groups(128)),  # TensorRT-LLM
    "NVFP4": Algorithm((Nvfp4,), nvfp4_groups()),
    "NVFP4_AWQ": Algorithm((Nvfp4,), nvfp4_groups()),
    "W4A16_NVFP4": Algorithm((Nvfp4,)),
    "W4A8_NVFP4_FP8": Algorithm((Nvfp4,), FP8_STATIC),
    "W4A16_AWQ": Algorithm((ModeloptInt4,)),
    "W4A8_AWQ": Algorithm((ModeloptInt4,), FP8_STATIC),
    "W8A16": Algorithm(INT8_SCHEMES),
    "W8A8_SQ_PER_CHANNEL": Algorithm(INT8_SCHEMES, INT8_STATIC),
    "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN": Algorithm(INT8_SCHEMES, INT8_PER_TOKEN),  # TensorRT-LLM
    "MXFP8": Algorithm((Mxfp8,), MXFP8_GROUPS),
    "MXFP4": Algorithm((Mxfp4,), MXFP4_GROUPS),
    "W4A8_MXFP4_FP8": Algorithm((Mxfp4,), FP8_STATIC),
    "W4A8_MXFP4_MXFP8": Algorithm((Mxfp4,), MXFP8_GROUPS),  # TensorRT-LLM
    "W4A16_MXFP4": Algorithm((Mxfp4,)),  # TensorRT-LLM
}
"""By upper-case name."""


@dataclass(frozen=True, slots=True)
class ModeloptRule:
    """What the section says of one module."""

    algorithm: str | None
    group_size: int | None


class ModeloptFamily(Family[ModeloptRule]):
    """A section of ModelOpt's, flat or nested, of one algorithm or with one for each layer."""

    def __init__(self, section: QuantizationSection, *, layers: Mapping[str, Any] | None = None) -> None:
        """``layers`` is the ``quantized_layers`` of the other file, for a section that has none."""
        super().__init__(section, excluded=names_in(section, *EXCLUDE_KEYS))
        algorithm = _algorithm(section, section.raw.get("quant_algo"))
        self._layers: dict[str, ModeloptRule] = {}
        self._rule: ModeloptRule | None = None
        if algorithm == MIXED:
            self._layers = _layer_rules(section, section.raw.get("quantized_layers") or layers)
        elif algorithm is not None:
            self._rule = ModeloptRule(algorithm, whole_number(section, section.raw, "group_size", _group_size(section)))
        else:
            self._layers = _group_rules(section)
        self._targets = NamePatterns(self._layers, place=section.place)

    def rule_for(self, module: str, kind: str) -> ModeloptRule | None:
        if self._rule is not None:
            return self._rule
        found = self._targets.find(module, kind=kind)
        return None if found is None else self._layers[found]

    def expects(self, module: str, kind: str) -> bool:
        if self._rule is not None:
            return super().expects(module, kind)
        named = self._targets.find(module, kind="") is not None
        return named and kind == "Linear" and self.excludes.find(module, kind=kind) is None

    def read(self, module: str, parts: Mapping[Role, StoredPart], rule: ModeloptRule | None) -> Reading:
        group_size = rule.group_size if rule else None
        scheme = scheme_of(module, parts, group_size=group_size)
        place = self.section.place
        algorithm = ALGORITHMS.get(rule.algorithm) if rule and rule.algorithm else None
        if algorithm is None:
            remark = f"{place} says nothing of modules that are stored as {scheme.describe()}; they are taken as such"
            return Reading(scheme, inputs_of(scheme, parts), () if rule is not None else (remark,))
        assert rule is not None
        if not isinstance(scheme, algorithm.schemes):
            remark = f"{place} says {rule.algorithm}, but the tensors are {scheme.describe()}, and are taken as such"
            return Reading(scheme, inputs_of(scheme, parts), (remark,))
        remarks = []
        inputs = algorithm.inputs
        if inputs is not None and not inputs.is_dynamic and Role.INPUT_SCALE not in parts:
            remarks.append(f"{place} says {rule.algorithm}, but there is no input_scale; inputs are left as they are")
            inputs = None
        if inputs is not None and isinstance(scheme, Nvfp4) and inputs.format == "nvfp4":
            inputs = nvfp4_inputs(scheme.group_size, parts)
        stored = getattr(scheme, "group_size", None)
        if group_size and stored and group_size != stored:
            remarks.append(
                f"{place} says groups of {group_size}, but the scales are for groups of {stored}, and are taken so"
            )
        return Reading(scheme, inputs, tuple(remarks))


def _algorithm(section: QuantizationSection, found: object, *, layer: str = "") -> str | None:
    """Return the algorithm's name in upper case. Raises `UnsupportedQuantization` for one that is not known."""
    if not found:
        return None
    name = str(found).upper()
    where = f" of {layer}" if layer else ""
    if name.startswith("NVFP4_SVD"):
        raise UnsupportedQuantization(
            f"{section.place} names the algorithm {found!r}{where}, whose low-rank branch cannot be computed here.",
            "SVDQuant adds b(a(x)) to each layer; without that branch the model's output would be wrong.",
            "Export the model with NVFP4 or NVFP4_AWQ instead, or use its unquantized form.",
        )
    name = {"NVFP4_STATIC": "NVFP4"}.get(name, name)
    if name == MIXED and not layer:
        return name
    if name not in ALGORITHMS:
        raise unknown(section, f"quant_algo{where}", found, [*ALGORITHMS, *([] if layer else [MIXED])])
    return name


def _layer_rules(section: QuantizationSection, layers: object) -> dict[str, ModeloptRule]:
    if not isinstance(layers, Mapping) or not all(isinstance(value, Mapping) for value in layers.values()):
        raise UnsupportedQuantization(
            f"{section.place} says {MIXED}, but has no quantized_layers.",
            "It must say of each layer by which algorithm it is quantized.",
            "Take config.json and hf_quant_config.json from where the model was made.",
        )
    return {
        name: ModeloptRule(
            _algorithm(section, content.get("quant_algo"), layer=name),
            whole_number(section, content, "group_size", None),
        )
        for name, content in layers.items()
    }


def _group_size(section: QuantizationSection) -> int | None:
    """Return the group size of the first of ``config_groups``, where the flat form keeps it."""
    for _, group in _groups(section):
        weights = group.get("weights")
        if isinstance(weights, Mapping):
            return whole_number(section, weights, "group_size", None)
    return None


def _group_rules(section: QuantizationSection) -> dict[str, ModeloptRule]:
    """Return a rule for each target of ``config_groups``, for sections that name no algorithm."""
    rules: dict[str, ModeloptRule] = {}
    for _, group in _groups(section):
        weights = group.get("weights")
        if not isinstance(weights, Mapping):
            continue
        rule = ModeloptRule(
            _implied(weights, group.get("input_activations")), whole_number(section, weights, "group_size", None)
        )
        rules.update({str(target): rule for target in group.get("targets") or ()})
    return rules


def _groups(section: QuantizationSection) -> Iterable[tuple[str, Mapping[str, Any]]]:
    groups = section.raw.get("config_groups")
    if isinstance(groups, Mapping):
        yield from ((str(name), group) for name, group in groups.items() if isinstance(group, Mapping))


def _implied(weights: Mapping[str, Any], inputs: object) -> str | None:
    """Return the algorithm that ModelOpt writes as such a group; None where several are, and the tensors must say it."""
    bits, kind, grouped = weights.get("num_bits"), weights.get("type"), bool(weights.get("group_size"))
    input_bits = inputs.get("num_bits") if isinstance(inputs, Mapping) else None
    if (bits, kind) == (8, "float"):
        if grouped:
            return "MXFP8"
        return "FP8_PER_CHANNEL_PER_TOKEN" if weights.get("strategy") == "channel" else "FP8"
    if (bits, kind) == (4, "float"):
        return {None: "W4A16_NVFP4", 4: "NVFP4"}.get(input_bits)
    if (bits, kind) == (8, "int"):
        return "W8A16" if input_bits is None else "W8A8_SQ_PER_CHANNEL"
    return "W4A16_AWQ" if (bits, kind) == (4, "int") else None
