"""A repository as it was at earlier commits: by a snapshot's id, or by the commit itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.fake_hub import FakeHub, fake_hub, fill_cache

pytest.importorskip("huggingface_hub")

import numpy
from huggingface_hub import constants
from safetensors.numpy import save

from headrace.checkpoint import open_checkpoint
from headrace.checkpoint.checkpoint import Checkpoint
from headrace.errors import InvalidSetting, ObjectChanged
from headrace.settings import Settings, TransportSettings
from headrace.storage import hub as module

NAME = "org/name"


def files_of(*names: str) -> dict[str, bytes]:
    tensors = {name: numpy.zeros(4, numpy.float32) for name in names}
    return {"config.json": b'{"model_type": "llama"}', "model.safetensors": save(tensors)}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    with fake_hub(monkeypatch, tmp_path, tokens=("good",)) as one:
        yield one


def opened(tmp_path: Path, uri: str = f"hf://{NAME}", snapshot: str | None = None) -> Checkpoint:
    quick = TransportSettings(max_attempts=2, backoff_first_s=0.001, connect_timeout_s=5, idle_timeout_s=5)
    return open_checkpoint(uri, snapshot=snapshot, settings=Settings(cache_dir=tmp_path / "cache", transport=quick))


def test_an_earlier_snapshot_is_found_among_the_commits(hub: FakeHub, tmp_path: Path) -> None:
    hub.publish(NAME, files_of("a"))
    with opened(tmp_path) as now:
        first = now.snapshot.id
    hub.publish(NAME, files_of("a", "b"))
    hub.publish(NAME, files_of("a", "b", "c"))
    with opened(tmp_path, snapshot=first) as old:
        assert list(old.entries) == ["a"]
        assert old.snapshot.id == first
        assert old.config == {"model_type": "llama"}


def test_a_commit_is_a_snapshot_too(hub: FakeHub, tmp_path: Path) -> None:
    commit = hub.publish(NAME, files_of("a"))
    hub.publish(NAME, files_of("b"))
    with opened(tmp_path, snapshot=commit) as old:
        assert list(old.entries) == ["a"]
    with opened(tmp_path, f"hf://{NAME}@{commit}", snapshot=commit) as old:
        assert list(old.entries) == ["a"]
    with pytest.raises(InvalidSetting, match="given twice"):
        opened(tmp_path, f"hf://{NAME}@main", snapshot=commit)


def test_a_snapshot_of_no_commit_is_refused(hub: FakeHub, tmp_path: Path) -> None:
    hub.publish(NAME, files_of("a"))
    hub.publish(NAME, files_of("b"))
    with opened(tmp_path) as checkpoint:
        now = checkpoint.snapshot.id
    with pytest.raises(ObjectChanged, match=f"Snapshot {now} is there now, and none of the 2 states"):
        opened(tmp_path, snapshot="0" * 12)


def test_not_more_commits_than_that_are_looked_at(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_COMMITS", 3)
    for number in range(5):
        hub.publish(NAME, files_of(f"a{number}"))
    with pytest.raises(ObjectChanged, match="none of the 3 states"):
        opened(tmp_path, snapshot="0" * 12)


def test_a_snapshot_of_the_hub_is_found_although_the_model_is_in_the_cache(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the cache files have other versions than on the hub, so the id there is another one."""
    files = files_of("a")
    commit = hub.publish(NAME, files)
    with opened(tmp_path) as checkpoint:
        on_the_hub = checkpoint.snapshot.id
    fill_cache(tmp_path, NAME, commit, files)
    with opened(tmp_path) as checkpoint:
        assert checkpoint.store.uri.scheme == "file"
        assert checkpoint.snapshot.id != on_the_hub
    with opened(tmp_path, snapshot=on_the_hub) as checkpoint:
        assert checkpoint.snapshot.id == on_the_hub
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ObjectChanged):
        opened(tmp_path, snapshot=on_the_hub)
