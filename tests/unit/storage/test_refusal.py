from __future__ import annotations

from email.utils import formatdate
from typing import Any

import pytest

from headrace.errors import AccessDenied, ObjectChanged, ObjectNotFound, StorageError, StoreUnavailable
from headrace.storage import Refusal, Verdict
from headrace.storage.refusal import Place, clean, is_elsewhere, is_expired, judge_complaint, read_complaint

PINNED = Place("s3://bucket/m/a", "http://127.0.0.1:1", '"v1"')
FRESH = Place("s3://bucket/m/a", "http://127.0.0.1:1")
NOW = 1_700_000_000.0


def xml(code: str, message: str = "It is so.", more: str = "") -> bytes:
    text = (
        f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>{message}</Message>{more}</Error>'
    )
    return text.encode()


def judge(status: int, body: bytes = b"", place: Place = PINNED, reason: str = "Reason", **headers: str) -> Verdict:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return judge_complaint(read_complaint(Refusal(status, reason, named, body)), place, now=NOW)


@pytest.mark.parametrize(
    ("status", "code", "pinned", "unpinned", "retry", "refresh"),
    [
        (404, "NoSuchKey", ObjectChanged, ObjectNotFound, False, False),
        (404, "", ObjectChanged, ObjectNotFound, False, False),
        (405, "MethodNotAllowed", ObjectChanged, ObjectNotFound, False, False),
        (404, "NoSuchBucket", ObjectNotFound, ObjectNotFound, False, False),
        (412, "PreconditionFailed", ObjectChanged, ObjectChanged, False, False),
        (412, "", ObjectChanged, ObjectChanged, False, False),
        (416, "InvalidRange", ObjectChanged, StorageError, False, False),
        (416, "", ObjectChanged, StorageError, False, False),
        (403, "AccessDenied", AccessDenied, AccessDenied, False, False),
        (403, "KMS.DisabledException", AccessDenied, AccessDenied, False, False),
        (403, "InvalidAccessKeyId", AccessDenied, AccessDenied, False, False),
        (403, "SignatureDoesNotMatch", AccessDenied, AccessDenied, False, False),
        (403, "RequestTimeTooSkewed", AccessDenied, AccessDenied, False, False),
        (403, "InvalidObjectState", StoreUnavailable, StoreUnavailable, False, False),
        (403, "", AccessDenied, AccessDenied, False, True),
        (401, "", AccessDenied, AccessDenied, False, True),
        (400, "", StorageError, StorageError, False, True),
        (400, "ExpiredToken", AccessDenied, AccessDenied, True, True),
        (403, "ExpiredToken", AccessDenied, AccessDenied, True, True),
        (400, "TokenRefreshRequired", AccessDenied, AccessDenied, True, True),
        (503, "SlowDown", StoreUnavailable, StoreUnavailable, True, False),
        (429, "", StoreUnavailable, StoreUnavailable, True, False),
        (500, "InternalError", StoreUnavailable, StoreUnavailable, True, False),
        (502, "", StoreUnavailable, StoreUnavailable, True, False),
        (503, "", StoreUnavailable, StoreUnavailable, True, False),
        (504, "", StoreUnavailable, StoreUnavailable, True, False),
        (599, "", StoreUnavailable, StoreUnavailable, True, False),
        (400, "RequestTimeout", StoreUnavailable, StoreUnavailable, True, False),
        (408, "", StoreUnavailable, StoreUnavailable, True, False),
        (301, "PermanentRedirect", StoreUnavailable, StoreUnavailable, False, False),
        (307, "TemporaryRedirect", StoreUnavailable, StoreUnavailable, False, False),
        (400, "AuthorizationHeaderMalformed", StoreUnavailable, StoreUnavailable, False, False),
        (400, "InvalidArgument", StorageError, StorageError, False, False),
        (501, "NotImplemented", StorageError, StorageError, False, False),
        (302, "", StorageError, StorageError, False, False),
        (200, "", StorageError, StorageError, False, False),
    ],
)
def test_the_table(status: int, code: str, pinned: Any, unpinned: Any, retry: bool, refresh: bool) -> None:
    for place, kind in ((PINNED, pinned), (FRESH, unpinned)):
        verdict = judge(status, xml(code) if code else b"", place)
        assert type(verdict.error) is kind
        assert (verdict.retry, verdict.refresh_credentials) == (retry, refresh)
        assert "s3://bucket/m/a" in verdict.error.what
        assert "http://127.0.0.1:1" in verdict.error.why
        assert verdict.error.mend


def test_the_stores_own_words_are_passed_on() -> None:
    body = xml("AccessDenied", "User: arn:aws:iam::1:user/x is not authorized to perform: s3:GetObject &amp; more")
    error = judge(403, body).error
    assert error.what == "s3://bucket/m/a cannot be read: the store answered 403 AccessDenied."
    assert error.why == (
        "http://127.0.0.1:1 says: User: arn:aws:iam::1:user/x is not authorized to perform: s3:GetObject & more."
    )
    assert "s3:ListBucket" in error.mend


