"""Room for tensors on their way: memory of their own within a read-ahead budget, or leases. What the stream asks before it allocates; knows no reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from headrace.checkpoint import Entry
from headrace.errors import BudgetExceeded
from headrace.settings import Settings, TransportSettings
from headrace.streaming.hugepages import HugePages
from headrace.streaming.leases import LeasedMemory, LeaseTerms, OnBudget, Pinning
from headrace.streaming.memory import (
    ALIGNMENT,
    Bytes,
    Memory,
    PrivateMemory,
    SharedFiles,
    SharedMemory,
    capacity_for,
    default_memory_limit,
)
from headrace.units import GIB, KIB, MIB, UNLIMITED, format_bytes

Ownership = Literal["owned", "leased"]

LONGEST_WINDOW_BYTES = 64 * MIB
_MOST_HELD = 3
"""How many times the largest tensor leases need room for: what is free beside one that is held, on one side of it or the other, is then enough for the next."""
_SMALLEST_READ_BYTES = 64 * KIB
_LEAST_PINNED_BYTES = GIB


class Room(Protocol):
    """Gives out memory for entries. The stream's lock guards it."""

    @property
    def num_promotions(self) -> int:
        """How often more was allocated because the consumer keeps tensors."""

    @property
    def promoted_bytes(self) -> int:
        """How much that was."""

    @property
    def peak_bytes(self) -> int:
        """Most memory that was in use at one time for tensors that the stream still answers for."""

    def try_allocate(self, entry: Entry) -> Bytes | None:
        """Return memory for ``entry`` within the budget; None where there is no room now."""

    def allocate_beyond(self, entry: Entry) -> Bytes:
        """Return memory for ``entry``, which is being waited for, whatever the budget says. Raises `BudgetExceeded` where even that has an end."""

    def may_come_back(self, entry: Entry) -> bool:
        """Whether waiting can make room for ``entry``: somebody holds memory that may return."""

    def handed_out(self, entry: Entry) -> None:
        """Note that the consumer has the tensor."""

    def close(self) -> None:
        """Give back what is not in anybody's hands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Memory that several tensors share, so that together they make one: the experts of a layer, each at its place in a stack."""

    name: str
    size_bytes: int
    offsets: Mapping[str, int]
    """Entry's name → where its bytes begin in the block. Entries may not overlap."""


class OwnedRoom:
    """Each tensor gets memory of its own, or its place in a block. The budget bounds what is read ahead: allocated and not yet handed out.

    A block's memory is mapped as a whole when its first tensor comes, but exists only where bytes have come; so it is counted tensor by tensor.
    """

    num_promotions: int = 0
    promoted_bytes: int = 0

    def __init__(self, memory: Memory, *, limit_bytes: int, blocks: Sequence[Block] = ()) -> None:
        self._memory = memory
        self._limit_bytes = limit_bytes
        self._block_of = {name: block for block in blocks for name in block.offsets}
        self._blocks = {block.name: block for block in blocks}
        self._mapped: dict[str, Bytes] = {}
        self._num_left = {block.name: len(block.offsets) for block in blocks}
        self._staging_bytes = 0
        self._peak_bytes = 0

    @property
    def peak_bytes(self) -> int:
        return self._peak_bytes

    def try_allocate(self, entry: Entry) -> Bytes | None:
        if (
            self._staging_bytes
            and self._limit_bytes != UNLIMITED
            and self._staging_bytes + entry.size_bytes > self._limit_bytes
        ):
            return None
        return self.allocate_beyond(entry)

    def allocate_beyond(self, entry: Entry) -> Bytes:
        block = self._block_of.get(entry.name)
        if block is None:
            array = self._memory.allocate(entry.size_bytes)
        else:
            start = block.offsets[entry.name]
            array = self._map(block)[start : start + entry.size_bytes]
        self._staging_bytes += entry.size_bytes
        self._peak_bytes = max(self._peak_bytes, self._staging_bytes)
        return array

    def block(self, name: str) -> Bytes | None:
        """Return the memory of a block, None where there is no such block or all its tensors are handed out. Whoever keeps it, or a tensor in it, keeps all of it."""
        return self._map(self._blocks[name]) if self._num_left.get(name) else None

    def _map(self, block: Block) -> Bytes:
        found = self._mapped.get(block.name)
        if found is None:
            found = self._mapped[block.name] = self._memory.allocate(block.size_bytes)
        return found

    def may_come_back(self, entry: Entry) -> bool:
        return False

    def handed_out(self, entry: Entry) -> None:
        self._staging_bytes -= entry.size_bytes
        block = self._block_of.get(entry.name)
        if block is not None:
            self._num_left[block.name] -= 1
            if not self._num_left[block.name]:
                self._mapped.pop(block.name, None)

    def close(self) -> None:
        self._staging_bytes = 0
        self._mapped.clear()


class LeasedRoom:
    """Tensors borrow memory, which is used again when they are gone."""

    def __init__(self, memory: LeasedMemory) -> None:
        self._memory = memory

    @property
    def num_promotions(self) -> int:
        return self._memory.num_promotions

    @property
    def promoted_bytes(self) -> int:
        return self._memory.promoted_bytes

    @property
    def peak_bytes(self) -> int:
        return self._memory.peak_bytes

    def try_allocate(self, entry: Entry) -> Bytes | None:
        return self._memory.try_allocate(entry.size_bytes, entry.name)

    def allocate_beyond(self, entry: Entry) -> Bytes:
        return self._memory.allocate_beyond(entry.size_bytes, entry.name)

    def may_come_back(self, entry: Entry) -> bool:
        return not self._memory.is_oversized(entry.size_bytes)

    def handed_out(self, entry: Entry) -> None:
        """Nothing to note: the lease itself says when it is over."""

    def close(self) -> None:
        self._memory.close()


