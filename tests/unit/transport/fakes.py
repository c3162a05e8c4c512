"""A store and readers without a network."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from headrace.errors import Cancelled
from headrace.storage import FileRange, StoredObject, Uri
from headrace.storage.local import file_version
from headrace.transport import RangeRead, ReadCounters
from headrace.transport.pieces import scatter


class FolderStore:
    """The part of a local store that a reader uses."""

    endpoint = "this machine"

    def __init__(self, folder) -> None:
        self.folder = folder
        self.uri = Uri("file", "", str(folder))

    def uri_of(self, key: str) -> str:
        return str(self.folder / key)

    def stat(self, key: str) -> StoredObject:
        status = (self.folder / key).stat()
        return StoredObject(key, status.st_size, file_version(status))

    def describe_range(self, stored: StoredObject, start: int, stop: int) -> FileRange:
        return FileRange(str(self.folder / stored.key), start, stop, stored.version)


class FakeReader:
    """A `RangeReader` that fills byte ``i`` of an object with ``i % 251``, or does first what ``before`` does.

    ``before(reader, read)`` may raise, or call `FakeReader.wait` to block until the test or `cancel` lets it go on.
    """

    def __init__(self, before: Callable[[FakeReader, RangeRead], None] | None = None) -> None:
        self.counters = ReadCounters()
        self.doing = "no read"
        self.cancelled = threading.Event()
        self.is_closed = False
        self.reads: list[RangeRead] = []
        self.threads: set[int] = set()
        self._before = before

    def read(self, read: RangeRead, pieces: Sequence[memoryview]) -> None:
        assert not self.is_closed
        self.threads.add(threading.get_ident())
        assert len(self.threads) == 1, "a reader has one thread"
        self.reads.append(read)
        self.doing = f"bytes {read.start} to {read.stop}"
        self.counters.num_requests += 1
        if self._before is not None:
            self._before(self, read)
        if self.cancelled.is_set():
            raise Cancelled("The read was stopped.")
        scatter(memoryview(content(read.start, read.stop)), pieces)
        self.counters.bytes_received += read.size_bytes

    def wait(self, event: threading.Event) -> None:
        """Wait for ``event``; raise `Cancelled` if the reader is cancelled before."""
        deadline = time.monotonic() + 20
        while not event.wait(0.002):
            if self.cancelled.is_set():
                raise Cancelled("The read was stopped.")
            assert time.monotonic() < deadline, "nobody let the read go on"

    def cancel(self) -> None:
        self.cancelled.set()

    def close(self) -> None:
        self.is_closed = True


def content(start: int, stop: int) -> bytes:
    return bytes(place % 251 for place in range(start, stop))
