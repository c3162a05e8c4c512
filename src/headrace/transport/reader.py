"""The interface behind which bytes move: one range into given pieces of memory. Knows no tensors.

A reader has one user thread; only `RangeReader.cancel` may be called from others. When `RangeReader.read` returns or raises, the reader has stopped
writing into the pieces: that is the acknowledgment after which their owner may lend or free the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.storage import StoredObject


@dataclass(frozen=True, slots=True)
class RangeRead:
    """One ranged GET or one positioned file read: bytes ``start`` to ``stop`` (half open) of a pinned object."""

    stored: StoredObject
    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        return self.stop - self.start


@dataclass(slots=True)
class ReadCounters:
    """What one reader has done so far. Written by its thread alone; others may read a slightly old value."""

    num_requests: int = 0
    num_retries: int = 0
    bytes_received: int = 0
    heard_at: float = 0.0
    """When the last byte came or the last attempt began, by the reader's clock; where it waits before an attempt, when it will begin."""
    longest_silence_s: float = 0.0
    """Longest time without a byte in the read in progress, or in the last one."""


class RangeReader(Protocol):
    """Carries out reads one after the other, each with its own retries."""

    @property
    def counters(self) -> ReadCounters:
        """What this reader has done so far."""

    @property
    def doing(self) -> str:
        """What the reader is at, for a person who asks what holds a load up: key, range, connection, attempt, seconds."""

    def read(self, read: RangeRead, pieces: Sequence[memoryview]) -> None:
        """Fill ``pieces`` (writable byte views, in file order, ``read.size_bytes`` in all) or raise.

        Raises `Cancelled` after `cancel`, `ObjectChanged`, `AccessDenied` and the like at once, and `ReadFailed` after the last attempt.
        """

    def cancel(self) -> None:
        """Wake and stop the read in progress, from any thread; later reads raise `Cancelled` too."""

    def close(self) -> None:
        """Close connections and files. Only when no read is in progress."""
