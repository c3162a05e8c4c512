"""What a bucket of Google Cloud Storage held before, read off its generations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from headrace.errors import StorageError
from headrace.storage import gcs as module
from headrace.storage.gcs import GcsStore

from .gcs_stub import document, media, opened
from .s3_stub import Answer, Asked, S3Stub


def generation(name: str, number: int, created: str, deleted: str | None = None) -> dict[str, Any]:
    item = {"name": name, "size": "10", "generation": str(number), "timeCreated": f"2026-01-01T10:00:{created}Z"}
    return item if deleted is None else {**item, "timeDeleted": f"2026-01-01T10:00:{deleted}Z"}


def page(*items: Mapping[str, Any], token: str = "") -> Answer:
    content: dict[str, Any] = {"kind": "storage#objects", "items": list(items)}
    return document({**content, "nextPageToken": token} if token else content)


def states_of(store: GcsStore) -> list[dict[str, str]]:
    return [{stored.key: stored.version for stored in past.list_level().objects} for past in store.open_past()]


def test_states_follow_from_generations_over_pages() -> None:
    """A replaced generation ends as the next one begins; one that ends with no other was removed."""
    pages = {
        "": page(
            generation("m/a b", 20, "02.500"), generation("m/a b", 10, "00.000", "02.500"), token="next",
        ),
        "next": page(generation("m/c", 11, "01.000", "03.000"), generation("m/sub/d", 12, "00.100"), generation("n", 1, "09")),
    }  # fmt: skip
    with S3Stub(lambda asked: pages[asked.query.get("pageToken", "")]) as stub, opened(stub.endpoint) as store:
        assert states_of(store) == [
            {"a b": "20"},
            {"a b": "20", "c": "11"},
            {"a b": "10", "c": "11"},
            {"a b": "10"},
            {"a b": "10"},
        ]
        asked = stub.asked[0].query
        assert (asked["versions"].lower(), asked["prefix"]) == ("true", "m/")
        assert "delimiter" not in asked


def test_what_was_removed_and_put_back_was_absent_in_between() -> None:
    items = (generation("m/a", 2, "05"), generation("m/a", 1, "01", "03"), generation("m/b", 3, "04"))
    with S3Stub(lambda _: page(*items)) as stub, opened(stub.endpoint) as store:
        assert states_of(store) == [{"a": "2", "b": "3"}, {"b": "3"}, {}, {"a": "1"}]


def test_an_old_generation_is_read_as_such() -> None:
    def answer(asked: Asked) -> Answer:
        if "versions" in asked.query:
            return page(generation("m/a", 9, "05"), generation("m/a", 7, "01", "05"))
        assert asked.query["generation"] == "7"
        return media(b"0123456789")

    with S3Stub(answer) as stub, opened(stub.endpoint) as store:
        *_, past = store.open_past()
        stored = past.stat("a")
        assert past.read_object(stored) == b"0123456789"
        assert "generation=7&ifGenerationMatch=7" in past.describe_range(stored, 1, 3).target  # type: ignore[union-attr]


def test_too_many_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_CHANGES", 1)
    items = (generation("m/a", 2, "05"), generation("m/a", 1, "01", "05"))
    with (
        S3Stub(lambda _: page(*items)) as stub,
        opened(stub.endpoint) as store,
        pytest.raises(StorageError, match="cannot be looked through"),
    ):
        list(store.open_past())
