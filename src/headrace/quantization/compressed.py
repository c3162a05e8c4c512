"""compressed-tensors' checkpoints: config groups, each for the modules that its targets mean, with its own format and its own rounding of inputs.

Source: compressed-tensors 0.19.0 (keys, formats, and in which order targets are tried: names, then expressions, then classes).

Activation order changes nothing but ``weight_g_idx``. What ``output_activations`` asks for is not done, and a group that quantizes no weight is left out; both are warned of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from headrace.errors import UnsupportedQuantization
from headrace.quantization.family import Family, Reading, names_in, unknown, whole_number
from headrace.quantization.inputs import FP8_STATIC, INT8_STATIC, MXFP4_GROUPS_NEAREST, MXFP8_GROUPS_NEAREST, fp8_groups
from headrace.quantization.int4 import PackedInt
from headrace.quantization.layouts import nvfp4_inputs, require_scale, scheme_of
from headrace.quantization.matching import NamePatterns
from headrace.quantization.scheme import InputQuantization, Role, Scheme, StoredPart
from headrace.quantization.section import QuantizationSection

FORMATS = (
    "dense",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "pack-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
)
_FORMAT_SYNONYMS = {"fakequant": "dense", "mxfp8-pack-quantized": "mxfp8-quantized", "mxfp8": "mxfp8-quantized"}
_STRATEGIES = ("tensor", "channel", "group", "block", "token", "tensor_group")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundingArguments:
    """How one tensor of a group is rounded: its ``weights``, or its ``input_activations``."""

    num_bits: int
    type: str
    strategy: str
    group_size: int | None
    block: tuple[int, int] | None
    symmetric: bool
    is_dynamic: bool
    """False also where only the scales of groups are found while the model runs (``local``), and the scale above them is stored."""
    has_exponent_scales: bool
    """Scales are powers of two (MX formats)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigGroup:
    """One of ``config_groups``."""

    name: str
    targets: tuple[str, ...]
    format: str
    weights: RoundingArguments
    inputs: RoundingArguments | None


class CompressedFamily(Family[ConfigGroup]):
    """A section of compressed-tensors'."""

    def __init__(self, section: QuantizationSection) -> None:
        super().__init__(section, excluded=names_in(section, "ignore"))
        _refuse_extras(section)
        self.groups = tuple(self._read_groups())
        by_target: dict[str, ConfigGroup] = {}
        for group in self.groups:
            for target in group.targets:
                by_target.setdefault(target, group)
        self._by_target = by_target
        self._targets = NamePatterns(by_target, place=section.place)

    def rule_for(self, module: str, kind: str) -> ConfigGroup | None:
        found = self._targets.find(module, kind=kind)
        return None if found is None else self._by_target[found]

    def expects(self, module: str, kind: str) -> bool:
        if self._targets.find(module, kind=kind) is None:
            return False
        return kind == "Linear" and self.excludes.find(module, kind=kind) is None

    def read(self, module: str, parts: Mapping[Role, StoredPart], rule: ConfigGroup | None) -> Reading:
        remarks = []
        if rule is None:
            rule = self._only_fitting(module, parts)
            remarks.append(
                f"No target in {self.section.place} means these modules, which are packed as {rule.name} has it, and are taken so"
            )
        scheme = _scheme(module, parts, rule)
        inputs, remark = _inputs(rule.inputs, parts, place=f"{self.section.place}: {rule.name}")
        if remark:
            remarks.append(remark)
        return Reading(scheme, inputs, tuple(remarks))

    def _only_fitting(self, module: str, parts: Mapping[Role, StoredPart]) -> ConfigGroup:
        fitting = [group for group in self.groups if _fits(module, parts, group)]
        if len(fitting) == 1:
            return fitting[0]
        raise UnsupportedQuantization(
            f"{module} is packed, but no group of {self.section.place} says how.",
            f"None of the targets means it: {', '.join(self._by_target) or 'there are none'}; and its tensors fit {len(fitting)} of {len(self.groups)} groups.",
            "Name it in the targets of its group, or take config.json from where the model was made.",
        )

    def _read_groups(self) -> Iterable[ConfigGroup]:
        section = self.section
        default = _format(section, section.raw.get("format") or "dense")
        groups = section.raw.get("config_groups") or {}
        if not isinstance(groups, Mapping):
            raise _malformed(section, "config_groups", groups, "an object")
        for name, content in groups.items():
            if not isinstance(content, Mapping):
                raise _malformed(section, f"config_groups.{name}", content, "an object with targets and weights")
            place = f"config_groups.{name}"
            weights = _arguments(section, content.get("weights"), f"{place}.weights")
            if content.get("output_activations"):
                self.remarks.append(f"{section.place} rounds the outputs of {name}; outputs are left as they are")
            if weights is None:
                self.remarks.append(f"{section.place} quantizes no weights in {name}; the group is left out")
                continue
            targets = content.get("targets")
            if isinstance(targets, str) or not isinstance(targets, Iterable):
                raise _malformed(section, f"{place}.targets", targets, "a list of names")
            yield ConfigGroup(
                name=str(name),
                targets=tuple(targets),
                format=_format(section, content.get("format") or default),
                weights=weights,
                inputs=_arguments(section, content.get("input_activations"), f"{place}.input_activations"),
            )


