from __future__ import annotations

import json
import logging
import os
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.checkpoint import headers as header_reads
from headrace.checkpoint import open_checkpoint
from headrace.checkpoint.checkpoint import Checkpoint
from headrace.errors import (
    CheckpointError,
    InvalidHeader,
    InvalidIndex,
    MissingFiles,
    NoWeights,
    ObjectChanged,
    TruncatedObject,
    WrongRange,
)
from headrace.settings import Settings, TransportSettings
from headrace.storage import StoredObject, parse_uri

from .header_files import file_of, tensor
from .memory_store import MemoryStore, fetch, index, weights

INDEX = "model.safetensors.index.json"


def opened(tmp_path: Path, objects: dict[str, bytes], **options: Any) -> Checkpoint:
    return open_checkpoint(MemoryStore(objects, **options), settings=Settings(cache_dir=tmp_path), fetch=fetch)


def files_of(checkpoint: Checkpoint) -> dict[str, str]:
    return {name: entry.file for name, entry in checkpoint.entries.items()}


def test_everything_that_a_checkpoint_says(tmp_path: Path) -> None:
    first = file_of({"b": tensor([2], 0, 4, "BF16"), "__metadata__": {"format": "pt"}}, bytes(4))
    objects = {
        "model-00001-of-00002.safetensors": first,
        "model-00002-of-00002.safetensors": weights(a=1, c=2),
        INDEX: index(
            a="model-00002-of-00002.safetensors",
            b="model-00001-of-00002.safetensors",
            c="model-00002-of-00002.safetensors",
        ),
        "config.json": b'{"model_type": "llama", "limit": Infinity}',
    }
    store = MemoryStore(objects)
    with open_checkpoint(store, settings=Settings(cache_dir=tmp_path), fetch=fetch) as checkpoint:
        assert checkpoint.uri == "s3://bucket/model"
        assert checkpoint.store is store
        assert checkpoint.files == ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
        assert list(checkpoint.entries) == ["b", "a", "c"]
        assert checkpoint.entries["b"].stop == len(first)
        assert checkpoint.metadata["model-00001-of-00002.safetensors"] == {"format": "pt"}
        assert checkpoint.metadata["model-00002-of-00002.safetensors"] == {}
        assert checkpoint.notes == ()
        assert checkpoint.total_bytes == 6
        assert checkpoint.config["model_type"] == "llama"
        assert checkpoint.stored(checkpoint.files[0]) == store.stat(checkpoint.files[0])
        assert [stored.key for stored in checkpoint.side_files.objects] == ["config.json", INDEX]
        assert checkpoint.snapshot.side == checkpoint.side_files.objects
        with pytest.raises(TypeError):
            checkpoint.entries["x"] = checkpoint.entries["a"]  # type: ignore[index]
    assert store.num_closed == 0, "a store that was given stays the caller's"
    assert list(tmp_path.iterdir()) == [], "opening writes nothing"


def test_consolidated_files_beside_an_index_are_not_even_opened(tmp_path: Path) -> None:
    store = MemoryStore(
        {
            "m-1-of-1.safetensors": weights(a=1),
            "consolidated.safetensors": b"not safetensors at all",
            "original/model.safetensors": weights(z=9),
            "metal/model.bin": b"",
            INDEX: index(a="m-1-of-1.safetensors"),
        }
    )
    checkpoint = open_checkpoint(store, settings=Settings(cache_dir=tmp_path), fetch=fetch)
    assert files_of(checkpoint) == {"a": "m-1-of-1.safetensors"}
    assert store.reads["consolidated.safetensors"] == store.reads["original/model.safetensors"] == 0
    assert checkpoint.notes == (f"Ignored: 'consolidated.safetensors', which {INDEX} does not name.",)


def test_a_stray_file_with_the_same_names_is_ignored_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "headrace"):
        checkpoint = opened(
            tmp_path,
            {
                "m-1-of-1.safetensors": file_of({"a": tensor([2], 0, 4, "BF16")}, bytes(4)),
                "model.safetensors": weights(a=4),
                INDEX: index(a="m-1-of-1.safetensors"),
            },
        )
    assert checkpoint.entries["a"].dtype == "BF16"
    assert [record.getMessage() for record in caplog.records] == [f"s3://bucket/model: {checkpoint.notes[0]}"]


