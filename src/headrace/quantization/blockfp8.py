"""``quant_method: fp8`` (and ``mxfp8``): FP8 weights by blocks, as DeepSeek and Qwen publish them, or with one scale for each.

Sources: DeepSeek V3's, V3.1's (``scale_fmt``) and Qwen3's configuration files, Transformers 5.24 (``FineGrainedFP8Config``), vLLM 0.33 (``Fp8Config``: ``ignored_layers``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.errors import UnsupportedQuantization
from headrace.quantization.family import Family, Reading, names_in, unknown
from headrace.quantization.fp8 import Fp8Block, Fp8Channel, Fp8Tensor
from headrace.quantization.inputs import FP8_PER_TOKEN, FP8_STATIC, MXFP8_GROUPS, fp8_groups
from headrace.quantization.layouts import inputs_of, scheme_of
from headrace.quantization.mx import Mxfp8
from headrace.quantization.scheme import InputQuantization, Role, Scheme, StoredPart
from headrace.quantization.section import QuantizationSection

EXCLUDE_KEYS = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
_ACTIVATION_SCHEMES = ("dynamic", "static")


class BlockFp8Family(Family[bool]):
    """A section of one FP8 format for all that it does not exclude."""

    def __init__(self, section: QuantizationSection) -> None:
        super().__init__(section, excluded=names_in(section, *EXCLUDE_KEYS))
        self._block = _read_block(section)
        # DeepSeek V3.1: the scales of inputs are powers of two, as those of its weights are.
        self._power_of_two = "up" if section.raw.get("scale_fmt") == "ue8m0" else None
        self._scheme = str(section.raw.get("activation_scheme") or "dynamic").lower()
        if self._scheme not in _ACTIVATION_SCHEMES:
            raise unknown(section, "activation_scheme", self._scheme, _ACTIVATION_SCHEMES)

    def rule_for(self, module: str, kind: str) -> bool:
        return True

    def expects(self, module: str, kind: str) -> bool:
        # Tools leave the head as it is without saying so.
        return module.rpartition(".")[2] != "lm_head" and super().expects(module, kind)

    def read(self, module: str, parts: Mapping[Role, StoredPart], rule: bool | None) -> Reading:
        scheme = scheme_of(module, parts, block=self._block)
        if not isinstance(scheme, (Fp8Block, Fp8Channel, Fp8Tensor, Mxfp8)):
            remark = f"{self.section.place} says {self.section.method}, but the tensors are {scheme.describe()}, and are taken as such"
            return Reading(scheme, inputs_of(scheme, parts), (remark,))
        if self._scheme == "static" and Role.INPUT_SCALE not in parts:
            remark = f"{self.section.place} has static inputs, but there is no input_scale; inputs are left as they are"
            return Reading(scheme, None, (remark,))
        return Reading(scheme, FP8_STATIC if self._scheme == "static" else self._dynamic(scheme))

    def _dynamic(self, scheme: Scheme) -> InputQuantization:
        """Return the dynamic rounding that goes with ``scheme``: groups as wide as its blocks, else one scale for each token."""
        if isinstance(scheme, Fp8Block):
            return fp8_groups(scheme.block[1], power_of_two=self._power_of_two)
        return MXFP8_GROUPS if isinstance(scheme, Mxfp8) else FP8_PER_TOKEN


def _read_block(section: QuantizationSection) -> tuple[int, int] | None:
    found: Any = section.raw.get("weight_block_size")
    if found is None:
        return None
    if isinstance(found, (list, tuple)) and len(found) == 2 and all(type(size) is int and size > 0 for size in found):
        return found[0], found[1]
    raise UnsupportedQuantization(
        f"{section.place} has {found!r} as weight_block_size.",
        "It must be two sizes: rows and columns of a block.",
        "Take config.json from where the model was made.",
    )