def _scheme(module: str, parts: Mapping[Role, StoredPart], group: ConfigGroup) -> Scheme:
    """Return the scheme that ``parts`` make. The tensors tell the formats apart; ``group`` says what they leave open."""
    codes, weights = parts[Role.CODES], group.weights
    if codes.suffix == "weight_packed" and codes.dtype is torch.int32:
        require_scale(module, parts)
        if weights.type != "int":
            raise _contradiction(module, codes, group)
        return PackedInt(
            bits=weights.num_bits,
            group_size=weights.group_size if weights.strategy == "group" else None,
            symmetric=weights.symmetric,
        )
    block = weights.block
    if weights.strategy == "group" and weights.type == "float" and weights.group_size:
        block = (1, weights.group_size)
    return scheme_of(module, parts, group_size=weights.group_size, block=block)


def _fits(module: str, parts: Mapping[Role, StoredPart], group: ConfigGroup) -> bool:
    is_int = parts[Role.CODES].dtype in (torch.int32, torch.int8)
    if is_int is not (group.weights.type == "int"):
        return False
    try:
        _scheme(module, parts, group).check(parts, module=module)
    except UnsupportedQuantization:
        return False
    return True


def _inputs(
    arguments: RoundingArguments | None, parts: Mapping[Role, StoredPart], *, place: str
) -> tuple[InputQuantization | None, str | None]:
    """Return how a module's inputs are rounded, and what is odd about it."""
    if arguments is None or arguments.num_bits >= 16:
        return None, None
    found = _rounding(arguments, parts, place=place)
    if not found.is_dynamic and Role.INPUT_SCALE not in parts:
        stored = "input_global_scale" if found.format == "nvfp4" else "input_scale"
        return None, f"{place} has static inputs, but there is no {stored}; inputs are left as they are"
    return found, None


def _rounding(arguments: RoundingArguments, parts: Mapping[Role, StoredPart], *, place: str) -> InputQuantization:
    kind = (arguments.type, arguments.num_bits)
    if kind == ("float", 4) and arguments.group_size:
        if arguments.has_exponent_scales or arguments.strategy == "group":
            return MXFP4_GROUPS_NEAREST
        return nvfp4_inputs(arguments.group_size, parts)
    if kind == ("float", 8) and arguments.has_exponent_scales:
        return MXFP8_GROUPS_NEAREST
    if kind == ("float", 8) and arguments.strategy == "group" and arguments.group_size and arguments.is_dynamic:
        return fp8_groups(arguments.group_size)
    if kind in (("float", 8), ("int", 8)) and arguments.strategy in ("tensor", "token"):
        static = FP8_STATIC if arguments.type == "float" else INT8_STATIC
        if not arguments.is_dynamic and arguments.symmetric:
            return static
        return InputQuantization(
            format=static.format,
            granularity=arguments.strategy,
            is_dynamic=arguments.is_dynamic,
            symmetric=arguments.symmetric,
        )
    raise UnsupportedQuantization(
        f"{place} rounds inputs to {arguments.num_bits}-bit {arguments.type} values by {arguments.strategy}, which is not done here.",
        "Known are 8 bits by tensor, token or group, and 4-bit floats in groups.",
        "Use another quantization of the model, or its unquantized form; headrace.stream gives the tensors as they are stored.",
    )


