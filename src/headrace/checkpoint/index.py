"""An index (``*.safetensors.index.json``): which file holds which tensor. Pure; parses bytes that others have read.

Source: the index that the Hugging Face libraries write; ``weight_map`` maps each tensor's name to a file next to the index.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.checkpoint.keys import natural_order, unsafe_reason
from headrace.checkpoint.sniff import recognise
from headrace.checkpoint.strictjson import parse_strictly
from headrace.checkpoint.wording import quoted
from headrace.errors import InvalidIndex

INDEX_SUFFIX = ".safetensors.index.json"
WEIGHTS_SUFFIX = ".safetensors"


@dataclass(frozen=True, slots=True)
class WeightIndex:
    """What an index says: its own key, and for each tensor's name the key of the file that holds it, both relative to the root."""

    key: str
    weight_map: Mapping[str, str]

    @property
    def files(self) -> tuple[str, ...]:
        """The files that are named, each once, in natural order."""
        return tuple(sorted(set(self.weight_map.values()), key=natural_order))

    @property
    def folders(self) -> tuple[str, ...]:
        """The sub-folders that the named files lie in, in order; without the root."""
        return tuple(sorted({folder for file in self.files if (folder := file.rpartition("/")[0])}))


def parse_index(raw: bytes, key: str, *, uri: str | None = None) -> WeightIndex:
    """Return what the index in ``raw`` says. Raises `InvalidIndex` for anything but a map from text to safe relative names of safetensors files.

    ``key`` is the index's own key relative to the root; names in it are relative to its folder. ``uri`` is for messages.
    """
    try:
        content = parse_strictly(raw)
    except ValueError as error:
        is_json = raw.removeprefix(b"\xef\xbb\xbf").lstrip().startswith((b"{", b"["))
        recognised = None if is_json else recognise(raw)
        why = str(error) if recognised is None else f"It {recognised.what}. {recognised.mend}"
        raise _invalid(key, uri, why) from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict):
        raise _invalid(key, uri, "It must be an object with an object named weight_map in it.")
    if not weight_map:
        raise _invalid(key, uri, "Its weight_map names no tensor.")
    folder = key.rpartition("/")[0]
    for name, file in weight_map.items():
        reason = _refused(file)
        if reason is not None:
            raise _invalid(key, uri, f"It maps tensor {quoted(name)} to {reason}.")
    return WeightIndex(key, {name: f"{folder}/{file}" if folder else file for name, file in weight_map.items()})


def _refused(file: Any) -> str | None:
    if not isinstance(file, str):
        return "something that is not text"
    reason = unsafe_reason(file)
    if reason is not None:
        return f"{quoted(file)}, which {reason}; only files inside the checkpoint may be named"
    if not file.endswith(WEIGHTS_SUFFIX):
        return f"{quoted(file)}, which is not a {WEIGHTS_SUFFIX} file"
    return None


def _invalid(key: str, uri: str | None, why: str) -> InvalidIndex:
    mend = f"Upload the model's own index again, or check it with: headrace inspect {uri or key}"
    return InvalidIndex(f"The index {key} is not valid.", why, mend)
