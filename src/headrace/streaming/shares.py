"""Who reads what when ranks load together: windows of entries, the blocks of memory that they lie in, each rank's share. Pure.

Every rank computes the same windows from the same entries. Rules that tests hold it to: every byte of every entry belongs to exactly one rank; within a
window the shares differ by little more than one small tensor; a rank's share of a window is one stretch of it, so that its reads are long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headrace.checkpoint.entry import Entry
from headrace.streaming.memory import ALIGNMENT, SHARE_BELOW_BYTES, SLAB_BYTES

LEAST_WINDOW_BYTES_PER_RANK = SHARE_BELOW_BYTES
"""A window is not made smaller than this for each rank: with less there is nothing to share."""
_CUT_ALIGNMENT = 4096
"""A tensor is cut between ranks at multiples of this from its start, a page: no page is written by two ranks' bytes."""
_LEAST_CUT_BYTES = 256 << 10
"""No cut leaves less than this on either side: a smaller read and broadcast cost more than the balance is worth."""


@dataclass(frozen=True, slots=True)
class Block:
    """One allocation: a large entry, or a run of small ones with one owner. ``places`` count in the stream, ``offsets`` in the block."""

    places: tuple[int, ...]
    offsets: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes ``start`` to ``stop`` of a block (its place in the window) that ``rank`` reads and sends to the others."""

    block: int
    start: int
    stop: int
    rank: int


@dataclass(frozen=True, slots=True)
class Window:
    """Entries ``start`` to ``stop`` of the stream, which are exchanged together. Entries without bytes are in no block."""

    start: int
    stop: int
    blocks: tuple[Block, ...]
    segments: tuple[Segment, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank reads for one place of a block: ``entry`` is a tensor of raw bytes, whole or a part, that goes to byte ``offset``."""

    entry: Entry
    block: int
    offset: int


def plan_windows(
    entries: Sequence[Entry], *, num_ranks: int, window_bytes: int, most_ranks: int | None = None
) -> tuple[Window, ...]:
    """Return the windows of ``entries``, in order: as many at a time as fit into ``window_bytes``, or one that is larger than that. None where nothing has bytes.

    ``most_ranks`` is how many ranks share them elsewhere, where that is more: windows end alike for all.
    """
    if not any(entry.size_bytes for entry in entries):
        return ()
    most = max(window_bytes, (most_ranks or num_ranks) * LEAST_WINDOW_BYTES_PER_RANK)
    return tuple(_Layout(entries, start, stop, num_ranks).window() for start, stop in _spans(entries, most))


def parts_of(window: Window, entries: Sequence[Entry], rank: int) -> Iterator[Part]:
    """Yield what ``rank`` reads of ``window``."""
    for segment in window.segments:
        if segment.rank != rank:
            continue
        block = window.blocks[segment.block]
        for place, offset in zip(block.places, block.offsets, strict=True):
            entry = entries[place]
            start, stop = max(segment.start - offset, 0), min(segment.stop - offset, entry.size_bytes)
            yield Part(_bytes_of(entry, start, stop), segment.block, offset + start)


def _bytes_of(entry: Entry, start: int, stop: int) -> Entry:
    name = entry.name if stop - start == entry.size_bytes else f"{entry.name}[{start}:{stop}]"
    return Entry(name, "U8", (stop - start,), entry.file, entry.start + start, entry.start + stop)


def _spans(entries: Sequence[Entry], most: int) -> Iterator[tuple[int, int]]:
    start = size = 0
    for place, entry in enumerate(entries):
        if place > start and size + entry.size_bytes > most:
            yield start, place
            start, size = place, 0
        size += entry.size_bytes
    if start < len(entries):
        yield start, len(entries)


class _Layout:
    """Lays out one window: rank r of n owns its bytes from r/n to (r+1)/n, moved to a tensor's border or a page where that is near."""

    def __init__(self, entries: Sequence[Entry], start: int, stop: int, num_ranks: int) -> None:
        self._entries = entries
        self._start, self._stop = start, stop
        self._num_ranks = num_ranks
        self._total = sum(entry.size_bytes for entry in entries[start:stop])
        self._blocks: list[Block] = []
        self._segments: list[Segment] = []

    def window(self) -> Window:
        run: list[int] = []
        run_owner = run_bytes = at = 0
        for place in range(self._start, self._stop):
            size = self._entries[place].size_bytes
            owner = self._owner(at + size // 2)
            if run and (owner != run_owner or size >= SHARE_BELOW_BYTES or run_bytes + size > SLAB_BYTES):
                self._add_run(run, run_owner)
                run, run_bytes = [], 0
            if size >= SHARE_BELOW_BYTES:
                self._add_large(place, at)
            elif size:
                run.append(place)
                run_owner = owner
                run_bytes += size
            at += size
        if run:
            self._add_run(run, run_owner)
        return Window(self._start, self._stop, tuple(self._blocks), tuple(self._segments), self._total)

    def _owner(self, position: int) -> int:
        return min(position * self._num_ranks // max(self._total, 1), self._num_ranks - 1)

    def _add_run(self, places: Sequence[int], owner: int) -> None:
        offsets, end = [], 0
        for place in places:
            start = -(-end // ALIGNMENT) * ALIGNMENT
            offsets.append(start)
            end = start + self._entries[place].size_bytes
        self._segments.append(Segment(len(self._blocks), 0, end, owner))
        self._blocks.append(Block(tuple(places), tuple(offsets), end))

    def _add_large(self, place: int, at: int) -> None:
        size = self._entries[place].size_bytes
        cuts = [0]
        for rank in range(1, self._num_ranks):
            cut = round((rank * self._total // self._num_ranks - at) / _CUT_ALIGNMENT) * _CUT_ALIGNMENT
            if cut - cuts[-1] >= _LEAST_CUT_BYTES and size - cut >= _LEAST_CUT_BYTES:
                cuts.append(cut)
        for start, stop in zip(cuts, [*cuts[1:], size], strict=True):
            owner = self._owner(at + (start + stop) // 2)
            self._segments.append(Segment(len(self._blocks), start, stop, owner))
        self._blocks.append(Block((place,), (0,), size))
