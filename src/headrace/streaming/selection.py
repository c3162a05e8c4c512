"""Which entries of a checkpoint are wanted, decided by name before any weight byte is asked for. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase

from headrace.checkpoint import Entry
from headrace.errors import InvalidSetting

Pattern = str | re.Pattern[str]
"""A glob that matches the whole name, or a compiled regular expression that is found anywhere in it."""
Wanted = Pattern | Iterable[Pattern] | Callable[[str], bool] | None
"""A pattern, several (any may match), or a predicate on the name; None where nothing was said."""


def select_entries(entries: Mapping[str, Entry], *, include: Wanted = None, exclude: Wanted = None) -> list[Entry]:
    """Return the entries whose name ``include`` matches (default: all) and ``exclude`` does not (default: none), in their order.

    Raises `InvalidSetting` where nothing is left of a checkpoint that holds something, since that is a typing error more often than a wish.
    """
    wanted = _predicate(include, default=True)
    unwanted = _predicate(exclude, default=False)
    chosen = [entry for name, entry in entries.items() if wanted(name) and not unwanted(name)]
    if entries and not chosen:
        example = next(iter(entries))
        raise InvalidSetting(
            "No tensor is left to load.",
            f"None of {len(entries)} names passes include={include!r}, exclude={exclude!r}; one of them is {example!r}.",
            "Globs match the whole name: write *.weight, not weight.",
        )
    return chosen


def _predicate(wanted: Wanted, *, default: bool) -> Callable[[str], bool]:
    if wanted is None:
        return lambda _: default
    if callable(wanted):
        return wanted
    if not isinstance(wanted, (str, re.Pattern, Iterable)):
        raise InvalidSetting(
            f"{wanted!r} is not a pattern.", "It must be a glob, a compiled regular expression or a predicate."
        )
    patterns = [wanted] if isinstance(wanted, (str, re.Pattern)) else list(wanted)
    for pattern in patterns:
        if not isinstance(pattern, (str, re.Pattern)):
            raise InvalidSetting(
                f"{pattern!r} is not a pattern.", "It must be a glob or a compiled regular expression."
            )
    return lambda name: any(_matches(pattern, name) for pattern in patterns)


def _matches(pattern: Pattern, name: str) -> bool:
    if isinstance(pattern, str):
        return fnmatchcase(name, pattern)
    return pattern.search(name) is not None
