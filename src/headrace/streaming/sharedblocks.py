"""Blocks that all ranks of one machine see: what one rank reads lies where the others find it, so nothing is sent. Knows blocks and ranks; knows no tensors.

One memfd holds the blocks of all windows, each at pages of its own; pages that were never written cost nothing. The first rank makes it, the others open it through
``/proc``. A rank reads into it through a shared mapping. What it hands out lies in a private mapping of the same pages: they are in memory once for all ranks, and
what a consumer writes to its tensor nobody else sees. When the last rank has dropped a block its pages go back to the system; when a rank ends, whatever way, so does its hold on them.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from headrace.process import HomeProcess
from headrace.streaming.lockstep import Lockstep, Step
from headrace.streaming.memory import Bytes
from headrace.streaming.shares import Window
from headrace.transport import SharedPlace

_MAP_NORESERVE = 0x4000
"""Linux's flag on x86 and ARM, which Python names from 3.12 on."""


@dataclass(frozen=True, slots=True)
class SharedFile:
    """Where the others find the memfd: as three numbers, all of them 0 where there is none."""

    pid: int = 0
    descriptor: int = 0
    inode: int = 0

    def numbers(self) -> tuple[int, ...]:
        return self.pid, self.descriptor, self.inode


class SharedBlocks:
    """This rank's view of the blocks of ``windows``. Any thread.

    Make it with `create` on the first rank and with `open` on the others. `allocate` gives a block to be filled, `hand_out` the same one to be kept, once all ranks have
    filled their parts of it.
    """

    def __init__(self, descriptor: int, windows: Sequence[Window], *, rank: int, num_ranks: int) -> None:
        """Map the memfd of ``descriptor``, which stays the caller's. Raises OSError or ValueError where that cannot be."""
        self._rank, self._num_ranks = rank, num_ranks
        self._places = _places_of(windows)
        size_bytes = _size_of(windows, num_ranks)
        writable = mmap.PROT_READ | mmap.PROT_WRITE
        self._shared = mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED, prot=writable)
        # Not reserved: the system would want room for a second copy of everything, which only a consumer that writes needs.
        flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
        self._private = mmap.mmap(descriptor, size_bytes, flags=flags, prot=writable)
        self._start = _address_of(self._shared)
        self._place = SharedPlace(0, os.dup(descriptor), size_bytes, 0)
        weakref.finalize(self, os.close, self._place.descriptor).atexit = False
        self._drops = _Drops(self._shared, len(self._places), rank=rank, num_ranks=num_ranks)

    @classmethod
    def create(cls, windows: Sequence[Window], *, num_ranks: int) -> tuple[SharedBlocks, SharedFile, int]:
        """Return the first rank's blocks, where the others find them, and the descriptor, to be closed once they have. Raises OSError where there is no such memory."""
        descriptor = os.memfd_create("headrace-ranks", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, _size_of(windows, num_ranks))
            blocks = cls(descriptor, windows, rank=0, num_ranks=num_ranks)
        except BaseException:
            os.close(descriptor)
            raise
        return blocks, SharedFile(os.getpid(), descriptor, os.fstat(descriptor).st_ino), descriptor

    @classmethod
    def open(cls, file: SharedFile, windows: Sequence[Window], *, rank: int, num_ranks: int) -> SharedBlocks:
        """Return another rank's blocks. Raises OSError where ``file`` is not to be found from here, as in another container, or ValueError where it is another one."""
        descriptor = os.open(f"/proc/{file.pid}/fd/{file.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            facts = os.fstat(descriptor)
            if (facts.st_ino, facts.st_size) != (file.inode, _size_of(windows, num_ranks)):
                raise ValueError("another process has that number here")
            return cls(descriptor, windows, rank=rank, num_ranks=num_ranks)
        finally:
            os.close(descriptor)

    def find(self, piece: memoryview) -> SharedPlace | None:
        """Return where ``piece`` of a block that is filled lies in the memfd, for a reader process; None where it lies elsewhere."""
        if not piece.nbytes or piece.readonly:
            return None
        offset = _address_of(piece) - self._start
        return replace(self._place, offset=offset) if 0 <= offset < self._place.size_bytes else None

    def allocate(self, window: int, block: int) -> Bytes:
        """Return the memory of one block, which this rank fills where it is its part."""
        _, start, size_bytes = self._places[window, block]
        return np.frombuffer(self._shared, dtype=np.uint8, count=size_bytes, offset=start)

    def hand_out(self, window: int, block: int) -> Bytes:
        """Return one block with what all ranks have read, for this rank to keep and to write to. It and its views own the memory."""
        number, start, size_bytes = self._places[window, block]
        pages = _rounded_up(size_bytes)
        self._shared.madvise(mmap.MADV_DONTNEED, start, pages)  # no second mapping of what stays; the bytes do
        array = np.frombuffer(self._private, dtype=np.uint8, count=size_bytes, offset=start)
        drop = weakref.finalize(array, self._drops.drop, self._private, number, start, pages)
        drop.atexit = False
        return array


def share_blocks(windows: Sequence[Window], lockstep: Lockstep, neighbours: Sequence[int]) -> SharedBlocks | None:
    """Return blocks that all ``neighbours`` see, ranks of ``lockstep`` on this machine; None, on every rank, where one of them cannot see the first neighbour's memory.

    Every rank must call this, with its own neighbours. Raises `RankFailed` where a rank fails or vanishes meanwhile.
    """
    rank, num_ranks = neighbours.index(lockstep.link.rank), len(neighbours)
    made: list[tuple[SharedBlocks, SharedFile, int]] = []
    found: list[SharedBlocks] = []

    def create() -> None:
        if rank == 0:
            with contextlib.suppress(OSError, ValueError):
                made.append(SharedBlocks.create(windows, num_ranks=num_ranks))

    def find() -> None:
        if rank == 0:
            found.extend(blocks for blocks, *_ in made)
        elif file.inode:
            with contextlib.suppress(OSError, ValueError):
                found.append(SharedBlocks.open(file, windows, rank=rank, num_ranks=num_ranks))

    try:
        told = lockstep.run(Step(name="planning", work=create, numbers=lambda: made[0][1].numbers() if made else ()))
        file = SharedFile(*told[neighbours[0]].numbers[:3])
        told = lockstep.run(Step(name="planning", work=find, numbers=lambda: (len(found),)))
    finally:
        for *_, descriptor in made:
            os.close(descriptor)
    return found[0] if all(status.numbers[0] for status in told) else None


class _Drops:
    """Who has dropped which block: a byte for each rank and block, behind the blocks. Each rank writes its own bytes only."""

    def __init__(self, shared: mmap.mmap, num_blocks: int, *, rank: int, num_ranks: int) -> None:
        self._shared = shared
        self._rank = rank
        self._home = HomeProcess()
        self._lock = threading.Lock()
        self._table = np.frombuffer(shared, dtype=np.uint8, offset=len(shared) - _rounded_up(num_ranks * num_blocks))
        self._table = self._table[: num_ranks * num_blocks].reshape(num_ranks, num_blocks)
        self._dropped: deque[tuple[int, int, int]] = deque()
        self._waiting: dict[int, tuple[int, int]] = {}

    def drop(self, private: mmap.mmap, number: int, start: int, pages: int) -> None:
        """Give back this rank's pages of a block; the last rank to do so gives back the memory itself."""
        if not self._home.is_here:
            return  # A forked child drops its own references only.
        with contextlib.suppress(ValueError):  # closed already
            private.madvise(mmap.MADV_DONTNEED, start, pages)
        self._dropped.append((number, start, pages))
        # Whoever has the lock looks again after it has let it go. Not waited for: the collector may run this in a thread that is inside it.
        while self._dropped and self._lock.acquire(blocking=False):
            try:
                self._count_in()
            finally:
                self._lock.release()

    def _count_in(self) -> None:
        while self._dropped:
            number, start, pages = self._dropped.popleft()
            self._table[self._rank, number] = 1
            self._waiting[number] = (start, pages)
        # Two ranks that drop the last of a block at the same moment may each miss the other's byte, so what waits is looked at with each that is dropped.
        for number, (start, pages) in list(self._waiting.items()):
            if self._table[:, number].all():
                self._shared.madvise(mmap.MADV_REMOVE, start, pages)
                del self._waiting[number]


def _address_of(memory: mmap.mmap | memoryview) -> int:
    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)


def _places_of(windows: Sequence[Window]) -> dict[tuple[int, int], tuple[int, int, int]]:
    """Return, by window and block: the block's number, where it starts in the file, and its size."""
    places: dict[tuple[int, int], tuple[int, int, int]] = {}
    start = 0
    for window, one in enumerate(windows):
        for block, what in enumerate(one.blocks):
            places[window, block] = (len(places), start, what.size_bytes)
            start += _rounded_up(what.size_bytes)
    return places


def _size_of(windows: Sequence[Window], num_ranks: int) -> int:
    blocks = [block for window in windows for block in window.blocks]
    return sum(_rounded_up(block.size_bytes) for block in blocks) + _rounded_up(num_ranks * len(blocks))


def _rounded_up(number: int) -> int:
    return -(-number // mmap.PAGESIZE) * mmap.PAGESIZE
