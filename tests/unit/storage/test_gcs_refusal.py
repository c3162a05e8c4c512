from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.errors import AccessDenied, HeadraceError, ObjectChanged, ObjectNotFound, StorageError, StoreUnavailable
from headrace.storage import Refusal
from headrace.storage.gcs_refusal import GCS, GCS_LISTING, read_gcs_complaint
from headrace.storage.refusal import Complaint, Place, judge_complaint

PLACE = Place("gs://bucket/m/a", "https://storage.googleapis.com")
PINNED = Place("gs://bucket/m/a", "https://storage.googleapis.com", "7")


def said(status: int, reason: str, message: str) -> bytes:
    content: dict[str, Any] = {"code": status, "message": message, "errors": [{"reason": reason, "message": message}]}
    return json.dumps({"error": content}).encode()


@pytest.mark.parametrize(
    ("refusal", "code", "message"),
    [
        (
            Refusal(404, "Not Found", {}, said(404, "notFound", "No such object: b/k")),
            "notFound",
            "No such object: b/k",
        ),
        (Refusal(403, "Forbidden", {}, b'{"error": {"message": "No.", "status": "DENIED"}}'), "DENIED", "No."),
        (Refusal(404, "Not Found", {}, b"No such object: b/k"), "NotFound", "No such object: b/k"),
        (Refusal(404, "Not Found", {}, b"Not Found\n"), "", "Not Found"),
        (Refusal(416, "Requested range", {}, b""), "", "Requested range"),
        (Refusal(403, "Forbidden", {}, b'{"error": {"message": "cut'), "", "Forbidden"),
        (Refusal(403, "Forbidden", {}, b'{"error": "access_denied"}'), "", "Forbidden"),
        (Refusal(403, "Forbidden", {}, b'{"error": {"errors": [7]}}'), "", "Forbidden"),
        (
            Refusal(400, "Bad Request", {}, b"<Error><Code>UserProjectMissing</Code><Message>Pay.</Message></Error>"),
            "UserProjectMissing",
            "Pay.",
        ),
        (Refusal(502, "Bad Gateway", {}, b"<html>502</html>"), "", "The answer is a web page"),
    ],
)
def test_every_language_is_understood(refusal: Refusal, code: str, message: str) -> None:
    complaint = read_gcs_complaint(refusal)
    assert (complaint.status, complaint.code) == (refusal.status, code)
    assert complaint.message.startswith(message)


def test_what_looks_like_a_token_is_not_repeated() -> None:
    token = "ya29." + "Ab1_" * 20
    complaint = read_gcs_complaint(Refusal(401, "Unauthorized", {}, f"Invalid token {token}".encode()))
    assert token not in complaint.message
    assert complaint.message.startswith("Invalid token")


@pytest.mark.parametrize(
    ("status", "code", "message", "kind", "retry", "refresh", "says"),
    [
        (401, "authError", "Invalid Credentials", AccessDenied, True, True, "application-default login"),
        (401, "", "", AccessDenied, True, True, "has expired"),
        (403, "forbidden", "x@y does not have storage.objects.get", AccessDenied, False, False, "x@y does not have"),
        (403, "", "", AccessDenied, False, False, "Storage Object Viewer"),
        (403, "insufficientPermissions", "Insufficient Permission", AccessDenied, False, False, "devstorage.read_only"),
        (403, "forbidden", "Provided scope(s) are not authorized", AccessDenied, False, False, "devstorage.read_only"),
        (
            400,
            "required",
            "Bucket is a requester pays bucket.",
            AccessDenied,
            False,
            False,
            "HEADRACE_GCS_USER_PROJECT",
        ),
        (400, "invalid", "No.", StorageError, False, False, "No."),
        (403, "rateLimitExceeded", "Slow.", StoreUnavailable, True, False, "HEADRACE_CONNECTIONS"),
        (403, "userRateLimitExceeded", "Slow.", StoreUnavailable, True, False, "HEADRACE_CONNECTIONS"),
        (408, "", "", StoreUnavailable, True, False, "overloaded"),
        (429, "tooManyRequests", "Slow.", StoreUnavailable, True, False, "HEADRACE_CONNECTIONS"),
        (500, "internalError", "Oh.", StoreUnavailable, True, False, "HEADRACE_CONNECTIONS"),
        (503, "", "", StoreUnavailable, True, False, "proxy"),
        (404, "notFound", "No such object: b/k", ObjectNotFound, False, False, "does not exist"),
        (404, "notFound", "The specified bucket does not exist.", ObjectNotFound, False, False, "in a bucket that"),
        (418, "", "", StorageError, False, False, "Check the uri"),
    ],
)
def test_every_refusal_has_its_error(
    status: int, code: str, message: str, kind: type[HeadraceError], retry: bool, refresh: bool, says: str
) -> None:
    verdict = judge_complaint(Complaint(status, code, message, None, {}), PLACE, now=0.0, dialect=GCS)
    assert type(verdict.error) is kind
    assert (verdict.retry, verdict.refresh_credentials) == (retry, refresh)
    assert says in str(verdict.error)
    assert "gs://bucket/m/a" in verdict.error.what
    assert "https://storage.googleapis.com" in verdict.error.why


@pytest.mark.parametrize(
    ("status", "code"), [(404, "notFound"), (404, ""), (412, "conditionNotMet"), (412, ""), (416, "")]
)
def test_a_pinned_object_changes(status: int, code: str) -> None:
    verdict = judge_complaint(Complaint(status, code, "", None, {}), PINNED, now=0.0, dialect=GCS)
    assert type(verdict.error) is ObjectChanged
    assert not verdict.retry
    assert "version 7" in verdict.error.why


@pytest.mark.parametrize("code", ["notFound", ""])
def test_a_listing_misses_nothing_but_the_bucket(code: str) -> None:
    verdict = judge_complaint(Complaint(404, code, "Not Found", None, {}), PLACE, now=0.0, dialect=GCS_LISTING)
    assert type(verdict.error) is ObjectNotFound
    assert "bucket that does not exist" in verdict.error.what
