"""The set of objects that a checkpoint is made of, with their versions. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from headrace.errors import InvalidSetting
from headrace.storage import StoredObject

_ID = re.compile(r"[0-9a-f]{12}")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What was pinned when the checkpoint was opened: weight files in the order of reading, side files by key."""

    uri: str
    weights: tuple[StoredObject, ...]
    side: tuple[StoredObject, ...]

    @property
    def id(self) -> str:
        """Twelve hex digits that differ whenever a key, size or version does.

        The uri is not a part of it: the same objects have the same id on every machine and under every spelling of their uri. Where versions are of
        one machine (inodes of a local disk), so is the id.
        """
        return digest_of((*self.weights, *self.side))[:12]


def check_snapshot_id(text: str) -> str:
    """Return ``text`` if it may be the id of a snapshot. Raises `InvalidSetting`."""
    if not _ID.fullmatch(text):
        raise InvalidSetting(
            f"{text!r} is not the id of a snapshot.",
            "An id has twelve hexadecimal digits, in lower case. For a hub repository a whole commit will do, too.",
            "Take it from a load's report or log, or from: headrace inspect.",
        )
    return text


def is_commit(text: str) -> bool:
    """Say whether ``text`` is a whole commit id, which names a snapshot of a hub repository."""
    return _COMMIT.fullmatch(text) is not None


def digest_of(objects: Iterable[StoredObject], *more: str) -> str:
    """Return the SHA-256, in hex, over ``more`` texts and the keys, sizes and versions of ``objects``, in whichever order they come."""
    lines = sorted((stored.key, str(stored.size_bytes), stored.version) for stored in objects)
    digest = hashlib.sha256()
    for text in (*more, *(part for line in lines for part in line)):
        # Each text with its length before it, so that no two lists of texts look alike; names of local files need not be UTF-8.
        raw = text.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.hexdigest()
