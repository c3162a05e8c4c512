"""Reads ranges over HTTP/1.1, straight from the socket into the caller's memory, with its own retries. Knows no dialect of any store.

An attempt asks the store for a fresh request (`ObjectStore.describe_range`: signatures age, credentials rotate) for the bytes that are still missing,
follows redirects, checks that the answer is those bytes, and receives them. What ends an attempt is answered by another one from the last byte held, after
a wait that the store or the backoff decides; what a refusal means is the store's to say (`ObjectStore.judge`).
"""

from __future__ import annotations

import contextlib
import http.client
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from headrace.errors import WrongRange
from headrace.settings import TransportSettings
from headrace.storage import FileRange, HttpRange, ObjectStore, Refusal
from headrace.transport.answer import end_of_answer
from headrace.transport.bandwidth import Bandwidth
from headrace.transport.connection import Answer, CutShort, HttpConnection, Origin, open_connection
from headrace.transport.failure import FAILURES, Failure, Refused, describe, give_up, strip_frames
from headrace.transport.pace import Pace
from headrace.transport.patience import Patience, TooSlow
from headrace.transport.pieces import PieceCursor
from headrace.transport.reader import RangeRead, ReadCounters
from headrace.transport.redirect import MOST_REDIRECTS, REDIRECTS, follow, too_many
from headrace.transport.retry import Attempts
from headrace.transport.stopping import StopSwitch
from headrace.transport.surroundings import Surroundings
from headrace.units import KIB, format_bytes, format_seconds

_THROTTLED = frozenset({429, 503})
_MOST_CONNECTIONS = 3
"""Connections that one reader keeps: a store, and where it redirects to."""
_MOST_WRONG_ANSWERS = 2
"""A server that answers with other bytes than asked does so for a reason: once may be a proxy's bad day, twice is its way."""
_REFUSAL_BYTES = 8 * KIB


@dataclass(slots=True)
class _Work:
    """The read in progress."""

    read: RangeRead
    uri: str
    cursor: PieceCursor
    attempts: Attempts
    started: float
    num_wrong_answers: int = 0
    over: str = "no connection"

    @property
    def position(self) -> int:
        return self.read.start + self.cursor.num_filled


