"""Ranks that load together: each reads a share for all of its machine, or of the group, so that these read every byte once and every rank gets every tensor.

Entries are loaded window by window (`headrace.streaming.shares`). Each rank streams its shares into the memory where their tensors will stay, reading ahead of the group; when
all have read their share of a window, the others find it in the same memory (`headrace.streaming.sharedblocks`), or, where the ranks of several machines share, each segment is broadcast
from its reader into the same place of everybody's memory. In between, ranks tell each other how they are (`headrace.streaming.lockstep`). What could differ between ranks is compared or agreed on before the first read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Literal

import torch

from headrace.checkpoint import Checkpoint, Entry
from headrace.errors import InvalidSetting, StreamClosed, StreamError
from headrace.process import HomeProcess
from headrace.progress import LoadProgress
from headrace.settings import Settings
from headrace.streaming.agreement import Agreement, Facts, agree, facts_of, settings_of_rank
from headrace.streaming.blocks import BlockRoom, OwnBlocks, blocks_in_file
from headrace.streaming.hugepages import HugePages
from headrace.streaming.lockstep import NUM_NUMBERS, Lockstep, Status, Step
from headrace.streaming.memory import Bytes, Memory, PrivateMemory
from headrace.streaming.report import LoadReport, RankReport
from headrace.streaming.sharedblocks import SharedBlocks, share_blocks
from headrace.streaming.shares import parts_of, plan_windows
from headrace.streaming.stream import PoolFactory, StreamOptions, TensorStream, readers_for
from headrace.streaming.tensors import Destination, mark, torch_dtype
from headrace.transport import SharedPlaces, open_pool

Exchange = Literal["auto", "shared", "broadcast"]
"""How what one rank read comes to the others."""
Scope = Literal["node", "group"]
"""Among whom every byte is read once: the ranks of the group on each machine, or the whole group."""


def check_scope(scope: Scope) -> None:
    """Raise `InvalidSetting` for what is no scope."""
    if scope not in ("node", "group"):
        raise InvalidSetting(f"scope is {scope!r}.", "It must be node or group.")


class DistributedStream:
    """Streams ``entries`` of ``checkpoint`` to every rank of a group; used as `TensorStream` is, by all ranks in the same way.

    Every rank gets the same tensors. Each is on the CPU, has the stored dtype and shape, is handed out once and owns its memory, whatever ``options`` say of ownership: what a
    consumer drops goes back to the system. A rank holds one window and what it reads ahead, within its part of the memory limit or, where that is less, 1 MiB for each rank of the group
    or the largest tensor. Tensors may be taken out of order; all before the one that is asked for are then held until they are asked for.

    The group is used inside the constructor, `take` (or the iterator) and `close`, and never in between. The first failure of any rank is raised on all: `RankFailed`, or on that rank its
    own error. A rank that wants no more must close the stream, best by a ``with`` block: the others then raise `RankFailed`, unless they stop at the same window.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        entries: Sequence[Entry] | None = None,
        *,
        lockstep: Lockstep,
        options: StreamOptions | None = None,
        settings: Settings | None = None,
        progress: LoadProgress | None = None,
        memory: Memory | None = None,
        exchange: Exchange = "auto",
        scope: Scope = "node",
        owns_checkpoint: bool = False,
        pool: PoolFactory = open_pool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Agree with the other ranks on what is read, in which windows, and on how it is exchanged; every rank of the group constructs its stream, or none returns.

        ``scope`` says who shares: ``node``, the ranks of each machine among themselves, so that each machine reads everything once; or ``group``, all ranks, so that what one machine
        reads is sent to the others. ``exchange`` is ``shared`` for memory that the ranks of a machine map, ``broadcast`` over the group, or ``auto``: shared where all who share are on one
        machine and can see it. Where neighbours cannot see each other's memory, the group shares by broadcast. ``memory`` is where tensors lie that are broadcast; where it is given
        nothing is mapped.
        """
        self.checkpoint = checkpoint
        self.options = options or StreamOptions()
        self.settings = settings or Settings.from_environment()
        self.progress = progress or LoadProgress()
        self.entries = tuple(checkpoint.entries.values()) if entries is None else tuple(entries)
        self._lockstep = lockstep
        self._owns_checkpoint = owns_checkpoint
        self._pool = pool
        self._clock = clock
        self._place_of = {entry.name: place for place, entry in enumerate(self.entries)}
        self._agreement = self._agree()
        self._sharers = tuple(range(lockstep.link.num_ranks))
        """The ranks that read each byte once among themselves."""
        self._places: SharedPlaces | None = None
        blocks = self._choose_blocks(exchange, scope, memory)
        if not self.windows:
            lockstep.is_over = True  # there is nothing to exchange
        self.exchange: Exchange = "shared" if isinstance(blocks, SharedBlocks) else "broadcast"
        self._room = BlockRoom(self.windows, self._parts, blocks, limit_bytes=self._agreement.ahead_bytes)
        self._own: TensorStream | None = None
        self._own_progress = LoadProgress(clock=clock)
        self._arrived: dict[int, Bytes] = {}
        self._taken: set[int] = set()
        self._next_window = 0
        self._statuses: Sequence[Status] = ()
        self._bytes_heard = 0
        self._peak_bytes = 0
        self._reading_s = 0.0
        self._waiting_s = 0.0
        self._started: float | None = None
        self._ended: float | None = None
        self._error: Exception | None = None
        self._is_closed = False
        self._home = HomeProcess()
        self._lock = threading.RLock()
        self.progress.bytes_wanted += self.bytes_wanted

    # -- the consumer's side

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what has not been handed out yet, in order; the end closes the stream."""
        for place, entry in enumerate(self.entries):
            if place not in self._taken:
                yield entry.name, self.take(entry.name)
        self.close()

    def __enter__(self) -> DistributedStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(error)

    def __del__(self) -> None:
        if hasattr(self, "_lock") and self._home.is_here:
            self._shut()  # A collective cannot be begun here: nobody knows when this runs.

    def take(self, name: str) -> torch.Tensor:
        """Wait for one tensor and hand it out; the stream keeps no reference to it. Exchanges windows with the other ranks until that one has come.

        Raises the first error of any rank, `StreamClosed`, or `StreamError` for a name that is not part of the stream or was handed out already.
        """
        self._home.check("A stream")
        with self._lock:
            place = self._place(name)
            while place not in self._arrived and self.entries[place].size_bytes:
                self._check_open(name)
                self._exchange_window()
            self._check_open(name)
            self._started = self._clock() if self._started is None else self._started
            array = self._arrived.pop(place, None)
            self._taken.add(place)
            if len(self._taken) == len(self.entries):
                self._ended = self._clock()
        tensor = Destination(self.entries[place], array, num_reads=0, raw=self.options.raw).tensor()
        mark(tensor)
        return tensor

    def close(self) -> None:
        """Tell the other ranks where they expect more, stop all reads and free what was not handed out. May be called twice, from any thread.

        Waits up to ten seconds for ranks that are busy elsewhere; those learn of it when they next ask for a tensor. In a forked child it does nothing.
        """
        self._end(None)

    @property
    def names_left(self) -> list[str]:
        """The names that have not been handed out, in order."""
        return [entry.name for place, entry in enumerate(self.entries) if place not in self._taken]

    @property
    def bytes_wanted(self) -> int:
        """Tensor bytes that each rank gets."""
        return sum(entry.size_bytes for entry in self.entries)

    @property
    def bytes_read_by_rank(self) -> tuple[int, ...]:
        """Body bytes that each rank has read, as of the last exchange; complete when the last window has come."""
        return tuple(status.numbers[1] for status in self._statuses)

    @property
    def report(self) -> LoadReport:
        """The account so far: bytes, requests and connections of all ranks together, as of the last exchange; memory and time of this one."""
        sums = [sum(column) for column in zip(*(status.numbers for status in self._statuses), strict=True)]
        _, bytes_read, num_requests, num_retries, num_hedges, *_ = sums or [0] * NUM_NUMBERS
        own = None if self._own is None else self._own.report
        started = self._started
        stopped = self._ended if self._ended is not None else self._clock()
        return LoadReport(
            uri=str(self.checkpoint.uri),
            snapshot_id=self.checkpoint.snapshot.id,
            num_files=len(self.checkpoint.files),
            num_tensors=len(self._taken),
            bytes_checkpoint=self.checkpoint.total_bytes,
            bytes_wanted=self.bytes_wanted,
            bytes_read=bytes_read,
            num_requests=num_requests,
            num_retries=num_retries,
            num_hedges=num_hedges,
            num_connections=settings_of_rank(self.settings, self._agreement).rank_transport.num_connections
            * self._lockstep.link.num_ranks,
            num_readers=0 if own is None else own.num_readers,
            readers_why="" if own is None else f"{own.readers_why}, this rank",
            seconds=0.0 if started is None else stopped - started,
            phases=dict(self.progress.phases),
            peak_staging_bytes=self._peak_bytes,
            settings_from=dict(self.settings.sources),
            exchange=self.exchange,
            ranks=tuple(self._account_of(rank, status) for rank, status in enumerate(self._statuses)),
        )

    def _account_of(self, rank: int, status: Status) -> RankReport:
        bytes_done, bytes_read, *_, reading_ms, waiting_ms = status.numbers
        return RankReport(
            rank=rank,
            bytes_read=bytes_read,
            bytes_received=sum(self._statuses[other].numbers[0] for other in self._sharers_of(rank)) - bytes_done,
            seconds_reading=reading_ms / 1e3,
            seconds_waiting=waiting_ms / 1e3,
        )

    # -- what the ranks agree on

    def _agree(self) -> Agreement:
        facts: list[Facts] = []

        def work() -> None:
            self._check_options()
            facts.append(facts_of(self.checkpoint, self.entries, self.settings, raw=self.options.raw))

        # What is told before the work is done is not looked at, but must not be mistaken for facts.
        step = Step(name="planning", work=work, numbers=lambda: facts[0].numbers() if facts else ())
        told = [Facts.from_numbers(status.numbers) for status in self._lockstep.run(step)]
        try:
            agreement = agree(told, uri=str(self.checkpoint.uri), snapshot_id=self.checkpoint.snapshot.id)
        except StreamError:
            self._lockstep.is_over = True  # on every rank: all have the same facts
            raise
        self._lockstep.key = told[0].entries
        return agreement

    def _plan(self, sharers: tuple[int, ...], most_ranks: int) -> None:
        """Divide the reading among ``sharers``."""
        self._sharers = sharers
        self.windows = plan_windows(
            self.entries, num_ranks=len(sharers), window_bytes=self._agreement.window_bytes, most_ranks=most_ranks
        )
        place = sharers.index(self._lockstep.link.rank)
        self._parts = [tuple(parts_of(window, self.entries, place)) for window in self.windows]

    def _sharers_of(self, rank: int) -> tuple[int, ...]:
        return self._sharers if rank in self._sharers else self._agreement.neighbours(rank)

    def _choose_blocks(self, exchange: Exchange, scope: Scope, memory: Memory | None) -> SharedBlocks | OwnBlocks:
        if exchange not in ("auto", "shared", "broadcast"):
            raise InvalidSetting(f"exchange is {exchange!r}.", "It must be auto, shared or broadcast.")
        check_scope(scope)
        everybody = tuple(range(self._lockstep.link.num_ranks))
        neighbours = self._agreement.neighbours(self._lockstep.link.rank)
        is_one_host = neighbours == everybody
        may_map = memory is None and exchange != "broadcast" and (scope == "node" or is_one_host)
        if may_map:
            self._plan(neighbours, self._agreement.most_neighbours)
            shared = share_blocks(self.windows, self._lockstep, neighbours) if self.windows else None
            if shared is not None:
                self._places = shared
                return shared
        self._plan(everybody, len(everybody))
        if memory is None and self._may_have_readers():
            blocks, self._places = blocks_in_file(self.windows)
            return blocks
        return OwnBlocks(self.windows, memory or PrivateMemory(HugePages() if self.settings.huge_pages else None))

    def _may_have_readers(self) -> bool:
        num_bytes = sum(part.entry.size_bytes for parts in self._parts for part in parts)
        settings = settings_of_rank(self.settings, self._agreement)
        return readers_for(self.checkpoint, num_bytes, settings).num_processes > 0

    def _check_options(self) -> None:
        if self.options.ownership == "leased" and self.options.on_budget == "error":
            raise InvalidSetting(
                "on_budget='error' cannot be kept to where ranks load together.",
                "Tensors then own their memory, so keeping them exceeds no budget.",
                "Leave on_budget out, or pass distributed=False.",
            )
        if len(self._place_of) != len(self.entries):
            raise StreamError("A tensor was asked for twice in one stream.", "Each tensor is handed out once.")
        if not self.options.raw:
            for entry in self.entries:
                torch_dtype(entry)  # refuse what cannot be represented before the first byte

    # -- windows

    def _exchange_window(self) -> None:
        """Read this rank's share of the next window, exchange it, and take in the window's tensors."""
        number = self._next_window
        window = self.windows[number]
        began, reading_s = self._clock(), self._reading_s
        self._started = self._clock() if self._started is None else self._started
        step = Step(
            name="loading weights",
            work=lambda: self._read_share(number),
            numbers=self._numbers,
            heard=self._heard,
            finish=lambda: self._broadcast(number) if self.exchange == "broadcast" else None,
            cancel=self._cancel,
            is_last=number == len(self.windows) - 1,
        )
        try:
            self._lockstep.run(step)
        except BaseException as error:
            self._error = error if isinstance(error, Exception) else None
            self._cancel()
            raise
        self._waiting_s += self._clock() - began - (self._reading_s - reading_s)
        if self._is_closed:  # by another thread, when the others could no longer hear of it in this step
            return
        self._next_window += 1
        for block, array in zip(window.blocks, self._room.release(number), strict=True):
            for place, offset in zip(block.places, block.offsets, strict=True):
                self._arrived[place] = array[offset : offset + self.entries[place].size_bytes]
        if step.is_last and self._own is not None:
            self._own.close()

    def _read_share(self, number: int) -> None:
        began = self._clock()
        own = self._own = self._own or self._open_own()
        for part in self._parts[number]:
            own.take(part.entry.name)
        # Here and not at the broadcast: memory that cannot be had is a failure of this rank, and the others must hear of it.
        for block in range(len(self.windows[number].blocks)):
            self._room.array_of(number, block)
        self._note_memory(number)
        self._reading_s += self._clock() - began

    def _open_own(self) -> TensorStream:
        stream = TensorStream(
            self.checkpoint,
            [part.entry for parts in self._parts for part in parts],
            options=StreamOptions(raw=True),
            settings=settings_of_rank(self.settings, self._agreement),
            progress=self._own_progress,
            room=self._room,
            places=self._places,
            pool=self._pool,
            clock=self._clock,
        )
        progress = self._own_progress  # not self: what outlives the stream must not keep it alive
        self.progress.describe_holdup = lambda: progress.describe_holdup()
        return stream

    def _broadcast(self, number: int) -> None:
        for segment in self.windows[number].segments:
            array = self._room.array_of(number, segment.block)
            self._lockstep.link.broadcast(array[segment.start : segment.stop], segment.rank)
        self._note_memory(number)

    def _note_memory(self, number: int) -> None:
        waiting = sum(len(array) for array in self._arrived.values())
        in_use = self.windows[number].size_bytes + self._room.ahead_bytes + waiting
        self._peak_bytes = max(self._peak_bytes, in_use, self._room.peak_bytes)

    def _numbers(self) -> tuple[int, ...]:
        if self._own is None:
            return ()
        report = self._own.report
        return (
            self._own_progress.bytes_done,
            report.bytes_read,
            report.num_requests,
            report.num_retries,
            report.num_hedges,
            round(self._reading_s * 1e3),
            round(self._waiting_s * 1e3),
        )

    def _heard(self, statuses: Sequence[Status]) -> None:
        self._statuses = statuses
        bytes_done = sum(statuses[rank].numbers[0] for rank in self._sharers)
        if bytes_done > self._bytes_heard:
            self.progress.arrived(bytes_done - self._bytes_heard)
            self._bytes_heard = bytes_done

    # -- the end

    def _place(self, name: str) -> int:
        place = self._place_of.get(name)
        if place is None:
            raise StreamError(
                f"Tensor {name!r} is not part of this stream.",
                "Only what was asked for before the first read is read.",
            )
        if place in self._taken:
            raise StreamError(
                f"Tensor {name!r} was handed out already.", "Each tensor is handed out once; keep the one you got."
            )
        return place

    def _check_open(self, name: str) -> None:
        if self._error is not None:
            raise self._error
        if self._is_closed:
            raise StreamClosed(f"Tensor {name!r} was asked for after the stream had been closed.")

    def _cancel(self) -> None:
        if self._own is not None:
            self._own.close()

    def _end(self, error: BaseException | None) -> None:
        if not self._home.is_here:
            return
        already, self._is_closed = self._is_closed, True
        if already:
            return
        self._lockstep.interrupt()
        # Not for ever: another thread may be in an exchange that the other ranks do not come to.
        is_ours = self._lock.acquire(timeout=self._lockstep.leave_after_s)
        try:
            if is_ours:
                self._lockstep.stop(error)
            self._shut()
        finally:
            if is_ours:
                self._lock.release()

    def _shut(self) -> None:
        if self._ended is None and self._started is not None:
            self._ended = self._clock()
        self._cancel()
        self._arrived.clear()
        if self._owns_checkpoint:
            self.checkpoint.close()
