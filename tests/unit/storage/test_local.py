from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.errors import AccessDenied, InvalidUri, ObjectChanged, ObjectNotFound, StoreUnavailable
from headrace.storage import StoredObject, parse_uri
from headrace.storage.local import LocalStore


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.fixture
def store(root: Path) -> LocalStore:
    return LocalStore(parse_uri(root))


def test_the_hub_cache_is_read_through_its_links(root: Path, store: LocalStore, tmp_path: Path) -> None:
    """The cache keeps contents under their hashes, and snapshots as folders of links that leave the snapshot."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs/0a1b").write_bytes(b"weights")
    (root / "model.safetensors").symlink_to("../blobs/0a1b")
    (root / "sub").symlink_to(tmp_path / "blobs")

    listing = store.list_level()
    assert [(item.key, item.size_bytes) for item in listing.objects] == [("model.safetensors", 7)]
    assert listing.folders == ("sub",)
    assert store.stat("model.safetensors") == listing.objects[0]
    assert store.read_object(listing.objects[0], start=2, stop=5) == b"igh"
    assert [item.key for item in store.list_level("sub").objects] == ["sub/0a1b"]


def test_a_broken_link_is_not_listed_and_explained_when_asked_for(root: Path, store: LocalStore) -> None:
    (root / "model.safetensors").symlink_to("../blobs/gone")
    (root / "config.json").write_bytes(b"{}")

    assert [item.key for item in store.list_level().objects] == ["config.json"]
    with pytest.raises(ObjectNotFound, match=r"is a link to \.\./blobs/gone, which does not exist"):
        store.stat("model.safetensors")


def test_hidden_and_special_files_are_left_out(root: Path, store: LocalStore) -> None:
    (root / ".cache").mkdir()
    (root / ".gitattributes").write_bytes(b"x")
    os.mkfifo(root / "pipe.safetensors")
    (root / "model.safetensors").write_bytes(b"x")

    listing = store.list_level()
    assert [item.key for item in listing.objects] == ["model.safetensors"]
    assert listing.folders == ()


def test_a_pipe_or_a_folder_is_not_waited_for(root: Path, store: LocalStore) -> None:
    os.mkfifo(root / "pipe")
    (root / "folder").mkdir()
    for key, says in (("pipe", "pipe"), ("folder", "a folder")):
        with pytest.raises(ObjectNotFound, match=says):
            store.stat(key)
        with pytest.raises(ObjectNotFound, match=says):
            store.read_object(StoredObject(key, 1, "x"))


def test_the_version_tells_writes_and_replacements_apart(root: Path, store: LocalStore) -> None:
    path = root / "a"
    path.write_bytes(b"one")
    first = store.stat("a")
    assert store.stat("a") == first

    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))
    written = store.stat("a")
    assert written.version != first.version

    times = path.stat().st_mtime_ns
    (root / "b").write_bytes(b"two")
    (root / "b").replace(path)
    os.utime(path, ns=(times, times))
    replaced = store.stat("a")
    assert replaced.size_bytes == written.size_bytes
    assert replaced.version != written.version
    for old in (first, written):
        with pytest.raises(ObjectChanged):
            store.read_object(old)
    assert store.read_object(replaced) == b"two"


def test_short_reads_are_continued(root: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "a").write_bytes(b"0123456789")
    pread, calls = os.pread, []

    def short(descriptor: int, num_bytes: int, offset: int) -> bytes:
        calls.append((num_bytes, offset))
        return pread(descriptor, min(num_bytes, 4), offset)

    monkeypatch.setattr(os, "pread", short)
    assert store.read_object(store.stat("a"), start=1) == b"123456789"
    assert calls == [(9, 1), (5, 5), (1, 9)]


def test_a_file_that_is_cut_while_it_is_read(root: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "a").write_bytes(b"0123456789")
    stored = store.stat("a")
    pread = os.pread

    def cut(descriptor: int, num_bytes: int, offset: int) -> bytes:
        os.truncate(root / "a", 4)
        return pread(descriptor, num_bytes, offset)

    monkeypatch.setattr(os, "pread", cut)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ObjectChanged, match="ends earlier"):
        store.read_object(stored)
    assert os.listdir("/proc/self/fd") == before


def test_a_disk_error_is_named(root: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "a").write_bytes(b"0123456789")
    stored = store.stat("a")

    def fail(*_: object) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pread", fail)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(StoreUnavailable, match=f"{root}/a cannot be read. Input/output error"):
        store.read_object(stored)
    assert os.listdir("/proc/self/fd") == before


def test_missing_rights_are_named(root: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "a").write_bytes(b"0123456789")
    stored = store.stat("a")

    def refuse(path: object, *_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", refuse)  # Root may read everything, so the mode bits would not do.
    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(AccessDenied, match="may not read"):
        store.read_object(stored)
    with pytest.raises(AccessDenied, match="may not read"):
        store.list_level()


def test_a_path_through_a_file_is_not_found(root: Path, store: LocalStore) -> None:
    (root / "a").write_bytes(b"x")
    with pytest.raises(ObjectNotFound):
        store.stat("a/b")
    assert store.list_level("a").objects == ()
    with pytest.raises(ObjectNotFound, match="is a file, not a folder"):
        LocalStore(parse_uri(root / "a")).list_level()


def test_a_range_is_described_with_its_version(root: Path, store: LocalStore) -> None:
    (root / "a b").write_bytes(b"0123456789")
    stored = store.stat("a b")
    described = store.describe_range(stored, 3, 7)
    assert described.path == f"{root}/a b"
    assert (described.start, described.stop, described.version) == (3, 7, stored.version)
    with pytest.raises(InvalidUri):
        store.describe_range(StoredObject("../a", 1, ""), 0, 1)
