"""Memory that is lent to tensors and comes back when nobody refers to them any more, within a limit. Knows sizes and labels; knows no entries.

A lease is an extent of a buffer. It returns when the storage of its tensor is freed, views and `detach()` included, never because an iterator moved on: a
finalizer on the array that the tensor's storage keeps alive puts a token on a queue. It may run in any thread at any time, inside our own critical section too, so it does
nothing else; `LeasedMemory` takes the tokens from the queue when it next looks for room.

When the consumer keeps what it was lent and the buffer is full, the buffer is retired: it is left to its holders, its free pages go back to the system, and a new
one is opened. That is a promotion; it is counted, and bounded by a hard limit.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Literal, NamedTuple

import numpy as np

from headrace.errors import BudgetExceeded, InvalidSetting
from headrace.streaming.extents import ExtentMap
from headrace.streaming.hugepages import HugePages
from headrace.streaming.memory import ALIGNMENT, Bytes, SharedFiles, private_mapping
from headrace.units import format_bytes

OnBudget = Literal["promote", "error"]

_POISON = 0xFF
"""What freed leases are filled with on request: NaN in every floating type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTerms:
    """How much may be lent, and what happens when it is not enough. Sizes in bytes."""

    limit_bytes: int
    """Size of the buffer that leases come from."""
    hard_limit_bytes: int
    """Most memory for all buffers together, retired ones counted by what of them is still held."""
    on_budget: OnBudget = "promote"
    """What happens when a consumer keeps so much that the next tensor has no room: open another buffer, or raise `BudgetExceeded`."""
    poison: bool = False
    """Fill what comes back, so that whoever still reads it sees NaN (`HEADRACE_DEBUG_POISON=1`)."""

    def __post_init__(self) -> None:
        if self.on_budget not in ("promote", "error"):
            raise InvalidSetting(f"on_budget is {self.on_budget!r}.", "It must be promote or error.")


@dataclass(frozen=True, slots=True)
class Pinning:
    """How a buffer is pinned for copies to a device, and how it is known that they have ended."""

    pin: Callable[[int, int], bool]
    """``(address, num_bytes) -> whether it worked``; a buffer that cannot be pinned is used pageable."""
    unpin: Callable[[int], None]
    fence: Callable[[], None]
    """Wait until the device reads none of what has come back."""


class _Token(NamedTuple):
    buffer: int
    start: int
    num_bytes: int


@dataclass(slots=True)
class _Buffer:
    number: int
    mapping: mmap.mmap
    whole: Bytes
    """The array that all leases are slices of, and so keep alive."""
    extents: ExtentMap
    labels: dict[int, str] = field(default_factory=dict)
    is_retired: bool = False
    is_pinned: bool = False