class HttpReader:
    """A `RangeReader` over HTTP. Connections stay open between reads; one whose body was not taken to its end is never used again."""

    def __init__(
        self,
        store: ObjectStore,
        settings: TransportSettings,
        surroundings: Surroundings | None = None,
        *,
        pace: Pace | None = None,
        bandwidth: Bandwidth | None = None,
        on_bytes: Callable[[int], None] | None = None,
    ) -> None:
        self._store = store
        self._settings = settings
        self._surroundings = surroundings or Surroundings()
        self._pace = pace
        self._bandwidth = bandwidth
        self._on_bytes = on_bytes
        self._switch = StopSwitch()
        self._connections: dict[Origin, HttpConnection] = {}
        self._counters = ReadCounters()
        self._work: _Work | None = None

    @property
    def counters(self) -> ReadCounters:
        return self._counters

    @property
    def doing(self) -> str:
        work = self._work
        if work is None:
            return "no read"
        seconds = self._surroundings.clock() - work.started
        filled = work.cursor.num_filled
        return (
            f"{work.uri} bytes {work.read.start} to {work.read.stop} over {work.over}, attempt {work.attempts.num_in_all}, {format_seconds(seconds)}, "
            f"{format_bytes(filled)} of {format_bytes(work.read.size_bytes)}, {format_bytes(filled / seconds if seconds > 0 else 0)}/s"
        )

    def cancel(self) -> None:
        self._switch.throw()

    def close(self) -> None:
        while self._connections:
            self._connections.popitem()[1].close()

    def read(self, read: RangeRead, pieces: Sequence[memoryview]) -> None:
        self._switch.check()
        uri = self._store.uri_of(read.stored.key)
        attempts = Attempts(self._settings, self._surroundings.random)
        work = _Work(read, uri, PieceCursor(pieces, read.size_bytes), attempts, self._surroundings.clock())
        self._work = work
        self._counters.longest_silence_s, self._counters.heard_at = 0.0, work.started
        try:
            while work.cursor.num_left:
                self._attempt(work)
        finally:
            self._work = None  # It refers to the pieces, which are their owner's again.

    def _attempt(self, work: _Work) -> None:
        """Make one attempt and, where it fails, wait until it is time for the next. Raises when there is to be none."""
        attempts, filled_before = work.attempts, work.cursor.num_filled
        attempts.begin()
        failure = self._outcome(work)
        self._switch.check()  # A socket that `cancel` shut down fails in many ways.
        attempts.ended(work.cursor.num_filled - filled_before, was_too_slow=isinstance(failure, TooSlow))
        if failure is None:
            if not work.cursor.num_left or not attempts.are_over:
                return  # The rest, if any, is asked for at once: the store sends less at a time than we ask.
            failure = CutShort("each answer held only a part of what was asked for")
        self._check_hope(work, failure)
        self._counters.num_retries += 1
        wait_s = attempts.wait_s(failure.verdict.wait_s if isinstance(failure, Refused) else None)
        work.over = f"no connection (waits for {format_seconds(wait_s)}: {describe(failure)})"
        self._counters.heard_at = self._surroundings.clock() + wait_s  # The silence until then is our own.
        self._surroundings.wait(self._switch.event, wait_s)
        self._switch.check()

    def _outcome(self, work: _Work) -> Failure | None:
        """Carry an attempt out and return how it failed, if it did so in a way that another attempt may mend."""
        try:
            self._carry_out(work)
        except FAILURES as failure:
            return strip_frames(failure)
        return None

    def _check_hope(self, work: _Work, failure: Failure) -> None:
        """Raise unless another attempt may help."""
        hopeless = work.attempts.are_over
        if isinstance(failure, Refused):
            if failure.status in _THROTTLED and self._pace is not None:
                self._pace.refused(failure.verdict.wait_s)
            if not failure.verdict.retry:
                raise failure.verdict.error from failure
        elif isinstance(failure, WrongRange):
            work.num_wrong_answers += 1
            hopeless = hopeless or work.num_wrong_answers >= _MOST_WRONG_ANSWERS
        if hopeless:
            endpoint, filled = self._store.endpoint, work.cursor.num_filled
            raise give_up(work.uri, endpoint, work.read, work.attempts, filled, failure) from failure

    def _carry_out(self, work: _Work) -> None:
        """Ask for what is missing and receive it, or as much of it as the answer holds."""
        patience = Patience(self._settings, self._surroundings.clock)
        asked: HttpRange | FileRange = self._store.describe_range(work.read.stored, work.position, work.read.stop)
        assert isinstance(asked, HttpRange)
        for _ in range(MOST_REDIRECTS + 1):
            connection, answer = self._ask(work, asked, patience)
            with self._kept_only_if_whole(connection, answer):
                if answer.status in (200, 206):
                    stop = end_of_answer(asked, work.read.stored, work.uri, answer.status, answer.headers)
                    self._receive(work, answer, stop, patience)
                    return
                refusal = _refusal_of(answer)
            verdict = self._store.judge(work.read.stored, refusal)
            location = refusal.headers.get("location")
            if refusal.status not in REDIRECTS or location is None or verdict.retry:
                raise Refused(refusal, verdict)
            asked = follow(asked, location, work.uri)
        raise too_many(asked, work.uri)

    def _ask(self, work: _Work, asked: HttpRange, patience: Patience) -> tuple[HttpConnection, Answer]:
        """Send a request; over a new connection, at once, where the one that was kept had been closed meanwhile."""
        while True:
            work.over = f"a new connection to {asked.host}:{asked.port}"
            connection = self._connection_for(asked, patience)
            work.over = connection.ends
            self._counters.num_requests += 1
            try:
                return connection, connection.ask(asked.target, asked.headers, patience)
            except TimeoutError:
                self._drop(connection)
                raise
            except (OSError, http.client.HTTPException):
                self._drop(connection)
                self._switch.check()
                if not connection.went_stale:  # A new connection has not served before: this loop ends.
                    raise
            except BaseException:
                self._drop(connection)
                raise

    def _receive(self, work: _Work, answer: Answer, stop: int, patience: Patience) -> None:
        """Receive the body up to byte ``stop`` of the object. This loop is where the time goes: one receive a turn, into final memory."""
        cursor, counters, on_bytes, clock = work.cursor, self._counters, self._on_bytes, self._surroundings.clock
        num_left = stop - work.position
        patience.body_begins()
        while num_left:
            num_bytes = answer.receive(cursor.room(num_left))
            if not num_bytes:
                raise CutShort(f"the connection ended {num_left} bytes before the end of the body")
            cursor.advance(num_bytes)
            num_left -= num_bytes
            now = clock()
            counters.bytes_received += num_bytes
            counters.longest_silence_s = max(counters.longest_silence_s, now - counters.heard_at)
            counters.heard_at = now
            if on_bytes is not None:
                on_bytes(num_bytes)
            if num_left:
                patience.received(num_bytes)
            if self._bandwidth is not None:
                self._hold_back(self._bandwidth.delay_s(num_bytes))

    def _hold_back(self, seconds: float) -> None:
        """Leave the next bytes in the network for so long: the other side's window fills, and it sends no faster."""
        if seconds > 0:
            self._surroundings.wait(self._switch.event, seconds)
            self._switch.check()

    def _connection_for(self, asked: HttpRange, patience: Patience) -> HttpConnection:
        origin = Origin.of(asked)
        connection = self._connections.pop(origin, None)
        if connection is None:
            connection = open_connection(origin, self._settings, self._surroundings, self._switch, patience)
            if len(self._connections) >= _MOST_CONNECTIONS:
                self._drop(next(iter(self._connections.values())))
        self._connections[origin] = connection  # Last in the dict is last used.
        return connection

    def _drop(self, connection: HttpConnection) -> None:
        self._connections.pop(connection.origin, None)
        connection.close()

    @contextlib.contextmanager
    def _kept_only_if_whole(self, connection: HttpConnection, answer: Answer) -> Iterator[None]:
        """Drop the connection at the end unless the answer was taken to its very end."""
        usable = False
        try:
            yield
            usable = answer.leaves_connection_usable()
        finally:
            if not usable:
                self._drop(connection)


def _refusal_of(answer: Answer) -> Refusal:
    """Return what the store said. A body that does not come in full is as good as what came."""
    body = bytearray(_REFUSAL_BYTES)
    filled = 0
    with contextlib.suppress(OSError, http.client.HTTPException):
        while filled < len(body) and (num_bytes := answer.receive(memoryview(body)[filled:])):
            filled += num_bytes
    return Refusal(answer.status, answer.reason, answer.headers, bytes(body[:filled]))
