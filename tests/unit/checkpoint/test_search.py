"""The snapshot that was asked for is found in what a store keeps of its past, or refused with what is there now."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.checkpoint import open_checkpoint
from headrace.checkpoint.checkpoint import Checkpoint
from headrace.errors import AccessDenied, HeadraceError, InvalidSetting, ObjectChanged, StoreUnavailable
from headrace.settings import Settings
from headrace.storage import ObjectStore, StoredObject
from headrace.storage.past import past_states
from headrace.storage.store import Change

from .memory_store import MemoryStore, fetch, index, weights

INDEX = "model.safetensors.index.json"
CONFIG = b'{"model_type": "llama"}'


class VersionedStore(MemoryStore):
    """A bucket that keeps versions: each `put` and `remove` happens a second after the last."""

    def __init__(self, uri: str = "s3://bucket/model", selected_key: str | None = None) -> None:
        super().__init__({}, uri, selected_key)
        self.changes: list[Change] = []
        self.bodies: dict[str, bytes] = {}
        self.refuses: HeadraceError | None = None

    def put(self, **files: bytes) -> None:
        for name, body in files.items():
            key = name.replace("__", ".")
            self.objects[key] = body
            version_id = f"id{len(self.changes)}"
            stored = self.stat(key)
            self.bodies[version_id] = body
            pinned = StoredObject(key, stored.size_bytes, stored.version, version_id)
            self.changes.append(Change(key, float(len(self.changes)), pinned))

    def remove(self, *keys: str) -> None:
        for key in keys:
            del self.objects[key]
            self.changes.append(Change(key, float(len(self.changes)), None))

    def read_object(self, stored: StoredObject, *, start: int = 0, stop: int | None = None) -> bytes:
        if not stored.version_id:
            return super().read_object(stored, start=start, stop=stop)
        self.reads[f"{stored.key}@{stored.version_id}"] += 1
        return self.bodies[stored.version_id][start:stop]

    def open_past(self) -> Iterator[ObjectStore]:
        if self.refuses is not None:
            raise self.refuses
        yield from past_states(self, self.changes)


def opened(tmp_path: Path, store: Any, snapshot: str | None = None) -> Checkpoint:
    return open_checkpoint(store, snapshot=snapshot, settings=Settings(cache_dir=tmp_path), fetch=fetch)


def test_what_is_there_now_is_opened_without_a_look_at_the_past(tmp_path: Path) -> None:
    store = VersionedStore()
    store.put(model__safetensors=weights(a=1), config__json=CONFIG)
    now = opened(tmp_path, store).snapshot.id
    store.refuses = AssertionError("the past was looked at")  # type: ignore[assignment]
    checkpoint = opened(tmp_path, store, now)
    assert checkpoint.snapshot.id == now
    assert checkpoint.stored("model.safetensors").version_id == ""


def test_an_overwritten_model_is_opened_as_it_was(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Weights, index and side files all come from their old versions, headers included."""
    store = VersionedStore()
    store.put(
        x__safetensors=weights(a=1), y__safetensors=weights(b=1), config__json=CONFIG,
        **{INDEX.replace(".", "__"): index(a="x.safetensors", b="y.safetensors")},
    )  # fmt: skip
    before = opened(tmp_path, store).snapshot.id
    store.put(
        x__safetensors=weights(c=1, d=2), config__json=b'{"model_type": "mistral"}',
        **{INDEX.replace(".", "__"): index(c="x.safetensors", d="x.safetensors")},
    )  # fmt: skip
    store.remove("y.safetensors")
    after = opened(tmp_path, store)
    assert list(after.entries) == ["c", "d"] and after.snapshot.id != before

    with caplog.at_level(logging.INFO, "headrace"):
        old = opened(tmp_path, store, before)
    assert list(old.entries) == ["a", "b"]
    assert old.snapshot.id == before
    assert old.config["model_type"] == "llama"
    assert (old.side_files.folder() / "config.json").read_bytes() == CONFIG
    assert old.stored("x.safetensors").version_id == "id0"
    assert f"Opened s3://bucket/model: snapshot {before}, 2 tensors in 2 files" in caplog.text
    assert f"snapshot {before} is read from the versions that the store keeps" in caplog.text


def test_a_removed_model_is_opened_as_it_was(tmp_path: Path) -> None:
    store = VersionedStore()
    store.put(model__safetensors=weights(a=1), config__json=CONFIG)
    before = opened(tmp_path, store).snapshot.id
    store.remove("model.safetensors", "config.json")
    assert list(opened(tmp_path, store, before).entries) == ["a"]