class LeasedMemory:
    """Lends arrays of bytes. Not thread safe but for the arrays themselves: its stream's lock guards it.

    ``wanted_bytes`` is how much will be asked for in all: no buffer is made larger than that. Nothing is allocated before the first lease. With ``files`` the buffers are
    theirs, and other processes can fill them; without, they are made of ``huge_pages`` where those pay.
    """

    def __init__(
        self,
        terms: LeaseTerms,
        *,
        wanted_bytes: int,
        pinning: Pinning | None = None,
        files: SharedFiles | None = None,
        huge_pages: HugePages | None = None,
    ) -> None:
        self.terms = terms
        self._files = files
        self._huge_pages = huge_pages
        self.capacity_bytes = _rounded_up(min(terms.limit_bytes, wanted_bytes), mmap.PAGESIZE)
        self.num_promotions = 0
        self.promoted_bytes = 0
        """Memory that was opened beyond the first buffer, oversized tensors not counted."""
        self.peak_bytes = 0
        """Most bytes that were lent at one time."""
        self._pinning = pinning
        self._tokens: SimpleQueue[_Token] = SimpleQueue()
        self._buffers: dict[int, _Buffer] = {}
        self._current: _Buffer | None = None
        self._num_buffers = 0

    @property
    def lent_bytes(self) -> int:
        """Bytes that have been lent and have not come back."""
        self._collect()
        return sum(buffer.extents.used_bytes for buffer in self._buffers.values())

    @property
    def held_labels(self) -> list[str]:
        """The labels of what has not come back, in the order of lending."""
        self._collect()
        return [label for buffer in self._buffers.values() for label in buffer.labels.values()]

    def is_oversized(self, num_bytes: int) -> bool:
        """Whether a tensor of this size gets a buffer of its own: one that it would fill by more than half leaves no room beside the tensor before it."""
        return 2 * num_bytes > self.capacity_bytes

    def try_allocate(self, num_bytes: int, label: str = "") -> Bytes | None:
        """Lend ``num_bytes`` from the current buffer; None where there is no room for them now."""
        self._collect()
        if self.is_oversized(num_bytes):
            return None
        if self._current is None:
            self._current = self._open(self.capacity_bytes)
        return self._lend(self._current, num_bytes, label)

    def allocate_beyond(self, num_bytes: int, label: str = "") -> Bytes:
        """Lend ``num_bytes`` although the current buffer has no room for them: from one of its own if it is oversized, else from a new current buffer.

        Raises `BudgetExceeded` where the terms forbid that.
        """
        self._collect()
        if self.is_oversized(num_bytes):
            self._check_hard_limit(num_bytes, label)
            array = self._lend(self._open(_rounded_up(num_bytes, mmap.PAGESIZE), is_retired=True), num_bytes, label)
        else:
            if self.terms.on_budget == "error":
                raise self._exceeded(num_bytes, label, "memory_limit", self.terms.limit_bytes)
            self._check_hard_limit(self.capacity_bytes, label)
            self._retire_current()
            self._current = self._open(self.capacity_bytes)
            self.num_promotions += 1
            self.promoted_bytes += self.capacity_bytes
            array = self._lend(self._current, num_bytes, label)
        assert array is not None
        return array

    def close(self) -> None:
        """Give back all that is not lent. What is lent stays valid for as long as anything refers to it."""
        self._collect()
        self._retire_current()

    # -- buffers

    def _open(self, num_bytes: int, *, is_retired: bool = False) -> _Buffer:
        if self._files is None:
            mapping = private_mapping(num_bytes, self._huge_pages)
        else:
            mapping = self._files.open_mapping(num_bytes)
        whole = np.frombuffer(mapping, dtype=np.uint8)
        buffer = _Buffer(
            self._num_buffers, mapping, whole, ExtentMap(num_bytes, alignment=ALIGNMENT), is_retired=is_retired
        )
        if self._pinning is not None and not is_retired:
            buffer.is_pinned = self._pinning.pin(_address(whole), num_bytes)
        self._buffers[buffer.number] = buffer
        self._num_buffers += 1
        return buffer

    def _lend(self, buffer: _Buffer, num_bytes: int, label: str) -> Bytes | None:
        start = buffer.extents.take(num_bytes)
        if start is None:
            return None
        buffer.labels[start] = label
        array = buffer.whole[start : start + num_bytes]
        weakref.finalize(array, self._tokens.put, _Token(buffer.number, start, num_bytes)).atexit = False
        self.peak_bytes = max(self.peak_bytes, sum(one.extents.used_bytes for one in self._buffers.values()))
        return array

    def _collect(self) -> None:
        """Take in what has come back."""
        tokens: list[_Token] = []
        while not self._tokens.empty():
            tokens.append(self._tokens.get())
        if tokens and self._pinning is not None:
            self._pinning.fence()
        for token in tokens:
            self._take_back(self._buffers[token.buffer], token)

    def _take_back(self, buffer: _Buffer, token: _Token) -> None:
        if self.terms.poison:
            buffer.whole[token.start : token.start + token.num_bytes] = _POISON
        buffer.extents.give_back(token.start, token.num_bytes)
        del buffer.labels[token.start]
        if buffer.is_retired:
            self._release_pages(buffer)

    def _retire_current(self) -> None:
        buffer, self._current = self._current, None
        if buffer is not None:
            buffer.is_retired = True
            if buffer.is_pinned and self._pinning is not None:
                # Here and not when the last tensor dies: that may be in any thread, long after the stream. What is held stays valid, unpinned.
                self._pinning.fence()
                self._pinning.unpin(_address(buffer.whole))
            self._release_pages(buffer)

    def _release_pages(self, buffer: _Buffer) -> None:
        """Give the free pages of a retired buffer back to the system; forget it when nothing of it is lent."""
        if not buffer.extents.used_bytes:
            del self._buffers[buffer.number]  # the mapping goes with the last reference to it
        else:
            for start, stop in buffer.extents.free_extents():
                first, last = _rounded_up(start, mmap.PAGESIZE), stop // mmap.PAGESIZE * mmap.PAGESIZE
                if first < last:
                    # What is not wanted in this mapping of a file stays in the file.
                    advice = mmap.MADV_DONTNEED if self._files is None else mmap.MADV_REMOVE
                    buffer.mapping.madvise(advice, first, last - first)

    # -- limits

    def _check_hard_limit(self, more_bytes: int, label: str) -> None:
        held = sum(buffer.extents.used_bytes for buffer in self._buffers.values())
        if held + more_bytes > self.terms.hard_limit_bytes:
            raise self._exceeded(more_bytes, label, "the hard limit", self.terms.hard_limit_bytes)

    def _exceeded(self, num_bytes: int, label: str, limit: str, limit_bytes: int) -> BudgetExceeded:
        held = self.held_labels
        names = ", ".join(name for name in held[:3] if name)
        kept = f"The consumer still holds {len(held)} tensors of {format_bytes(self.lent_bytes)}"
        return BudgetExceeded(
            f"There is no room for {label or 'the next tensor'} ({format_bytes(num_bytes)} more): {limit} is {format_bytes(limit_bytes)}.",
            f"{kept}{f' ({names}, ...)' if names else ''}, so their memory cannot be used again.",
            "Copy each tensor and drop it before asking for the next, raise memory_limit, or take ownership='owned' if all are to be kept.",
        )


def _address(array: Bytes) -> int:
    return int(array.ctypes.data)


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
