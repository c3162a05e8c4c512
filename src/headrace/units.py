"""Sizes, rates and durations: as people write them, and back. Pure; knows nothing of what is measured."""

from __future__ import annotations

import re

from headrace.errors import InvalidSetting

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
UNLIMITED = -1
"""A memory limit that is none."""

_FACTORS = {
    "": 1,
    "b": 1,
    "k": 10**3,
    "kb": 10**3,
    "kib": KIB,
    "m": 10**6,
    "mb": 10**6,
    "mib": MIB,
    "g": 10**9,
    "gb": 10**9,
    "gib": GIB,
    "t": 10**12,
    "tb": 10**12,
    "tib": 1 << 40,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str | int) -> int:
    """Return the number of bytes that ``text`` says: ``4096``, ``"64MiB"``, ``"1.5 GB"`` (decimal without the i).

    Raises `InvalidSetting` for a negative number, an unknown unit or anything else.
    """
    if isinstance(text, bool):
        raise InvalidSetting(f"{text!r} is not a size.", "A size is a whole number of bytes or text such as 4GiB.")
    if isinstance(text, int):
        if text < 0:
            raise InvalidSetting(f"{text} is not a size.", "A size is not negative.")
        return text
    match = _SIZE.fullmatch(text)
    factor = _FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise InvalidSetting(
            f"{text!r} is not a size.", mend="Write bytes, or a number with KiB, MiB, GiB, KB, MB or GB."
        )
    return int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor


def parse_memory_limit(text: str | int) -> int:
    """Return a memory limit in bytes: as `parse_bytes`, and ``-1`` for unlimited (`UNLIMITED`), ``0`` for the smallest that works."""
    return UNLIMITED if text in (-1, "-1") and not isinstance(text, bool) else parse_bytes(text)


def parse_rate(text: str | int) -> int:
    """Return a rate in bytes per second: as `parse_bytes`, with or without ``/s`` after it (``100MB``, ``1GiB/s``)."""
    return parse_bytes(text.strip().removesuffix("/s") if isinstance(text, str) else text)


def format_bytes(num_bytes: float) -> str:
    """Return ``num_bytes`` in decimal units with three significant digits, as networks are measured: ``269 MB``."""
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if abs(num_bytes) >= factor:
            value = num_bytes / factor
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """Return a duration for people: ``0.25 s``, ``12.3 s``, ``4 min 05 s``."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"