def test_an_overlay_wins_where_the_index_says_so(tmp_path: Path) -> None:
    checkpoint = opened(
        tmp_path,
        {
            "base.safetensors": weights(a=1, b=1),
            "overlay.safetensors": weights(a=2),
            INDEX: index(a="overlay.safetensors", b="base.safetensors"),
        },
    )
    assert files_of(checkpoint) == {"b": "base.safetensors", "a": "overlay.safetensors"}
    assert checkpoint.total_bytes == 2


def test_subfolders_that_the_index_names_are_read(tmp_path: Path) -> None:
    checkpoint = opened(
        tmp_path,
        {
            "model.safetensors": weights(a=1),
            "talker/x.safetensors": weights(b=1),
            "talker/y.safetensors": weights(c=1),
            INDEX: index(a="model.safetensors", b="talker/x.safetensors"),
        },
    )
    assert files_of(checkpoint) == {"a": "model.safetensors", "b": "talker/x.safetensors"}
    assert checkpoint.notes == (f"Ignored: 'talker/y.safetensors', which {INDEX} does not name.",)


def test_a_subfolder_has_its_own_index(tmp_path: Path) -> None:
    checkpoint = opened(
        tmp_path,
        {"x.safetensors": weights(a=1), "y.safetensors": weights(a=2), INDEX: index(a="y.safetensors")},
        uri="s3://bucket/model/talker",
    )
    assert files_of(checkpoint) == {"a": "y.safetensors"}


def test_missing_files_are_an_error_before_any_header_is_read(tmp_path: Path) -> None:
    store = MemoryStore(
        {"1.safetensors": weights(a=1), INDEX: index(a="1.safetensors", b="2.safetensors", c="no/3.safetensors")}
    )
    with pytest.raises(MissingFiles, match=r"2 files of the 3 .*: '2\.safetensors', 'no/3\.safetensors'\."):
        open_checkpoint(store, settings=Settings(cache_dir=tmp_path), fetch=fetch)
    assert store.reads == {INDEX: 1}


def test_a_cut_file_is_an_error_though_the_index_wants_only_its_first_tensor(tmp_path: Path) -> None:
    objects = {"1.safetensors": weights(a=1, b=2)[:-1], INDEX: index(a="1.safetensors")}
    with pytest.raises(TruncatedObject, match=r"headrace inspect s3://bucket/model/1\.safetensors"):
        opened(tmp_path, objects)


def test_an_unsafe_index_reads_nothing_else(tmp_path: Path) -> None:
    store = MemoryStore({"1.safetensors": weights(a=1), INDEX: index(a="../../other/1.safetensors")})
    with pytest.raises(InvalidIndex, match=r"'\.\.' part"):
        open_checkpoint(store, settings=Settings(cache_dir=tmp_path), fetch=fetch)
    assert store.reads == {INDEX: 1}
    assert set(store.listings) == {""}


def test_an_empty_index_is_an_empty_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidIndex, match="empty file"):
        opened(tmp_path, {"1.safetensors": weights(a=1), INDEX: b""})


def test_pickled_weights_are_refused_unread(tmp_path: Path) -> None:
    store = MemoryStore({"pytorch_model.bin": b"\x80\x04", "pytorch_model.bin.index.json": b"{}", "config.json": b"{}"})
    with pytest.raises(NoWeights, match="unpickling runs code"):
        open_checkpoint(store, settings=Settings(cache_dir=tmp_path), fetch=fetch)
    assert not store.reads


def test_files_without_one_tensor_are_no_weights(tmp_path: Path) -> None:
    with pytest.raises(NoWeights, match="not one tensor"):
        opened(tmp_path, {"model.safetensors": file_of({"__metadata__": {"k": "v"}})})


