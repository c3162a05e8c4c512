"""Which objects are side files: what is allowed by name, within bounds. Lists folders of a store; reads no object."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from headrace.checkpoint.index import INDEX_SUFFIX
from headrace.checkpoint.wording import counted, listed
from headrace.errors import AccessDenied, InvalidUri, ObjectNotFound
from headrace.storage import Listing, ObjectStore, StoredObject
from headrace.units import format_bytes

# An allow-list: whatever is not named here may be weights under a name that nobody has thought of.
_SUFFIXES = (
    ".json",
    ".jsonl",
    ".jinja",
    ".jinja2",
    ".txt",
    ".model",
    ".tiktoken",
    ".vocab",
    ".merges",
    ".bpe",
    ".spm",
    ".py",
    ".md",
    ".yaml",
    ".yml",
    ".toml",
    ".cfg",
    ".ini",
)
_NAMES = ("license", "notice", "copying", "use_policy")


@dataclass(frozen=True, slots=True, kw_only=True)
class SideLimits:
    """How much may count as side files."""

    file_bytes: int = 64_000_000
    """Largest single file. Tokenizers reach 35 MB, an index of a large model of experts 25 MB."""
    total_bytes: int = 100_000_000
    """Most bytes of all files together."""
    num_objects: int = 2000
    """Most files."""
    num_folders: int = 32
    """Most sub-folders that are listed: each costs a request."""
    depth: int = 3
    """Levels of sub-folders that are looked into; 0: none."""


@dataclass(frozen=True, slots=True)
class SideListing:
    """The side files by key, and what was left out and why (full sentences)."""

    objects: tuple[StoredObject, ...]
    notes: tuple[str, ...] = ()


def is_side_file(key: str) -> bool:
    """Say whether an object of this name may be a side file."""
    name = key.rpartition("/")[2].lower()
    return not name.startswith(".") and (name.endswith(_SUFFIXES) or name.partition(".")[0] in _NAMES)


def list_side_files(store: ObjectStore, top: Listing, limits: SideLimits | None = None) -> SideListing:
    """Return the side files at and below the level ``top`` of ``store``, which the caller has listed already."""
    limits = limits or SideLimits()
    found = [stored for stored in top.objects if is_side_file(stored.key)]
    notes: list[str] = []
    waiting = deque((folder, 1) for folder in top.folders if limits.depth and _is_entered(folder))
    num_listed = 0
    while waiting:
        if num_listed == limits.num_folders or len(found) > limits.num_objects:
            notes.append(
                f"Not looked into for side files: {listed(folder for folder, _ in waiting)}; there are too many."
            )
            break
        folder, depth = waiting.popleft()
        num_listed += 1
        try:
            level = store.list_level(folder)
        except (AccessDenied, InvalidUri, ObjectNotFound) as error:
            notes.append(f"Not looked into for side files: {listed([folder])}. {error.what}")
            continue
        found.extend(stored for stored in level.objects if is_side_file(stored.key))
        if depth < limits.depth:
            waiting.extend((below, depth + 1) for below in level.folders if _is_entered(below))
    kept, more_notes = _within(found, limits)
    return SideListing(kept, (*notes, *more_notes))


def _is_entered(folder: str) -> bool:
    name = folder.rpartition("/")[2]
    # Hidden folders, compiled Python, and the intermediate states of a training run.
    return not name.startswith((".", "__pycache__", "checkpoint-"))


def _within(found: Iterable[StoredObject], limits: SideLimits) -> tuple[tuple[StoredObject, ...], tuple[str, ...]]:
    """Keep as many files as the limits allow: near the root first, then small ones; an index, which only we read, last."""
    kept: list[StoredObject] = []
    large: list[StoredObject] = []
    beyond: list[StoredObject] = []
    total = 0
    for stored in sorted(found, key=_rank):
        if stored.size_bytes > limits.file_bytes:
            large.append(stored)
        elif total + stored.size_bytes > limits.total_bytes or len(kept) == limits.num_objects:
            beyond.append(stored)
        else:
            kept.append(stored)
            total += stored.size_bytes
    notes = []
    if large:
        notes.append(
            f"Left out of the side files, since larger than {format_bytes(limits.file_bytes)}: {listed(stored.key for stored in large)}."
        )
    if beyond:
        bound = f"{format_bytes(limits.total_bytes)} or {counted(limits.num_objects, 'file')} in all"
        notes.append(f"Left out of the side files, since more than {bound}: {listed(stored.key for stored in beyond)}.")
    return tuple(sorted(kept, key=lambda stored: stored.key)), tuple(notes)


def _rank(stored: StoredObject) -> tuple[bool, int, int, str]:
    return stored.key.endswith(INDEX_SUFFIX), stored.key.count("/"), stored.size_bytes, stored.key
