"""``quant_method: mxfp4``, as gpt-oss is published: all experts of a layer in one tensor of blocks and one of scales. Everything else is plain, and inputs are not rounded.

Source: the files of openai/gpt-oss-20b; Transformers 5.24 (``Mxfp4Config``).
"""

from __future__ import annotations

from collections.abc import Mapping

from headrace.quantization.family import Family, Reading, names_in
from headrace.quantization.layouts import inputs_of, scheme_of
from headrace.quantization.scheme import Role, StoredPart
from headrace.quantization.section import QuantizationSection


class GptOssFamily(Family[bool]):
    """A section that has nothing to say but what is excluded."""

    def __init__(self, section: QuantizationSection) -> None:
        super().__init__(section, excluded=names_in(section, "modules_to_not_convert", "ignore"))

    def rule_for(self, module: str, kind: str) -> bool:
        return True

    def expects(self, module: str, kind: str) -> bool:
        return False

    def read(self, module: str, parts: Mapping[Role, StoredPart], rule: bool | None) -> Reading:
        scheme = scheme_of(module, parts)
        return Reading(scheme, inputs_of(scheme, parts))
