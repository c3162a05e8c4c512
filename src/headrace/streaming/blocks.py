"""Memory for what ranks exchange: whole blocks, each allocated once, which one rank's reads and the others' broadcasts fill in place."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from headrace.checkpoint import Entry
from headrace.streaming.memory import Bytes, Memory, SharedFiles, SharedMemory, capacity_for
from headrace.streaming.shares import Part, Window
from headrace.units import UNLIMITED


class Blocks(Protocol):
    """The memory of blocks, by window and place in it. Any thread."""

    def allocate(self, window: int, block: int) -> Bytes:
        """Return the memory of one block, to be filled. Called once for each."""

    def hand_out(self, window: int, block: int) -> Bytes:
        """Return the memory of one block that was filled, for tensors that own it. Called once for each, after `allocate`."""


class OwnBlocks:
    """Blocks of this rank alone, out of ``memory``."""

    def __init__(self, windows: Sequence[Window], memory: Memory) -> None:
        self._windows = windows
        self._memory = memory
        self._arrays: dict[tuple[int, int], Bytes] = {}

    def allocate(self, window: int, block: int) -> Bytes:
        array = self._memory.allocate(self._windows[window].blocks[block].size_bytes)
        self._arrays[window, block] = array
        return array

    def hand_out(self, window: int, block: int) -> Bytes:
        return self._arrays.pop((window, block))


def blocks_in_file(windows: Sequence[Window]) -> tuple[OwnBlocks, SharedFiles]:
    """Return blocks of this rank alone in a file, and what finds them there: reader processes can fill them. Pages that were never written cost nothing."""
    files = SharedFiles()
    capacity_bytes = capacity_for(block.size_bytes for window in windows for block in window.blocks)
    return OwnBlocks(windows, SharedMemory(capacity_bytes, files)), files


class BlockRoom:
    """Room for the parts that one rank reads: each goes to its place in the block where its tensor will stay. The limit bounds what is read ahead."""

    num_promotions: int = 0
    promoted_bytes: int = 0

    def __init__(
        self, windows: Sequence[Window], parts: Sequence[Sequence[Part]], blocks: Blocks, *, limit_bytes: int
    ) -> None:
        self._windows = windows
        self._blocks = blocks
        self._limit_bytes = limit_bytes
        self._where = {part.entry: (number, part) for number, some in enumerate(parts) for part in some}
        self._arrays: dict[tuple[int, int], Bytes] = {}
        self._lock = threading.Lock()
        self._ahead_bytes = 0
        self._peak_bytes = 0

    @property
    def peak_bytes(self) -> int:
        return self._peak_bytes

    @property
    def ahead_bytes(self) -> int:
        """How much is allocated for parts that have not been taken for their window yet."""
        return self._ahead_bytes

    def try_allocate(self, entry: Entry) -> Bytes | None:
        is_too_much = self._ahead_bytes + entry.size_bytes > self._limit_bytes != UNLIMITED
        return None if self._ahead_bytes and is_too_much else self.allocate_beyond(entry)

    def allocate_beyond(self, entry: Entry) -> Bytes:
        number, part = self._where[entry]
        array = self.array_of(number, part.block)
        # Only what is read here counts: the rest of the block costs nothing before it is written to.
        self._ahead_bytes += entry.size_bytes
        self._peak_bytes = max(self._peak_bytes, self._ahead_bytes)
        return array[part.offset : part.offset + entry.size_bytes]

    def may_come_back(self, entry: Entry) -> bool:
        return False

    def handed_out(self, entry: Entry) -> None:
        self._ahead_bytes -= entry.size_bytes

    def array_of(self, window: int, block: int) -> Bytes:
        """Return the memory of one block. May be called from any thread."""
        with self._lock:
            array = self._arrays.get((window, block))
            if array is None:
                array = self._arrays[window, block] = self._blocks.allocate(window, block)
            return array

    def release(self, window: int) -> list[Bytes]:
        """Return the memory of a window's blocks, which all are filled, and keep it no longer."""
        with self._lock:
            numbers = range(len(self._windows[window].blocks))
            for block in numbers:
                del self._arrays[window, block]
            return [self._blocks.hand_out(window, block) for block in numbers]

    def close(self) -> None:
        with self._lock:
            self._arrays.clear()
