"""What a load and its reader processes both see: the memory that is filled, and a page that says how far each connection is. Knows no tensors."""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from typing import Protocol

from headrace.transport.reader import ReadCounters


@dataclass(frozen=True, slots=True)
class SharedPlace:
    """Where a piece of memory lies: a file in memory, by a number that no other file of the load has, and an offset."""

    number: int
    descriptor: int
    size_bytes: int
    """Of the file."""
    offset: int


class SharedPlaces(Protocol):
    """Memory that can be filled by other processes."""

    def find(self, piece: memoryview) -> SharedPlace | None:
        """Return where ``piece`` lies; None where that is in no file. The descriptor is lent for the length of the read that the piece belongs to."""


_FIGURES = struct.Struct("=qqqdd")
_STRIDE_BYTES = 64
NUM_SLOTS = 1024


class StatusPage:
    """The counters of up to `NUM_SLOTS` connections of one reader process, in shared memory: written there, read here, without a message.

    Each figure is eight bytes at a multiple of eight; a reader of the page may see some of a slot's figures a moment before others.
    """

    def __init__(self, descriptor: int) -> None:
        self._mapped = mmap.mmap(descriptor, NUM_SLOTS * _STRIDE_BYTES, flags=mmap.MAP_SHARED)

    @staticmethod
    def make_file() -> int:
        """Return the descriptor of a new, empty page, which is the caller's."""
        descriptor = os.memfd_create("headrace-status", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, NUM_SLOTS * _STRIDE_BYTES)
        return descriptor

    def write(self, slot: int, counters: ReadCounters) -> None:
        """Say how far a connection is."""
        figures = (counters.num_requests, counters.num_retries, counters.bytes_received)
        _FIGURES.pack_into(self._mapped, slot * _STRIDE_BYTES, *figures, counters.heard_at, counters.longest_silence_s)

    def read(self, slot: int) -> ReadCounters:
        """Return how far a connection is."""
        return ReadCounters(*_FIGURES.unpack_from(self._mapped, slot * _STRIDE_BYTES))

    def close(self) -> None:
        """Unmap the page. May be called twice."""
        self._mapped.close()
