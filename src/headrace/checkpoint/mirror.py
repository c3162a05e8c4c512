"""One folder that holds a set of side files: written whole, and recognised as whole. Knows no store and no cache around it.

A folder is complete when its marker says so: a file that lists every object with its key, size and version, and what was written for it with its
SHA-256. The marker is written last, after everything else is on the disk, and a folder gets its name only after that. So neither a partial copy, nor
a file of the right length that was never filled, nor one that was changed later, counts as complete.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from headrace.checkpoint.keys import unsafe_reason
from headrace.checkpoint.wording import quoted
from headrace.errors import CacheError
from headrace.storage import StoredObject

MARKER = ".headrace-complete.json"

_FORMAT = 1
_NUM_READERS = 8
_SLACK_BYTES = 1 << 20


def check_layout(objects: Collection[StoredObject]) -> None:
    """Raise `CacheError` where the keys cannot all be files below one folder: a path that leaves it, or a file that is also a folder."""
    files = {stored.key for stored in objects}
    for key in sorted(files):
        reason = "has the name of the marker" if key == MARKER else unsafe_reason(key)
        if reason is not None:
            raise CacheError(
                f"The side file {quoted(key)} cannot be mirrored.", f"Its key {reason}.", "Rename or remove the object."
            )
        folder = key.rpartition("/")[0]
        while folder:
            if folder in files:
                raise CacheError(
                    f"The side files {quoted(folder)} and {quoted(key)} cannot both be mirrored.",
                    "A store can hold both; on a disk the first is a file or a folder, not both.",
                    "Rename or remove one of the two objects.",
                )
            folder = folder.rpartition("/")[0]


def fill(folder: Path, objects: Sequence[StoredObject], read: Callable[[StoredObject], bytes]) -> None:
    """Write all ``objects`` and the marker into the existing, empty ``folder``, and wait until they are on the disk.

    ``read`` is called from several threads. Raises `CacheError` where the disk is too small, with what is needed and what there is; passes on
    `OSError` and what ``read`` raises. What was written by then is for the caller to remove.
    """
    need = sum(stored.size_bytes for stored in objects) + _SLACK_BYTES
    _check_space(folder, need)
    for parent in sorted({parent for stored in objects for parent in Path(stored.key).parents if parent.name}):
        (folder / parent).mkdir(mode=0o700)

    def mirror(stored: StoredObject) -> dict[str, Any]:
        content = read(stored) if stored.size_bytes else b""
        _write(folder / stored.key, content)
        # A store may hand out more than it has: what is gzip-encoded there is stored here as it was before.
        return {**_identity(stored), "written_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}

    try:
        with ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="headrace-side-files") as pool:
            futures = [pool.submit(mirror, stored) for stored in objects]
            try:
                written = [future.result() for future in futures]
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        marker = json.dumps({"format": _FORMAT, "files": written}, indent=1)
        _write(folder / MARKER, marker.encode())
        for below in sorted({folder, *(parent for stored in objects for parent in (folder / stored.key).parents)}):
            if below == folder or folder in below.parents:
                sync_folder(below)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _too_small(folder, need) from error
        raise


def is_complete(folder: Path, objects: Collection[StoredObject]) -> bool:
    """Say whether ``folder`` holds exactly these versions of ``objects``, unchanged since they were written. Reads the files, not the objects."""
    try:
        content = json.loads(_read_regular(folder / MARKER))
        if content["format"] != _FORMAT:
            return False
        written = {item["key"]: item for item in content["files"]}
        if len(written) != len(objects):
            return False
        return all(_is_same(folder, stored, written.get(stored.key)) for stored in objects)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def sync_folder(folder: Path) -> None:
    """Wait until the names in ``folder`` are on the disk, where the file system can say so."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot
            raise
    finally:
        os.close(descriptor)


def _is_same(folder: Path, stored: StoredObject, item: Any) -> bool:
    if item is None or any(item[name] != value for name, value in _identity(stored).items()):
        return False
    content = _read_regular(folder / stored.key)
    return (len(content), hashlib.sha256(content).hexdigest()) == (item["written_bytes"], item["sha256"])


def _identity(stored: StoredObject) -> dict[str, Any]:
    return {"key": stored.key, "size_bytes": stored.size_bytes, "version": stored.version}


def _read_regular(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        return file.read()


def _write(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)


def _check_space(folder: Path, need: int) -> None:
    if shutil.disk_usage(folder).free < need:
        raise _too_small(folder, need)


def _too_small(folder: Path, need: int) -> CacheError:
    have = shutil.disk_usage(folder).free
    return CacheError(
        f"The disk of {folder.parent} is too small for the side files.",
        f"They need {need:,} bytes; {have:,} are free to this user.",
        "Make room, or set HEADRACE_CACHE_DIR to a folder on another disk.",
    )


def remove(paths: Iterable[Path]) -> None:
    """Remove folders with all that is in them; what cannot be removed stays."""
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
