"""Jobs for a pool, and the record of one that is under way. Pure; guarded by the pool's lock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.transport.reader import RangeRead, RangeReader


@dataclass(frozen=True, slots=True)
class ReadJob:
    """One read to be carried out.

    ``pieces`` is called in the reader's thread when the read begins and returns the memory to fill, as `RangeReader.read` takes it. ``done`` is called
    exactly once, with None or the error, when nothing writes into the pieces any more and nothing in the pool refers to them. It is called in the
    reader's thread; for a job that never began, in the thread that stopped the pool or submitted too late.
    """

    read: RangeRead
    pieces: Callable[[], Sequence[memoryview]]
    done: Callable[[BaseException | None], None]


@dataclass(frozen=True, slots=True)
class PoolCounters:
    """What all readers of a pool have done so far. ``bytes_received`` counts what a retry or a hedge brought twice."""

    num_requests: int = 0
    num_retries: int = 0
    num_hedges: int = 0
    bytes_received: int = 0


@dataclass(slots=True, eq=False)
class Flight:
    """A job under way: its first reader writes into the pieces; a second one, if any, into scratch memory."""

    job: ReadJob
    started: float
    reader: RangeReader | None = None
    pieces: Sequence[memoryview] | None = None
    second: RangeReader | None = None
    """The reader that asks for the same bytes once more, while it does. There is one at a time."""
    second_started: float = 0.0
    num_hedges: int = 0
    """How many second readers have been sent: the next one takes the place of one that is silent, too; one that failed has no successor."""
    is_overtaken: bool = False
    """The second reader has everything, and the first is being stopped: whoever sent the second one ends the job."""
    is_stopped: bool = False
    """The first reader writes no more: the pieces have no writer."""
    error: BaseException | None = None
    """How the first reader ended."""
