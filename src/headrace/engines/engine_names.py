"""Which tensors of a checkpoint one worker of an engine needs, decided by name before any weight byte is asked for. Pure; knows no engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from headrace.storage import ObjectStore


def _never(name: str) -> bool:
    return False


def _as_it_is(name: str) -> str:
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class NameFilter:
    """Says of each stored name whether this worker needs the tensor. What is said about the model's names counts after ``prefix`` and ``renamed``."""

    prefix: str = ""
    """What the engine puts before every name of this source."""
    is_unused: Callable[[str], bool] = _never
    """The model's own word, on the stored name: it would drop the tensor."""
    is_foreign: Callable[[str], bool] = _never
    """On the stored name: an expert that another rank holds."""
    renamed: Callable[[str], str | None] = _as_it_is
    """The model's name for a stored one; None where the model drops it, which only the model itself does."""
    absent_modules: tuple[str, ...] = ()
    """Prefixes, in the model's names, of modules that this worker does not have: layers of other pipeline stages, a language model beside an encoder alone."""

    def is_needed(self, name: str) -> bool:
        if self.is_unused(name) or self.is_foreign(name):
            return False
        if not self.absent_modules:
            return True
        own = self.renamed(self.prefix + name)
        return own is None or not own.startswith(self.absent_modules)


def matching_keys(store: ObjectStore, patterns: list[str]) -> list[str]:
    """Return the keys of the objects that the first of ``patterns`` which matches any matches, sorted. A pattern is a glob of each part of a key."""
    for pattern in patterns:
        found = sorted(_matching(store, "", pattern.split("/")))
        if found:
            return found
    return []


def _matching(store: ObjectStore, folder: str, parts: list[str]) -> list[str]:
    level = store.list_level(folder)
    if len(parts) == 1:
        return [one.key for one in level.objects if fnmatchcase(one.key.rpartition("/")[2], parts[0])]
    below = [one for one in level.folders if fnmatchcase(one.rpartition("/")[2], parts[0])]
    return [key for one in below for key in _matching(store, one, parts[1:])]
