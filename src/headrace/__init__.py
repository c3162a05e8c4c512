"""Headrace streams LLM weights from where they are stored straight into an inference engine, in bounded memory, without a local copy."""

from typing import TYPE_CHECKING

from headrace.lazynames import lazy_names

if TYPE_CHECKING:
    from headrace.checkpoint import Checkpoint, Entry
    from headrace.engines import load_model, register_quantizers
    from headrace.errors import HeadraceError
    from headrace.progress import LoadProgress
    from headrace.settings import Settings, TransportSettings
    from headrace.storage import Uri, is_object_uri, parse_uri
    from headrace.streaming import LoadReport, TensorStream, load_state_dict, open
    from headrace.streaming.loading import stream

__all__ = [
    "Checkpoint",
    "Entry",
    "HeadraceError",
    "LoadProgress",
    "LoadReport",
    "Settings",
    "TensorStream",
    "TransportSettings",
    "Uri",
    "is_object_uri",
    "load_model",
    "load_state_dict",
    "open",
    "parse_uri",
    "register_quantizers",
    "stream",
]

# Names are imported when they are first used: importing torch takes two seconds, which a --help or a server's open port need not wait for.
_HOMES = {
    "Checkpoint": "checkpoint",
    "Entry": "checkpoint",
    "HeadraceError": "errors",
    "LoadProgress": "progress",
    "LoadReport": "streaming",
    "Settings": "settings",
    "TensorStream": "streaming",
    "TransportSettings": "settings",
    "Uri": "storage",
    "is_object_uri": "storage",
    "load_model": "engines",
    "load_state_dict": "streaming",
    "open": "streaming",
    "parse_uri": "storage",
    "register_quantizers": "engines",
    "stream": "streaming.loading",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES, __all__)
