"""The stream: tensors in the order of the plan, read ahead within a budget, each handed out once, each valid for as long as anybody holds it.

The consumer's thread hands reads to the pool (`_pump`) as the budget allows; a reader thread reports each finished read (`_finished`), and hands over
more. A tensor is handed out only after every read that writes into it has been acknowledged. Waiting for a tensor out of order is allowed: it jumps the
queue and is exempt from the budget, so that no order of consumption can deadlock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from headrace.checkpoint import Checkpoint, Entry
from headrace.errors import Cancelled, StreamClosed, StreamError
from headrace.progress import LoadProgress
from headrace.settings import Settings, TransportSettings
from headrace.storage import ObjectStore
from headrace.streaming.memory import Memory, PrivateMemory, available_memory_bytes, default_memory_limit
from headrace.streaming.plan import Plan, PlannedRead, plan_reads
from headrace.streaming.report import LoadReport
from headrace.streaming.tensors import Destination, torch_dtype
from headrace.transport import RangeRead, ReaderPool, ReadJob, open_pool

_QUEUED_PER_CONNECTION = 3
"""Reads that wait in the pool for each connection: enough that none idles, few enough that an error or a jump in the queue is quick."""


class PoolFactory(Protocol):
    """Makes the pool that carries out a stream's reads; ``on_bytes`` is to be told, from any thread, that bytes came."""

    def __call__(
        self, store: ObjectStore, settings: TransportSettings, *, on_bytes: Callable[[int], None]
    ) -> ReaderPool: ...


@dataclass(slots=True)
class _Account:
    """What the stream has in hand. Guarded by the stream's lock."""

    staging_bytes: int = 0
    peak_staging_bytes: int = 0
    num_taken: int = 0
    bytes_taken: int = 0
    next_read: int = 0
    num_in_pool: int = 0
    submitted: set[int] = field(default_factory=set)


