"""The parts of values that one rank of a tensor- or expert-parallel model keeps: which bytes are asked for, and how the parts come out of them. Pure; knows no engine.

A part is a slice of each dimension of a value, be that a stored tensor or a stack of many. Of each stored tensor that it touches, a region is wanted; in the file that is a number of
runs of bytes with gaps between them, which are the other ranks'. One run is asked for as it is. Of several, either each is asked for, or the rows that hold them all, of which the
regions are then kept; the rule is that of all reads (``gap_bytes``): a gap costs as many bytes as it has, and a further request as many as could have come in its time. A region of
many short runs, as where the input features are split, is read with its rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from headrace.checkpoint import DTYPES, Entry
from headrace.engines.placement import Placement
from headrace.engines.values import Assembly, FindBlock, Index, Output, Plain, Stack, Take, no_block

MOST_RUNS = 4096
"""Of more runs than this the rows are read: each is a read of its own to plan and to place."""

Bounds = tuple[tuple[int, int], ...]
"""For each dimension where the part starts and where it stops."""


@dataclass(frozen=True, slots=True)
class Region:
    """A region of a stored tensor, and its place in one of the parts of a value."""

    bounds: Bounds
    part: int
    place: tuple[int | slice, ...]


@dataclass(frozen=True)
class Reading:
    """What is read of one stored tensor, for the value ``name``."""

    entry: Entry
    name: str
    regions: Sequence[Region]
    """They do not overlap."""
    reads_rows: bool
    """Whether the rows that hold all regions are read, or each run by itself."""

    @cached_property
    def _runs(self) -> Sequence[tuple[Entry, int]]:
        """The runs in the order of the file, each with the number of its region, whose runs are in order, too."""
        runs = [(run, number) for number, one in enumerate(self.regions) for run in _runs_of(self.entry, one.bounds)]
        return sorted(runs, key=lambda item: item[0].start)

    @cached_property
    def _rows(self) -> tuple[int, int]:
        bounds = [region.bounds[0] for region in self.regions]
        return min(start for start, _ in bounds), max(stop for _, stop in bounds)

    @cached_property
    def pieces(self) -> Sequence[Entry]:
        """What is asked for, in the order of the file."""
        return (_rows_of(self.entry, self._rows),) if self.reads_rows else tuple(run for run, _ in self._runs)

    def take(self, take: Take) -> list[torch.Tensor]:
        """Take every piece once, in order; return the values of the regions, in their shapes, as views of what was read or in memory of their own."""
        if self.reads_rows:
            first, rows = self._rows[0], take(self.pieces[0])
            return [rows[_slices(((start - first, stop - first), *inner))] for (start, stop), *inner in self._bounds]
        taken: list[list[torch.Tensor]] = [[] for _ in self.regions]
        for run, number in self._runs:
            taken[number].append(take(run))
        return [
            (runs[0] if len(runs) == 1 else torch.cat([run.flatten() for run in runs])).view(_shape(bounds))
            for runs, bounds in zip(taken, self._bounds, strict=True)
        ]

    @property
    def _bounds(self) -> list[Bounds]:
        return [region.bounds for region in self.regions]


@dataclass(frozen=True)
class Parts:
    """The parts of the values of ``whole`` that are asked for. Its outputs are the whole values', since the engine slices those; what it builds are the parts."""

    whole: Plain | Stack
    bounds: Mapping[str, Sequence[Bounds]]
    """Value → its parts, in the order in which they are asked for."""
    readings: Sequence[Reading]
    """In the order of the files."""

    @property
    def outputs(self) -> Mapping[str, Output]:
        return self.whole.outputs

    @cached_property
    def pieces(self) -> Sequence[tuple[Entry, str]]:
        return tuple((entry, reading.name) for reading in self.readings for entry in reading.pieces)

    def build(self, take: Take, block: FindBlock = no_block) -> dict[str, list[torch.Tensor]]:
        """Return the parts; each owns its memory, and of what was read beyond them nothing stays."""
        built: dict[str, list[torch.Tensor | None]] = {name: [None] * len(parts) for name, parts in self.bounds.items()}
        for reading in self.readings:
            for region, values in zip(reading.regions, reading.take(take), strict=True):
                parts, shape = built[reading.name], _shape(self.bounds[reading.name][region.part])
                if values.shape == shape:
                    owned = values.clone(memory_format=torch.contiguous_format) if reading.reads_rows else values
                    parts[region.part] = owned
                    continue
                part = parts[region.part]
                if part is None:
                    part = parts[region.part] = torch.empty(shape, dtype=self.outputs[reading.name].dtype)
                part[region.place] = values
        return {name: [part for part in parts if part is not None] for name, parts in built.items()}


