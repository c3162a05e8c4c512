"""What a store's refusal means: one table by error code and HTTP status, for ranged reads and for the SDK's calls alike.

Codes and their meaning: Amazon S3 API Reference, "Error responses", and the spellings that MinIO, Ceph and SeaweedFS use. Knows no connection, no
credentials; the wall clock comes in as an argument.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime

from headrace.errors import AccessDenied, ObjectChanged, ObjectNotFound, StorageError, StoreUnavailable
from headrace.storage.store import Refusal, Verdict

MOST_WAIT_S = 300.0
"""Longest wait that a store's Retry-After can ask for, in seconds."""

_BODY_BYTES = 8192
_WEB_PAGE = "The answer is a web page, so another server or a proxy may stand in between"
_MESSAGE_CHARACTERS = 300
_REGION = re.compile(r"[a-z0-9-]{1,40}")
# Signatures, tokens and keys look like this; a name that does, too, loses nothing that the error does not say elsewhere.
_SECRET = re.compile(r"[A-Za-z0-9+/=%_-]{40,}")


@dataclass(frozen=True, slots=True)
class Complaint:
    """What a store said: HTTP status, its error code ("" where it gave none) and message, the region it pointed to, its headers."""

    status: int
    code: str
    message: str
    region: str | None
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Place:
    """What was asked, and where, for the words of an error. ``version`` is the pinned one, or None where none was asked for."""

    uri: str
    endpoint: str
    version: str | None = None
    anonymous: bool = False


def read_complaint(refusal: Refusal) -> Complaint:
    """Return what the refused answer says.

    Its XML is searched rather than parsed: the body may be cut, or be a page of some proxy, and nothing in it may expand.
    """
    text = refusal.body[:_BODY_BYTES].decode("utf-8", "replace")
    message = _element(text, "Message")
    if re.match(r"\s*(<!doctype html|<html)", text, re.IGNORECASE):
        message = _WEB_PAGE
    return make_complaint(
        refusal.status, _element(text, "Code"), message or refusal.reason, _element(text, "Region"), refusal.headers
    )


def make_complaint(status: int, code: str, message: str, region: str, headers: Mapping[str, str]) -> Complaint:
    """Return a complaint made of what a store or its SDK handed over, cleaned for people: nothing long, nothing unprintable."""
    # The SDK puts the status where an answer without a body gives no code.
    code = "" if code.isdigit() or not re.fullmatch(r"[A-Za-z0-9._-]{1,80}", code) else code
    wanted = headers.get("x-amz-bucket-region") or region
    return Complaint(status, code, clean(message), wanted if _REGION.fullmatch(wanted) else None, headers)


def clean(text: str) -> str:
    """Return ``text`` on one line, shortened, with everything that looks like a signature, token or key taken out."""
    line = " ".join(
        "".join(letter if letter.isprintable() else " " for letter in text[: 4 * _MESSAGE_CHARACTERS]).split()
    )
    line = _SECRET.sub("…", line)
    return line if len(line) <= _MESSAGE_CHARACTERS else line[: _MESSAGE_CHARACTERS - 1] + "…"


def is_expired(complaint: Complaint) -> bool:
    """Say whether the store refused the credentials only because they are too old."""
    return complaint.code in _EXPIRED


def is_elsewhere(complaint: Complaint) -> bool:
    """Say whether the store points to the bucket's region. Most of S3's answers name it, so the header alone means nothing."""
    bare = not complaint.code and complaint.status in (301, 307, 400)  # HEAD has no body that could say more.
    return complaint.region is not None and (bare or complaint.code in _ELSEWHERE)


def judge_complaint(complaint: Complaint, place: Place, *, now: float) -> Verdict:
    """Return what ``complaint`` means. ``now`` is the wall clock, in seconds since 1970, for a Retry-After that is a date."""
    rule = _rule_of(complaint, place)
    error = rule.error(_what(rule, complaint, place), _why(rule, complaint, place), _mend(rule, place))
    wait_s = _retry_after(complaint.headers.get("retry-after", ""), now) if rule.retry else None
    return Verdict(error, retry=rule.retry, wait_s=wait_s, refresh_credentials=rule.refresh)


