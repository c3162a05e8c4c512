"""How names that come out of files are written in messages: escaped, short, and not too many. Pure."""

from __future__ import annotations

from collections.abc import Iterable

_LONGEST_NAME = 120
_MOST_NAMES = 8


def quoted(name: str) -> str:
    """Return ``name`` in quotes, with every character escaped that does not print, and cut when it is very long."""
    return repr(name) if len(name) <= _LONGEST_NAME else repr(name[:_LONGEST_NAME]) + "…"


def listed(names: Iterable[str], most: int = _MOST_NAMES) -> str:
    """Return ``names`` in quotes with commas between, the first ``most`` of them and how many more there are."""
    every = list(names)
    shown = ", ".join(quoted(name) for name in every[:most])
    return shown if len(every) <= most else f"{shown} and {len(every) - most:,} more"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 tensor``, ``1,024 tensors``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
