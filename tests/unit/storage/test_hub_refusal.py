from __future__ import annotations

import pytest

from headrace.errors import AccessDenied, ObjectChanged, ObjectNotFound, StorageError, StoreUnavailable
from headrace.storage.hub_refusal import judge_hub
from headrace.storage.refusal import Place
from headrace.storage.store import Refusal

URI, PAGE = "hf://org/name/model.safetensors", "https://huggingface.co/org/name"
OPEN, PINNED = Place(URI, "https://huggingface.co"), Place(URI, "https://huggingface.co", "a" * 64)


def refusal(status: int, code: str = "", message: str = "", **headers: str) -> Refusal:
    given = {"x-error-code": code, "x-error-message": message}
    return Refusal(status, "Reason", {name: value for name, value in given.items() if value} | headers)


@pytest.mark.parametrize(
    ("given", "place", "kind", "says"),
    [
        (refusal(401, "RepoNotFound", "Repository not found"), OPEN, ObjectNotFound, "hf auth login"),
        (refusal(404, "RevisionNotFound", "Invalid rev id: x"), OPEN, ObjectNotFound, "has no such revision"),
        (refusal(404, "EntryNotFound", "Entry not found"), OPEN, ObjectNotFound, "does not exist"),
        (refusal(404, "EntryNotFound", "Entry not found"), PINNED, ObjectChanged, "is gone"),
        (refusal(403, "GatedRepo", "Access is restricted"), OPEN, AccessDenied, f"Ask for access at {PAGE}, and log in with: hf auth login"),
        (refusal(401, "GatedRepo", "Access is restricted"), PINNED, AccessDenied, "is gated"),
        (refusal(403, "", "Access to this resource is disabled."), OPEN, AccessDenied, "is disabled"),
        (refusal(401, "", "Invalid credentials in Authorization header"), OPEN, AccessDenied, "huggingface.co/settings/tokens"),
        (refusal(401, "", "Invalid credentials in Authorization header"), OPEN, AccessDenied, "says: Invalid credentials"),
        (refusal(403, "", "Enable access to gated repositories"), OPEN, AccessDenied, "says: Enable access to gated repositories"),
        (refusal(403), OPEN, AccessDenied, "403"),
        (refusal(404), OPEN, ObjectNotFound, "does not exist"),
        (refusal(404), PINNED, ObjectChanged, "is gone"),
        (refusal(416), PINNED, ObjectChanged, "not the version"),
        (refusal(400), OPEN, StorageError, "HF_ENDPOINT"),
    ],
)  # fmt: skip
def test_a_refusal_is_final_and_says_how_to_mend_it(given: Refusal, place: Place, kind: type, says: str) -> None:
    verdict = judge_hub(given, place, PAGE, now=0.0)
    assert type(verdict.error) is kind
    assert says in str(verdict.error)
    assert URI in verdict.error.what
    assert verdict.error.mend
    assert not verdict.retry


@pytest.mark.parametrize(
    ("given", "wait_s"),
    [
        (refusal(503), None),
        (refusal(500, "InternalError", "Internal error"), None),
        (refusal(429, "", "Too many requests", **{"retry-after": "7"}), 7.0),
        (refusal(429, "", "Too many requests", ratelimit='"api";r=0;t=42'), 42.0),
        (refusal(429), None),
    ],
)
def test_trouble_passes(given: Refusal, wait_s: float | None) -> None:
    verdict = judge_hub(given, PINNED, PAGE, now=0.0)
    assert type(verdict.error) is StoreUnavailable
    assert (verdict.retry, verdict.wait_s) == (True, wait_s)


def test_what_a_store_behind_the_hub_says_is_passed_on() -> None:
    body = b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>"
    verdict = judge_hub(Refusal(403, "Forbidden", {}, body), PINNED, PAGE, now=0.0)
    assert type(verdict.error) is AccessDenied
    assert "Request has expired" in verdict.error.why
