"""Which keys may become a path below a folder: those that stay in it, on every system. Pure."""

from __future__ import annotations

import re

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_DIGITS = re.compile(r"([0-9]{1,18})")


def unsafe_reason(key: str) -> str | None:
    """Say why ``key`` must not be joined to a folder (``holds a '..' part``); None where it may.

    A key that may be joined is relative, divided by single slashes, and has no empty, ``.`` or ``..`` part, backslash, control character or half
    surrogate pair.
    """
    if not key:
        return "is empty"
    if key.startswith("/"):
        return "is an absolute path"
    if _CONTROL.search(key):
        return "holds a NUL or another control character"
    if "\\" in key:
        return "holds a backslash"
    parts = key.split("/")
    if "" in parts:
        return "has an empty part between its slashes"
    for part in (".", ".."):
        if part in parts:
            return f"holds a {part!r} part"
    if not key.isascii() and key != key.encode("utf-8", "replace").decode("utf-8"):
        return "cannot be written as UTF-8"
    return None


def natural_order(key: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key by which ``model-2`` comes before ``model-10``."""
    parts = _DIGITS.split(key)
    return tuple((1, int(part), part) if _DIGITS.fullmatch(part) else (0, 0, part) for part in parts)
