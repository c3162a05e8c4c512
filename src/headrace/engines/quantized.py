"""Brings a checkpoint's quantization to the construction of its model: Transformers looks at one place only, and skips what it does not know with a log line."""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

from headrace.checkpoint import Entry
from headrace.engines.quantizer import OUR_METHOD, Shared, register_quantizers
from headrace.errors import CheckpointError, UnsupportedQuantization
from headrace.quantization import CheckpointQuantization, QuantizationSection, detect, find_modelopt, find_quantization
from headrace.quantization.section import CONFIG_FILE, MODELOPT_FILE

_QUANTIZERS = ("transformers.quantizers.", "transformers.utils.quantization_config")
_NESTS = ("text_config", "language_config", "llm_config")


def read_quantization(folder: Path, *, source: str) -> QuantizationSection | None:
    """Return what the side files in ``folder`` say of the quantization; None where they say nothing.

    Raises `CheckpointError` for a file that is not a JSON object, and `UnsupportedQuantization` for a section that makes no sense.
    """
    return find_quantization(
        _read_object(folder / CONFIG_FILE, source=source), _read_object(folder / MODELOPT_FILE, source=source)
    )


def detect_quantization(folder: Path, entries: Mapping[str, Entry], *, source: str) -> CheckpointQuantization | None:
    """Return what the side files in ``folder`` and the stored tensors together say of the quantization; None where there is none that we read.

    Raises what `read_quantization` raises, and `UnsupportedQuantization` for packed tensors that make no sense.
    """
    config, modelopt = (
        _read_object(folder / CONFIG_FILE, source=source),
        _read_object(folder / MODELOPT_FILE, source=source),
    )
    return detect(
        find_quantization(config, modelopt),
        entries,
        modelopt_section=find_modelopt(modelopt),
        dtype=config.get("dtype") or config.get("torch_dtype"),
        source=source,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingWishes:
    """What is to become of packed weights."""

    dequantize: bool = False
    """Expand them into plain values as they arrive."""
    weight_only: bool = False
    """Keep them packed, and leave inputs, keys and values as they are, although the checkpoint's maker rounds them."""


def pass_quantization(
    config: Any,
    section: QuantizationSection | None,
    detected: CheckpointQuantization | None = None,
    *,
    source: str,
    wishes: PackingWishes | None = None,
) -> None:
    """Put what is known of the quantization where Transformers looks for it when it builds the model: at the top level of ``config``, under our own method's name.

    Methods that we do not read are left to Transformers' quantizers. Raises `UnsupportedQuantization` where there is none either: Transformers would go on without one, and
    build plain parameters for packed tensors.
    """
    wishes = wishes or PackingWishes()
    if detected is not None:
        _clear(config)
        if not wishes.dequantize and (detected.modules or detected.kv is not None):
            register_quantizers()
            config.quantization_config = {
                "quant_method": OUR_METHOD,
                "section": detected.section.as_config(),
                "detected": Shared(detected),
                "weight_only": wishes.weight_only,
            }
        return
    if section is None:
        return
    if wishes.dequantize or wishes.weight_only:
        raise UnsupportedQuantization(
            f"{source} is quantized with {section.label}, which Headrace does not expand.",
            f"{section.place} says so; models of this kind are built by Transformers' own quantizer.",
            "Load it without dequantize and weight_only, or use the unquantized form of the model.",
        )
    if not has_quantizer(section):
        raise UnsupportedQuantization(
            f"{source} is quantized with {section.label}, which cannot be loaded.",
            f"{section.place} says so, and neither Headrace nor Transformers {transformers.__version__} has a reader of that name. Without one the packed tensors would be taken "
            "for plain numbers. No weight byte was read.",
            "Use the unquantized form of the model, or stream the tensors as they are with headrace.stream.",
        )
    config.quantization_config = section.as_config()


def _clear(config: Any) -> None:
    """Take the quantization out of ``config`` and the configurations in it, where Transformers would look for one to build by."""
    for held in (config, *(getattr(config, nest, None) for nest in _NESTS)):
        if getattr(held, "quantization_config", None) is not None:
            del held.quantization_config


def has_quantizer(section: QuantizationSection) -> bool:
    """Say whether Transformers, with what was registered in it, can build a model that is quantized so."""
    method = section.method
    if method == "bitsandbytes":
        method += "_8bit" if section.raw.get("load_in_8bit") else "_4bit"
    return method in AUTO_QUANTIZATION_CONFIG_MAPPING and method in AUTO_QUANTIZER_MAPPING


def came_from_quantizer(error: BaseException) -> bool:
    """Say whether ``error`` was raised by the part of Transformers that prepares quantized models, rather than by a model or by a load."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__", "").startswith(_QUANTIZERS) for frame, _ in frames)


def _read_object(path: Path, *, source: str) -> dict[str, Any]:
    try:
        # As leniently as everybody reads it: some models' configurations hold Infinity.
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise _invalid(path.name, source, f"It is not JSON: {error}.") from error
    if not isinstance(content, dict):
        raise _invalid(path.name, source, "It is not an object.")
    return content


def _invalid(name: str, source: str, why: str) -> CheckpointError:
    return CheckpointError(f"{name} of {source} is not a configuration.", why, "Upload the model's own again.")
