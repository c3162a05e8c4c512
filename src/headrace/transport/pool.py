"""A few reader threads with one queue of jobs. Knows neither HTTP nor files, only readers; what a job's bytes mean is its owner's business.

A piece of memory has one writer at a time. When nothing is left to begin and a read is late, an idle thread asks for the same bytes a second time, into
scratch memory; if that is sooner, the first reader is stopped, and only when it has acknowledged are the bytes copied to where they belong.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable

from headrace.errors import Cancelled
from headrace.process import HomeProcess
from headrace.settings import TransportSettings
from headrace.transport.failure import clear_frames
from headrace.transport.flight import Flight, PoolCounters, ReadJob
from headrace.transport.hedge import Lateness
from headrace.transport.pace import Pace
from headrace.transport.pieces import scatter
from headrace.transport.reader import RangeReader, ReadCounters

CLOSE_TIMEOUT_S = 30.0
"""How long `ReaderPool.close` waits for its threads. All but name look-ups and dead network file systems end at once."""


def private_scratch(num_bytes: int) -> memoryview:
    """Return fresh memory for a second read, which goes back to the system as soon as nobody refers to it.

    A mapping of its own: once some large block was freed, malloc would take the next ones from its arenas and keep what a thread has freed there.
    """
    return memoryview(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


class _Seat:
    """One thread's reader: opened when it is needed, and anew after one that failed or was stopped."""

    __slots__ = ("reader",)

    def __init__(self) -> None:
        self.reader: RangeReader | None = None


