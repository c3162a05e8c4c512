from __future__ import annotations

from typing import Any

import pytest

from headrace.errors import AccessDenied, ObjectChanged, ObjectNotFound, StorageError, StoreUnavailable
from headrace.storage import Refusal, Verdict
from headrace.storage.azure_refusal import AZURE, is_expired, read_azure_complaint
from headrace.storage.refusal import Complaint, Place, judge_complaint

from .azure_stub import error
from .s3_stub import Answer

PINNED = Place("az://container/m/a", "https://acct.blob.core.windows.net", '"v1"')
FRESH = Place("az://container/m/a", "https://acct.blob.core.windows.net")
FAILED = "Server failed to authenticate the request. Make sure the value of Authorization header is formed correctly."
STAMP = " RequestId:8c8f9e0b-001e-0018-5e41-4c3f0a000000 Time:2026-11-29T20:00:00.0000000Z"


def complaint_of(answer: Answer) -> Complaint:
    headers = {name.lower(): value for name, value in answer.headers.items()}
    return read_azure_complaint(Refusal(answer.status, "Reason", headers, answer.body))


def judge(answer: Answer, place: Place = PINNED) -> Verdict:
    return judge_complaint(complaint_of(answer), place, now=0.0, dialect=AZURE)


@pytest.mark.parametrize(
    ("status", "code", "pinned", "unpinned", "retry", "refresh"),
    [
        (404, "BlobNotFound", ObjectChanged, ObjectNotFound, False, False),
        (404, "ResourceNotFound", ObjectChanged, ObjectNotFound, False, False),
        (404, "", ObjectChanged, ObjectNotFound, False, False),
        (404, "ContainerNotFound", ObjectNotFound, ObjectNotFound, False, False),
        (409, "ContainerBeingDeleted", ObjectNotFound, ObjectNotFound, False, False),
        (412, "ConditionNotMet", ObjectChanged, ObjectChanged, False, False),
        (412, "", ObjectChanged, ObjectChanged, False, False),
        (416, "InvalidRange", ObjectChanged, StorageError, False, False),
        (403, "AuthorizationFailure", AccessDenied, AccessDenied, False, False),
        (403, "AuthorizationPermissionMismatch", AccessDenied, AccessDenied, False, False),
        (403, "AuthorizationResourceTypeMismatch", AccessDenied, AccessDenied, False, False),
        (403, "InsufficientAccountPermissions", AccessDenied, AccessDenied, False, False),
        (403, "KeyBasedAuthenticationNotPermitted", AccessDenied, AccessDenied, False, False),
        (403, "AccountIsDisabled", AccessDenied, AccessDenied, False, False),
        (403, "SomethingNew", AccessDenied, AccessDenied, False, False),
        (403, "", AccessDenied, AccessDenied, False, True),
        (403, "AuthenticationFailed", AccessDenied, AccessDenied, False, True),
        (401, "InvalidAuthenticationInfo", AccessDenied, AccessDenied, True, True),
        (401, "NoAuthenticationInformation", AccessDenied, AccessDenied, False, False),
        (409, "PublicAccessNotPermitted", AccessDenied, AccessDenied, False, False),
        (409, "BlobArchived", StoreUnavailable, StoreUnavailable, False, False),
        (503, "ServerBusy", StoreUnavailable, StoreUnavailable, True, False),
        (500, "OperationTimedOut", StoreUnavailable, StoreUnavailable, True, False),
        (500, "InternalError", StoreUnavailable, StoreUnavailable, True, False),
        (429, "", StoreUnavailable, StoreUnavailable, True, False),
        (502, "", StoreUnavailable, StoreUnavailable, True, False),
        (400, "InvalidHeaderValue", StorageError, StorageError, False, False),
        (400, "", StorageError, StorageError, False, False),
        (501, "", StorageError, StorageError, False, False),
    ],
)
def test_the_table(status: int, code: str, pinned: Any, unpinned: Any, retry: bool, refresh: bool) -> None:
    for place, kind in ((PINNED, pinned), (FRESH, unpinned)):
        verdict = judge(error(status, code) if code else Answer(status), place)
        assert type(verdict.error) is kind
        assert (verdict.retry, verdict.refresh_credentials) == (retry, refresh)
        assert "az://container/m/a" in verdict.error.what
        assert place.endpoint in verdict.error.why
        assert verdict.error.mend


@pytest.mark.parametrize(
    ("status", "code", "message", "detail", "mend", "expired"),
    [
        (403, "AuthenticationFailed", FAILED + STAMP, "Signature not valid in the specified time frame: Start [x]", "new SAS", True),
        (403, "AuthenticationFailed", FAILED + STAMP, "Signature did not match. String to sign used was x", "key or SAS", False),
        (403, "AuthenticationFailed", FAILED + STAMP, "The MAC signature found in the HTTP request is not the same", "rotated", False),
        (403, "AuthenticationFailed", FAILED + STAMP, "Request date header too old: 'x'", "clock", False),
        (401, "InvalidAuthenticationInfo", FAILED + STAMP, "Lifetime validation failed. The token is expired.", "az login", True),
        (401, "InvalidAuthenticationInfo", FAILED + STAMP, "Issuer validation failed. Issuer did not match.", "az login", True),
        (401, "InvalidAuthenticationInfo", FAILED + STAMP, "", "az login", True),
        # What the emulator says of a wrong signature, and Azure of a network that is not allowed.
        (403, "AuthorizationFailure", FAILED + STAMP, "", "key or SAS", False),
        (403, "AuthorizationFailure", "This request is not authorized to perform this operation." + STAMP, "", "firewall", False),
    ],
)  # fmt: skip
def test_one_code_has_many_meanings(
    status: int, code: str, message: str, detail: str, mend: str, expired: bool
) -> None:
    answer = error(status, code, message, detail)
    verdict = judge(answer)
    assert type(verdict.error) is AccessDenied
    assert mend in verdict.error.mend
    assert is_expired(complaint_of(answer)) is expired
    assert verdict.retry is expired
    assert (detail.partition(":")[0] or message.partition(".")[0]) in verdict.error.why


def test_a_head_request_is_told_by_its_headers() -> None:
    answer = Answer(404, b"", {"x-ms-error-code": "ContainerNotFound"})
    assert "container that does not exist" in judge(answer).error.what


def test_which_credentials_were_shown_is_said_and_not_the_credentials() -> None:
    place = Place("az://c/a", "https://e", credentials="the SAS of AZURE_STORAGE_SAS_TOKEN")
    shown = judge(error(403, "AuthorizationPermissionMismatch"), place).error
    assert "It was shown the SAS of AZURE_STORAGE_SAS_TOKEN." in shown.why
    assert "shown" not in judge(error(404, "BlobNotFound"), place).error.why
    anonymous = judge(error(409, "PublicAccessNotPermitted"), Place("az://c/a", "https://e", anonymous=True)).error
    assert "anonymous" in anonymous.mend


def test_both_versions_are_named() -> None:
    place = Place("az://c/a", "https://e", '"old"', current='"new"')
    error_ = judge(error(412, "ConditionNotMet"), place).error
    assert 'version "old"; now "new"' in error_.why