class TensorStream:
    """Streams ``entries`` of ``checkpoint`` in that order; a context manager and an iterator of ``(name, tensor)``.

    Each tensor is on the CPU, owns its memory (nothing here writes to it or reuses it again), has the stored dtype and shape, and is handed out once. Memory
    that is allocated for tensors not yet handed out stays within ``settings.memory_limit_bytes`` plus the tensor that is waited for and one read. One consumer thread at a
    time may iterate; `take` may be called from several. The first error of any read is raised in the consumer. With ``owns_checkpoint`` closing the stream closes
    the checkpoint too.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        entries: Sequence[Entry] | None = None,
        *,
        settings: Settings | None = None,
        progress: LoadProgress | None = None,
        memory: Memory | None = None,
        raw: bool = False,
        owns_checkpoint: bool = False,
        pool: PoolFactory = open_pool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.checkpoint = checkpoint
        self.settings = settings or Settings.from_environment()
        self.progress = progress or LoadProgress()
        chosen = list(checkpoint.entries.values()) if entries is None else list(entries)
        if not raw:
            for entry in chosen:
                torch_dtype(entry)  # refuse what cannot be represented before the first byte
        transport = self.settings.transport
        self.plan: Plan = plan_reads(chosen, read_bytes=transport.read_bytes, gap_bytes=transport.gap_bytes)
        limit = self.settings.memory_limit_bytes
        self.memory_limit_bytes = default_memory_limit(available_memory_bytes()) if limit is None else limit
        self._raw = raw
        self._owns_checkpoint = owns_checkpoint
        self._memory = memory or PrivateMemory()
        self._clock = clock
        self._place_of = {entry.name: place for place, entry in enumerate(self.plan.entries)}
        if len(self._place_of) != len(self.plan.entries):
            raise StreamError("A tensor was asked for twice in one stream.", "Each tensor is handed out once.")
        self._destinations: dict[int, Destination] = {}
        self._taken: set[int] = set()
        self._account = _Account()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._closed = False
        self._started: float | None = None
        self._ended: float | None = None
        self._pool = pool(checkpoint.store, transport, on_bytes=self._touch)
        self._num_wanted_bytes_arrived = 0
        self.progress.bytes_wanted += self.plan.bytes_wanted

    # -- the consumer's side

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what has not been handed out yet, in the plan's order; the end closes the stream."""
        for place, entry in enumerate(self.plan.entries):
            if place not in self._taken:
                yield entry.name, self.take(entry.name)
        self.close()

    def __enter__(self) -> TensorStream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_pool"):
            self.close()

    def take(self, name: str) -> torch.Tensor:
        """Wait for one tensor and hand it out; the stream keeps no reference to it.

        Raises the load's first error, `StreamClosed`, or `StreamError` for a name that is not in the plan or was handed out already.
        """
        place = self._place_of.get(name)
        if place is None:
            raise StreamError(
                f"Tensor {name!r} is not part of this stream.", "Only what was asked for before the first read is read."
            )
        with self._changed:
            self._start()
            while True:
                self._check(name, place)
                destination = self._destinations.get(place)
                if destination is not None and destination.num_reads == 0:
                    break
                if destination is None or self._has_unsubmitted_read(place):
                    self._submit_now(place)
                    continue
                self._changed.wait()
            del self._destinations[place]
            self._taken.add(place)
            self._note_taken(destination.entry)
            self._pump()
        return destination.tensor()

    def close(self) -> None:
        """Stop all reads, wait until every reader has acknowledged, and free what was not handed out. May be called twice, from any thread."""
        with self._changed:
            already, self._closed = self._closed, True
            if self._ended is None and self._started is not None:
                self._ended = self._clock()
            self._changed.notify_all()
        if already:
            return
        self._pool.close()
        with self._changed:
            self._destinations.clear()
            self._account.staging_bytes = 0
        if self._owns_checkpoint:
            self.checkpoint.close()

    @property
    def names_left(self) -> list[str]:
        """The names that have not been handed out, in the plan's order."""
        with self._changed:
            return [entry.name for place, entry in enumerate(self.plan.entries) if place not in self._taken]

    @property
    def report(self) -> LoadReport:
        """The account so far; final after the end or `close`."""
        counters = self._pool.counters
        with self._changed:
            account, started = self._account, self._started
            stopped = self._ended if self._ended is not None else self._clock()
            return LoadReport(
                uri=str(self.checkpoint.uri),
                snapshot_id=self.checkpoint.snapshot.id,
                num_files=len(self.checkpoint.files),
                num_tensors=account.num_taken,
                bytes_checkpoint=self.checkpoint.total_bytes,
                bytes_wanted=self.plan.bytes_wanted,
                bytes_read=counters.bytes_received,
                num_requests=counters.num_requests,
                num_retries=counters.num_retries,
                num_hedges=counters.num_hedges,
                num_connections=self.settings.transport.num_connections,
                seconds=0.0 if started is None else stopped - started,
                phases=dict(self.progress.phases),
                peak_staging_bytes=account.peak_staging_bytes,
            )

    # -- all below holds the lock, but for `_pieces`

    def _start(self) -> None:
        if self._started is None:
            self._started = self._clock()
            self.progress.describe_holdup = self._pool.describe_holdup
            self._pump()

    def _check(self, name: str, place: int) -> None:
        if self._error is not None:
            raise self._error
        if place in self._taken:
            raise StreamError(
                f"Tensor {name!r} was handed out already.", "Each tensor is handed out once; keep the one you got."
            )
        if self._closed:
            raise StreamClosed(f"Tensor {name!r} was asked for after the stream had been closed.")

    def _pump(self) -> None:
        """Hand reads to the pool, in order, while the queue and the budget allow."""
        account = self._account
        most = _QUEUED_PER_CONNECTION * self.settings.transport.num_connections
        while (
            account.next_read < len(self.plan.reads)
            and account.num_in_pool < most
            and not self._closed
            and self._error is None
        ):
            index = account.next_read
            if index not in account.submitted:
                needed = self._bytes_to_allocate(self.plan.reads[index])
                if needed and account.staging_bytes and account.staging_bytes + needed > self.memory_limit_bytes:
                    return
                self._submit(index, first=False)
            account.next_read += 1

    def _submit_now(self, place: int) -> None:
        """Hand over every read of a tensor that is being waited for, before all others and whatever the budget says."""
        if place not in self._destinations:
            self._allocate(place)
        for index in reversed(self.plan.reads_of[place]):
            if index not in self._account.submitted:
                self._submit(index, first=True)

    def _has_unsubmitted_read(self, place: int) -> bool:
        return any(index not in self._account.submitted for index in self.plan.reads_of[place])

    def _submit(self, index: int, *, first: bool) -> None:
        read = self.plan.reads[index]
        for piece in read.pieces:
            if piece.entry >= 0 and piece.entry not in self._destinations:
                self._allocate(piece.entry)
        self._account.submitted.add(index)
        self._account.num_in_pool += 1
        job = ReadJob(
            read=RangeRead(self.checkpoint.stored(read.file), read.start, read.stop),
            pieces=lambda: self._pieces(read),
            done=lambda error: self._finished(read, error),
        )
        self._pool.submit(job, first=first)

    def _allocate(self, place: int) -> None:
        entry = self.plan.entries[place]
        self._destinations[place] = Destination(
            entry, self._memory, num_reads=len(self.plan.reads_of[place]), raw=self._raw
        )
        account = self._account
        account.staging_bytes += entry.size_bytes
        account.peak_staging_bytes = max(account.peak_staging_bytes, account.staging_bytes)

    def _bytes_to_allocate(self, read: PlannedRead) -> int:
        fresh = {piece.entry for piece in read.pieces if piece.entry >= 0 and piece.entry not in self._destinations}
        return sum(self.plan.entries[place].size_bytes for place in fresh)

    def _note_taken(self, entry: Entry) -> None:
        account = self._account
        account.staging_bytes -= entry.size_bytes
        account.num_taken += 1
        account.bytes_taken += entry.size_bytes
        if account.num_taken == len(self.plan.entries):
            self._ended = self._clock()

    # -- the readers' side

    def _pieces(self, read: PlannedRead) -> list[memoryview]:
        """Return where the bytes of ``read`` go; what lies in a gap goes to memory that nobody looks at."""
        views: list[memoryview] = []
        for piece in read.pieces:
            if piece.entry < 0:
                views.append(memoryview(bytearray(piece.size_bytes)))
            else:
                views.append(self._destinations[piece.entry].view(piece.offset, piece.size_bytes))
        return views

    def _finished(self, read: PlannedRead, error: BaseException | None) -> None:
        with self._changed:
            self._account.num_in_pool -= 1
            if error is None:
                self._count_in(read)
                self._pump()
            elif self._error is None and not (isinstance(error, Cancelled) and self._closed):
                self._error = self._pool.error or error
            self._changed.notify_all()

    def _count_in(self, read: PlannedRead) -> None:
        wanted = 0
        for piece in read.pieces:
            if piece.entry >= 0:
                wanted += piece.size_bytes
                destination = self._destinations.get(piece.entry)
                if destination is not None:
                    destination.num_reads -= 1
        self._num_wanted_bytes_arrived += wanted
        self.progress.arrived(wanted)

    def _touch(self, num_bytes: int) -> None:
        """Note that bytes came, from a reader's thread: a load that is slow is not a load that stands."""
        self.progress.changed = self.progress.clock()
