"""Brings a checkpoint's quantization to the construction of its model: Transformers looks at one place only, and skips what it does not know with a log line."""

from __future__ import annotations

import json
import traceback
from pathlib import Path
from typing import Any

import transformers
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

from headrace.errors import CheckpointError, UnsupportedQuantization
from headrace.quantization import QuantizationSection, find_quantization
from headrace.quantization.section import CONFIG_FILE, MODELOPT_FILE

_QUANTIZERS = ("transformers.quantizers.", "transformers.utils.quantization_config")


def read_quantization(folder: Path, *, source: str) -> QuantizationSection | None:
    """Return what the side files in ``folder`` say of the quantization; None where they say nothing.

    Raises `CheckpointError` for a file that is not a JSON object, and `UnsupportedQuantization` for a section that makes no sense.
    """
    return find_quantization(
        _read_object(folder / CONFIG_FILE, source=source), _read_object(folder / MODELOPT_FILE, source=source)
    )


def pass_quantization(config: Any, section: QuantizationSection | None, *, source: str) -> None:
    """Put ``section`` where Transformers looks for it when it builds the model: at the top level of ``config``.

    Raises `UnsupportedQuantization` where Transformers has no quantizer for the method: it would go on without one, and build plain parameters for packed tensors.
    """
    if section is None:
        return
    if not has_quantizer(section):
        raise UnsupportedQuantization(
            f"{source} is quantized with {section.label}, which cannot be loaded yet.",
            f"{section.place} says so, and Transformers {transformers.__version__} has no quantizer of that name. Without one the packed tensors would be taken for "
            "plain numbers. No weight byte was read.",
            "Use the unquantized form of the model, or stream the tensors as they are with headrace.stream.",
        )
    config.quantization_config = section.as_config()


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
