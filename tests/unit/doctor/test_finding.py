"""Findings and reports: what they say of themselves, for people and for programs."""

from __future__ import annotations

import json

from headrace.doctor.finding import Finding, State, failed, failed_with, ok, skipped, warning
from headrace.doctor.report import Report, first_trouble, lines_of
from headrace.errors import AccessDenied

BAD = failed("list", "It failed.", "For a reason.", "Do this.", [("shown", "a key")])
ODD = warning("stat", "It is odd.", "So it is.", "Look.")
GOOD = ok("name", "All is well.", [("note", "one"), ("note", "two"), ("size", "3")])
LEFT = skipped("tls", "Not tried, because network failed.")


def test_a_finding_takes_an_errors_parts() -> None:
    finding = failed_with("credentials", AccessDenied("what.", "why.", "mend."))
    assert (finding.state, finding.what, finding.why, finding.mend) == (State.FAILED, "what.", "why.", "mend.")
    assert [one.is_trouble for one in (BAD, ODD, GOOD, LEFT)] == [True, True, False, False]


def test_a_finding_is_json() -> None:
    said = json.loads(json.dumps(GOOD.to_dict()))
    assert said == {
        "step": "name",
        "state": "ok",
        "what": "All is well.",
        "why": "",
        "mend": "",
        "seconds": 0.0,
        "details": {"note": ["one", "two"], "size": "3"},
    }


def test_the_report_is_as_bad_as_its_worst_finding() -> None:
    cases: list[tuple[tuple[Finding, ...], State, int]] = [
        ((GOOD, LEFT), State.OK, 0),
        ((GOOD, ODD), State.WARNING, 0),
        ((ODD, GOOD, BAD), State.FAILED, 1),
    ]
    for findings, state, code in cases:
        report = Report("s3://b/m", findings)
        assert (report.state, report.exit_code) == (state, code)


def test_the_summary_names_what_to_mend_first() -> None:
    later = failed("cache", "Full.", "", "Make room.")
    assert Report("", (ODD, BAD, later)).summary() == "Mend this first: list. It failed. Do this. (1 more check fails.)"
    assert Report("", (BAD,)).summary() == "Mend this first: list. It failed. Do this."
    assert Report("", (GOOD, ODD)).summary() == "A load should work. To look at: stat."
    assert Report("", (GOOD,)).summary() == "A load should work: nothing is wrong."


def test_the_report_as_json() -> None:
    said = Report("s3://b/m", (GOOD, BAD)).to_dict()
    assert (said["uri"], said["state"]) == ("s3://b/m", "failed")
    assert [one["step"] for one in said["findings"]] == ["name", "list"]


def test_lines_put_why_and_mend_below_trouble_only() -> None:
    lines = list(lines_of(BAD))
    assert lines[0] == ("FAILED   list              ", "It failed.")
    assert [(margin.split()[0], text) for margin, text in lines[1:]] == [
        ("why", "For a reason."),
        ("mend", "Do this."),
        ("shown", "a key"),
    ]
    assert list(lines_of(LEFT)) == [("skipped  tls               ", "Not tried, because network failed.")]
    assert [margin.split() for margin, _ in lines_of(GOOD)] == [["ok", "name"], ["note"], ["note"], ["size"]]


def test_the_first_trouble_is_a_failure_where_there_is_one() -> None:
    assert first_trouble((GOOD, ODD, BAD)) is BAD
    assert first_trouble((GOOD, ODD)) is ODD
    assert first_trouble((GOOD, LEFT)) is None
