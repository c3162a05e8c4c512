"""The stream: tensors in the order of the plan, read ahead within a budget, each handed out once, each valid for as long as anybody holds it.

The consumer's thread hands reads to the pool (`_pump`) as the budget allows; a reader thread reports each finished read (`_finished`), and hands over
more. A tensor is handed out only after every read that writes into it has been acknowledged. Waiting for a tensor out of order is allowed: it jumps the
queue and is exempt from the budget, so that no order of consumption can deadlock.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch

from headrace.checkpoint import Checkpoint, Entry
from headrace.errors import Cancelled, InvalidSetting, StreamClosed, StreamError
from headrace.process import HomeProcess
from headrace.processors import usable_processors
from headrace.progress import LoadProgress
from headrace.settings import Settings, TransportSettings
from headrace.storage import ObjectStore
from headrace.streaming.hugepages import HugePages
from headrace.streaming.leases import OnBudget
from headrace.streaming.memory import Bytes, SharedFiles, available_memory_bytes
from headrace.streaming.pinning import pinning_for
from headrace.streaming.plan import Plan, PlannedRead, plan_reads
from headrace.streaming.readahead import ReadAhead
from headrace.streaming.report import LoadReport
from headrace.streaming.room import (
    Block,
    OwnedRoom,
    Ownership,
    Room,
    fitting_reads,
    leased_room,
    owned_room,
    stream_memory_limit,
)
from headrace.streaming.tensors import Destination, mark, torch_dtype
from headrace.transport import (
    Circumstances,
    ProcessPool,
    RangeRead,
    ReaderChoice,
    ReaderPool,
    ReadJob,
    SharedPlaces,
    choose_readers,
    is_local,
    open_pool,
)

logger = logging.getLogger("headrace")

_QUEUED_PER_CONNECTION = 3
"""Reads that wait in the pool for each connection: enough that none idles, few enough that an error or a jump in the queue is quick."""
_LONGEST_WAIT_FOR_ROOM_S = 0.25
"""How long a consumer that asks for the next tensor waits for other threads to drop theirs, before the budget is exceeded; halved each time none does."""
_LOOK_FOR_ROOM_EVERY_S = 0.005


class PoolFactory(Protocol):
    """Makes the pool that carries out a stream's reads; ``on_bytes`` is to be told, from any thread, that bytes came."""

    def __call__(
        self, store: ObjectStore, settings: TransportSettings, *, on_bytes: Callable[[int], None]
    ) -> ReaderPool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """What a stream may be told beside what to read."""

    ownership: Ownership = "owned"
    """``owned``: each tensor has memory of its own. ``leased``: memory is used again when its tensors are gone, within the memory limit; for consumers that copy.
    Either way a tensor is valid for as long as anybody holds it."""
    on_budget: OnBudget = "promote"
    """Leased, when the consumer keeps tensors: ``promote`` allocates more and warns once, ``error`` raises `BudgetExceeded`."""
    device: str | torch.device = "cpu"
    """Where the consumer will copy tensors to: leases are pinned for a CUDA device. The stream's tensors are on the CPU all the same."""
    raw: bool = False
    """Hand out flat uint8 tensors."""
    blocks: tuple[Block, ...] = ()
    """Tensors that share memory, each at its place (owned memory only); `TensorStream.block` gives the whole."""

    def __post_init__(self) -> None:
        if self.ownership not in ("owned", "leased"):
            raise InvalidSetting(f"ownership is {self.ownership!r}.", "It must be owned or leased.")
        if self.on_budget not in ("promote", "error"):
            raise InvalidSetting(f"on_budget is {self.on_budget!r}.", "It must be promote or error.")
        try:
            torch.device(self.device)
        except RuntimeError as error:
            raise InvalidSetting(f"device is {self.device!r}.", f"{str(error).splitlines()[0]}.") from error


@dataclass(slots=True)
class _Account:
    """What the stream has done so far. Guarded by the stream's lock."""

    num_taken: int = 0
    next_read: int = 0
    num_in_pool: int = 0
    submitted: set[int] = field(default_factory=set)


