"""A range reader whose reads are carried out by a reader process. Knows no HTTP.

The thread that asks waits, and answers what the process asks: for a request, for the meaning of a refusal. What it raises then is raised here in the end. Reads that no
process can carry out, because none is ready yet or all have died, or since the memory is this process's own, are carried out here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.errors import Cancelled
from headrace.storage import HttpRange, ObjectStore
from headrace.transport.channel import ChannelClosed
from headrace.transport.pace import Pace
from headrace.transport.pieces import scatter
from headrace.transport.processes import Fleet, ReaderConnection
from headrace.transport.reader import RangeRead, RangeReader, ReadCounters
from headrace.transport.sharing import SharedPlace, SharedPlaces
from headrace.transport.told import error_of, refusal_of, tell_error, tell_range
from headrace.units import MIB, format_bytes, format_seconds

_MOST_SENT_BACK_BYTES = MIB
"""So much of a read may lie in memory that the process does not see, gaps above all; it is sent over the channel."""
_LOOK_EVERY_S = 0.5
_ACKNOWLEDGED_WITHIN_S = 5.0
"""A process that does not acknowledge within this time that it has stopped a read is ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What all readers of a pool share."""

    store: ObjectStore
    fleet: Fleet
    places: SharedPlaces
    open_own: Callable[[], RangeReader]
    """Opens a reader of this process."""
    pace: Pace | None = None
    on_bytes: Callable[[int], None] | None = None
    clock: Callable[[], float] = time.monotonic


class RemoteReader:
    """A `RangeReader` that a connection of a reader process stands behind, or where there is none, a reader of this process."""

    def __init__(self, means: Means) -> None:
        self._means = means
        self._lock = threading.Lock()
        self._cancelled_at: float | None = None
        self._connection: ReaderConnection | None = None
        self._own: RangeReader | None = None
        self._is_own_at_work = False
        self._past = ReadCounters()
        self._num_noted = 0
        self._raised: list[BaseException] = []
        self._read: RangeRead | None = None
        self._started = 0.0
        self._before = 0

    @property
    def counters(self) -> ReadCounters:
        past, own, remote = self._past, self._own, self._remote_counters()
        parts = [past, remote, *([own.counters] if own is not None else [])]
        now = own.counters if own is not None and self._is_own_at_work else remote
        return ReadCounters(
            num_requests=sum(one.num_requests for one in parts),
            num_retries=sum(one.num_retries for one in parts),
            bytes_received=sum(one.bytes_received for one in parts),
            heard_at=now.heard_at,
            longest_silence_s=now.longest_silence_s,
        )

    @property
    def doing(self) -> str:
        own, connection, read = self._own, self._connection, self._read
        if own is not None and self._is_own_at_work:
            return own.doing
        if connection is None or read is None:
            return "no read"
        counters = self._remote_counters()
        seconds = self._means.clock() - self._started
        return (
            f"{self._means.store.uri_of(read.stored.key)} bytes {read.start} to {read.stop} by reader process {connection.process.pid}, "
            f"{format_seconds(seconds)}, {format_bytes(counters.bytes_received - self._before)} of {format_bytes(read.size_bytes)}, "
            f"the last {format_seconds(self._means.clock() - max(counters.heard_at, self._started))} ago"
        )

    def read(self, read: RangeRead, pieces: Sequence[memoryview]) -> None:
        self._check()
        places = [self._means.places.find(piece) for piece in pieces]
        unseen = sum(piece.nbytes for piece, place in zip(pieces, places, strict=True) if place is None)
        if unseen > min(_MOST_SENT_BACK_BYTES, read.size_bytes // 2):
            self._read_here(read, pieces)
            return
        while (connection := self._connect()) is not None:
            self._close_own()
            try:
                self._read_there(connection, read, pieces, places)
                return
            except ChannelClosed:
                connection.process.kill()
                self._disconnect()
                self._check()
        self._read_here(read, pieces)

    def cancel(self) -> None:
        with self._lock:
            if self._cancelled_at is None:
                self._cancelled_at = self._means.clock()
            own, connection = self._own, self._connection
        if own is not None:
            own.cancel()
        if connection is not None:
            connection.process.cancel(connection.slot)

    def close(self) -> None:
        self._disconnect()
        self._close_own()

    # -- in a reader process

    def _connect(self) -> ReaderConnection | None:
        if self._connection is None:
            connection = self._means.fleet.lend(self._is_cancelled)
            if connection is not None:
                with self._lock:
                    self._connection = connection
                    is_late = self._cancelled_at is not None
                if is_late:
                    connection.process.cancel(connection.slot)
        return self._connection

    def _disconnect(self) -> None:
        connection = self._connection
        if connection is not None:
            _add(self._past, self._remote_counters())
            with self._lock:
                self._connection = None
            self._means.fleet.take_back(connection)

    def _read_there(
        self,
        connection: ReaderConnection,
        read: RangeRead,
        pieces: Sequence[memoryview],
        places: Sequence[SharedPlace | None],
    ) -> None:
        store = self._means.store
        connection.process.show(places)
        self._read, self._started = read, self._means.clock()
        self._before = self._num_noted = self._remote_counters().bytes_received
        message = {
            "kind": "read",
            "key": read.stored.key,
            "size_bytes": read.stored.size_bytes,
            "version": read.stored.version,
            "start": read.start,
            "stop": read.stop,
            "pieces": [_tell_place(place, piece) for place, piece in zip(places, pieces, strict=True)],
            "range": self._first_request(read),
            "uri": store.uri_of(read.stored.key),
            "endpoint": store.endpoint,
        }
        is_over = False
        try:
            connection.channel.send(message)
            told, sent_back = self._answer_until_over(connection, read)
            is_over = True
            if told is not None:
                raise self._failure(told)
        finally:
            if not is_over:
                connection.process.kill()  # When this returns, nothing of that process writes any more.
            self._read = None
            self._raised.clear()
            self._note_bytes()
        scatter(memoryview(sent_back), [piece for piece, place in zip(pieces, places, strict=True) if place is None])

    def _first_request(self, read: RangeRead) -> dict[str, Any] | None:
        """Return the request that a read begins with; None where it cannot be described now: the process asks again, and knows which failures are worth another attempt."""
        try:
            asked = self._means.store.describe_range(read.stored, read.start, read.stop)
        except Exception:  # noqa: BLE001 (whatever it is, it is raised again)
            return None
        assert isinstance(asked, HttpRange)
        return tell_range(asked)

    def _answer_until_over(self, connection: ReaderConnection, read: RangeRead) -> tuple[dict[str, Any] | None, bytes]:
        """Answer what the process asks until it says that it has ended the read; return what it failed with, or None, and the bytes that it sends back."""
        channel = connection.channel
        while True:
            while not channel.can_receive(_LOOK_EVERY_S):
                self._note_bytes()
                cancelled_at = self._cancelled_at
                if cancelled_at is not None and self._means.clock() - cancelled_at > _ACKNOWLEDGED_WITHIN_S:
                    raise ChannelClosed("the reader process does not stop")
            message, body, _ = channel.receive()
            if message["kind"] in ("done", "failed"):
                return message.get("error"), body
            self._answer(connection, read, message, body)

    def _answer(self, connection: ReaderConnection, read: RangeRead, message: dict[str, Any], body: bytes) -> None:
        kind, store = message["kind"], self._means.store
        if kind == "refused":
            if self._means.pace is not None:
                self._means.pace.refused(message["wait_s"])
            return
        try:
            if kind == "describe":
                asked = store.describe_range(read.stored, message["start"], message["stop"])
                assert isinstance(asked, HttpRange)
                answer: dict[str, Any] = {"kind": "range", "range": tell_range(asked)}
            else:
                verdict = store.judge(read.stored, refusal_of(message, body))
                answer = {
                    "kind": "verdict",
                    **self._tell(verdict.error),
                    "retry": verdict.retry,
                    "wait_s": verdict.wait_s,
                }
        except Exception as error:  # noqa: BLE001 (it is the read's, and comes back with it unless the reader tries again)
            answer = {"kind": "raised", **self._tell(error)}
        connection.channel.send(answer)

    def _tell(self, error: BaseException) -> dict[str, Any]:
        self._raised.append(error)
        return {"error": tell_error(error), "number": len(self._raised) - 1}

    def _failure(self, told: dict[str, Any]) -> BaseException:
        number: int | None = told["number"]
        if number is not None and number < len(self._raised):
            return self._raised[number]
        return error_of(told)

    def _remote_counters(self) -> ReadCounters:
        connection = self._connection
        return ReadCounters() if connection is None else connection.process.status.read(connection.slot)

    def _note_bytes(self) -> None:
        """Tell the load that bytes came, a few times a second."""
        num_bytes = self._remote_counters().bytes_received
        if num_bytes > self._num_noted and self._means.on_bytes is not None:
            self._means.on_bytes(num_bytes - self._num_noted)
        self._num_noted = max(num_bytes, self._num_noted)

    # -- here

    def _close_own(self) -> None:
        with self._lock:
            own, self._own = self._own, None
        if own is not None:
            _add(self._past, own.counters)
            own.close()

    def _read_here(self, read: RangeRead, pieces: Sequence[memoryview]) -> None:
        with self._lock:
            if self._own is None:
                self._own = self._means.open_own()
            own = self._own
        self._check()
        self._is_own_at_work = True
        try:
            own.read(read, pieces)
        finally:
            self._is_own_at_work = False

    def _is_cancelled(self) -> bool:
        return self._cancelled_at is not None

    def _check(self) -> None:
        if self._is_cancelled():
            raise Cancelled("The read was stopped.", "Its owner closed the stream, or another read had failed.")


def _tell_place(place: SharedPlace | None, piece: memoryview) -> tuple[int, int, int]:
    return (-1, 0, piece.nbytes) if place is None else (place.number, place.offset, piece.nbytes)


def _add(total: ReadCounters, more: ReadCounters) -> None:
    total.num_requests += more.num_requests
    total.num_retries += more.num_retries
    total.bytes_received += more.bytes_received
