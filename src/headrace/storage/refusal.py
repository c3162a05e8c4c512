"""What a store's refusal means: a table by error code and HTTP status, for ranged reads and for the SDK's calls alike. S3's is here.

Codes and their meaning: Amazon S3 API Reference, "Error responses", and the spellings that MinIO, Ceph and SeaweedFS use. A store that speaks otherwise
brings a `Dialect` of its own. Knows no connection, no credentials; the wall clock comes in as an argument.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Mapping
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
    """What was asked, and where, for the words of an error. ``version`` is the pinned one, or None where none was asked for.

    ``current`` is the version that is there now, where that was looked up. ``credentials`` says which kind was shown ("the account key"), never the
    credentials themselves; empty where that is not to be said.
    """

    uri: str
    endpoint: str
    version: str | None = None
    anonymous: bool = False
    current: str = ""
    credentials: str = ""


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of a table. ``what`` follows the uri; without one, the status and code are named. ``why`` is for where the store says nothing."""

    error: type[StorageError]
    mend: str
    what: str = ""
    why: str = ""
    retry: bool = False
    refresh: bool = False
    is_absence: bool = False
    """Whether it means that the object is not there: of a pinned one, that it is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How one kind of store refuses. An error code that is known decides; without one the status does."""

    by_code: Mapping[str, Rule]
    by_status: Mapping[int, Rule]
    denied: Rule
    """A 401 or 403 with a code that is not known."""
    bare_bad: Rule
    """A 400 without a code."""
    busy: Rule
    """A 5xx with a code that is not known."""
    bare_busy: Rule
    """A 5xx without a code."""
    refused: Rule
    """Everything else."""
    find_special: Callable[[Complaint], Rule | None] = lambda _: None
    """A rule for what a code alone does not tell; it is asked first."""


def read_complaint(refusal: Refusal, *, code_header: str = "", detail: str = "") -> Complaint:
    """Return what the refused answer says. ``code_header`` names a header that holds the error code; ``detail`` names an element with
    better words than the usual one's.

    Its XML is searched rather than parsed: the body may be cut, or be a page of some proxy, and nothing in it may expand.
    """
    text = refusal.body[:_BODY_BYTES].decode("utf-8", "replace")
    message = " ".join(filter(None, (detail and _element(text, detail), _element(text, "Message"))))
    if re.match(r"\s*(<!doctype html|<html)", text, re.IGNORECASE):
        message = _WEB_PAGE
    code = refusal.headers.get(code_header, "") or _element(text, "Code")
    return make_complaint(refusal.status, code, message or refusal.reason, _element(text, "Region"), refusal.headers)


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


def refuses_operation(complaint: Complaint) -> bool:
    """Say whether a store of S3's protocol may not know the operation at all, so that another one for the same end is worth a try."""
    if complaint.status == 501 or complaint.code in ("NotImplemented", "MethodNotAllowed"):
        return True
    return complaint.status in (400, 405) and complaint.region is None and complaint.code not in _BY_CODE


def judge_complaint(complaint: Complaint, place: Place, *, now: float, dialect: Dialect | None = None) -> Verdict:
    """Return what ``complaint`` means in ``dialect``, by default S3's. ``now`` is the wall clock, in seconds since 1970, for a Retry-After that is a date."""
    rule = _rule_of(complaint, place, dialect or S3)
    error = rule.error(_what(rule, complaint, place), _why(rule, complaint, place), _mend(rule, place))
    wait_s = _retry_after(complaint.headers.get("retry-after", ""), now) if rule.retry else None
    return Verdict(error, retry=rule.retry, wait_s=wait_s, refresh_credentials=rule.refresh)


_ABSENT = Rule(
    ObjectNotFound,
    "Check bucket, folder and endpoint; upper and lower case differ.",
    "does not exist",
    is_absence=True,
)
GONE = Rule(
    ObjectChanged,
    "Open the checkpoint again; give each new version a folder of its own.",
    "is gone",
    "It was there when the checkpoint was opened.",
)
"""What the absence of a pinned object means, in any dialect."""

CHANGED = Rule(
    ObjectChanged,
    "Open the checkpoint again; give each new version a folder of its own.",
    "is not the version that was opened",
    "It was written anew while it was being read.",
)
"""What a failed condition on the version means, in any dialect."""

