from __future__ import annotations

import gc
import logging
import os
import signal
import tempfile
import threading
from pathlib import Path

import pytest

from headrace.checkpoint import mirror, open_checkpoint
from headrace.checkpoint.sidefiles import SideFiles
from headrace.errors import CacheError, HeadraceError, ObjectNotFound, StoreUnavailable
from headrace.settings import Settings
from headrace.storage import StoredObject

from .memory_store import MemoryStore, fetch, weights

CONTENT = {"config.json": b'{"model_type": "x"}', "empty.txt": b"", "sub/modeling.py": b"pass"}


def side_files(store: MemoryStore, cache_dir: Path) -> SideFiles:
    return SideFiles(store, [store.stat(key) for key in store.objects], cache_dir=cache_dir)


def content_of(folder: Path) -> dict[str, bytes]:
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    found.pop(mirror.MARKER)
    return found


@pytest.fixture
def unwritable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder that nobody can make, not even root; temporary folders go below ``tmp_path``."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    (tmp_path / "file").write_text("x")
    return tmp_path / "file" / "cache"


def test_a_bucket_is_mirrored_once_and_nothing_before_it_is_asked_for(tmp_path: Path) -> None:
    store = MemoryStore(CONTENT)
    files = side_files(store, tmp_path / "cache")
    assert [stored.key for stored in files.objects] == sorted(CONTENT)
    assert not store.reads
    assert not (tmp_path / "cache").exists()
    folder = files.folder()
    assert content_of(folder) == CONTENT
    assert files.link.resolve() == folder.resolve()
    assert files.folder() == folder
    assert store.reads == {"config.json": 1, "sub/modeling.py": 1}
    files.close()
    assert content_of(folder) == CONTENT, "the mirror outlives the checkpoint"


def test_the_next_start_reads_no_object_at_all(tmp_path: Path) -> None:
    objects = {**CONTENT, "model.safetensors": weights(a=1)}
    settings = Settings(cache_dir=tmp_path / "cache")
    with open_checkpoint(MemoryStore(objects), settings=settings, fetch=fetch) as checkpoint:
        folder = checkpoint.side_files.folder()
        assert set(content_of(folder)) == set(CONTENT), "weights are not mirrored"
    store = MemoryStore(objects)
    with open_checkpoint(store, settings=settings, fetch=fetch) as checkpoint:
        assert checkpoint.config == {"model_type": "x"}
        assert checkpoint.side_files.folder() == folder
        assert checkpoint.config is checkpoint.config
    assert store.reads == {"model.safetensors": 1}


def test_a_changed_object_is_seen_at_the_next_start(tmp_path: Path) -> None:
    store = MemoryStore(CONTENT)
    first = side_files(store, tmp_path).folder()
    store.objects["config.json"] = b'{"model_type": "y"}'
    files = side_files(store, tmp_path)
    assert files.read("config.json") == b'{"model_type": "y"}'
    second = files.folder()
    assert second != first
    assert files.link.resolve() == second.resolve()
    assert files.read("config.json") == b'{"model_type": "y"}'
    assert (first / "config.json").read_bytes() == CONTENT["config.json"]


def test_reading_one_file_fills_no_cache(tmp_path: Path) -> None:
    store = MemoryStore(CONTENT)
    files = side_files(store, tmp_path / "cache")
    assert files.read("config.json") == CONTENT["config.json"]
    assert files.read("empty.txt") == b""
    assert store.reads == {"config.json": 1}
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("key", ["absent.json", "../config.json", "model.safetensors", "/etc/passwd"])
def test_only_side_files_can_be_read(tmp_path: Path, key: str) -> None:
    files = side_files(MemoryStore(CONTENT), tmp_path)
    with pytest.raises(ObjectNotFound, match="There is no side file"):
        files.read(key)


def test_many_threads_fill_it_once(tmp_path: Path) -> None:
    store = MemoryStore(CONTENT)
    files = side_files(store, tmp_path)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(files.folder())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert store.reads.total() == 2


def test_a_cache_that_cannot_be_written_gives_way_to_a_private_folder(
    unwritable: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = side_files(MemoryStore(CONTENT), unwritable)
    with caplog.at_level(logging.WARNING, "headrace"):
        folder = files.folder()
    assert content_of(folder) == CONTENT
    assert folder.stat().st_mode & 0o777 == 0o700
    assert files.folder() == folder
    assert files.read("config.json") == CONTENT["config.json"]
    (record,) = caplog.records
    assert "HEADRACE_CACHE_DIR" in record.getMessage()
    assert str(unwritable.parent) in record.getMessage()
    files.close()
    assert not folder.exists()
    files.close()


def test_a_private_folder_goes_with_its_owner(unwritable: Path) -> None:
    files = side_files(MemoryStore(CONTENT), unwritable)
    folder = files.folder()
    assert folder.exists()
    del files
    gc.collect()
    assert not folder.exists()


def test_a_forked_child_leaves_the_private_folder_alone(unwritable: Path) -> None:
    files = side_files(MemoryStore(CONTENT), unwritable)
    folder = files.folder()
    child = os.fork()
    if child == 0:
        try:
            files.close()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)  # no cleanup of the test run's own things in the child
    os.waitpid(child, 0)
    assert content_of(folder) == CONTENT
    files.close()
    assert not folder.exists()


def test_a_private_folder_that_cannot_be_filled_does_not_stay(unwritable: Path) -> None:
    store = MemoryStore(CONTENT)
    files = side_files(store, unwritable)
    store.objects["sub/modeling.py"] = b"other"
    with pytest.raises(HeadraceError, match="has changed"):
        files.folder()
    assert list(Path(tempfile.gettempdir()).iterdir()) == []


def test_no_place_at_all_is_an_error(unwritable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(unwritable))
    with pytest.raises(CacheError, match="no place for the side files"):
        side_files(MemoryStore(CONTENT), unwritable).folder()


def test_a_store_that_fails_does_not_pass_for_a_broken_cache(tmp_path: Path) -> None:
    class Broken(MemoryStore):
        def read_object(self, stored: StoredObject, *, start: int = 0, stop: int | None = None) -> bytes:
            raise ConnectionResetError(104, "Connection reset by peer")

    files = side_files(Broken(CONTENT), tmp_path / "cache")
    with pytest.raises(StoreUnavailable, match="Connection reset by peer"):
        files.folder()
    assert list((tmp_path / "cache" / "side_files").iterdir()) == []


def test_a_foreign_cache_is_refused_but_single_files_can_be_read(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    cache_dir = tmp_path / "cache"
    cache_dir.mkdir()
    os.chown(cache_dir, 12345, 12345)
    files = side_files(MemoryStore(CONTENT), cache_dir)
    with pytest.raises(CacheError, match="belongs to user 12345"):
        files.folder()
    assert files.read("config.json") == CONTENT["config.json"]
    assert list(cache_dir.iterdir()) == []
