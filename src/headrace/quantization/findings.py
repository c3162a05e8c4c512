"""Gathers what is odd about many modules into a few sentences."""

from __future__ import annotations

from collections.abc import Iterable

_MOST_NAMED = 3


class Findings:
    """Sentences, each with the modules or tensors that it is true of, in the order in which they were first found."""

    def __init__(self) -> None:
        self._names: dict[str, list[str]] = {}

    def add(self, sentence: str, *names: str) -> None:
        """Note that ``sentence`` (without its full stop) is true of ``names``."""
        self._names.setdefault(sentence, []).extend(names)

    def sentences(self) -> tuple[str, ...]:
        """Return one sentence for each, with the first names that it is true of and the number of the others."""
        return tuple(
            f"{sentence}: {list_names(names)}." if names else f"{sentence}." for sentence, names in self._names.items()
        )


def list_names(names: Iterable[str]) -> str:
    """Return the first of ``names``, and how many others there are."""
    listed = list(names)
    rest = len(listed) - _MOST_NAMED
    shown = ", ".join(listed[:_MOST_NAMED])
    return f"{shown} and {rest:,} more" if rest > 0 else shown
