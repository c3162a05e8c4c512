"""What is read of a stored tensor, or of a packed weight, of which only regions are wanted, and how their values come out of it. Pure.

In the file a region is a number of runs of bytes with gaps between them. One run is asked for as it is. Of several, either each is asked for, or the rows that hold them all, of
which the regions are then kept; the rule is that of all reads (``gap_bytes``): a gap costs as many bytes as it has, and a further request as many as could have come in its time. A
region of many short runs, as where the input features are split, is read with its rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch

from headrace.checkpoint import DTYPES, Entry
from headrace.engines.values import Expansion, Take
from headrace.quantization.scheme import Role
from headrace.quantization.weight_cuts import Bounds, WeightCut
from headrace.streaming import torch_dtype, torch_shape

MOST_RUNS = 4096
"""Of more runs than this the rows are read: each is a read of its own to plan and to place."""


@dataclass(frozen=True, slots=True)
class Region:
    """A region of a stored tensor, and its place in one of the parts of a value."""

    bounds: Bounds
    part: int
    place: tuple[int | slice, ...]


class Reading(Protocol):
    """What is read for regions of one value ``name``, in one go."""

    @property
    def name(self) -> str: ...

    @property
    def regions(self) -> Sequence[Region]: ...

    @property
    def pieces(self) -> Sequence[Entry]:
        """What is asked for, in the order of the files."""

    @property
    def replaced(self) -> Mapping[str, Sequence[Entry]]:
        """Stored tensor → what is asked for in its place."""

    @property
    def gives_views(self) -> bool:
        """Whether `take` returns views of more than the regions."""

    def take(self, take: Take) -> list[torch.Tensor]:
        """Take every piece once, in order, and return the values of the regions, in their shapes."""


@dataclass(frozen=True)
class PlainReading:
    """Of one stored tensor."""

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
        return (_rows_of(self.entry, self._rows),) if self.reads_rows else tuple(run for run, _ in self._runs)

    @property
    def replaced(self) -> Mapping[str, Sequence[Entry]]:
        return {self.entry.name: self.pieces}

    @property
    def gives_views(self) -> bool:
        return self.reads_rows

    def take(self, take: Take) -> list[torch.Tensor]:
        if self.reads_rows:
            first, rows = self._rows[0], take(self.pieces[0])
            return [rows[_slices(((start - first, stop - first), *inner))] for (start, stop), *inner in self._bounds]
        taken: list[list[torch.Tensor]] = [[] for _ in self.regions]
        for run, number in self._runs:
            taken[number].append(take(run))
        return [
            (runs[0] if len(runs) == 1 else torch.cat([run.flatten() for run in runs])).view(shape_of(bounds))
            for runs, bounds in zip(taken, self._bounds, strict=True)
        ]

    @property
    def _bounds(self) -> list[Bounds]:
        return [region.bounds for region in self.regions]


@dataclass(frozen=True)
class ExpandedReading:
    """Of one packed weight, which is expanded: the codes of one region, and the scales that belong to them."""

    expansion: Expansion
    name: str
    region: Region
    cut: WeightCut
    parts: Mapping[Role, PlainReading]
    """In the order of the files: of views the part or what holds it, of what is packed anew all."""

    @property
    def regions(self) -> Sequence[Region]:
        return (self.region,)

    @cached_property
    def pieces(self) -> Sequence[Entry]:
        return tuple(piece for reading in self.parts.values() for piece in reading.pieces)

    @property
    def replaced(self) -> Mapping[str, Sequence[Entry]]:
        return {reading.entry.name: reading.pieces for reading in self.parts.values()}

    @property
    def gives_views(self) -> bool:
        return False

    def take(self, take: Take) -> list[torch.Tensor]:
        found = {role: reading.take(take)[0] for role, reading in self.parts.items()}
        out = torch.empty(shape_of(self.region.bounds), dtype=self.expansion.dtype)
        self.expansion.expand(self.cut.parts_of(found), out.T if self.expansion.is_transposed else out, self.cut.slice)
        return [out]


def plain_reading(entry: Entry, name: str, regions: Sequence[Region], *, gap_bytes: int) -> PlainReading | None:
    """Return what is read for ``regions`` of ``entry``; None where several values share a byte."""
    if DTYPES[entry.dtype].packed != 1:
        return None
    return PlainReading(entry, name, regions, reads_rows=_should_read_rows(entry, regions, gap_bytes))


def expanded_reading(expansion: Expansion, name: str, region: Region, *, gap_bytes: int) -> ExpandedReading | None:
    """Return what is read for ``region`` of what ``expansion`` makes; None where that is not cut: experts in one tensor, or a format whose codes are packed anew in a slice."""
    roles = {entry.name: role for role, entry in expansion.entries.items()}
    entries = {roles[entry.name]: entry for entry, _ in expansion.pieces}
    if expansion.num_experts is not None or any(DTYPES[entry.dtype].packed != 1 for entry in entries.values()):
        return None
    rows, columns = region.bounds[::-1] if expansion.is_transposed else region.bounds
    whole = {
        role: torch.empty(torch_shape(entry), dtype=torch_dtype(entry), device="meta")
        for role, entry in entries.items()
    }
    cut = WeightCut(expansion.weight.scheme, expansion.weight.shape, rows, columns, whole)
    try:
        made = cut.slice.parts
    except (RuntimeError, ValueError):  # it looks at values, or is not cut at all
        return None
    if Role.CODES in cut.repacked:
        return None
    parts = {}
    for role, entry in entries.items():
        reading = (
            plain_reading(entry, name, [Region(cut.bounds(role), 0, ())], gap_bytes=gap_bytes) if role in made else None
        )
        if reading is not None:
            parts[role] = reading
    return ExpandedReading(expansion, name, region, cut, parts)


def volume(bounds: Bounds) -> int:
    return math.prod(shape_of(bounds))


def shape_of(bounds: Bounds) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in bounds)


def _slices(bounds: Bounds) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in bounds)


def _last_cut(bounds: Bounds, shape: Sequence[int]) -> int:
    """Return the last dimension of which not all is kept, 0 where all is; a run lies within one index of those before it."""
    cut_ones = (place for place, (bound, size) in enumerate(zip(bounds, shape, strict=True)) if bound != (0, size))
    return max(cut_ones, default=0)


def _should_read_rows(entry: Entry, regions: Sequence[Region], gap_bytes: int) -> bool:
    bounds = [region.bounds for region in regions]
    num_runs = sum(math.prod(shape_of(one[: _last_cut(one, entry.shape)])) for one in bounds)
    if num_runs == 1:
        return False
    num_rows = max(one[0][1] for one in bounds) - min(one[0][0] for one in bounds)
    gaps = (num_rows * math.prod(entry.shape[1:]) - sum(map(volume, bounds))) * _item_bytes(entry)
    return gaps <= num_runs * gap_bytes or num_runs > MOST_RUNS


def _runs_of(entry: Entry, bounds: Bounds) -> list[Entry]:
    if not bounds or shape_of(bounds) == entry.shape:
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
