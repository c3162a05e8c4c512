"""Last words: the cause and the mend, short, at the end, and without secrets."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path

import pytest

from headrace.errors import AccessDenied, ServingError
from headrace.serving.failure import MOST_BYTES, RedactingFilter, last_words, redact, write_termination_log


def test_an_error_of_ours_says_what_why_and_how_to_mend() -> None:
    words = last_words(
        AccessDenied("s3://bucket/model cannot be listed.", "The keys have expired.", "Run aws sso login.")
    )
    assert words.splitlines() == [
        "headrace: the model is not served.",
        "AccessDenied: s3://bucket/model cannot be listed.",
        "The keys have expired.",
        "Run aws sso login.",
    ]


def test_any_other_error_is_followed_to_its_root() -> None:
    try:
        try:
            raise ConnectionResetError("peer left")
        except OSError as error:
            raise RuntimeError("see root cause above") from error
    except RuntimeError as error:
        lines = last_words(error).splitlines()
    assert lines[1:3] == ["RuntimeError: see root cause above", "ConnectionResetError: peer left"]


def test_they_are_short_and_keep_their_end() -> None:
    words = last_words(ServingError("ž" * 9000, "why", "Do this."))
    assert len(words.encode()) <= MOST_BYTES
    assert words.startswith("headrace: the model is not served.\nServingError: žž")
    assert words.endswith("why\nDo this.")


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        (
            "GET https://b.s3.amazonaws.com/k?X-Amz-Credential=AKIAABCDEFGHIJKLMNOP&X-Amz-Signature=abcdef failed",
            "abcdef",
        ),
        ("key AKIAABCDEFGHIJKLMNOP is not known", "AKIAABCDEFGHIJKLMNOP"),
        ("https://user:hunter22@host/x", "hunter22"),
        ("Authorization: Bearer abcdefghijklmnop", "abcdefghijklmnop"),
        ("token hf_abcdefghijklmnopqrstuv is bad", "hf_abcdefghijklmnopqrstuv"),
        ("aws_secret_access_key = wJalrXUtnFEMI/K7MDENG", "wJalrXUtnFEMI"),
        ("{'secret_access_key': 'wJalrXUtnFEMI/K7MDENG'}", "wJalrXUtnFEMI"),
        ("api_key=sk-123456789", "sk-123456789"),
        ("it was my-own-key", "my-own-key"),
    ],
)
def test_secrets_are_taken_out(text: str, secret: str) -> None:
    assert secret in text
    redacted = redact(text, ["my-own-key"])
    assert secret not in redacted
    assert "***" in redacted


def test_what_is_no_secret_stays() -> None:
    text = "s3://bucket/llama: 3 tokens are missing from model-1.safetensors; see https://host/page and token 17."
    assert redact(text) == text


def test_logs_are_redacted_with_their_tracebacks(capsys: pytest.CaptureFixture[str]) -> None:
    handler = logging.StreamHandler()
    handler.addFilter(RedactingFilter(["my-own-key"]))
    log = logging.getLogger("test-redaction")
    log.addHandler(handler)
    log.propagate = False
    try:
        try:
            raise ValueError("bad my-own-key")
        except ValueError:
            log.exception("with %s", "my-own-key")
    finally:
        log.removeHandler(handler)
    printed = capsys.readouterr().err
    assert "my-own-key" not in printed
    assert "with ***" in printed
    assert "ValueError: bad ***" in printed


def test_the_termination_log_is_written_where_it_exists(tmp_path: Path) -> None:
    log = tmp_path / "termination-log"
    assert write_termination_log("x", log) is False
    assert not log.exists()
    log.write_text("older and longer text")
    assert write_termination_log("new", log) is True
    assert log.read_text() == "new"
    assert write_termination_log("x", tmp_path) is False  # a folder


def test_serving_errors_pickle() -> None:
    error = pickle.loads(pickle.dumps(ServingError("a", "b", "c")))
    assert (error.what, error.why, error.mend) == ("a", "b", "c")
