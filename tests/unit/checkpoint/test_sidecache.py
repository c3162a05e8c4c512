from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import filelock
import pytest

from headrace.checkpoint import mirror, sidecache
from headrace.checkpoint.mirror import MARKER, is_complete
from headrace.checkpoint.sidecache import SideFileCache
from headrace.errors import CacheError, ObjectChanged
from headrace.storage import StoredObject

from . import cache_worker
from .memory_store import MemoryStore

URI = "s3://bucket/model"
CONTENT = {"config.json": b"{}", "tokenizer.json": b"t" * 100, "sub/x.py": b"pass"}


class Filled:
    """A cache and a bucket to fill it from."""

    def __init__(self, cache_dir: Path) -> None:
        self.cache_dir = cache_dir
        self.cache = SideFileCache(cache_dir)
        self.store = MemoryStore(CONTENT)

    @property
    def objects(self) -> list[StoredObject]:
        return [self.store.stat(key) for key in self.store.objects]

    def folder(self) -> Path:
        return self.cache.folder(URI, self.objects, self.store.read_object)

    @property
    def versions(self) -> list[str]:
        return sorted(path.name for path in (self.cache_dir / "side_files").iterdir())


@pytest.fixture
def filled(tmp_path: Path) -> Filled:
    return Filled(tmp_path / "cache")


def test_the_link_is_named_by_the_uri_and_leads_to_the_version(filled: Filled) -> None:
    folder = filled.folder()
    link = filled.cache_dir / "model_streamer" / hashlib.sha256(URI.encode()).hexdigest()[:16]
    assert filled.cache.link_of(URI) == link
    assert link.is_symlink()
    assert link.resolve() == folder.resolve()
    assert not os.path.isabs(os.readlink(link)), "the cache may be moved"
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == {*CONTENT, MARKER}
    for path in (filled.cache_dir, folder, link.parent):
        assert path.stat().st_mode & 0o777 == 0o700


def test_an_unchanged_snapshot_costs_no_read(filled: Filled) -> None:
    folder = filled.folder()
    assert filled.store.reads.total() == 3
    assert SideFileCache(filled.cache_dir).folder(URI, filled.objects, filled.store.read_object) == folder
    assert filled.cache.find(URI, filled.objects) == folder
    assert filled.store.reads.total() == 3
    assert len(filled.versions) == 1


def test_a_changed_object_gets_a_new_folder_and_the_old_one_stays_as_it_was(filled: Filled) -> None:
    old, old_objects = filled.folder(), filled.objects
    filled.store.objects["config.json"] = b"[]"
    assert filled.cache.find(URI, filled.objects) is None
    new = filled.folder()
    assert new != old
    assert (new / "config.json").read_bytes() == b"[]"
    assert filled.cache.link_of(URI).resolve() == new.resolve()
    assert is_complete(old, old_objects)
    # And back again: the older snapshot is still there, only the link moves.
    num_reads = filled.store.reads.total()
    filled.store.objects["config.json"] = b"{}"
    assert filled.folder() == old
    assert filled.store.reads.total() == num_reads
    assert filled.cache.link_of(URI).resolve() == old.resolve()


def test_other_uris_and_endpoints_have_folders_of_their_own(filled: Filled) -> None:
    read = filled.store.read_object
    folders = {
        filled.folder(),
        filled.cache.folder(URI + "2", filled.objects, read),
        filled.cache.folder(URI, filled.objects, read, "http://127.0.0.1:1"),
        filled.cache.folder(URI, filled.objects, read, "http://127.0.0.1:2"),
    }
    assert len(folders) == 4


def test_an_incomplete_folder_of_that_name_is_left_alone(filled: Filled) -> None:
    first = filled.folder()
    (first / "tokenizer.json").write_bytes(bytes(100))
    second = filled.folder()
    assert second != first
    assert is_complete(second, filled.objects)
    assert (first / "tokenizer.json").read_bytes() == bytes(100)
    assert filled.cache.link_of(URI).resolve() == second.resolve()
    num_reads = filled.store.reads.total()
    assert filled.folder() == second
    assert filled.store.reads.total() == num_reads


def test_zeros_of_full_length_without_a_marker_are_not_taken(filled: Filled) -> None:
    folder = filled.folder()
    (folder / MARKER).unlink()
    for key, content in CONTENT.items():
        (folder / key).write_bytes(bytes(len(content)))
    again = filled.folder()
    assert {key: (again / key).read_bytes() for key in CONTENT} == CONTENT


