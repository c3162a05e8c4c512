"""Where each stored tensor goes in a model, known before the first weight byte, and the ledger that is checked after the last. Pure; knows no engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from headrace.checkpoint import Entry
from headrace.errors import PlacementError

_MOST_NAMES = 12
"""Names that one line of an error lists; the rest are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The outcome of planning one model over one checkpoint."""

    order: tuple[Entry, ...]
    """The entries that the model takes, in the order in which it takes them."""
    targets: Mapping[str, str]
    """Entry name → the parameter or buffer that it fills, or helps to fill."""
    asked: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Value → what the model asks of it, in order: ``...``, or the slices of a tensor-parallel rank."""
    ignored: tuple[str, ...] = ()
    """Entries that the model's class declares it does not need; they are never requested."""
    unexpected: tuple[str, ...] = ()
    """Entries that no parameter wants."""
    missing: tuple[str, ...] = ()
    """Parameters and persistent buffers that no entry fills and that are not tied to one that is filled."""
    doubled: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Parameter → the several entries that would each fill all of it."""
    mismatched: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    """Parameter → (stored shape, the model's shape)."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Parameter → why the conversion that makes it does not work on these shapes."""

    @property
    def is_complete(self) -> bool:
        return not (self.missing or self.unexpected or self.doubled or self.mismatched or self.failed)


def check_placement(placement: Placement, *, source: str, model_class: str, tolerate_mismatch: bool = False) -> None:
    """Raise one `PlacementError` that lists everything that does not fit, each list with what its names most resemble on the other side."""
    lines: list[str] = []
    if placement.missing:
        lines.append(f"missing ({len(placement.missing)}): {_with_hints(placement.missing, placement.unexpected)}")
    if placement.unexpected:
        lines.append(
            f"unexpected ({len(placement.unexpected)}): {_with_hints(placement.unexpected, placement.missing)}"
        )
    if placement.doubled:
        doubled = [f"{name} from {' and '.join(names)}" for name, names in placement.doubled.items()]
        lines.append(f"doubled ({len(doubled)}): {list_names(doubled)}")
    if placement.mismatched and not tolerate_mismatch:
        pairs = [
            f"{name} is stored as {list(stored)}, the model wants {list(wanted)}"
            for name, (stored, wanted) in placement.mismatched.items()
        ]
        lines.append(f"mismatched ({len(pairs)}): {list_names(pairs)}")
    if placement.failed:
        lines.append(
            f"not convertible ({len(placement.failed)}): {list_names([f'{name}: {why}' for name, why in placement.failed.items()])}"
        )
    if not lines:
        return
    raise PlacementError(
        f"{source} does not fit {model_class}. No weight byte was read.",
        "\n".join(["In the checkpoint's and the model's names:", *lines]),
        _mend(placement),
    )


def check_ledger(*, taken: Iterable[str], placement: Placement, unfilled: Sequence[str], source: str) -> None:
    """Raise `PlacementError` where the load did not do what was placed: an entry not taken, or a parameter that is still without memory."""
    left = sorted({entry.name for entry in placement.order} - set(taken))
    lines = []
    if left:
        lines.append(f"not taken ({len(left)}): {list_names(left)}")
    if unfilled:
        lines.append(f"not filled ({len(unfilled)}): {list_names(unfilled)}")
    if lines:
        raise PlacementError(
            f"The load of {source} ended with an account that does not add up.",
            "\n".join(lines),
            "This is a fault of Headrace or of the installed Transformers version; please report it with this message.",
        )


def _mend(placement: Placement) -> str:
    """Return what helps against what does not fit: a flag only where it does."""
    check = "Check config.json against the weights; headrace inspect --tensors lists them."
    if placement.doubled or placement.failed:
        return check
    flags = []
    if placement.missing or placement.unexpected:
        does = [
            *(["initialise what is missing"] if placement.missing else []),
            *(["leave out what is unexpected"] if placement.unexpected else []),
        ]
        flags.append(f"strict=False to {' and '.join(does)}")
    if placement.mismatched:
        flags.append("ignore_mismatched_sizes=True to initialise what is mismatched")
    return f"{check} Where it is meant, pass {', and '.join(flags)}."


def _with_hints(names: Sequence[str], others: Sequence[str]) -> str:
    hinted = []
    for name in names[:_MOST_NAMES]:
        near = get_close_matches(name, others[:2000], n=1, cutoff=0.75)
        hinted.append(f"{name} (near {near[0]})" if near else name)
    return list_names(hinted, total=len(names))


def list_names(names: Sequence[str], *, total: int | None = None) -> str:
    """Return the first of ``names`` in one line, and how many more there are."""
    count = len(names) if total is None else total
    shown = ", ".join(names[:_MOST_NAMES])
    return shown if count <= _MOST_NAMES else f"{shown} and {count - _MOST_NAMES} more"
