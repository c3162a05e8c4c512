"""What one check found: how it stands, what is so, why, and how to mend it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from headrace.errors import AccessDenied, HeadraceError

Rows = tuple[tuple[str, str], ...]
"""Labels and values, for people."""


class State(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"
    """A load works, but not as well or as safely as it could."""
    FAILED = "failed"
    """A load fails here."""
    SKIPPED = "skipped"
    """Not carried out; ``what`` says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The outcome of one step. ``what``, ``why`` and ``mend`` are full sentences, as an error's parts are, and hold no secret."""

    step: str
    state: State
    what: str
    why: str = ""
    mend: str = ""
    seconds: float = 0.0
    """How long the check took."""
    details: Rows = ()
    is_refusal: bool = False
    """Whether a store refused what it was shown: then it matters which credentials those were."""

    @property
    def is_trouble(self) -> bool:
        """Whether there is something to mend."""
        return self.state in (State.WARNING, State.FAILED)

    def to_dict(self) -> dict[str, Any]:
        """Return it JSON-ready. A label that comes several times has a list of its values."""
        details: dict[str, Any] = {}
        for label, value in self.details:
            known = details.get(label)
            details[label] = value if known is None else [*known, value] if isinstance(known, list) else [known, value]
        return {
            "step": self.step,
            "state": str(self.state),
            "what": self.what,
            "why": self.why,
            "mend": self.mend,
            "seconds": round(self.seconds, 3),
            "details": details,
        }


def ok(step: str, what: str, details: Iterable[tuple[str, str]] = ()) -> Finding:
    """Return the finding of a step that is as it should be."""
    return Finding(step=step, state=State.OK, what=what, details=tuple(details))


def warning(step: str, what: str, why: str, mend: str, details: Iterable[tuple[str, str]] = ()) -> Finding:
    """Return the finding of a step that a load survives."""
    return Finding(step=step, state=State.WARNING, what=what, why=why, mend=mend, details=tuple(details))


def failed(step: str, what: str, why: str, mend: str, details: Iterable[tuple[str, str]] = ()) -> Finding:
    """Return the finding of a step at which a load fails."""
    return Finding(step=step, state=State.FAILED, what=what, why=why, mend=mend, details=tuple(details))


def failed_with(step: str, error: HeadraceError, details: Iterable[tuple[str, str]] = ()) -> Finding:
    """Return the finding of a step that ended with one of our errors, whose parts are a finding's."""
    return Finding(
        step=step,
        state=State.FAILED,
        what=error.what,
        why=error.why,
        mend=error.mend,
        details=tuple(details),
        is_refusal=isinstance(error, AccessDenied),
    )


def skipped(step: str, because: str) -> Finding:
    """Return the finding of a step that was not carried out; ``because`` is a sentence."""
    return Finding(step=step, state=State.SKIPPED, what=because)