def cut(assemblies: Sequence[Assembly], placement: Placement, *, gap_bytes: int) -> tuple[list[Assembly], Placement]:
    """Return ``assemblies`` and ``placement`` with those values cut of which only parts are asked for."""
    cuts = [_cut(item, placement.asked, gap_bytes) if isinstance(item, Plain | Stack) else item for item in assemblies]
    pieces: dict[str, list[Entry]] = {}
    for item in cuts:
        if isinstance(item, Parts):
            pieces |= {entry.name: [] for entry, _ in item.whole.pieces}
            pieces |= {reading.entry.name: list(reading.pieces) for reading in item.readings}
    if not pieces:
        return cuts, placement
    order = tuple(piece for entry in placement.order for piece in pieces.get(entry.name, (entry,)))
    targets = {piece.name: placement.targets[name] for name, some in pieces.items() for piece in some}
    return cuts, replace(placement, order=order, targets={**placement.targets, **targets})


def _cut(whole: Plain | Stack, asked: Mapping[str, Sequence[Index]], gap_bytes: int) -> Assembly:
    sources = _sources(whole)
    bounds = {name: _parts_of(asked.get(name, ()), output.shape) for name, output in whole.outputs.items()}
    if sources is None or any(parts is None for parts in bounds.values()):
        return whole
    parts = {name: some for name, some in bounds.items() if some is not None}
    wanted = sum(_volume(part) for some in parts.values() for part in some)
    if wanted == sum(math.prod(output.shape) for output in whole.outputs.values()):
        return whole
    readings = []
    for plain, name, index in sources:
        regions = [
            region
            for number, part in enumerate(parts[name])
            if (region := _region(index, number, part, whole.outputs[name].shape)) is not None
        ]
        if regions:
            readings.append(
                Reading(plain.entry, name, regions, reads_rows=_should_read_rows(plain.entry, regions, gap_bytes))
            )
    return Parts(whole, parts, sorted(readings, key=lambda one: (one.entry.file, one.entry.start)))


def _sources(whole: Plain | Stack) -> list[tuple[Plain, str, tuple[int | slice, ...]]] | None:
    """Return the stored tensors of ``whole``, each with the name of its value and its index therein; None where one of them is not cut by bytes."""
    if isinstance(whole, Plain):
        pieces: list[tuple[object, str, tuple[int | slice, ...]]] = [(whole, whole.name, ())]
    else:
        pieces = [(piece.source, piece.name, piece.index) for piece in whole.stacked]
    found = [
        (source, name, index)
        for source, name, index in pieces
        if isinstance(source, Plain) and DTYPES[source.entry.dtype].packed == 1
    ]
    return found if len(found) == len(pieces) else None


def _parts_of(indices: Sequence[Index], shape: Sequence[int]) -> list[Bounds] | None:
    """Return the bounds of all parts; None where there are none, one has nothing in it (too rare for a form of its own), or two overlap."""
    found = [bounds_of(index, shape) for index in indices]
    parts = [bounds for bounds in found if bounds is not None and _volume(bounds)]
    if not parts or len(parts) < len(found):
        return None
    overlap = any(_overlap(one, other) for one, other in itertools.combinations(parts, 2))
    return None if overlap else parts