def test_who_is_second_keeps_the_first_one_s_folder(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    real = mirror.fill

    def overtaken(*arguments: Any) -> None:
        monkeypatch.setattr(mirror, "fill", real)
        real(*arguments)
        SideFileCache(filled.cache_dir).folder(URI, filled.objects, filled.store.read_object)

    monkeypatch.setattr(filelock.FileLock, "acquire", lambda self, *arguments, **options: None)
    monkeypatch.setattr(filelock.FileLock, "release", lambda self, *arguments, **options: None)
    monkeypatch.setattr(mirror, "fill", overtaken)
    folder = filled.folder()
    assert filled.versions == [folder.name]
    assert filled.store.reads.total() == 6


def test_a_failed_read_leaves_nothing(filled: Filled) -> None:
    objects = filled.objects
    filled.store.objects["sub/x.py"] = b"other"
    with pytest.raises(ObjectChanged):
        filled.cache.folder(URI, objects, filled.store.read_object)
    assert filled.versions == []
    assert not filled.cache.link_of(URI).is_symlink()


def test_a_disk_that_fills_up_leaves_nothing(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        path.write_bytes(content[:1])
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(mirror, "_write", full)
    with pytest.raises(CacheError, match="too small for the side files"):
        filled.folder()
    assert filled.versions == []


@pytest.mark.parametrize("error", [filelock.Timeout("x"), NotImplementedError("flock"), OSError(37, "No locks")])
def test_locks_that_fail_are_done_without(filled: Filled, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(self: object, *arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(filelock.FileLock, "acquire", fail)
    assert is_complete(filled.folder(), filled.objects)


def test_keys_that_leave_the_folder_write_nothing(filled: Filled) -> None:
    with pytest.raises(CacheError, match=r"'\.\.' part"):
        filled.cache.folder(URI, [StoredObject("../x.json", 1, "1")], filled.store.read_object)
    assert not filled.cache_dir.exists()


@contextmanager
def owned_by(path: Path, uid: int) -> Iterator[None]:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(path, uid, uid, follow_symlinks=False)
    yield


@pytest.mark.parametrize("place", ["", "model_streamer", "side_files", "version", "link"])
def test_what_belongs_to_another_user_is_refused(filled: Filled, place: str) -> None:
    folder = filled.folder()
    path = {"version": folder, "link": filled.cache.link_of(URI)}.get(place, filled.cache_dir / place)
    with owned_by(path, 12345):
        num_reads = filled.store.reads.total()
        with pytest.raises(CacheError) as caught:
            filled.folder()
    assert f"{path} belongs to user 12345" in caught.value.what
    assert "HEADRACE_CACHE_DIR" in caught.value.mend
    assert filled.store.reads.total() == num_reads


def test_a_link_to_what_belongs_to_another_user_is_refused(filled: Filled, tmp_path: Path) -> None:
    filled.folder()
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    link = filled.cache.link_of(URI)
    link.unlink()
    link.symlink_to(foreign)
    with owned_by(foreign, 12345), pytest.raises(CacheError, match="belongs to user 12345"):
        filled.folder()


def test_the_owner_is_compared_with_the_effective_user(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    filled.folder()
    with owned_by(filled.cache_dir, 12345):
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        filled.folder()
        monkeypatch.setattr(os, "geteuid", lambda: 54321)
        with pytest.raises(CacheError, match="belongs to user 12345, not to 54321"):
            filled.folder()


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
@pytest.mark.parametrize("place", ["", "model_streamer", "side_files", "version"])
def test_what_others_may_write_to_is_refused(filled: Filled, place: str, mode: int) -> None:
    folder = filled.folder()
    path = folder if place == "version" else filled.cache_dir / place
    path.chmod(mode)
    with pytest.raises(CacheError, match="other users may write to") as caught:
        filled.folder()
    assert f"chmod go-w {path}" in caught.value.mend


def test_a_sticky_folder_is_accepted(filled: Filled) -> None:
    filled.cache_dir.mkdir()
    filled.cache_dir.chmod(0o1777)
    assert is_complete(filled.folder(), filled.objects)


def test_a_wide_umask_does_not_open_the_cache(filled: Filled) -> None:
    before = os.umask(0)
    try:
        folder = filled.folder()
    finally:
        os.umask(before)
    assert all(path.stat().st_mode & 0o077 == 0 for path in (filled.cache_dir, folder, *folder.rglob("*")))


def test_something_else_in_the_link_s_place_is_refused(filled: Filled) -> None:
    filled.cache.link_of(URI).mkdir(parents=True)
    for path in (filled.cache_dir, filled.cache_dir / "model_streamer"):
        path.chmod(0o700)
    with pytest.raises(CacheError, match="is not a link"):
        filled.folder()


def test_a_cache_below_a_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    filled = Filled(tmp_path / "file" / "cache")
    assert filled.cache.find(URI, filled.objects) is None
    with pytest.raises(OSError, match="File exists"):
        filled.folder()
    assert filled.store.reads.total() == 0


def age(path: Path, days: float) -> None:
    then = time.time() - days * 86400
    os.utime(path, (then, then), follow_symlinks=False)


def test_old_versions_go_when_a_new_one_comes(filled: Filled) -> None:
    first = filled.folder()
    filled.store.objects["config.json"] = b"[1]"
    second = filled.folder()
    filled.store.objects["config.json"] = b"[2]"
    age(first / MARKER, 31)
    third = filled.folder()
    assert filled.versions == sorted([second.name, third.name]), "second is young, first is old and not linked"
    age(third / MARKER, 300)
    age(second / MARKER, 29)
    SideFileCache(filled.cache_dir).folder("s3://other/model", filled.objects, filled.store.read_object)
    assert third.exists(), "what a link points to stays"
    assert second.exists()


def test_opening_a_version_makes_it_young_again(filled: Filled) -> None:
    folder = filled.folder()
    age(folder / MARKER, 31)
    filled.folder()
    assert time.time() - (folder / MARKER).stat().st_mtime < 3600


def test_abandoned_partial_folders_and_links_go(filled: Filled) -> None:
    versions, links = filled.cache_dir / "side_files", filled.cache_dir / "model_streamer"
    filled.folder()
    for name, days in ((".tmp-old", 1), (".tmp-young", 0.1)):
        (versions / name).mkdir()
        (versions / name / "partial.txt").write_text("x")
        age(versions / name, days)
        (links / name).symlink_to("nowhere")
        age(links / name, days)
    filled.store.objects["config.json"] = b"[1]"
    filled.folder()
    assert not (versions / ".tmp-old").exists()
    assert (versions / ".tmp-young").exists()
    assert not (links / ".tmp-old").is_symlink()
    assert (links / ".tmp-young").is_symlink()


class Workers:
    """Processes that fill one cache, started together."""

    def __init__(self, mode: str, cache_dir: Path, number: int) -> None:
        command = [sys.executable, cache_worker.__file__, mode, str(cache_dir)]
        pipe = subprocess.PIPE
        with ExitStack() as held:
            self.processes = [
                held.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)) for _ in range(number)
            ]
            self._held = held.pop_all()

    def run(self) -> list[str]:
        """Let all of them go at once; return what each printed, and wait until they have ended."""
        with self._held:
            try:
                for process in self.processes:
                    assert process.stdout is not None
                    assert process.stdout.readline() == "ready\n"
                for process in self.processes:
                    assert process.stdin is not None
                    process.stdin.write("go\n")
                    process.stdin.flush()
                return [process.communicate(timeout=60)[0].strip() for process in self.processes]
            finally:
                for process in self.processes:
                    process.kill()


def worker_objects() -> list[StoredObject]:
    store = MemoryStore(cache_worker.OBJECTS)
    return [store.stat(key) for key in store.objects]


@pytest.mark.parametrize("mode", ["locked", "unlocked"])
def test_eight_processes_fill_one_cache(tmp_path: Path, mode: str) -> None:
    cache_dir = tmp_path / "cache"
    workers = Workers(mode, cache_dir, 8)
    answers = [answer.split() for answer in workers.run()]
    assert [process.returncode for process in workers.processes] == [0] * 8
    folders = {Path(folder) for folder, _ in answers}
    num_reads = sorted(int(number) for _, number in answers)
    assert len(folders) == 1
    folder = folders.pop()
    assert is_complete(folder, worker_objects())
    assert SideFileCache(cache_dir).link_of(URI).resolve() == folder.resolve()
    assert [path.name for path in (cache_dir / "side_files").iterdir()] == [folder.name], "no partial copy is left"
    if mode == "locked":
        assert num_reads == [0] * 7 + [len(cache_worker.OBJECTS)]
    else:
        assert num_reads[-1] == len(cache_worker.OBJECTS)


def test_a_writer_that_was_killed_leaves_nothing_that_is_taken(tmp_path: Path) -> None:
    cache_dir = tmp_path / "cache"
    workers = Workers("killed", cache_dir, 1)
    assert workers.run() == [""]
    assert workers.processes[0].returncode == -9
    (partial,) = (cache_dir / "side_files").iterdir()
    assert partial.name.startswith(sidecache._TEMPORARY)
    assert any(partial.rglob("*.txt")), "it was in the middle of it"
    endpoint = MemoryStore({}).endpoint
    assert SideFileCache(cache_dir).find(URI, worker_objects(), endpoint) is None
    after = Workers("locked", cache_dir, 1)
    (answer,) = after.run()
    folder, num_reads = answer.split()
    assert int(num_reads) == len(cache_worker.OBJECTS)
    assert is_complete(Path(folder), worker_objects())
