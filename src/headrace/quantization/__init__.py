"""What packed tensors mean. Knows no engine and does no input or output."""

from typing import TYPE_CHECKING

from headrace.lazynames import lazy_names
from headrace.quantization.section import QuantizationSection, find_modelopt, find_quantization

if TYPE_CHECKING:
    from headrace.quantization.detection import METHODS, detect
    from headrace.quantization.modules import CheckpointQuantization, KvQuantization, QuantizedModule, SchemeCount
    from headrace.quantization.scheme import InputQuantization, Role, Scheme, StoredPart, WeightQuantization

__all__ = [
    "METHODS",
    "CheckpointQuantization",
    "InputQuantization",
    "KvQuantization",
    "QuantizationSection",
    "QuantizedModule",
    "Role",
    "Scheme",
    "SchemeCount",
    "StoredPart",
    "WeightQuantization",
    "detect",
    "find_modelopt",
    "find_quantization",
]

# What a section says is asked for by commands that need no torch; all else imports it, so it is imported when it is first used.
_HOMES = {
    "METHODS": "detection",
    "CheckpointQuantization": "modules",
    "InputQuantization": "scheme",
    "KvQuantization": "modules",
    "QuantizedModule": "modules",
    "Role": "scheme",
    "Scheme": "scheme",
    "SchemeCount": "modules",
    "StoredPart": "scheme",
    "WeightQuantization": "scheme",
    "detect": "detection",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES, __all__)