def test_a_file_without_tensors_beside_others_is_fine(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, {"1.safetensors": file_of({"__metadata__": {}}), "2.safetensors": weights(a=1)})
    assert files_of(checkpoint) == {"a": "2.safetensors"}
    assert checkpoint.files == ("1.safetensors", "2.safetensors")


def test_the_single_file_that_the_uri_named(tmp_path: Path) -> None:
    objects = {
        "m-1-of-2.safetensors": weights(a=1),
        "m-2-of-2.safetensors": weights(b=1),
        INDEX: index(a="m-1-of-2.safetensors", b="m-2-of-2.safetensors"),
        "config.json": b"{}",
    }
    checkpoint = opened(tmp_path, objects, selected_key="m-2-of-2.safetensors")
    assert files_of(checkpoint) == {"b": "m-2-of-2.safetensors"}
    assert checkpoint.notes == ()
    assert "config.json" in {stored.key for stored in checkpoint.side_files.objects}


def test_the_index_that_the_uri_named(tmp_path: Path) -> None:
    other = "model.fp16.safetensors.index.json"
    objects = {
        "full.safetensors": weights(a=1),
        "half.safetensors": weights(a=1),
        INDEX: index(a="full.safetensors"),
        other: index(a="half.safetensors"),
    }
    assert files_of(opened(tmp_path, objects)) == {"a": "full.safetensors"}
    assert files_of(opened(tmp_path, objects, selected_key=other)) == {"a": "half.safetensors"}


def test_empty_objects_are_refused_without_a_read(tmp_path: Path) -> None:
    store = MemoryStore({"model.safetensors": b""})
    with pytest.raises(InvalidHeader, match="empty file"):
        open_checkpoint(store, settings=Settings(cache_dir=tmp_path), fetch=fetch)
    assert not store.reads


def test_one_read_for_each_header_and_two_for_long_ones(tmp_path: Path) -> None:
    asked: list[tuple[str, int, int]] = []

    def counting(store: Any, stored: StoredObject, start: int, stop: int) -> bytes:
        asked.append((stored.key, start, stop))
        return fetch(store, stored, start, stop)

    long = file_of({"__metadata__": {"pad": "x" * header_reads.GUESS_BYTES}, "b": tensor([9], 0, 9, "U8")}, bytes(9))
    short = file_of({"a": tensor([1 << 20], 0, 1 << 20, "U8")}, bytes(1 << 20))
    store = MemoryStore({"long.safetensors": long, "short.safetensors": short})
    checkpoint = open_checkpoint(store, settings=Settings(cache_dir=tmp_path), fetch=counting)
    guess = header_reads.GUESS_BYTES
    assert sorted(asked) == [
        ("long.safetensors", 0, guess),
        ("long.safetensors", guess, len(long) - 9),
        ("short.safetensors", 0, guess),
    ]
    assert checkpoint.entries["b"].start == len(long) - 9


def test_headers_are_read_side_by_side(tmp_path: Path) -> None:
    together = threading.Barrier(4)

    def meeting(store: Any, stored: StoredObject, start: int, stop: int) -> bytes:
        together.wait(timeout=30)
        return fetch(store, stored, start, stop)

    objects = {f"{number}.safetensors": weights(**{f"t{number}": 1}) for number in range(4)}
    settings = Settings(cache_dir=tmp_path, transport=TransportSettings(num_connections=4))
    checkpoint = open_checkpoint(MemoryStore(objects), settings=settings, fetch=meeting)
    assert list(checkpoint.entries) == ["t0", "t1", "t2", "t3"]


def test_the_first_failure_stops_what_has_not_begun_and_ends_all_threads(tmp_path: Path) -> None:
    begun: list[str] = []

    def failing(store: Any, stored: StoredObject, start: int, stop: int) -> bytes:
        begun.append(stored.key)
        if stored.key == "003.safetensors":
            raise ObjectChanged("003.safetensors has changed.")
        return fetch(store, stored, start, stop)

    objects = {f"{number:03}.safetensors": weights(**{f"t{number}": 1}) for number in range(200)}
    settings = Settings(cache_dir=tmp_path, transport=TransportSettings(num_connections=1))
    with pytest.raises(ObjectChanged, match=r"003\.safetensors has changed"):
        open_checkpoint(MemoryStore(objects), settings=settings, fetch=failing)
    assert begun == [f"{number:03}.safetensors" for number in range(4)]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("headrace")]


