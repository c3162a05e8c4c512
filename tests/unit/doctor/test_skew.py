"""The store's Date against this machine's clock."""

from __future__ import annotations

import http.client
from email.utils import formatdate
from typing import Any

import pytest

from headrace.doctor.asking import Reply
from headrace.doctor.finding import Finding, State
from headrace.doctor.skew import examine_clock, judge_skew, seconds_of, skew_of
from headrace.settings import TransportSettings
from headrace.storage import HttpRange, Refusal

from .fakes import NOW, ORIGIN, world


def examine(
    status: int = 403, *, kind: str = "s3", body: bytes = b"", scheme: str = "https", **headers: str
) -> Finding:
    asked: list[HttpRange] = []

    def ask(request: HttpRange, *_: Any) -> Reply:
        asked.append(request)
        return Reply(request, Refusal(status, "Forbidden", headers, body))

    from dataclasses import replace

    origin = replace(ORIGIN, scheme=scheme)
    finding = examine_clock(origin, kind, TransportSettings(), world(), is_anonymous=False, ask=ask)
    assert [request.target for request in asked] == ["/"]
    assert "authorization" not in {name.lower() for name, _ in asked[0].headers}
    return finding


@pytest.mark.parametrize(
    ("theirs", "before", "after", "skew"),
    [
        (100.0, 100.5, 100.6, 0.0),
        (100.0, 100.9, 101.5, 0.0),
        (100.0, 150.0, 150.1, 49.0),
        (200.0, 150.0, 150.5, -49.5),
        (150.2, 150.0, 151.0, 0.0),
    ],
)
def test_the_difference_is_what_the_answer_proves(theirs: float, before: float, after: float, skew: float) -> None:
    assert skew_of(theirs, before, after) == pytest.approx(skew)


def test_dates_are_read_or_not() -> None:
    assert seconds_of("Tue, 14 Nov 2023 22:13:20 GMT") == NOW
    assert seconds_of("") is None
    assert seconds_of("yesterday") is None


def test_clocks_that_agree() -> None:
    finding = examine(date=formatdate(NOW, usegmt=True), server="AmazonS3")
    assert (finding.state, finding.what) == (State.OK, "The clocks agree.")
    assert finding.details == (("server", "AmazonS3"),)


@pytest.mark.parametrize(("ahead_s", "way"), [(-400, "behind"), (400, "ahead of")])
def test_a_clock_that_is_off_refuses_signatures(ahead_s: int, way: str) -> None:
    finding = examine(date=formatdate(NOW - ahead_s, usegmt=True))
    assert finding.state is State.FAILED
    assert f"{way} the store's" in finding.what
    assert "Signatures" in finding.why
    assert "Set this machine's clock" in finding.mend


@pytest.mark.parametrize(
    ("skew", "kind", "is_anonymous", "state"),
    [
        (30.0, "s3", False, State.OK),
        (-120.0, "s3", False, State.WARNING),
        (301.0, "gs", False, State.FAILED),
        (301.0, "gs", True, State.WARNING),
        (-4000.0, "http", False, State.WARNING),
        (-4000.0, "hf", False, State.WARNING),
    ],
)
def test_how_much_matters_depends_on_the_store(skew: float, kind: str, is_anonymous: bool, state: State) -> None:
    assert judge_skew(skew, kind, [], is_anonymous=is_anonymous).state is state


def test_no_date_is_no_finding() -> None:
    assert examine().state is State.SKIPPED


def test_a_port_for_tls_that_was_asked_plainly() -> None:
    finding = examine(400, body=b"The plain HTTP request was sent to HTTPS port", scheme="http")
    assert finding.state is State.FAILED
    assert finding.mend == "Write https:// in the endpoint."


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (http.client.BadStatusLine("SSH-2.0-OpenSSH_9.2 secret"), "what came is not HTTP (BadStatusLine)"),
        (TimeoutError(), "nothing came in time"),
        (ConnectionResetError(104, "Connection reset by peer"), "Connection reset by peer"),
    ],
)
def test_what_does_not_speak_http(error: Exception, why: str) -> None:
    def ask(*_: Any) -> Reply:
        raise error

    finding = examine_clock(ORIGIN, "s3", TransportSettings(), world(), is_anonymous=False, ask=ask)
    assert finding.state is State.FAILED
    assert why in finding.why
    assert "secret" not in repr(finding)
