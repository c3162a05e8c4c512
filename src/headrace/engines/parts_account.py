"""The account of what a load does not ask for: which groups of tensors, how many, how many bytes. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headrace.checkpoint import Entry
from headrace.units import format_bytes

MTP = "layers for multi-token prediction"
UNUSED = "scales that nothing uses"
NEEDLESS = "what the model's class has no use for"
OTHER_STAGES = "other stages of the pipeline"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOutGroup:
    """One group of tensors that is not asked for, or not wholly."""

    name: str
    num_tensors: int
    num_bytes: int
    """Those that are not asked for."""


def left_out_groups(
    entries: Mapping[str, Entry], order: Iterable[Entry], groups: Mapping[str, str]
) -> tuple[LeftOutGroup, ...]:
    """Return the groups of ``entries`` that are not in ``order`` (of some of which only a part may be), those with the most bytes first.

    ``groups`` names the group of an entry that is left out.
    """
    asked = {entry.name: entry.size_bytes for entry in order}
    tensors: Counter[str] = Counter()
    num_bytes: Counter[str] = Counter()
    for name, entry in entries.items():
        left = entry.size_bytes - asked.get(name, 0)
        if name not in asked or left:
            group = groups.get(name, NEEDLESS)
            tensors[group] += 1
            num_bytes[group] += left
    return tuple(
        LeftOutGroup(name=name, num_tensors=tensors[name], num_bytes=num_bytes[name])
        for name in sorted(tensors, key=lambda name: (-num_bytes[name], name))
    )


def describe_left_out(groups: Iterable[LeftOutGroup], absent: Iterable[str], *, total_bytes: int) -> str | None:
    """Return one line about what is not asked for and what is not there; None where there is nothing to say."""
    listed = list(groups)
    said = []
    if listed:
        named = ", ".join(
            f"{group.name} ({group.num_tensors} tensors, {format_bytes(group.num_bytes)})" for group in listed
        )
        left = sum(group.num_bytes for group in listed)
        said.append(f"{format_bytes(left)} of {format_bytes(total_bytes)} are not asked for: {named}")
    missing = ", ".join(absent)
    if missing:
        said.append(f"not in the checkpoint, and not needed here: {missing}")
    return "; ".join(said) or None
