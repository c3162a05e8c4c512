from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.checkpoint import mirror
from headrace.checkpoint.mirror import MARKER, check_layout, fill, is_complete
from headrace.errors import CacheError
from headrace.storage import StoredObject

from .memory_store import MemoryStore

CONTENT = {"config.json": b"{}", "empty.txt": b"", "a/b/deep.txt": b"deep", "tokenizer.json": b"t" * 5000}


def objects_of(content: dict[str, bytes] = CONTENT) -> list[StoredObject]:
    store = MemoryStore(content)
    return [store.stat(key) for key in content]


def read(stored: StoredObject) -> bytes:
    return CONTENT[stored.key]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "made"
    made.mkdir()
    return made


def test_what_is_written_is_complete_and_private(folder: Path) -> None:
    fill(folder, objects_of(), read)
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    marker = json.loads(found.pop(MARKER))
    assert found == CONTENT
    assert {item["key"]: item["size_bytes"] for item in marker["files"]} == {
        key: len(content) for key, content in CONTENT.items()
    }
    assert all(item["version"] for item in marker["files"])
    assert is_complete(folder, objects_of())
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.rglob("*"))


def test_empty_objects_are_not_read(folder: Path) -> None:
    asked: list[str] = []

    def asking(stored: StoredObject) -> bytes:
        asked.append(stored.key)
        return read(stored)

    fill(folder, objects_of(), asking)
    assert sorted(asked) == ["a/b/deep.txt", "config.json", "tokenizer.json"]
    assert (folder / "empty.txt").read_bytes() == b""


def test_nothing_at_all_is_complete_too(folder: Path) -> None:
    assert not is_complete(folder, [])
    fill(folder, [], read)
    assert is_complete(folder, [])


def test_content_that_the_store_uncompressed_may_be_longer(folder: Path) -> None:
    (stored,) = objects_of({"config.json": b"zz"})
    fill(folder, [stored], lambda _: b"uncompressed")
    assert (folder / "config.json").read_bytes() == b"uncompressed"
    assert is_complete(folder, [stored])


def spoil_with_zeros(folder: Path) -> None:
    (folder / "tokenizer.json").write_bytes(bytes(5000))


def spoil_by_cutting(folder: Path) -> None:
    os.truncate(folder / "tokenizer.json", 4999)


def spoil_by_removing(folder: Path) -> None:
    (folder / "empty.txt").unlink()


def spoil_the_marker(folder: Path) -> None:
    os.truncate(folder / MARKER, 100)


def remove_the_marker(folder: Path) -> None:
    (folder / MARKER).unlink()


def empty_the_marker(folder: Path) -> None:
    (folder / MARKER).write_text("[]")


def age_the_marker(folder: Path) -> None:
    content = json.loads((folder / MARKER).read_text())
    (folder / MARKER).write_text(json.dumps({**content, "format": 0}))


def put_a_link(folder: Path) -> None:
    (folder / "config.json").rename(folder / "elsewhere")
    (folder / "config.json").symlink_to("elsewhere")


def put_a_pipe(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")


def put_a_folder(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()


SPOILS = [
    spoil_with_zeros,
    spoil_by_cutting,
    spoil_by_removing,
    spoil_the_marker,
    remove_the_marker,
    empty_the_marker,
    age_the_marker,
    put_a_link,
    put_a_pipe,
    put_a_folder,
]


@pytest.mark.parametrize("spoil", SPOILS, ids=lambda spoil: spoil.__name__)
def test_what_was_spoiled_is_not_complete(folder: Path, spoil: object) -> None:
    fill(folder, objects_of(), read)
    assert is_complete(folder, objects_of())
    spoil(folder)  # type: ignore[operator]
    assert not is_complete(folder, objects_of())


def test_other_versions_and_other_files_are_not_complete(folder: Path) -> None:
    fill(folder, objects_of(), read)
    first, *rest = objects_of()
    assert not is_complete(folder, rest)
    assert not is_complete(folder, [*objects_of(), StoredObject("more.txt", 0, '"x"')])
    assert not is_complete(folder, [StoredObject(first.key, first.size_bytes, '"other"'), *rest])
    assert not is_complete(folder, [StoredObject(first.key, 3, first.version), *rest])
    assert not is_complete(folder / "absent", objects_of())


def test_a_full_length_file_of_zeros_without_a_marker_is_not_complete(folder: Path) -> None:
    (stored,) = objects_of({"config.json": bytes(100)})
    (folder / "config.json").write_bytes(bytes(100))
    assert not is_complete(folder, [stored])


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["../x.json"], "'..' part"),
        (["a/../../x.json"], "'..' part"),
        (["/etc/x.json"], "absolute path"),
        (["a//x.json"], "empty part"),
        (["a\\x.json"], "backslash"),
        (["a\0.json"], "NUL"),
        ([MARKER], "name of the marker"),
        (["a.txt", "a.txt/b.txt"], "cannot both be mirrored"),
        (["a.txt", "a.txt/b/c/d.txt"], "cannot both be mirrored"),
    ],
)
def test_keys_that_cannot_be_files_are_refused(keys: list[str], words: str) -> None:
    with pytest.raises(CacheError) as caught:
        check_layout([StoredObject(key, 1, "1") for key in keys])
    assert words in str(caught.value)
    assert "\0" not in str(caught.value)


def test_keys_that_only_look_alike_are_fine() -> None:
    check_layout([StoredObject(key, 1, "1") for key in ("a.txt", "a.txt2/b", "a/b", "b", "ü/重 +%20.json")])


def test_a_full_disk_is_noticed_before_anything_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000_000))
    with pytest.raises(CacheError) as caught:
        fill(folder, objects_of(), lambda stored: pytest.fail("read"))
    assert caught.value.why == "They need 1,053,582 bytes; 1,000,000 are free to this user."
    assert "HEADRACE_CACHE_DIR" in caught.value.mend
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_meanwhile_says_need_and_have(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def full(path: Path, content: bytes) -> None:
        if path.name == "tokenizer.json":
            raise OSError(number, os.strerror(number), str(path))
        path.write_bytes(content)

    monkeypatch.setattr(mirror, "_write", full)
    with pytest.raises(CacheError, match=r"They need 1,053,582 bytes; [\d,]+ are free"):
        fill(folder, objects_of(), read)
    assert not is_complete(folder, objects_of())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("headrace")]


def test_other_errors_pass_and_leave_no_marker(folder: Path) -> None:
    def failing(stored: StoredObject) -> bytes:
        if stored.key == "a/b/deep.txt":
            raise KeyError("gone")
        return read(stored)

    with pytest.raises(KeyError):
        fill(folder, objects_of(), failing)
    assert not (folder / MARKER).exists()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("headrace")]
