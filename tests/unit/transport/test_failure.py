from __future__ import annotations

import errno
import http.client
import pickle
import ssl

import pytest

from headrace.errors import AccessDenied, ReadFailed, ReadStalled, WrongRange
from headrace.settings import TransportSettings
from headrace.storage import Refusal, StoredObject, Verdict
from headrace.transport import RangeRead
from headrace.transport.failure import Failure, Refused, describe, give_up
from headrace.transport.patience import TooSlow
from headrace.transport.retry import Attempts

READ = RangeRead(StoredObject("k", 100, "v"), 10, 60)


def _given_up(last: Failure, num_attempts: int = 3) -> Exception:
    attempts = Attempts(TransportSettings(), lambda: 0.0)
    for _ in range(num_attempts):
        attempts.begin()
    return give_up("s3://b/k", "http://h:1", READ, attempts, 7, last)


def test_the_account_names_object_range_endpoint_and_attempts() -> None:
    error = _given_up(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), 1)
    assert type(error) is ReadFailed
    assert str(error).startswith(
        "Cannot read bytes 10 to 60 of s3://b/k from http://h:1: 7 of 50 bytes came in 1 attempt. "
    )
    assert "The last one failed: ConnectionResetError, Connection reset by peer." in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_kinds() -> None:
    assert type(_given_up(TooSlow("nothing came for 1 s"))) is ReadStalled
    assert type(_given_up(TimeoutError("timed out"))) is ReadStalled
    assert type(_given_up(http.client.BadStatusLine("x"))) is ReadFailed
    assert type(_given_up(WrongRange("What.", "Why.", "Mend."))) is WrongRange
    refused = Refused(
        Refusal(403, "Forbidden\x1b[31m" + "x" * 500, {}), Verdict(AccessDenied("No.", "Expired.", "Renew."))
    )
    error = _given_up(refused)
    assert type(error) is AccessDenied
    assert str(error).startswith("No. Expired. The read of bytes 10 to 60 of s3://b/k")
    assert "HTTP 403 Forbidden[31mxxx" in str(error)
    assert str(error).endswith("Renew.")
    assert len(str(error)) < 300


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        (http.client.BadStatusLine("hush"), "the answer is not HTTP (BadStatusLine)"),
        (http.client.IncompleteRead(b"hush"), "the answer is not HTTP (IncompleteRead)"),
        (ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] hush"), "TLS failed (SSLError)"),
        (TimeoutError("_ssl.c:1000: The handshake operation timed out"), "the connection could not be made in time"),
        (TimeoutError(errno.ETIMEDOUT, "Connection timed out"), "Connection timed out"),
        (OSError(), "OSError"),
    ],
)
def test_failures_in_words(failure: Failure, text: str) -> None:
    assert describe(failure) == text
