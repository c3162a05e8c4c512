"""What the doctor adds to the error of a load that failed: the checks that bear on it, quickly, and only what the error does not say itself."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace.doctor import identity, network, objects, ranges, skew, tls
from headrace.doctor.examination import NAME, Examination, Limits, Plan
from headrace.doctor.finding import Finding, ok
from headrace.doctor.report import first_trouble
from headrace.doctor.world import World
from headrace.errors import (
    AccessDenied,
    Cancelled,
    HeadraceError,
    NoWeights,
    ObjectChanged,
    ObjectNotFound,
    ReadFailed,
    ReadStalled,
    StorageError,
    StoreUnavailable,
    TransportError,
    WrongRange,
)

MOST_SECONDS = 6.0
"""Longest time that a failed load waits for its finding."""

QUICK = Limits(connect_timeout_s=2.0, idle_timeout_s=3.0, total_timeout_s=4.0, max_attempts=1)


@dataclass(frozen=True, slots=True)
class Advice:
    """What is said below an error: a finding, or nothing, and how to run all checks."""

    finding: Finding | None
    pointer: str

    def lines(self) -> tuple[str, ...]:
        """Return what is printed, a paragraph each."""
        if self.finding is None:
            return (self.pointer,)
        finding = self.finding
        said = " ".join(part for part in (f"{finding.step}: {finding.what}", finding.why, finding.mend) if part)
        return said, self.pointer


def steps_for(error: HeadraceError) -> tuple[str, ...]:
    """Return the steps that may explain ``error``; none where nothing that the doctor looks at can."""
    if isinstance(error, (ObjectChanged, Cancelled)):
        return ()
    if isinstance(error, AccessDenied):
        return (skew.STEP, identity.STEP)
    if isinstance(error, (ObjectNotFound, NoWeights)):
        return (NAME, objects.LIST)
    if isinstance(error, WrongRange):
        return (ranges.READ,)
    if isinstance(error, (StoreUnavailable, ReadFailed, ReadStalled)):
        return (network.STEP, tls.STEP, skew.STEP)
    return (network.STEP, tls.STEP)


def is_explained(error: BaseException) -> bool:
    """Say whether the doctor has anything to do with an error: one of a store, of the way to it, or of a folder without weights."""
    return isinstance(error, (StorageError, TransportError, NoWeights)) and not isinstance(error, Cancelled)


def advise(error: HeadraceError, plan: Plan, world: World, *, most_seconds: float = MOST_SECONDS) -> Advice:
    """Return what to say below ``error``, within ``most_seconds``. Raises nothing; a check that hangs is left behind in a daemon thread."""
    findings: list[Finding] = []
    broken: list[Exception] = []
    examination = Examination(plan, replace(world, on_unexpected=broken.append))

    def examine() -> None:
        with contextlib.suppress(Exception), contextlib.closing(examination):
            for finding in examination.run(steps_for(error)):
                if broken:  # A check of ours; that is not why the load failed.
                    return
                findings.append(finding)

    if steps_for(error):
        thread = threading.Thread(target=examine, name="headrace-doctor", daemon=True)
        thread.start()
        thread.join(most_seconds)
    return Advice(choose(error, list(findings)), pointer_to(plan.uri, examination.uri))


def choose(error: HeadraceError, findings: Sequence[Finding]) -> Finding | None:
    """Return the finding that explains ``error``: the first trouble that says something new. For refused credentials it is also which ones they were."""
    trouble = first_trouble(findings)
    if trouble is not None:
        return trouble if is_new(trouble, error) else _guess_of(trouble)
    if isinstance(error, AccessDenied):
        return next((one for one in findings if one.step == identity.STEP and is_new(one, error)), None)
    return None


def _guess_of(trouble: Finding) -> Finding | None:
    """Return what a listing that found nothing says of folders with similar names."""
    similar = [value for label, value in trouble.details if label == objects.SIMILAR]
    return ok(objects.LIST, f"There is {' and '.join(similar)}. Did you mean that?") if similar else None


def is_new(finding: Finding, error: HeadraceError) -> bool:
    """Say whether a finding holds a reason that the error does not hold already."""
    known = _plain(str(error))
    says = finding.why or finding.what
    return _plain(says) not in known


def pointer_to(written: str, canonical: str) -> str:
    """Return the sentence that leads to all checks. A uri with a query may be a signed one, and is not repeated."""
    if not canonical or "?" in written:
        return "Run headrace doctor with the same uri for all checks."
    return f"Run headrace doctor {canonical} for all checks."


def _plain(text: str) -> str:
    return " ".join(text.lower().split()).rstrip(".")
