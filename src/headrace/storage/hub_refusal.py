"""What the Hugging Face hub's refusals mean: a dialect of `headrace.storage.refusal`. The hub puts its code and reason into headers.

Codes: those that huggingface_hub (2.4) tells apart. The hub answers 401 for private and for absent repositories alike, so that nobody can tell which there are.
"""

from __future__ import annotations

import re
from dataclasses import replace

from headrace.errors import AccessDenied, ObjectNotFound, StorageError, StoreUnavailable
from headrace.storage.refusal import (
    CHANGED,
    Complaint,
    Dialect,
    Place,
    Rule,
    judge_complaint,
    make_complaint,
    read_complaint,
)
from headrace.storage.store import Refusal, Verdict

_LOGIN = "log in with: hf auth login (or set HF_TOKEN)"
_CODES = {401: "InvalidCredentials", 403: "Forbidden"}
_RATE_LIMIT_RESET = re.compile(r"\bt=(\d{1,6})\b")

_NO_REPOSITORY = Rule(
    ObjectNotFound,
    f"Check the name; for a private repository {_LOGIN}.",
    "is not a repository that this user can see",
)
_NO_REVISION = Rule(
    ObjectNotFound,
    "Check the branch, tag or commit after the @; without one it is main.",
    "has no such revision",
)
_NO_ENTRY = Rule(ObjectNotFound, "Check the name; upper and lower case differ.", "does not exist", is_absence=True)
_GATED = Rule(
    AccessDenied,
    "",
    "is gated: its owner decides who may read it",
)
_DISABLED = Rule(
    AccessDenied,
    "Look at the repository's page, or use another model.",
    "is disabled",
)
_DENIED = Rule(
    AccessDenied,
    f"Make sure that the token may read this repository (huggingface.co/settings/tokens), or {_LOGIN}.",
    why="The token does not allow it.",
)
_BUSY = Rule(
    StoreUnavailable,
    "Try again later; a token (HF_TOKEN) has higher limits, and fewer connections (HEADRACE_CONNECTIONS) ask for less.",
    why="The hub is overloaded or broken.",
    retry=True,
)
_REFUSED = Rule(StorageError, "Check HF_ENDPOINT, if it is set, and the uri.", why="The hub does not say why.")

HUB = Dialect(
    by_code={
        "RepoNotFound": _NO_REPOSITORY,
        "RevisionNotFound": _NO_REVISION,
        "EntryNotFound": _NO_ENTRY,
        "GatedRepo": _GATED,
        "DisabledRepo": _DISABLED,
    },
    by_status={
        401: _DENIED,
        403: _DENIED,
        404: _NO_ENTRY,
        410: _NO_ENTRY,
        412: CHANGED,
        **dict.fromkeys((408, 409, 425, 429), _BUSY),
    },
    denied=_DENIED,
    bare_bad=_REFUSED,
    busy=_BUSY,
    bare_busy=_BUSY,
    refused=_REFUSED,
)
"""The hub, its mirrors, and the stores that it redirects to."""


def is_from_hub(refusal: Refusal) -> bool:
    """Say whether the hub itself refused, rather than a store that it redirected to."""
    return "x-error-code" in refusal.headers or "x-error-message" in refusal.headers


def judge_hub(refusal: Refusal, place: Place, repository: str, *, now: float) -> Verdict:
    """Return what a refusal means. ``repository`` is the address of the repository's page, where access to a gated one is asked for."""
    complaint = _read(refusal)
    verdict = judge_complaint(complaint, place, now=now, dialect=HUB)
    error = verdict.error
    if complaint.code == "GatedRepo":
        error = AccessDenied(error.what, error.why, f"Ask for access at {repository}, and {_LOGIN} as who has it.")
    wait_s = verdict.wait_s
    if refusal.status == 429 and wait_s is None:
        match = _RATE_LIMIT_RESET.search(refusal.headers.get("ratelimit", ""))
        wait_s = float(match[1]) if match else None
    return replace(verdict, error=error, wait_s=wait_s)


def _read(refusal: Refusal) -> Complaint:
    if not is_from_hub(refusal):
        return read_complaint(refusal)
    code = refusal.headers.get("x-error-code", "")
    message = refusal.headers.get("x-error-message", "")
    if not code:  # The message is what matters then, and only one that comes with a code is shown.
        disabled = message == "Access to this resource is disabled."
        code = "DisabledRepo" if disabled else _CODES.get(refusal.status, "")
    return make_complaint(refusal.status, code, message or refusal.reason, "", refusal.headers)
