"""The folder for side files: rights, owner, file system, room."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from headrace.doctor import cachefolder
from headrace.doctor.cachefolder import Mount, examine_cache, mount_of
from headrace.doctor.finding import Finding, State
from headrace.doctor.world import World

MOUNTS = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:25 / /dev/shm rw shared:3 - tmpfs tmpfs rw
31 22 0:30 / /mnt/my\\040models rw - nfs4 server:/export rw
32 31 0:31 / /mnt/my\\040models/inner rw - overlay overlay rw
a line that is none
"""


def examine(folder: Path, *, free: int = 10**10, needed: int = 0, mounts: str = "") -> Finding:
    world = World(mounts=lambda: mounts, free_bytes=lambda _: free)
    return examine_cache(folder, "HEADRACE_CACHE_DIR", needed, world)


def test_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "cache"
    finding = examine(folder)
    assert (finding.state, finding.what) == (
        State.OK,
        f"{folder} can be written (it will be made), and 10 GB are free.",
    )
    assert ("folder", f"{folder} (HEADRACE_CACHE_DIR)") in finding.details
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_a_folder_that_is_there(tmp_path: Path) -> None:
    finding = examine(tmp_path)
    assert finding.what == f"{tmp_path} can be written, and 10 GB are free."
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "cache"
    finding = examine(folder)
    assert (finding.state, finding.what) == (State.WARNING, f"{folder} cannot be written.")
    assert f"{tmp_path / 'file'} says: Not a directory." in finding.why
    assert "temporary folder of its own" in finding.why
    assert "HEADRACE_CACHE_DIR" in finding.mend
    assert "emptyDir" in finding.mend


def test_no_folder_at_all_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(cachefolder.tempfile, "TemporaryFile", refuse)
    finding = examine(tmp_path)
    assert finding.state is State.FAILED
    assert "Read-only file system. There is no temporary folder that can be written, either." in finding.why


def test_too_little_room(tmp_path: Path) -> None:
    finding = examine(tmp_path, free=20_000_000, needed=30_000_000)
    assert finding.state is State.FAILED
    assert finding.why == "They need 30 MB, and 20 MB are free."


def test_a_cache_that_others_may_fill_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    os.chmod(folder, 0o777)
    finding = examine(folder)
    assert finding.state is State.FAILED
    assert "other users may write" in finding.what


@pytest.mark.parametrize(
    ("folder", "mount"),
    [
        ("/srv/cache", Mount("ext4", "/")),
        ("/dev/shm/cache", Mount("tmpfs", "/dev/shm")),
        ("/dev/shmx", Mount("ext4", "/")),
        ("/mnt/my models/cache", Mount("nfs4", "/mnt/my models")),
        ("/mnt/my models/inner/x", Mount("overlay", "/mnt/my models/inner")),
    ],
)
def test_the_file_system_of_a_folder(folder: str, mount: Mount) -> None:
    assert mount_of(Path(folder), MOUNTS) == mount
    assert mount_of(Path(folder), "") is None


@pytest.mark.parametrize(
    ("kind", "said"),
    [("tmpfs", "memory"), ("overlay", "lost"), ("nfs4", "locks"), ("fuse.s3fs", "locks"), ("ext4", "ext4")],
)
def test_what_a_file_system_means(tmp_path: Path, kind: str, said: str) -> None:
    finding = examine(tmp_path, mounts=f"22 1 254:0 / / rw - {kind} source rw\n")
    assert said in dict(finding.details)["file system"]
