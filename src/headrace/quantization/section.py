"""Finds what the side files say about a checkpoint's quantization. Pure: takes parsed JSON, returns a value; it does not know what the section means.

Where it is looked for, first found first taken:

1. ``quantization_config``, then ``compression_config`` (compressed-tensors before 0.8), in config.json: at the top level, then in ``text_config``,
   ``language_config`` and ``llm_config``, where multimodal checkpoints keep what belongs to their language model.
2. hf_quant_config.json, which NVIDIA ModelOpt wrote before it wrote into config.json as well: nested under ``quantization``, or flat.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.errors import UnsupportedQuantization

CONFIG_FILE = "config.json"
MODELOPT_FILE = "hf_quant_config.json"

_NESTS = ("text_config", "language_config", "llm_config")
_KEYS = ("quantization_config", "compression_config")
_SYNONYMS = {
    "awq_marlin": "awq",
    "gptq_marlin": "gptq",
    "compressed_tensors": "compressed-tensors",
    "sparseml": "compressed-tensors",
    "auto_round": "auto-round",
    "intel/auto-round": "auto-round",
    "petit_nvfp4": "modelopt",
}


@dataclass(frozen=True, slots=True)
class QuantizationSection:
    """One section as it was found."""

    method: str
    """The ``quant_method`` that names the format, after `canonical_method`: ``fp8``, ``gptq``, ``compressed-tensors``, ``modelopt``."""
    place: str
    """Where it was found: ``config.json: text_config.quantization_config``."""
    raw: Mapping[str, Any]
    """Its content, unchanged; of a nested hf_quant_config.json what is under ``quantization``."""

    @property
    def algorithm(self) -> str | None:
        """The ``quant_algo`` that ModelOpt names; None elsewhere."""
        found = self.raw.get("quant_algo")
        return str(found) if found else None

    @property
    def label(self) -> str:
        """The method, with the algorithm where there is one: ``modelopt NVFP4``."""
        return f"{self.method} {self.algorithm}" if self.algorithm else self.method

    def as_config(self) -> dict[str, Any]:
        """Return the section as ``quantization_config`` at the top level of config.json spells it: with its method in ``quant_method``."""
        return {**self.raw, "quant_method": self.method}


def find_quantization(
    config: Mapping[str, Any], hf_quant_config: Mapping[str, Any] | None = None
) -> QuantizationSection | None:
    """Return the section that counts, or None where neither file names a quantization. Null and empty sections name none.

    Raises `UnsupportedQuantization` for a section that is not an object, or from which no method can be told.
    """
    for place, section in _sections(config):
        found = _as_mapping(section, place)
        if found:
            return QuantizationSection(_method_of(found, place), place, found)
    return find_modelopt(hf_quant_config or {})


def find_modelopt(content: Mapping[str, Any]) -> QuantizationSection | None:
    """Return what hf_quant_config.json says, nested or flat, whatever config.json says; None where it names no algorithm.

    Raises `UnsupportedQuantization` for a section that is not an object.
    """
    place, section = MODELOPT_FILE, content
    if "quantization" in content:
        place, section = f"{MODELOPT_FILE}: quantization", _as_mapping(content["quantization"], MODELOPT_FILE)
    # A file that names no algorithm comes with checkpoints that were exported unquantized.
    if not any(section.get(key) for key in ("quant_algo", "kv_cache_quant_algo", "quant_method")):
        return None
    return QuantizationSection(canonical_method(str(section.get("quant_method") or "modelopt")), place, section)


def canonical_method(name: str) -> str:
    """Return the method that ``name`` means: vLLM and SGLang have names for a method with one algorithm or kernel, and methods were renamed."""
    name = name.lower()
    if name.startswith("modelopt"):
        return "modelopt"
    return _SYNONYMS.get(name, name)


def _sections(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    nests = [("", config), *((f"{nest}.", config.get(nest)) for nest in _NESTS)]
    for prefix, holder in nests:
        if isinstance(holder, Mapping):
            yield from ((f"{CONFIG_FILE}: {prefix}{key}", holder[key]) for key in _KEYS if key in holder)


def _as_mapping(section: Any, place: str) -> Mapping[str, Any]:
    if section is None:
        return {}
    if not isinstance(section, Mapping):
        raise UnsupportedQuantization(
            f"{place} is {_kind(section)}.",
            "It must be an object that names a method and its parameters.",
            "Take the file from where the model was made.",
        )
    return section


def _method_of(section: Mapping[str, Any], place: str) -> str:
    named = section.get("quant_method")
    if isinstance(named, str) and named:
        return canonical_method(named)
    producer = section.get("producer")
    if section.get("quant_algo") or (isinstance(producer, Mapping) and producer.get("name") == "modelopt"):
        return "modelopt"
    if section.get("load_in_4bit") or section.get("load_in_8bit"):
        return "bitsandbytes"
    if section.get("config_groups"):
        return "compressed-tensors"
    raise UnsupportedQuantization(
        f"{place} names no method.",
        f"It has no quant_method, and none can be told from its keys: {', '.join(sorted(map(str, section))[:12])}.",
        "Take config.json from where the model was made.",
    )


def _kind(value: Any) -> str:
    return {str: "text", list: "a list", bool: "a truth value"}.get(type(value), "a number")