def bounds_of(index: Index, shape: Sequence[int]) -> Bounds | None:
    """Return the bounds that ``index`` has in a tensor of ``shape``; None for one that is not made of slices without steps."""
    if index is Ellipsis:
        return tuple((0, size) for size in shape)
    parts = index if isinstance(index, tuple) else (index,)
    if len(parts) > len(shape) or not all(isinstance(part, slice) and part.step in (None, 1) for part in parts):
        return None
    given = [part.indices(size)[:2] for part, size in zip(parts, shape, strict=False)]
    return tuple((start, max(start, stop)) for start, stop in given) + tuple((0, size) for size in shape[len(parts) :])


def _region(index: tuple[int | slice, ...], number: int, part: Bounds, shape: Sequence[int]) -> Region | None:
    """Return the region of a stored tensor, which is ``index`` of a value of ``shape``, that lies in part ``number`` of that; None where none of it does."""
    bounds: list[tuple[int, int]] = []
    place: list[int | slice] = []
    for dimension, (start, stop) in enumerate(part):
        own = index[dimension] if dimension < len(index) else slice(None)
        if isinstance(own, int):
            if not start <= own < stop:
                return None
            place.append(own - start)
            continue
        first, last, _ = own.indices(shape[dimension])
        low, high = max(first, start), min(last, stop)
        if low >= high:
            return None
        bounds.append((low - first, high - first))
        place.append(slice(low - start, high - start))
    return Region(tuple(bounds), number, tuple(place))


def _overlap(one: Bounds, other: Bounds) -> bool:
    return all(max(a[0], b[0]) < min(a[1], b[1]) for a, b in zip(one, other, strict=True))


def _volume(bounds: Bounds) -> int:
    return math.prod(_shape(bounds))


def _shape(bounds: Bounds) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in bounds)


def _slices(bounds: Bounds) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in bounds)


def _last_cut(bounds: Bounds, shape: Sequence[int]) -> int:
    """Return the last dimension of which not all is kept, 0 where all is; a run lies within one index of those before it."""
    cut_ones = (place for place, (bound, size) in enumerate(zip(bounds, shape, strict=True)) if bound != (0, size))
    return max(cut_ones, default=0)


def _should_read_rows(entry: Entry, regions: Sequence[Region], gap_bytes: int) -> bool:
    bounds = [region.bounds for region in regions]
    num_runs = sum(math.prod(_shape(one[: _last_cut(one, entry.shape)])) for one in bounds)
    if num_runs == 1:
        return False
    num_rows = max(one[0][1] for one in bounds) - min(one[0][0] for one in bounds)
    gaps = (num_rows * math.prod(entry.shape[1:]) - sum(map(_volume, bounds))) * _item_bytes(entry)
    return gaps <= num_runs * gap_bytes or num_runs > MOST_RUNS


def _runs_of(entry: Entry, bounds: Bounds) -> list[Entry]:
    if not bounds or _shape(bounds) == entry.shape:
        return [entry]
    last = _last_cut(bounds, entry.shape)
    inner = entry.shape[last + 1 :]
    strides = [math.prod(entry.shape[place + 1 :]) for place in range(len(entry.shape))]
    start, stop = bounds[last]
    runs = []
    for outer in itertools.product(*(range(*bound) for bound in bounds[:last])):
        first = sum(number * stride for number, stride in zip(outer, strides, strict=False)) + start * strides[last]
        runs.append(_part(entry, first, (stop - start, *inner)))
    return runs


def _rows_of(entry: Entry, bound: tuple[int, int]) -> Entry:
    start, stop = bound
    if bound == (0, entry.shape[0]):
        return entry
    return _part(entry, start * math.prod(entry.shape[1:]), (stop - start, *entry.shape[1:]))


def _part(entry: Entry, first: int, shape: tuple[int, ...]) -> Entry:
    """Return the entry of the values from number ``first`` on that fill ``shape``."""
    start = entry.start + first * _item_bytes(entry)
    stop = start + math.prod(shape) * _item_bytes(entry)
    name = f"{entry.name}[{first}:{first + math.prod(shape)}]"
    return replace(entry, name=name, shape=shape, start=start, stop=stop)


def _item_bytes(entry: Entry) -> int:
    return entry.size_bytes // math.prod(entry.shape)