@dataclass(frozen=True, slots=True)
class _Rule:
    """One row of the table. ``what`` follows the uri; without one, the status and code are named. ``why`` is for where the store says nothing."""

    error: type[StorageError]
    mend: str
    what: str = ""
    why: str = ""
    retry: bool = False
    refresh: bool = False


_ABSENT = _Rule(
    ObjectNotFound,
    "Check bucket, folder and endpoint; upper and lower case differ.",
    "does not exist",
)
_GONE = _Rule(
    ObjectChanged,
    "Open the checkpoint again; give each new version a folder of its own.",
    "is gone",
    "It was there when the checkpoint was opened.",
)
_CHANGED = _Rule(
    ObjectChanged,
    "Open the checkpoint again; give each new version a folder of its own.",
    "is not the version that was opened",
    "It was written anew while it was being read.",
)
_NO_BUCKET = _Rule(
    ObjectNotFound,
    "Check the bucket's name and the endpoint; another endpoint has other buckets.",
    "is in a bucket that does not exist",
)
_DENIED = _Rule(
    AccessDenied,
    "Check which credentials are used (aws sts get-caller-identity) and that they allow s3:GetObject on the objects and s3:ListBucket on the bucket.",
    why="The credentials do not allow it.",
)
_BARE_DENIED = _Rule(
    AccessDenied,
    _DENIED.mend,
    why="The store gave no reason; expired credentials and missing rights look like this.",
    refresh=True,
)
_UNKNOWN_KEY = _Rule(
    AccessDenied,
    "Check the access key and that it belongs to this endpoint; a variable such as AWS_ACCESS_KEY_ID wins over a profile.",
    why="The store does not know this access key.",
)
_SIGNATURE = _Rule(
    AccessDenied,
    "Check the secret key (a blank or a cut end is the common cause), the region, and that no proxy rewrites host or path.",
    why="The signature does not match the secret key that the store has.",
)
_OLD = _Rule(
    AccessDenied,
    "Get new credentials (aws sso login, a new session token) and try again.",
    why="The credentials have expired.",
    retry=True,
    refresh=True,
)
_SKEWED = _Rule(
    AccessDenied,
    "Set this machine's clock; the store allows fifteen minutes of difference.",
    why="This machine's clock differs too much from the store's.",
)
_BUSY = _Rule(
    StoreUnavailable,
    "Try again later; fewer connections (HEADRACE_CONNECTIONS) ask for less.",
    why="The store is overloaded or broken.",
    retry=True,
)
_BARE_BUSY = _Rule(
    StoreUnavailable,
    "Try again later; check that the endpoint is that of an S3 server, and not of its console or a proxy.",
    why="The store is overloaded or broken, and gave no reason.",
    retry=True,
)
_REGION_WRONG = _Rule(
    StoreUnavailable,
    "Set the bucket's region (AWS_DEFAULT_REGION, or region in the AWS configuration).",
    why="The bucket lives in another region.",
)
_ARCHIVED = _Rule(
    StoreUnavailable,
    "Restore the object, or copy it to a storage class that can be read at once.",
    why="The object is in an archive.",
)
_BARE_BAD = _Rule(
    StorageError,
    "Check the credentials (aws sts get-caller-identity), the region and the endpoint.",
    why="The store gave no reason; expired credentials and a wrong region look like this.",
    refresh=True,
)
_REFUSED = _Rule(
    StorageError, "Check that the endpoint is an S3 server, and the uri.", why="The store does not say why."
)

_EXPIRED = ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired", "InvalidToken")
_ELSEWHERE = (
    "PermanentRedirect",
    "TemporaryRedirect",
    "Redirect",
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
)