_NO_BUCKET = Rule(
    ObjectNotFound,
    "Check the bucket's name and the endpoint; another endpoint has other buckets.",
    "is in a bucket that does not exist",
)
_DENIED = Rule(
    AccessDenied,
    "Check which credentials are used (aws sts get-caller-identity) and that they allow s3:GetObject on the objects and s3:ListBucket on the bucket; old snapshots need s3:GetObjectVersion, too.",
    why="The credentials do not allow it.",
)
_BARE_DENIED = Rule(
    AccessDenied,
    _DENIED.mend,
    why="The store gave no reason; expired credentials and missing rights look like this.",
    refresh=True,
)
_UNKNOWN_KEY = Rule(
    AccessDenied,
    "Check the access key and that it belongs to this endpoint; a variable such as AWS_ACCESS_KEY_ID wins over a profile.",
    why="The store does not know this access key.",
)
_SIGNATURE = Rule(
    AccessDenied,
    "Check the secret key (a blank or a cut end is the common cause), the region, and that no proxy rewrites host or path.",
    why="The signature does not match the secret key that the store has.",
)
_OLD = Rule(
    AccessDenied,
    "Get new credentials (aws sso login, a new session token) and try again.",
    why="The credentials have expired.",
    retry=True,
    refresh=True,
)
_SKEWED = Rule(
    AccessDenied,
    "Set this machine's clock; the store allows fifteen minutes of difference.",
    why="This machine's clock differs too much from the store's.",
)
_BUSY = Rule(
    StoreUnavailable,
    "Try again later; fewer connections (HEADRACE_CONNECTIONS) ask for less.",
    why="The store is overloaded or broken.",
    retry=True,
)
_BARE_BUSY = Rule(
    StoreUnavailable,
    "Try again later; check that the endpoint is that of an S3 server, and not of its console or a proxy.",
    why="The store is overloaded or broken, and gave no reason.",
    retry=True,
)
_REGION_WRONG = Rule(
    StoreUnavailable,
    "Set the bucket's region (AWS_DEFAULT_REGION, or region in the AWS configuration).",
    why="The bucket lives in another region.",
)
_ARCHIVED = Rule(
    StoreUnavailable,
    "Restore the object, or copy it to a storage class that can be read at once.",
    why="The object is in an archive.",
)
_BARE_BAD = Rule(
    StorageError,
    "Check the credentials (aws sts get-caller-identity), the region and the endpoint.",
    why="The store gave no reason; expired credentials and a wrong region look like this.",
    refresh=True,
)
_REFUSED = Rule(
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
    "PreconditionFailed": CHANGED,
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
    412: CHANGED,
    **dict.fromkeys((408, 409, 425, 429), _BUSY),
}


S3 = Dialect(
    by_code=_BY_CODE,
    by_status=_BY_STATUS,
    denied=_DENIED,
    bare_bad=_BARE_BAD,
    busy=_BUSY,
    bare_busy=_BARE_BUSY,
    refused=_REFUSED,
)
"""Amazon S3 and the stores that speak its protocol."""


def _rule_of(complaint: Complaint, place: Place, dialect: Dialect) -> Rule:
    rule = dialect.find_special(complaint) or dialect.by_code.get(complaint.code) or _rule_of_status(complaint, dialect)
    if place.version is None:
        return rule
    # Each range lies inside the pinned size, so one that cannot be satisfied means another object. (MinIO answers 416 where 412 is due.)
    if complaint.status == 416:
        return CHANGED
    return GONE if rule.is_absence else rule


def _rule_of_status(complaint: Complaint, dialect: Dialect) -> Rule:
    status = complaint.status
    if complaint.code and status in (401, 403):
        return dialect.denied  # A code of its own, KMS's for instance, is a reason that new credentials do not change.
    if not complaint.code and status == 400:
        return dialect.bare_bad
    if status >= 500 and status != 501:
        return dialect.busy if complaint.code else dialect.bare_busy
    return dialect.by_status.get(status, dialect.refused)


def _what(rule: Rule, complaint: Complaint, place: Place) -> str:
    if rule.what:
        return f"{place.uri} {rule.what}."
    return f"{place.uri} cannot be read: the store answered {f'{complaint.status} {complaint.code}'.strip()}."


def _why(rule: Rule, complaint: Complaint, place: Place) -> str:
    shown = f" It was shown {place.credentials}." if place.credentials and rule.error is AccessDenied else ""
    return _reason(rule, complaint, place) + shown


def _reason(rule: Rule, complaint: Complaint, place: Place) -> str:
    if rule is CHANGED or rule is GONE:
        said = f"{complaint.status} {complaint.code}".strip()
        version = f"version {place.version}; " if place.version else ""
        version += f"now {place.current}; " if place.current else ""
        return f"{rule.why.rstrip('.')} ({version}{place.endpoint} answered {said})."
    said = complaint.message.rstrip(".")
    # The reason of an answer without a body is the name of its status, which says nothing new.
    if complaint.code and said:
        return f"{place.endpoint} says: {said}."
    if said == _WEB_PAGE:
        return f"{said} ({place.endpoint})."
    own = rule.why or (f"{said}." if said else "")
    return f"{own} ({place.endpoint})" if own else f"This is what {place.endpoint} says."


def _mend(rule: Rule, place: Place) -> str:
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