def test_each_version_of_the_index_is_read_once(tmp_path: Path) -> None:
    """However many states there are: an index may have megabytes."""
    store = VersionedStore()
    store.put(x__safetensors=weights(a=1), **{INDEX.replace(".", "__"): index(a="x.safetensors")})
    first = opened(tmp_path, store).snapshot.id
    for number in range(20):
        store.put(readme__md=bytes(number))
    store.put(**{INDEX.replace(".", "__"): index(a="x.safetensors") + b" "})
    opened(tmp_path, store, first)
    # Twice what was there now, once the old one; the newer of the old versions is what is there now.
    assert {key: number for key, number in store.reads.items() if key.startswith(INDEX)} == {
        INDEX: 2,
        f"{INDEX}@id1": 1,
    }


def test_a_state_in_the_middle_of_an_upload_is_passed_over(tmp_path: Path) -> None:
    """The index names a file that was not there yet, and for a while there was no model at all."""
    store = VersionedStore()
    store.put(model__safetensors=weights(a=1))
    first = opened(tmp_path, store).snapshot.id
    store.remove("model.safetensors")
    store.put(**{INDEX.replace(".", "__"): index(b="new.safetensors")})
    store.put(new__safetensors=weights(b=1))
    assert list(opened(tmp_path, store, first).entries) == ["a"]


def test_a_single_file_has_its_past_too(tmp_path: Path) -> None:
    store = VersionedStore(selected_key="one.safetensors")
    store.put(one__safetensors=weights(a=1))
    first = opened(tmp_path, store).snapshot.id
    store.put(one__safetensors=weights(b=1, c=1))
    assert list(opened(tmp_path, store, first).entries) == ["a"]
    assert store.num_closed == 0, "a store that was given stays the caller's"


def test_what_is_nowhere_is_refused_with_what_is_there_now(tmp_path: Path) -> None:
    store = VersionedStore()
    store.put(model__safetensors=weights(a=1), config__json=CONFIG)
    now = opened(tmp_path, store).snapshot.id
    with pytest.raises(ObjectChanged) as caught:
        opened(tmp_path, store, "0" * 12)
    assert caught.value.what == "s3://bucket/model is not at snapshot 000000000000."
    assert f"Snapshot {now} is there now" in caught.value.why
    assert "none of the 2 states" in caught.value.why
    assert "versioning" in caught.value.mend


def test_a_store_without_a_past_says_so(tmp_path: Path) -> None:
    store = MemoryStore({"model.safetensors": weights(a=1)})
    now = opened(tmp_path, store).snapshot.id
    with pytest.raises(ObjectChanged) as caught:
        opened(tmp_path, store, "f" * 12)
    assert now in caught.value.why and "only in S3, Google Cloud Storage and Azure" in caught.value.why


def test_what_is_there_now_need_not_be_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ObjectChanged, match="What is there now is no checkpoint"):
        opened(tmp_path, MemoryStore({"config.json": CONFIG}), "f" * 12)


def test_a_past_that_may_not_be_looked_at_says_which_right_is_missing(tmp_path: Path) -> None:
    store = VersionedStore()
    store.put(model__safetensors=weights(a=1))
    now = opened(tmp_path, store).snapshot.id
    store.refuses = AccessDenied("No.", "The credentials do not allow it.")
    with pytest.raises(ObjectChanged, match="s3:ListBucketVersions") as caught:
        opened(tmp_path, store, "f" * 12)
    assert now in caught.value.why


def test_other_failures_stay_what_they_are(tmp_path: Path) -> None:
    store = VersionedStore()
    store.put(model__safetensors=weights(a=1))
    store.refuses = StoreUnavailable("The store is away.")
    with pytest.raises(StoreUnavailable):
        opened(tmp_path, store, "f" * 12)


@pytest.mark.parametrize("text", ["", "latest", "ABCDEF012345", "0" * 11, "0" * 13, "0" * 40])
def test_what_is_no_id_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidSetting, match="twelve"):
        opened(tmp_path, MemoryStore({"model.safetensors": weights(a=1)}), text)


def test_local_files_have_no_past(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(weights(a=1))
    now = open_checkpoint(folder, settings=Settings(cache_dir=tmp_path)).snapshot.id
    assert open_checkpoint(folder, snapshot=now, settings=Settings(cache_dir=tmp_path)).snapshot.id == now
    (folder / "model.safetensors").write_bytes(weights(b=1, c=1))
    with pytest.raises(ObjectChanged, match=f"{folder} is not at snapshot {now}"):
        open_checkpoint(folder, snapshot=now, settings=Settings(cache_dir=tmp_path))
