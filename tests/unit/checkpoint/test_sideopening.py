"""Side files are opened without weights, and share the mirror of the checkpoint that they belong to."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from headrace.checkpoint import mirror, open_checkpoint
from headrace.checkpoint.sideopening import open_side_files
from headrace.errors import ObjectNotFound
from headrace.settings import Settings

from .header_files import file_of, tensor
from .memory_store import MemoryStore

SIDES = {"config.json": b"{}", "tokenizer.json": b'{"a": 1}', "sub/template.jinja": b"x"}
WEIGHTS = {"model.safetensors": file_of({"a": tensor([1], 0, 4)}, b"\0" * 4)}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(cache_dir=tmp_path / "cache")


def stand_in(monkeypatch: pytest.MonkeyPatch, objects: dict[str, bytes]) -> MemoryStore:
    store = MemoryStore(objects)
    monkeypatch.setattr("headrace.checkpoint.sideopening.open_store", lambda uri, *, settings: store)
    return store


def test_side_files_without_weights(monkeypatch: pytest.MonkeyPatch, settings: Settings) -> None:
    store = stand_in(monkeypatch, SIDES)
    with open_side_files("s3://bucket/model", settings=settings) as files:
        folder = files.folder()
        names = {str(path.relative_to(folder)) for path in folder.rglob("*.j*")}
        assert names - {mirror.MARKER} == set(SIDES)
        assert files.read("tokenizer.json") == SIDES["tokenizer.json"]
        assert store.num_closed == 0
    assert store.num_closed == 1
    assert store.reads == dict.fromkeys(SIDES, 1)


def test_no_weight_is_read_and_the_checkpoint_reads_no_side_file_again(
    monkeypatch: pytest.MonkeyPatch, settings: Settings
) -> None:
    store = stand_in(monkeypatch, {**SIDES, **WEIGHTS})
    with open_side_files("s3://bucket/model", settings=settings) as files:
        folder = files.folder()
    assert "model.safetensors" not in store.reads
    before = store.reads.copy()
    with open_checkpoint(
        store, settings=settings, fetch=lambda store, stored, start, stop: WEIGHTS[stored.key][start:stop]
    ) as checkpoint:
        assert checkpoint.side_files.folder() == folder
        assert checkpoint.config == {}
    assert store.reads == before


def test_a_place_without_any_is_said_and_the_store_closed(monkeypatch: pytest.MonkeyPatch, settings: Settings) -> None:
    store = stand_in(monkeypatch, WEIGHTS)
    with (
        pytest.raises(ObjectNotFound, match=r"no side files at s3://bucket/model"),
        open_side_files("s3://bucket/model", settings=settings),
    ):
        pytest.fail("there are none")
    assert store.num_closed == 1
    assert not settings.cache_dir.exists()


def test_what_is_left_out_is_logged(
    monkeypatch: pytest.MonkeyPatch, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in(monkeypatch, {**SIDES, "huge.json": bytes(70_000_000)})
    with caplog.at_level(logging.WARNING), open_side_files("s3://bucket/model", settings=settings) as files:
        assert "huge.json" not in {stored.key for stored in files.objects}
    assert "huge.json" in caplog.text