@pytest.mark.parametrize("change", [lambda raw: raw[:-1], lambda raw: raw + b"x"])
def test_a_read_of_another_length_is_refused(tmp_path: Path, change: Any) -> None:
    def wrong(store: Any, stored: StoredObject, start: int, stop: int) -> bytes:
        return bytes(change(fetch(store, stored, start, stop)))

    with pytest.raises(WrongRange, match=r"s3://bucket/model/model\.safetensors, from byte 0"):
        open_checkpoint(
            MemoryStore({"model.safetensors": weights(a=1)}), settings=Settings(cache_dir=tmp_path), fetch=wrong
        )


def test_the_phase_is_told(tmp_path: Path) -> None:
    phases: list[str] = []

    class Progress:
        @contextmanager
        def during(self, phase: str) -> Any:
            phases.append(phase)
            yield
            phases.append(f"{phase} ended")

    store = MemoryStore({"model.safetensors": weights(a=1)})
    open_checkpoint(store, settings=Settings(cache_dir=tmp_path), fetch=fetch, progress=Progress())
    assert phases == ["opening", "opening ended"]


@pytest.mark.parametrize("content", [b"[]", b"{", b"\xff\xfe\xff", b"[" * 100_000])
def test_a_broken_config_is_an_error_when_it_is_asked_for(tmp_path: Path, content: bytes) -> None:
    checkpoint = opened(tmp_path, {"model.safetensors": weights(a=1), "config.json": content})
    with pytest.raises(CheckpointError, match=r"s3://bucket/model/config\.json is not a configuration"):
        _ = checkpoint.config


def test_without_a_config_it_is_empty(tmp_path: Path) -> None:
    assert opened(tmp_path, {"model.safetensors": weights(a=1)}).config == {}


@pytest.mark.parametrize("kind", [str, Path, parse_uri])
def test_a_local_folder(tmp_path: Path, kind: Any) -> None:
    folder = tmp_path / "a model"
    (folder / "original").mkdir(parents=True)
    (folder / "model-00001-of-00001.safetensors").write_bytes(weights(model__a=1))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "original" / "model.safetensors").write_bytes(weights(z=1))
    (folder / "original" / "params.json").write_text("{}")
    with open_checkpoint(kind(str(folder)), settings=Settings(cache_dir=tmp_path / "cache")) as checkpoint:
        assert files_of(checkpoint) == {"model.a": "model-00001-of-00001.safetensors"}
        assert checkpoint.config == {"model_type": "llama"}
        assert checkpoint.side_files.folder() == folder
        assert [stored.key for stored in checkpoint.snapshot.side] == ["config.json"]
    assert not (tmp_path / "cache").exists()


def test_a_local_file(tmp_path: Path) -> None:
    path = tmp_path / "model-00001-of-00002.safetensors"
    path.write_bytes(weights(a=1))
    with open_checkpoint(path, settings=Settings(cache_dir=tmp_path / "cache")) as checkpoint:
        assert files_of(checkpoint) == {"a": path.name}
        assert checkpoint.side_files.folder() == tmp_path


def test_a_sparse_local_file_of_many_gigabytes(tmp_path: Path) -> None:
    size = 5 << 30
    start = file_of({"a": tensor([size], 0, size, "U8"), "b": tensor([1], size, size + 4)})
    path = tmp_path / "model.safetensors"
    path.write_bytes(start)
    os.truncate(path, len(start) + size + 4)
    with open_checkpoint(tmp_path, settings=Settings(cache_dir=tmp_path / "cache")) as checkpoint:
        assert checkpoint.entries["b"].start == len(start) + size
    os.truncate(path, len(start) + size + 3)
    with pytest.raises(TruncatedObject):
        open_checkpoint(tmp_path, settings=Settings(cache_dir=tmp_path / "cache"))