_BY_CODE = {
    "NoSuchKey": _ABSENT,
    "NoSuchVersion": _ABSENT,
    "NotFound": _ABSENT,
    "MethodNotAllowed": _ABSENT,  # A GET that meets a delete marker.
    "NoSuchBucket": _NO_BUCKET,
    "PreconditionFailed": _CHANGED,
    "AccessDenied": _DENIED,
    "AllAccessDisabled": _DENIED,
    "InvalidAccessKeyId": _UNKNOWN_KEY,
    "SignatureDoesNotMatch": _SIGNATURE,
    "RequestTimeTooSkewed": _SKEWED,
    "InvalidObjectState": _ARCHIVED,
    **dict.fromkeys(_EXPIRED, _OLD),
    **dict.fromkeys(_ELSEWHERE, _REGION_WRONG),
    **dict.fromkeys(
        (
            "SlowDown",
            "ServiceUnavailable",
            "InternalError",
            "RequestTimeout",
            "RequestTimeoutException",
            "OperationAborted",
            "Throttling",
            "ThrottlingException",
            "TooManyRequests",
            "TooManyRequestsException",
            "RequestLimitExceeded",
            "BandwidthLimitExceeded",
        ),
        _BUSY,
    ),
}
_BY_STATUS = {
    301: _REGION_WRONG,
    307: _REGION_WRONG,
    401: _BARE_DENIED,
    403: _BARE_DENIED,
    404: _ABSENT,
    405: _ABSENT,
    410: _ABSENT,
    412: _CHANGED,
    **dict.fromkeys((408, 409, 425, 429), _BUSY),
}


def _rule_of(complaint: Complaint, place: Place) -> _Rule:
    rule = _BY_CODE.get(complaint.code) or _rule_of_status(complaint)
    if place.version is None:
        return rule
    # Each range lies inside the pinned size, so one that cannot be satisfied means another object. (MinIO answers 416 where 412 is due.)
    if complaint.status == 416:
        return _CHANGED
    return _GONE if rule is _ABSENT else rule


def _rule_of_status(complaint: Complaint) -> _Rule:
    status = complaint.status
    if complaint.code and status in (401, 403):
        return _DENIED  # A code of its own, KMS's for instance, is a reason that new credentials do not change.
    if not complaint.code and status == 400:
        return _BARE_BAD
    if status >= 500 and status != 501:
        return _BUSY if complaint.code else _BARE_BUSY
    return _BY_STATUS.get(status, _REFUSED)


def _what(rule: _Rule, complaint: Complaint, place: Place) -> str:
    if rule.what:
        return f"{place.uri} {rule.what}."
    return f"{place.uri} cannot be read: the store answered {f'{complaint.status} {complaint.code}'.strip()}."


def _why(rule: _Rule, complaint: Complaint, place: Place) -> str:
    if rule is _CHANGED or rule is _GONE:
        said = f"{complaint.status} {complaint.code}".strip()
        version = f"version {place.version}; " if place.version else ""
        return f"{rule.why.rstrip('.')} ({version}{place.endpoint} answered {said})."
    said = complaint.message.rstrip(".")
    # The reason of an answer without a body is the name of its status, which says nothing new.
    if complaint.code and said:
        return f"{place.endpoint} says: {said}."
    if said == _WEB_PAGE:
        return f"{said} ({place.endpoint})."
    own = rule.why or (f"{said}." if said else "")
    return f"{own} ({place.endpoint})" if own else f"This is what {place.endpoint} says."


def _mend(rule: _Rule, place: Place) -> str:
    if place.anonymous and rule.error is AccessDenied:
        return "The request was anonymous: use credentials, or make the objects public."
    return rule.mend


def _retry_after(value: str, now: float) -> float | None:
    """Return the seconds that a Retry-After asks for (RFC 9110, 10.2.3: seconds or a date), None where it cannot be read."""
    value = value.strip()
    if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", value):
        return min(float(value), MOST_WAIT_S)
    try:
        date = parsedate_to_datetime(value)
    except ValueError:
        return None
    date = date if date.tzinfo is not None else date.replace(tzinfo=UTC)
    return min(max(date.timestamp() - now, 0.0), MOST_WAIT_S)


def _element(text: str, name: str) -> str:
    match = re.search(rf"<{name}>([^<]{{1,2000}})</{name}>", text)
    return html.unescape(match[1]).strip() if match else ""