class _Patience:
    """How long one `TensorStream.take` waits for room. It waits only where there is a thread, beside ours, that could drop something."""

    def __init__(self, longest_s: float, clock: Callable[[], float]) -> None:
        self._clock = clock
        others = [
            one
            for one in threading.enumerate()
            if one is not threading.current_thread() and not one.name.startswith("headrace")
        ]
        self._end = clock() + (longest_s if others else 0.0)

    @property
    def is_over(self) -> bool:
        return self._clock() >= self._end


def readers_for(checkpoint: Checkpoint, num_bytes: int, settings: Settings) -> ReaderChoice:
    """Return who reads ``num_bytes`` of a checkpoint for this rank, where its memory can be shared."""
    store = checkpoint.store
    given = Circumstances(
        endpoint=store.endpoint,
        is_local=is_local(store),
        num_bytes=num_bytes,
        # Rounded up: readers wait for the network most of the time, so that each has use for a part of a processor.
        num_processors=math.ceil(usable_processors()) // settings.local_ranks,
    )
    return choose_readers(settings.rank_transport, given)


class TensorStream:
    """Streams ``entries`` of ``checkpoint`` in that order; a context manager and an iterator of ``(name, tensor)``.

    Each tensor is on the CPU, has the stored dtype and shape, is handed out once, and stays valid for as long as anything refers to its storage: nothing here writes to it
    before that. Memory that is allocated for tensors not yet handed out (owned), or for all that are not dropped yet (leased), stays within the memory limit plus the
    tensor that is waited for and one read. One consumer thread at a time may iterate; `take` may be called from several. The first error of any read is raised in the
    consumer. With ``owns_checkpoint`` closing the stream closes the checkpoint too. ``room`` replaces the memory that ``options`` ask for; with ``places``, which finds it in
    files, reader processes can fill it.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        entries: Sequence[Entry] | None = None,
        *,
        options: StreamOptions | None = None,
        settings: Settings | None = None,
        progress: LoadProgress | None = None,
        room: Room | None = None,
        places: SharedPlaces | None = None,
        owns_checkpoint: bool = False,
        pool: PoolFactory = open_pool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.checkpoint = checkpoint
        self.options = options or StreamOptions()
        self.settings = settings or Settings.from_environment()
        self.progress = progress or LoadProgress()
        chosen = list(checkpoint.entries.values()) if entries is None else list(entries)
        if not self.options.raw:
            for entry in chosen:
                torch_dtype(entry)  # refuse what cannot be represented before the first byte
        self._transport = self.settings.rank_transport
        available_bytes = available_memory_bytes()
        limit_bytes = stream_memory_limit(
            chosen, self.settings, ownership=self.options.ownership, available_bytes=available_bytes
        )
        read_bytes, window_bytes = fitting_reads(limit_bytes, self._transport)
        self.plan: Plan = plan_reads(
            chosen, read_bytes=read_bytes, gap_bytes=self._transport.gap_bytes, window_bytes=window_bytes
        )
        self._owns_checkpoint = owns_checkpoint
        self._clock = clock
        self._place_of = {entry.name: place for place, entry in enumerate(self.plan.entries)}
        if len(self._place_of) != len(self.plan.entries):
            raise StreamError("A tensor was asked for twice in one stream.", "Each tensor is handed out once.")
        is_hidden = room is not None and places is None
        self._readers = self._choose_readers(is_hidden=is_hidden, has_pool=pool is not open_pool)
        files = SharedFiles() if self._readers.num_processes and room is None else None
        self._room = room or self._make_room_for(chosen, limit_bytes, available_bytes, files)
        self._destinations: dict[int, Destination] = {}
        self._taken: set[int] = set()
        self._account = _Account()
        self._ahead = ReadAhead(is_limited=self.options.ownership == "leased")
        self._home = HomeProcess()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._closed = False
        self._started: float | None = None
        self._ended: float | None = None
        self._longest_wait_s = _LONGEST_WAIT_FOR_ROOM_S
        # The pool's threads live on without the stream, so nothing that they keep may refer to it: a forgotten stream must end.
        if self._readers.num_processes:
            pool = partial(
                open_pool,
                num_processes=self._readers.num_processes,
                places=files or places,
                on_demand_for_bytes=self.plan.bytes_wanted if self._readers.is_on_demand else None,
            )
        self._pool = pool(checkpoint.store, self._transport, on_bytes=self.progress.touch)
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

        Raises the load's first error, `StreamClosed`, `BudgetExceeded`, or `StreamError` for a name that is not in the plan or was handed out already.
        """
        self._home.check("A stream")
        place = self._place_of.get(name)
        if place is None:
            raise StreamError(
                f"Tensor {name!r} is not part of this stream.",
                "Only what was asked for before the first read is read.",
            )
        patience: _Patience | None = None
        with self._changed:
            self._start()
            while True:
                self._check(name, place)
                destination = self._destinations.get(place)
                if destination is not None and destination.num_reads == 0:
                    break
                if destination is None or self._unsubmitted_reads(place):
                    patience = patience or _Patience(self._longest_wait_s, self._clock)
                    if self._make_room(place, patience):
                        self._submit_now(place)
                    continue
                if self._ahead.consumer_waits():
                    self._pump()
                self._changed.wait()
            del self._destinations[place]
            self._taken.add(place)
            self._note_taken(destination.entry)
            self._pump()
        tensor = destination.tensor()
        mark(tensor)
        return tensor

    def block(self, name: str) -> torch.Tensor | None:
        """Return the memory of one of the ``blocks`` that the options name: flat uint8, filled where its tensors have been taken. None where there is no such block.

        To be asked for before the last of its tensors is taken: the stream keeps no reference to it from then on.
        """
        self._home.check("A stream")
        with self._changed:
            if not isinstance(self._room, OwnedRoom) or self._closed:
                return None
            array = self._room.block(name)
            return None if array is None else torch.from_numpy(array)

    def close(self) -> None:
        """Stop all reads, wait until every reader has acknowledged, and free what was not handed out. May be called twice, from any thread.

        In a forked child it does nothing: the reads, and the memory that they write to, are the parent's.
        """
        if not self._home.is_here:
            return
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
            self._room.close()
        if self._owns_checkpoint:
            self.checkpoint.close()

    @property
    def names_left(self) -> list[str]:
        """The names that have not been handed out, in the plan's order."""
        self._home.check("A stream")
        with self._changed:
            return [entry.name for place, entry in enumerate(self.plan.entries) if place not in self._taken]

    @property
    def report(self) -> LoadReport:
        """The account so far; final after the end or `close`."""
        self._home.check("A stream")
        pool, counters = self._pool, self._pool.counters
        with self._changed:
            account, started = self._account, self._started
            stopped = self._ended if self._ended is not None else self._clock()
            return LoadReport(
                uri=str(self.checkpoint.uri),
                snapshot_id=self.checkpoint.snapshot.id,
                ownership=self.options.ownership,
                num_files=len(self.checkpoint.files),
                num_tensors=account.num_taken,
                bytes_checkpoint=self.checkpoint.total_bytes,
                bytes_wanted=self.plan.bytes_wanted,
                bytes_read=counters.bytes_received,
                num_requests=counters.num_requests,
                num_retries=counters.num_retries,
                num_hedges=counters.num_hedges,
                num_connections=self._transport.num_connections,
                num_readers=pool.num_readers if isinstance(pool, ProcessPool) else 0,
                readers_why=(pool.why_started if isinstance(pool, ProcessPool) else "") or self._readers.why,
                seconds=0.0 if started is None else stopped - started,
                phases=dict(self.progress.phases),
                peak_staging_bytes=self._room.peak_bytes,
                num_promotions=self._room.num_promotions,
                promoted_bytes=self._room.promoted_bytes,
                settings_from=dict(self.settings.sources),
            )

    def _choose_readers(self, *, is_hidden: bool, has_pool: bool) -> ReaderChoice:
        if is_hidden or has_pool:  # Somebody else's memory, which other processes do not see.
            return ReaderChoice(0, "the caller's memory" if is_hidden else "the caller's pool")
        return readers_for(self.checkpoint, self.plan.bytes_wanted, self.settings)

    def _make_room_for(
        self, entries: Sequence[Entry], limit_bytes: int, available_bytes: int, files: SharedFiles | None
    ) -> Room:
        huge_pages = HugePages() if self.settings.huge_pages else None
        if self.options.ownership == "owned":
            return owned_room(
                entries, limit_bytes=limit_bytes, blocks=self.options.blocks, files=files, huge_pages=huge_pages
            )
        return leased_room(
            entries,
            self.settings,
            limit_bytes=limit_bytes,
            available_bytes=available_bytes,
            on_budget=self.options.on_budget,
            pinning=pinning_for(self.options.device),
            files=files,
            huge_pages=huge_pages,
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
        most = _QUEUED_PER_CONNECTION * self._transport.num_connections
        while account.next_read < len(self.plan.reads) and account.num_in_pool < most:
            if self._closed or self._error is not None or not self._ahead.may_read_on():
                return
            index = account.next_read
            if index not in account.submitted:
                for place in self._unallocated([index]):
                    array = self._room.try_allocate(self.plan.entries[place])
                    if array is None:
                        return
                    self._destinations[place] = self._destination(place, array)
                self._submit(index, first=False)
            account.next_read += 1

    def _make_room(self, place: int, patience: _Patience) -> bool:
        """Allocate what a waited-for tensor and its reads need, beyond the budget if need be; False where the lock was let go and all is to be looked at anew."""
        for needed in self._unallocated(self._unsubmitted_reads(place), place):
            entry = self.plan.entries[needed]
            array = self._room.try_allocate(entry) if entry.size_bytes else None
            if array is None and entry.size_bytes:
                if self._room.may_come_back(entry) and not patience.is_over:
                    self._changed.wait(_LOOK_FOR_ROOM_EVERY_S)
                    return False
                array = self._go_beyond(entry)
            self._destinations[needed] = self._destination(needed, array)
        return True

    def _go_beyond(self, entry: Entry) -> Bytes:
        before = self._room.num_promotions
        array = self._room.allocate_beyond(entry)
        if self._room.num_promotions > before:
            self._longest_wait_s /= 2
            if before == 0:
                logger.warning(
                    "The consumer of %s keeps tensors, so their memory cannot be lent again; more is allocated. "
                    "Copy each tensor and drop it, or ask for ownership='owned'.",
                    self.checkpoint.uri,
                )
        return array

    def _destination(self, place: int, array: Bytes | None) -> Destination:
        return Destination(
            self.plan.entries[place], array, num_reads=len(self.plan.reads_of[place]), raw=self.options.raw
        )

    def _unsubmitted_reads(self, place: int) -> list[int]:
        return [index for index in self.plan.reads_of[place] if index not in self._account.submitted]

    def _unallocated(self, reads: Sequence[int], *places: int) -> list[int]:
        """Return the entries that have no memory yet of ``places`` and of those that ``reads`` write to, in order."""
        touched = {piece.entry for index in reads for piece in self.plan.reads[index].pieces if piece.entry >= 0}
        return sorted((touched | set(places)) - self._destinations.keys())

    def _submit_now(self, place: int) -> None:
        """Hand over every read of a tensor that is being waited for, before all others."""
        for index in reversed(self._unsubmitted_reads(place)):
            self._submit(index, first=True)

    def _submit(self, index: int, *, first: bool) -> None:
        read = self.plan.reads[index]
        self._account.submitted.add(index)
        self._account.num_in_pool += 1
        job = ReadJob(
            read=RangeRead(self.checkpoint.stored(read.file), read.start, read.stop),
            pieces=lambda: self._pieces(read),
            done=lambda error: self._finished(read, error),
        )
        self._pool.submit(job, first=first)

    def _note_taken(self, entry: Entry) -> None:
        account = self._account
        self._room.handed_out(entry)
        self._ahead.handed_out(entry.size_bytes)
        account.num_taken += 1
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
        touched = set()
        for piece in read.pieces:
            if piece.entry >= 0:
                wanted += piece.size_bytes
                touched.add(piece.entry)
        for place in touched:
            destination = self._destinations.get(place)
            if destination is not None:
                destination.num_reads -= 1
        self._ahead.arrived(wanted)
        self.progress.arrived(wanted)
