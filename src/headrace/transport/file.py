"""Reads ranges of local files with ``preadv``, scattered into the caller's memory. Knows no tensors.

Files are read, not mapped: over network file systems a mapping turns into small page faults. The version is checked before and after each read, so a file
that was written to meanwhile is an error, not a mix. One ``preadv`` returns at most 2 GiB less a page on Linux, and a signal or a network file system may
make it shorter (read(2)): short reads are continued.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from headrace.errors import AccessDenied, Cancelled, HeadraceError, ObjectChanged, ReadFailed
from headrace.storage import FileRange, ObjectStore
from headrace.storage.local import file_version
from headrace.transport.answer import changed
from headrace.transport.pieces import PieceCursor
from headrace.transport.reader import RangeRead, ReadCounters
from headrace.units import MIB, format_bytes, format_seconds

STEP_BYTES = 4 * MIB
"""Most bytes of one system call: large enough for network file systems, small enough that a stop is noticed soon."""

MOST_OPEN_FILES = 4
"""Files that one reader keeps open."""

MOST_PIECES = min(os.sysconf("SC_IOV_MAX"), 1024)

Preadv = Callable[[int, list[memoryview], int], int]


class FileReader:
    """A `RangeReader` over files of this machine. It keeps a few of them open; ``preadv`` is `os.preadv` but for tests."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        on_bytes: Callable[[int], None] | None = None,
        preadv: Preadv = os.preadv,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._on_bytes = on_bytes
        self._preadv = preadv
        self._clock = clock
        self._stopped = threading.Event()
        self._descriptors: dict[str, int] = {}
        self._counters = ReadCounters()
        self._work: tuple[RangeRead, PieceCursor, float] | None = None

    @property
    def counters(self) -> ReadCounters:
        return self._counters

    @property
    def doing(self) -> str:
        work = self._work
        if work is None:
            return "no read"
        read, cursor, started = work
        seconds, filled = self._clock() - started, cursor.num_filled
        return (
            f"{self._store.uri_of(read.stored.key)} bytes {read.start} to {read.stop} from {self._store.endpoint}, attempt 1, {format_seconds(seconds)}, "
            f"{format_bytes(filled)} of {format_bytes(read.size_bytes)}, {format_bytes(filled / seconds if seconds > 0 else 0)}/s"
        )

    def cancel(self) -> None:
        self._stopped.set()

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def read(self, read: RangeRead, pieces: Sequence[memoryview]) -> None:
        self._check_stopped()
        asked = self._store.describe_range(read.stored, read.start, read.stop)
        assert isinstance(asked, FileRange)
        uri = self._store.uri_of(read.stored.key)
        cursor = PieceCursor(pieces, read.size_bytes)
        self._work = (read, cursor, self._clock())
        try:
            descriptor = self._descriptor_of(asked.path)
            _check_version(descriptor, asked, uri)
            self._fill(descriptor, asked, cursor, uri)
            _check_version(descriptor, asked, uri)
        except OSError as error:
            self._forget(asked.path)
            raise _failure_of(error, asked, uri) from error
        except BaseException:
            self._forget(asked.path)
            raise
        finally:
            self._work = None  # It refers to the pieces, which are their owner's again.

    def _fill(self, descriptor: int, asked: FileRange, cursor: PieceCursor, uri: str) -> None:
        counters, on_bytes = self._counters, self._on_bytes
        while cursor.num_left:
            self._check_stopped()
            position = asked.start + cursor.num_filled
            counters.num_requests += 1
            num_bytes = self._preadv(descriptor, cursor.rooms(MOST_PIECES, STEP_BYTES), position)
            if not num_bytes:
                _check_version(descriptor, asked, uri)
                raise ReadFailed(
                    f"{uri} ends at byte {position}; bytes {asked.start} to {asked.stop} were wanted.",
                    "The file is shorter than its own size says.",
                    "Check the file system that it lies on.",
                )
            cursor.advance(num_bytes)
            counters.bytes_received += num_bytes
            if on_bytes is not None:
                on_bytes(num_bytes)

    def _descriptor_of(self, path: str) -> int:
        descriptor = self._descriptors.pop(path, None)
        if descriptor is None:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)  # Doubles the kernel's read-ahead.
            if len(self._descriptors) >= MOST_OPEN_FILES:
                self._forget(next(iter(self._descriptors)))
        self._descriptors[path] = descriptor  # Last in the dict is last used.
        return descriptor

    def _forget(self, path: str) -> None:
        descriptor = self._descriptors.pop(path, None)
        if descriptor is not None:
            os.close(descriptor)

    def _check_stopped(self) -> None:
        if self._stopped.is_set():
            raise Cancelled("The read was stopped.", "Its owner closed the stream, or another read had failed.")


def _check_version(descriptor: int, asked: FileRange, uri: str) -> None:
    found = file_version(os.fstat(descriptor))
    if found != asked.version:
        raise changed(uri, f"Its inode, time and size were {asked.version} and are now {found}.")


def _failure_of(error: OSError, asked: FileRange, uri: str) -> HeadraceError:
    reason: Any = error.strerror or type(error).__name__
    if isinstance(error, FileNotFoundError):
        return ObjectChanged(
            f"{uri} is gone.", "It was there when the checkpoint was opened.", "Open the checkpoint again."
        )
    if isinstance(error, PermissionError):
        return AccessDenied(f"{uri} may not be read.", f"{reason}.", "Give this user the right to read it.")
    return ReadFailed(
        f"Cannot read bytes {asked.start} to {asked.stop} of {uri}.",
        f"{reason}.",
        "Check the disk or file system that it lies on.",
    )
