"""The part of a stored tensor that one rank of a tensor-parallel model keeps: which bytes are asked for, and how the part comes out of them. Pure; knows no engine.

A part is a slice of each dimension. In the file it is a number of runs of bytes with gaps between them, which are the other ranks'. One run is asked for as it is. Of several, either
each is asked for, or the rows that hold them all, of which the part is then kept; the rule is that of all reads (``gap_bytes``): a gap costs as many bytes as it has, and a
further request as many as could have come in its time. A part of many short runs, as where the input features are split, is read whole.
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
from headrace.engines.values import Assembly, FindBlock, Index, Output, Plain, Take, no_block

MOST_RUNS = 4096
"""Of more runs than this the rows are read: each is a read of its own to plan and to place."""

Bounds = tuple[tuple[int, int], ...]
"""For each dimension where the part starts and where it stops."""


@dataclass(frozen=True)
class Cut:
    """The part ``bounds`` of one stored tensor, as the value ``name``. Its output is the whole tensor's, since the engine slices that; what it builds is the part."""

    whole: Plain
    bounds: Bounds
    reads_rows: bool
    """Whether whole rows are read, and the part is kept of them, or each run of it by itself."""

    @property
    def name(self) -> str:
        return self.whole.name

    @property
    def outputs(self) -> Mapping[str, Output]:
        return self.whole.outputs

    @cached_property
    def pieces(self) -> Sequence[tuple[Entry, str]]:
        if self.reads_rows:
            return ((_rows_of(self.whole.entry, self.bounds[0]), self.name),)
        return tuple((entry, self.name) for entry in _runs_of(self.whole.entry, self.bounds))

    def build(self, take: Take, block: FindBlock = no_block) -> dict[str, torch.Tensor]:
        """Return the part; it owns its memory, and of the rows nothing stays."""
        shape = tuple(stop - start for start, stop in self.bounds)
        if self.reads_rows:
            rows = take(self.pieces[0][0])
            inner = tuple(slice(start, stop) for start, stop in self.bounds[1:])
            return {self.name: rows[(slice(None), *inner)].clone(memory_format=torch.contiguous_format)}
        runs = [take(entry) for entry, _ in self.pieces]
        return {
            self.name: runs[0].view(shape) if len(runs) == 1 else torch.cat([run.flatten() for run in runs]).view(shape)
        }


def cut(assemblies: Sequence[Assembly], placement: Placement, *, gap_bytes: int) -> tuple[list[Assembly], Placement]:
    """Return ``assemblies`` and ``placement`` with those stored tensors cut of which one part is asked for."""
    cuts = [_cut(item, placement.asked, gap_bytes) if isinstance(item, Plain) else item for item in assemblies]
    parts = {item.whole.entry.name: [entry for entry, _ in item.pieces] for item in cuts if isinstance(item, Cut)}
    if not parts:
        return cuts, placement
    order = tuple(part for entry in placement.order for part in parts.get(entry.name, (entry,)))
    targets = {part.name: placement.targets[name] for name, some in parts.items() for part in some}
    return cuts, replace(placement, order=order, targets={**placement.targets, **targets})


def _cut(plain: Plain, asked: Mapping[str, Sequence[Index]], gap_bytes: int) -> Assembly:
    indices = asked.get(plain.name, ())
    bounds = bounds_of(indices[0], plain.output.shape) if len(indices) == 1 else None
    if bounds is None or DTYPES[plain.entry.dtype].packed != 1 or _is_all(bounds, plain.output.shape):
        return plain
    if any(start == stop for start, stop in bounds):
        return plain  # nothing of it: too rare for a form of its own
    return Cut(plain, bounds, reads_rows=_should_read_rows(plain.entry, bounds, gap_bytes))


def bounds_of(index: Index, shape: Sequence[int]) -> Bounds | None:
    """Return the bounds that ``index`` has in a tensor of ``shape``; None for one that is not made of slices without steps."""
    if index is Ellipsis:
        return tuple((0, size) for size in shape)
    parts = index if isinstance(index, tuple) else (index,)
    if len(parts) > len(shape) or not all(isinstance(part, slice) and part.step in (None, 1) for part in parts):
        return None
    given = [part.indices(size)[:2] for part, size in zip(parts, shape, strict=False)]
    return tuple((start, max(start, stop)) for start, stop in given) + tuple((0, size) for size in shape[len(parts) :])


def _is_all(bounds: Bounds, shape: Sequence[int]) -> bool:
    return bounds == tuple((0, size) for size in shape)


def _last_cut(bounds: Bounds, shape: Sequence[int]) -> int:
    """Return the last dimension of which not all is kept; a run lies within one index of those before it."""
    return max(place for place, (bound, size) in enumerate(zip(bounds, shape, strict=True)) if bound != (0, size))


def _should_read_rows(entry: Entry, bounds: Bounds, gap_bytes: int) -> bool:
    last = _last_cut(bounds, entry.shape)
    num_runs = math.prod(stop - start for start, stop in bounds[:last])
    if num_runs == 1:
        return False
    start, stop = bounds[last]
    row_bytes = math.prod(entry.shape[last + 1 :]) * _item_bytes(entry)
    return (entry.shape[last] - (stop - start)) * row_bytes <= gap_bytes or num_runs > MOST_RUNS


def _runs_of(entry: Entry, bounds: Bounds) -> list[Entry]:
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