class ReaderPool:
    """Carries out jobs on up to ``settings.num_connections`` daemon threads, each with a reader of its own from ``open_reader``.

    Threads start as jobs come. The first job that fails stops the others, whose ``done`` is given `Cancelled`, and every job submitted later is given that
    first error at once. Second reads are sent where ``is_hedged``; their memory comes from ``scratch``. Every method may be called from any thread, from
    ``done`` too; no lock is held while ``pieces``, ``done``, ``open_reader`` or ``scratch`` are called. After a fork the child has no use for it: `submit`
    raises there and `close` does nothing.
    """

    def __init__(
        self,
        open_reader: Callable[[], RangeReader],
        settings: TransportSettings,
        *,
        is_hedged: bool = False,
        scratch: Callable[[int], memoryview] = private_scratch,
        pace: Pace | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open_reader = open_reader
        self._num_connections = settings.num_connections
        self._scratch = scratch
        self._pace = pace or Pace(settings.num_connections, clock)
        self._clock = clock
        self._lateness = Lateness(settings.hedge_after_s if is_hedged else 0.0)
        self._home = HomeProcess()
        self._changed = threading.Condition(threading.Lock())
        # All below is guarded by the lock of `_changed`.
        self._queue: deque[ReadJob] = deque()
        self._flights: list[Flight] = []
        self._threads: list[threading.Thread] = []
        self._seats: list[_Seat] = []
        self._is_stopping = False
        self._error: BaseException | None = None
        self._num_hedges = 0
        self._num_second_reads = 0  # Second reads under way.
        self._past = ReadCounters()

    # -- for the owner of the jobs

    def submit(self, job: ReadJob, *, first: bool = False) -> None:
        """Queue a job, before all that wait where ``first``. On a pool that failed or was closed, its ``done`` is called before this returns."""
        self._home.check("A pool of readers")
        with self._changed:
            if not self._is_stopping:
                self._start_threads()
                self._queue.insert(0 if first else len(self._queue), job)
                self._changed.notify_all()
                return
            error = self._error or _cancelled()
        self._tell(job, error)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Stop all reads and wait for the threads; return whether all have ended. May be called again.

        A thread that has not ended in time still holds its job's memory: that job's ``done`` was not called. Called from ``done``, it does not wait.
        """
        if not self._home.is_here:
            return True
        self._stop(None)
        if threading.current_thread() not in self._threads:  # Two of them would wait for each other.
            deadline = time.monotonic() + timeout_s
            for thread in self._threads:
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def __enter__(self) -> ReaderPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def error(self) -> BaseException | None:
        """The first failure: the one that stopped the pool."""
        return self._error

    @property
    def counters(self) -> PoolCounters:
        """What all readers have done so far."""
        with self._changed:
            every = [self._past, *(seat.reader.counters for seat in self._seats if seat.reader is not None)]
            return PoolCounters(
                num_requests=sum(one.num_requests for one in every),
                num_retries=sum(one.num_retries for one in every),
                num_hedges=self._num_hedges,
                bytes_received=sum(one.bytes_received for one in every),
            )

    def describe_holdup(self) -> str:
        """Say which read has been under way for the longest time, where its bytes come from and how fast; for people."""
        with self._changed:
            flight = min(self._flights, key=lambda one: one.started, default=None)
            if flight is None:
                return f"no read is under way, {len(self._queue)} wait"
            if flight.reader is None:
                return f"a reader is being opened for {flight.job.read.stored.key}"
            return flight.reader.doing + (" (asked for a second time)" if flight.second is not None else "")

    # -- threads and their tasks

    def _start_threads(self) -> None:
        """Start threads for the jobs in hand and one more job; with hedging one to spare, so that a lone read can be late, too."""
        spare = 0 if self._lateness.is_off else 1
        wanted = min(self._num_connections, len(self._queue) + len(self._flights) + 1 + spare)
        while len(self._threads) < wanted:
            thread = threading.Thread(target=self._work, name=f"headrace-reader-{len(self._threads)}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # The system allows no more threads: those that run will do.
                if not self._threads:
                    raise
                return
            self._threads.append(thread)

    def _work(self) -> None:
        seat = _Seat()
        with self._changed:
            self._seats.append(seat)
        try:
            while self._work_once(seat):
                pass
        except BaseException as bug:  # noqa: BLE001 (a thread that dies silently would leave the owner waiting)
            self._stop(bug)
        finally:
            self._vacate(seat)

    def _work_once(self, seat: _Seat) -> bool:
        """Carry out one task and return True, or False when there are to be no more. Nothing of the task outlives this call."""
        flight, is_second = self._next_task()
        if flight is None:
            return False
        if is_second:
            self._fly_second(seat, flight)
        else:
            self._fly(seat, flight)
        return True

    def _next_task(self) -> tuple[Flight | None, bool]:
        """Wait for something to do: a job to begin, or a late read to ask for a second time."""
        with self._changed:
            while not self._is_stopping:
                if self._queue and len(self._flights) < self._pace.num_allowed:
                    flight = Flight(self._queue.popleft(), self._clock())
                    self._flights.append(flight)
                    return flight, False
                late, wait_s = self._find_late()
                if late is not None:
                    if late.second is not None:
                        late.second.cancel()  # It is as silent as the first.
                        late.second = None
                    late.num_hedges += 1
                    self._num_second_reads += 1
                    self._num_hedges += 1
                    return late, True
                self._changed.wait(wait_s)
        return None, False

    def _find_late(self) -> tuple[Flight | None, float | None]:
        """Return a read that is late, or else in how many seconds to look again; None where something must change before."""
        # What waits in the queue comes first. A store that throttles is not asked twice while it means it, and not by many at once for as long as it is spared.
        is_at_pace = (
            self._num_second_reads > 0 and len(self._flights) + self._num_second_reads >= self._pace.num_allowed
        )
        if self._lateness.is_off or self._queue or is_at_pace:
            return None, None
        quiet_s = self._pace.quiet_s
        if quiet_s > 0:
            return None, quiet_s
        late, wait_s = self._lateness.find_late(self._flights, self._clock())
        return late, min(wait_s, threading.TIMEOUT_MAX)

    # -- one job

    def _fly(self, seat: _Seat, flight: Flight) -> None:
        error = self._read_first(seat, flight)
        if error is None:
            self._pace.succeeded()
        else:
            clear_frames(error)
        with self._changed:
            if error is None and flight.reader is not None:
                self._lateness.finished(self._clock() - flight.started, flight.reader.counters.longest_silence_s)
            flight.is_stopped, flight.error = True, error
            self._flights.remove(flight)
            if not flight.is_overtaken:
                flight.pieces = None
                if flight.second is not None:
                    flight.second.cancel()
            self._changed.notify_all()
        if error is not None or flight.is_overtaken:
            self._vacate(seat)  # A reader that was stopped stays stopped.
        if not flight.is_overtaken:
            self._end(flight.job, error)

    def _read_first(self, seat: _Seat, flight: Flight) -> BaseException | None:
        try:
            reader = self._occupy(seat)
            with self._changed:
                if self._is_stopping:
                    raise _cancelled()
                flight.reader, flight.started = reader, self._clock()
                if not self._lateness.is_off and not self._queue:
                    self._changed.notify_all()  # Idle threads find out when this read will be late.
            flight.pieces = flight.job.pieces()
            reader.read(flight.job.read, flight.pieces)
        except BaseException as error:  # noqa: BLE001 (every error is the owner's to hear)
            return error
        return None

    def _fly_second(self, seat: _Seat, flight: Flight) -> None:
        scratch = self._read_second(seat, flight)
        with self._changed:
            self._num_second_reads -= 1
            is_replaced = flight.second is None or flight.second is not seat.reader
            flight.second = flight.second if is_replaced else None
            overtakes = scratch is not None and not is_replaced and not flight.is_stopped
            if overtakes and flight.reader is not None:
                flight.is_overtaken = True
                flight.reader.cancel()
                while not flight.is_stopped:
                    self._changed.wait()
        if scratch is None or not overtakes:
            self._vacate(seat)  # It failed, or came too late and may have been stopped.
            return
        error = flight.error
        if error is not None and flight.pieces is not None:
            scatter(scratch, flight.pieces)
            error = None
        flight.pieces = None
        self._end(flight.job, error)

    def _read_second(self, seat: _Seat, flight: Flight) -> memoryview | None:
        """Read the whole range into scratch memory; None where that failed, which is nobody's concern: the first reader is still at it."""
        try:
            reader = self._occupy(seat)
            scratch = self._scratch(flight.job.read.size_bytes)
            with self._changed:
                if self._is_stopping or flight.is_stopped:
                    return None
                flight.second, flight.second_started = reader, self._clock()
            reader.read(flight.job.read, [scratch])
        except BaseException:  # noqa: BLE001
            return None
        return scratch

    def _end(self, job: ReadJob, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, Cancelled):
            self._stop(error)
        self._tell(job, error)

    def _tell(self, job: ReadJob, error: BaseException | None) -> None:
        try:
            job.done(error)
        except BaseException as bug:  # noqa: BLE001 (the owner's own bug must not leave the other jobs waiting)
            self._stop(bug)

    def _stop(self, error: BaseException | None) -> None:
        """Begin no more jobs, stop those under way, and tell the owners of those that wait. The first error is remembered."""
        with self._changed:
            if not self._is_stopping:
                self._error = error
            self._is_stopping = True
            orphans = list(self._queue)
            self._queue.clear()
            for flight in self._flights:
                for reader in (flight.reader, flight.second):
                    if reader is not None:
                        reader.cancel()
            self._changed.notify_all()
        for job in orphans:
            self._tell(job, _cancelled())

    # -- readers

    def _occupy(self, seat: _Seat) -> RangeReader:
        if seat.reader is None:
            seat.reader = self._open_reader()
        return seat.reader

    def _vacate(self, seat: _Seat) -> None:
        with self._changed:
            reader, seat.reader = seat.reader, None
            if reader is None:
                return
            self._past.num_requests += reader.counters.num_requests
            self._past.num_retries += reader.counters.num_retries
            self._past.bytes_received += reader.counters.bytes_received
        with contextlib.suppress(OSError):
            reader.close()


def _cancelled() -> Cancelled:
    return Cancelled("The read was not carried out.", "Its owner closed the stream, or another read had failed.")