@pytest.mark.parametrize(
    ("code", "hint"),
    [
        ("SignatureDoesNotMatch", "secret key"),
        ("InvalidAccessKeyId", "AWS_ACCESS_KEY_ID"),
        ("RequestTimeTooSkewed", "clock"),
        ("ExpiredToken", "new credentials"),
        ("InvalidObjectState", "Restore"),
    ],
)
def test_hints(code: str, hint: str) -> None:
    assert hint in judge(403, xml(code)).error.mend


def test_an_anonymous_refusal_asks_for_credentials() -> None:
    place = Place("s3://bucket/m/a", "http://127.0.0.1:1", anonymous=True)
    assert "anonymous" in judge(403, xml("AccessDenied"), place).error.mend
    assert "anonymous" not in judge(404, xml("NoSuchKey"), place).error.mend


def test_a_change_names_the_version() -> None:
    error = judge(412, xml("PreconditionFailed")).error
    assert '"v1"' in error.why
    assert "412 PreconditionFailed" in error.why


def test_secrets_that_a_store_repeats_are_taken_out() -> None:
    token = "FwoGZXIvYXdzE" + "Ab9/+=" * 40
    body = xml("ExpiredToken", f"The token {token} has expired. Signature={'0a' * 32}")
    error = judge(400, body).error
    assert "has expired" in error.why
    for shown in (str(error), repr(error)):
        assert token not in shown
        assert token[20:60] not in shown
        assert "0a0a0a0a" not in shown


def test_entities_are_not_expanded() -> None:
    bomb = (
        b'<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;"><!ENTITY c SYSTEM "file:///etc/passwd">]>'
        b"<Error><Code>AccessDenied</Code><Message>&b;&c;</Message></Error>"
    )
    error = judge(403, bomb).error
    assert type(error) is AccessDenied
    assert "root:" not in error.why
    assert "&b;&c;" in error.why


def test_bodies_of_any_kind_are_survived() -> None:
    for body in (b"", b"\xff\xfe\x00", b"<Code>", b"<Error><Code>NoSuch", b"{}", b"<Code></Code>", b"<Code>a b</Code>"):
        verdict = judge(403, body)
        assert type(verdict.error) is AccessDenied
        assert "403." in verdict.error.what


def test_only_the_first_part_of_a_body_is_looked_at() -> None:
    assert type(judge(400, b" " * 9000 + xml("SlowDown")).error) is StorageError


def test_a_web_page_is_recognised() -> None:
    page = b"<!DOCTYPE html><html><head><title>Sign in</title><Code>NoSuchKey</Code></head></html>"
    for status in (200, 302, 403, 502):
        assert "web page" in judge(status, b"\n<html>please sign in</html>").error.why
    assert "web page" in judge(403, page.replace(b"<Code>NoSuchKey</Code>", b"")).error.why


def test_messages_stay_on_one_short_line() -> None:
    assert clean("a\n\x1b[31mb\r\n\tc") == "a [31mb c"
    assert len(clean("word " * 1000)) == 300


@pytest.mark.parametrize(
    ("value", "wait_s"),
    [
        ("0", 0.0),
        ("7", 7.0),
        (" 2.5 ", 2.5),
        ("100000", 300.0),
        (formatdate(NOW + 30, usegmt=True), 30.0),
        (formatdate(NOW - 30, usegmt=True), 0.0),
        (formatdate(NOW + 1e6, usegmt=True), 300.0),
        ("", None),
        ("soon", None),
        ("-1", None),
        ("1e9", None),
        ("Fri, 99 Foo 2023", None),
    ],
)
def test_retry_after(value: str, wait_s: float | None) -> None:
    assert judge(503, xml("SlowDown"), retry_after=value).wait_s == wait_s
    assert judge(403, xml("AccessDenied"), retry_after=value).wait_s is None


@pytest.mark.parametrize(
    ("status", "body", "headers", "region"),
    [
        (301, b"", {"x-amz-bucket-region": "eu-west-1"}, "eu-west-1"),
        (400, b"", {"x-amz-bucket-region": "eu-west-1"}, "eu-west-1"),
        (307, xml("TemporaryRedirect"), {"x-amz-bucket-region": "eu-west-1"}, "eu-west-1"),
        (400, xml("AuthorizationHeaderMalformed", more="<Region>ap-south-1</Region>"), {}, "ap-south-1"),
        (301, b"", {}, None),
        (301, b"", {"x-amz-bucket-region": "evil.example/#"}, None),
        (403, xml("AccessDenied"), {"x-amz-bucket-region": "eu-west-1"}, None),
        (400, xml("ExpiredToken"), {"x-amz-bucket-region": "eu-west-1"}, None),
        (404, xml("NoSuchKey"), {"x-amz-bucket-region": "eu-west-1"}, None),
    ],
)
def test_which_refusals_point_to_another_region(
    status: int, body: bytes, headers: dict[str, str], region: str | None
) -> None:
    complaint = read_complaint(Refusal(status, "", headers, body))
    assert is_elsewhere(complaint) is (region is not None)
    if region is not None:
        assert complaint.region == region


def test_which_refusals_are_about_age() -> None:
    for code in ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired", "InvalidToken"):
        assert is_expired(read_complaint(Refusal(400, "", {}, xml(code))))
    assert not is_expired(read_complaint(Refusal(403, "", {}, xml("AccessDenied"))))
    assert not is_expired(read_complaint(Refusal(403, "", {})))