def rank_memory_limit(settings: Settings, *, available_bytes: int) -> int:
    """Return this rank's share of the node's memory limit, in bytes; `UNLIMITED` stays that, and 0 asks for the smallest that works."""
    limit = settings.memory_limit_bytes
    if limit is None:
        limit = default_memory_limit(available_bytes)
    return limit if limit == UNLIMITED else limit // settings.local_ranks


def stream_memory_limit(
    entries: Sequence[Entry], settings: Settings, *, ownership: Ownership, available_bytes: int
) -> int:
    """Return the limit for a stream of ``entries``: `rank_memory_limit`, with the smallest that works in place of 0.

    For leases that is the largest tensor three times (a consumer holds one while it asks for the next, and the one that it holds may lie in the middle) and a short read; for owned memory it is 0: nothing is read ahead of the
    tensor that is waited for.
    """
    limit = rank_memory_limit(settings, available_bytes=available_bytes)
    if limit == 0 and ownership == "leased":
        return _MOST_HELD * max((entry.size_bytes for entry in entries), default=0) + _SMALLEST_READ_BYTES
    return limit


def fitting_reads(limit_bytes: int, transport: TransportSettings) -> tuple[int, int]:
    """Return the longest read and the longest stretch to be read out of order that ``limit_bytes`` of memory leave room for."""
    if limit_bytes == UNLIMITED:
        return transport.read_bytes, LONGEST_WINDOW_BYTES
    read_bytes = min(transport.read_bytes, max(limit_bytes // 4, _SMALLEST_READ_BYTES))
    return read_bytes, min(LONGEST_WINDOW_BYTES, max(limit_bytes // 2, 1))


def owned_room(
    entries: Sequence[Entry],
    *,
    limit_bytes: int,
    blocks: Sequence[Block] = (),
    files: SharedFiles | None = None,
    huge_pages: HugePages | None = None,
) -> OwnedRoom:
    """Return room for tensors of ``entries`` that own their memory: this process's own, made of ``huge_pages`` where they pay, or a file among ``files``."""
    memory: Memory = PrivateMemory(huge_pages)
    if files is not None:
        in_blocks = {name for block in blocks for name in block.offsets}
        alone = (entry.size_bytes for entry in entries if entry.name not in in_blocks)
        memory = SharedMemory(capacity_for([*alone, *(block.size_bytes for block in blocks)]), files)
    return OwnedRoom(memory, limit_bytes=limit_bytes, blocks=blocks)


def leased_room(
    entries: Sequence[Entry],
    settings: Settings,
    *,
    limit_bytes: int,
    available_bytes: int,
    on_budget: OnBudget,
    pinning: Pinning | None,
    files: SharedFiles | None = None,
    huge_pages: HugePages | None = None,
) -> LeasedRoom:
    """Return room for leases of ``entries`` within ``limit_bytes``.

    Raises `BudgetExceeded`, before anything is read, where ``on_budget`` is "error" and a tensor could not be lent within the limit, or a tensor is larger than the memory
    that there is.
    """
    wanted = 2 * sum(entry.size_bytes + ALIGNMENT for entry in entries)
    limit = wanted if limit_bytes == UNLIMITED else limit_bytes
    if pinning is not None and settings.memory_limit_bytes is None and on_budget == "promote":
        limit = min(limit, _pinned_bytes(settings.rank_transport))
    terms = LeaseTerms(
        limit_bytes=limit,
        hard_limit_bytes=max(int(available_bytes * 0.9) // settings.local_ranks, limit),
        on_budget=on_budget,
        poison=settings.debug_poison,
    )
    memory = LeasedMemory(terms, wanted_bytes=wanted, pinning=pinning, files=files, huge_pages=huge_pages)
    largest = max(entries, key=lambda entry: entry.size_bytes, default=None)
    if largest is not None:
        _check_largest(largest, terms, wanted, is_oversized=memory.is_oversized(largest.size_bytes))
    return LeasedRoom(memory)


def _pinned_bytes(transport: TransportSettings) -> int:
    """Return how much is pinned where nobody said: room for the reads under way and for what waits to be copied.

    Pinning makes every page of a buffer before the first read, whether it comes to be used or not: 0.4 CPU seconds a GiB and more.
    """
    return max(_LEAST_PINNED_BYTES, 2 * transport.num_connections * transport.read_bytes)


def _check_largest(largest: Entry, terms: LeaseTerms, wanted_bytes: int, *, is_oversized: bool) -> None:
    least_bytes = min(_MOST_HELD * largest.size_bytes, wanted_bytes)
    if terms.on_budget == "error" and terms.limit_bytes < least_bytes:
        raise BudgetExceeded(
            f"memory_limit is {format_bytes(terms.limit_bytes)}, too small to lend {largest.name} ({format_bytes(largest.size_bytes)}).",
            "A consumer holds one tensor, which may lie in the middle, while it asks for the next: three times the largest must fit.",
            f"Set memory_limit to at least {format_bytes(least_bytes)}, to 0 for the smallest that works, or on_budget to promote.",
        )
    if is_oversized and largest.size_bytes > terms.hard_limit_bytes:
        raise BudgetExceeded(
            f"{largest.name} is {format_bytes(largest.size_bytes)}; {format_bytes(terms.hard_limit_bytes)} of memory may be used.",
            "It cannot be loaded whole in this process's memory.",
            "Give the process (or its container) more memory.",
        )
