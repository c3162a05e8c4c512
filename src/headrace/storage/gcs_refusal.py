"""What a refusal of Google Cloud Storage means: its dialect, for ranged reads and for the SDK's calls alike. Pure.

Reasons and their meaning: Cloud Storage documentation, "HTTP status and error codes for JSON" and "for XML". Its JSON API refuses metadata requests in
JSON and media requests in plain text; what stands in front of it answers with web pages.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from headrace.errors import AccessDenied, ObjectNotFound, StorageError, StoreUnavailable
from headrace.storage.refusal import CHANGED, Complaint, Dialect, Rule, make_complaint, read_complaint
from headrace.storage.store import Refusal

_BODY_BYTES = 8192

_ABSENT = Rule(
    ObjectNotFound,
    "Check bucket and folder; upper and lower case differ.",
    "does not exist",
    is_absence=True,
)
_NO_BUCKET = Rule(
    ObjectNotFound,
    "Check the bucket's name, and the endpoint where that is one of your own.",
    "is in a bucket that does not exist",
)
_DENIED = Rule(
    AccessDenied,
    "Check which account is used (gcloud auth list, GOOGLE_APPLICATION_CREDENTIALS), and give it storage.objects.get and storage.objects.list on the "
    "bucket, as the role Storage Object Viewer does.",
    why="The account may not read it, or it does not exist.",
)
_SCOPES = Rule(
    AccessDenied,
    "Give the machine or the token the scope devstorage.read_only or cloud-platform.",
    why="The token is not made for Cloud Storage.",
)
_TOKEN = Rule(
    AccessDenied,
    "Get new credentials (gcloud auth application-default login), or check the key file and this machine's clock.",
    why="The token has expired, or is not one that the store accepts.",
    retry=True,
    refresh=True,
)
_PAYER = Rule(
    AccessDenied,
    "Name the project that pays: HEADRACE_GCS_USER_PROJECT, or gcs_user_project in the settings.",
    why="Whoever reads this bucket pays for it.",
)
_BUSY = Rule(
    StoreUnavailable,
    "Try again later; fewer connections (HEADRACE_CONNECTIONS) ask for less.",
    why="The store is overloaded or broken.",
    retry=True,
)
_BARE_BUSY = Rule(
    StoreUnavailable,
    "Try again later; check that the endpoint is Cloud Storage, and not a proxy in front of it.",
    why="The store is overloaded or broken, and gave no reason.",
    retry=True,
)
_REFUSED = Rule(
    StorageError, "Check the uri, and that the endpoint is Cloud Storage.", why="The store does not say why."
)

_BY_CODE = {
    "notFound": _ABSENT,
    "NoSuchKey": _ABSENT,
    "NoSuchBucket": _NO_BUCKET,
    "conditionNotMet": CHANGED,
    "PreconditionFailed": CHANGED,
    "insufficientPermissions": _SCOPES,
    "UserProjectMissing": _PAYER,
    # Quotas are refused as 403, too.
    **dict.fromkeys(
        ("rateLimitExceeded", "userRateLimitExceeded", "quotaExceeded", "dailyLimitExceeded", "backendError"), _BUSY
    ),
}
_BY_STATUS = {
    403: _DENIED,
    404: _ABSENT,
    410: _ABSENT,
    412: CHANGED,
    **dict.fromkeys((408, 409, 425, 429), _BUSY),
}


def _find_special(complaint: Complaint) -> Rule | None:
    said = complaint.message.lower()
    if complaint.status == 401:
        return _TOKEN
    if complaint.status == 400 and "requester pays" in said:
        return _PAYER
    if complaint.status == 403 and "scope" in said:
        return _SCOPES
    if complaint.status == 404 and "bucket does not exist" in said:
        return _NO_BUCKET
    return None


GCS = Dialect(
    by_code=_BY_CODE,
    by_status=_BY_STATUS,
    denied=_DENIED,
    bare_bad=_REFUSED,
    busy=_BUSY,
    bare_busy=_BARE_BUSY,
    refused=_REFUSED,
    find_special=_find_special,
)
"""Google Cloud Storage, and the emulators of it."""

GCS_LISTING = replace(GCS, by_code={**_BY_CODE, "notFound": _NO_BUCKET}, by_status={**_BY_STATUS, 404: _NO_BUCKET})
"""The same where a folder was listed: one that is absent is an empty one, so it is the bucket that is not there."""


def read_gcs_complaint(refusal: Refusal) -> Complaint:
    """Return what the refused answer says, whichever of its languages it speaks; the body may be cut."""
    text = refusal.body[:_BODY_BYTES].decode("utf-8", "replace").strip()
    if text.startswith("<"):
        return read_complaint(refusal)
    code = message = ""
    if text.startswith("{"):
        code, message = _read_json(text)
    elif text and text.lower() != refusal.reason.lower():
        # The status's name stands for the code that plain text does not give, so that the message counts as one.
        code, message = "".join(refusal.reason.split()), text
    return make_complaint(refusal.status, code, message or refusal.reason, "", refusal.headers)


def _read_json(text: str) -> tuple[str, str]:
    """Return the reason and the message of an error document; empty where it has another form."""
    try:
        said: Any = json.loads(text)["error"]
        message = said.get("message", "")
        reasons = [item.get("reason", "") for item in said.get("errors", ())] or [said.get("status", "")]
        return str(reasons[0]), str(message)
    except (ValueError, LookupError, TypeError, AttributeError):
        return "", ""
