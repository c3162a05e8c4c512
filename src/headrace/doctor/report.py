"""All findings of one examination, for people and for programs. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.doctor.finding import Finding, State

_STEP_COLUMN = 17
_STATE_COLUMN = 8


@dataclass(frozen=True, slots=True)
class Report:
    """The findings in the order of the steps; ``uri`` is the canonical form, which holds no query, or empty where there is none."""

    uri: str
    findings: tuple[Finding, ...]

    @property
    def failures(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.state is State.FAILED)

    @property
    def warnings(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.state is State.WARNING)

    @property
    def state(self) -> State:
        """The worst of all states but skipped."""
        return State.FAILED if self.failures else State.WARNING if self.warnings else State.OK

    @property
    def exit_code(self) -> int:
        """1 where a load would fail, else 0."""
        return 1 if self.failures else 0

    def to_dict(self) -> dict[str, Any]:
        """Return it JSON-ready."""
        return {
            "uri": self.uri,
            "state": str(self.state),
            "summary": self.summary(),
            "findings": [finding.to_dict() for finding in self.findings],
        }

    def summary(self) -> str:
        """Return the outcome in a sentence or two; the first failure is what to mend first."""
        if self.failures:
            first = self.failures[0]
            others = len(self.failures) - 1
            more = f" ({others} more {'check fails' if others == 1 else 'checks fail'}.)" if others else ""
            return f"Mend this first: {first.step}. {first.what} {first.mend}{more}"
        if self.warnings:
            steps = ", ".join(finding.step for finding in self.warnings)
            return f"A load should work. To look at: {steps}."
        return "A load should work: nothing is wrong."


def lines_of(finding: Finding) -> Iterator[tuple[str, str]]:
    """Yield what is printed of a finding: the margin and the text of each line."""
    state = "FAILED" if finding.state is State.FAILED else str(finding.state)
    yield f"{state:<{_STATE_COLUMN}} {finding.step:<{_STEP_COLUMN}} ", finding.what
    margin = " " * (_STATE_COLUMN + _STEP_COLUMN + 2)
    if finding.is_trouble:
        for label, text in (("why ", finding.why), ("mend", finding.mend)):
            if text:
                yield f"{margin}{label}  ", text
    width = max((len(label) for label, _ in finding.details), default=0)
    for label, text in finding.details:
        yield f"{margin}  {label:<{width}}  ", text


def first_trouble(findings: Sequence[Finding]) -> Finding | None:
    """Return the first failure, or else the first warning, or None."""
    for state in (State.FAILED, State.WARNING):
        for finding in findings:
            if finding.state is state:
                return finding
    return None