def _arguments(section: QuantizationSection, content: Any, place: str) -> RoundingArguments | None:
    if content is None:
        return None
    if not isinstance(content, Mapping):
        raise _malformed(section, place, content, "an object")
    group_size = whole_number(section, content, "group_size", None)
    strategy = content.get("strategy")
    if strategy is None:
        # As compressed-tensors infers it: -1 is its older word for one scale per row.
        strategy = "tensor" if group_size is None else "channel" if group_size < 0 else "group"
    strategy = str(strategy).lower()
    if strategy not in _STRATEGIES:
        raise unknown(section, f"strategy of {place}", strategy, _STRATEGIES)
    kind = str(content.get("type") or "int").lower()
    if kind not in ("int", "float"):
        raise unknown(section, f"type of {place}", kind, ("int", "float"))
    num_bits = whole_number(section, content, "num_bits", 8)
    assert num_bits is not None
    return RoundingArguments(
        num_bits=num_bits,
        type=kind,
        strategy=strategy,
        group_size=group_size if group_size and group_size > 0 else None,
        block=_block(section, content.get("block_structure"), f"{place}.block_structure"),
        symmetric=content.get("symmetric") is not False,
        is_dynamic=content.get("dynamic") is True,
        has_exponent_scales="uint8" in str(content.get("scale_dtype")) or "e8m0" in str(content.get("scale_dtype")),
    )


def _block(section: QuantizationSection, found: Any, place: str) -> tuple[int, int] | None:
    if found is None:
        return None
    sizes = found.split("x") if isinstance(found, str) else found
    if (
        isinstance(sizes, (list, tuple))
        and len(sizes) == 2
        and all(str(size).isdecimal() and int(size) > 0 for size in sizes)
    ):
        return int(sizes[0]), int(sizes[1])
    raise _malformed(section, place, found, "two sizes")


def _format(section: QuantizationSection, found: object) -> str:
    name = _FORMAT_SYNONYMS.get(str(found), str(found))
    if name in ("sparse-bitmask", "sparse-24-bitmask", "marlin-24"):
        raise _sparse(section, name)
    if name not in FORMATS:
        raise unknown(section, "format", found, FORMATS)
    return name


def _refuse_extras(section: QuantizationSection) -> None:
    sparsity = section.raw.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity and str(sparsity.get("format")) != "dense":
        raise _sparse(section, str(sparsity.get("format")))
    transforms = section.raw.get("transform_config")
    if transforms and not (isinstance(transforms, Mapping) and not transforms.get("config_groups", transforms)):
        raise UnsupportedQuantization(
            f"{section.place} has a transform_config, which is not applied here.",
            "Rotations that are computed while the model runs would be left out, and its output would be wrong.",
            "Export the model with its transforms folded into the weights, or use its unquantized form.",
        )


def _sparse(section: QuantizationSection, name: str) -> UnsupportedQuantization:
    return UnsupportedQuantization(
        f"{section.place} says that weights are compressed as {name}, which cannot be read here.",
        "Sparse weights leave zeros out of the files; only dense ones are read.",
        "Export the model without sparse compression (save_pretrained with disable_sparse_compression), or use its unquantized form.",
    )


def _contradiction(module: str, codes: StoredPart, group: ConfigGroup) -> UnsupportedQuantization:
    return UnsupportedQuantization(
        f"{module}.{codes.suffix} holds 32-bit words, but {group.name} says {group.weights.num_bits}-bit {group.weights.type} values.",
        "Only packed integers are stored in such words.",
        "Take config.json from where the model was made.",
    )


def _malformed(section: QuantizationSection, key: str, found: object, must: str) -> UnsupportedQuantization:
    return UnsupportedQuantization(
        f"{section.place} has {found!r} as {key}.",
        f"It must be {must}.",
        "Take config.json from where the model was made.",
    )
