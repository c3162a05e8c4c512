"""The parts of values that one rank of a tensor- or expert-parallel model keeps: which bytes are asked for, and how the parts come out of them. Pure; knows no engine.

A part is a slice of each dimension of a value, be that a stored tensor, an expanded weight, or a stack of many. Of each stored tensor that it touches, a region is wanted; `readings`
knows what of the file that is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from headrace.checkpoint import Entry
from headrace.engines.packed_slice import PackedSlice, StackedSlices
from headrace.engines.placement import Placement
from headrace.engines.readings import Reading, Region, expanded_reading, plain_reading, shape_of, volume
from headrace.engines.values import Assembly, Expansion, FindBlock, Index, Output, Plain, Stack, Take, no_block
from headrace.quantization.weight_cuts import Bounds

Whole = Plain | Expansion | Stack


@dataclass(frozen=True)
class Parts:
    """The parts of the values of ``whole`` that are asked for. Its outputs are the whole values', since the engine slices those; what it builds are the parts."""

    whole: Whole
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

    @property
    def replaced(self) -> Mapping[str, Sequence[Entry]]:
        """Stored tensor → what is asked for in its place."""
        nothing: dict[str, Sequence[Entry]] = {entry.name: () for entry, _ in self.whole.pieces}
        return nothing | {name: some for reading in self.readings for name, some in reading.replaced.items()}

    def build(self, take: Take, block: FindBlock = no_block) -> dict[str, list[torch.Tensor]]:
        """Return the parts; each owns its memory, and of what was read beyond them nothing stays."""
        built: dict[str, list[torch.Tensor | None]] = {name: [None] * len(parts) for name, parts in self.bounds.items()}
        for reading in self.readings:
            for region, values in zip(reading.regions, reading.take(take), strict=True):
                parts, shape = built[reading.name], shape_of(self.bounds[reading.name][region.part])
                if values.shape == shape:
                    owned = values.clone(memory_format=torch.contiguous_format) if reading.gives_views else values
                    parts[region.part] = owned
                    continue
                part = parts[region.part]
                if part is None:
                    part = parts[region.part] = torch.empty(shape, dtype=self.outputs[reading.name].dtype)
                part[region.place] = values
        return {name: [part for part in parts if part is not None] for name, parts in built.items()}


def cut(assemblies: Sequence[Assembly], placement: Placement, *, gap_bytes: int) -> tuple[list[Assembly], Placement]:
    """Return ``assemblies`` and ``placement`` with those values cut of which only parts are asked for, and slices of packed weights that read no more than theirs."""
    cuts = [_narrowed(item, placement.asked, gap_bytes) for item in assemblies]
    pieces: dict[str, Sequence[Entry]] = {}
    for item in cuts:
        if isinstance(item, Parts | PackedSlice | StackedSlices):
            pieces |= item.replaced
    if not pieces:
        return cuts, placement
    order = tuple(piece for entry in placement.order for piece in pieces.get(entry.name, (entry,)))
    targets = {piece.name: placement.targets[name] for name, some in pieces.items() for piece in some}
    return cuts, replace(placement, order=order, targets={**placement.targets, **targets})


def _narrowed(assembly: Assembly, asked: Mapping[str, Sequence[Index]], gap_bytes: int) -> Assembly:
    if isinstance(assembly, PackedSlice | StackedSlices):
        return assembly.narrowed(gap_bytes=gap_bytes)
    return _cut(assembly, asked, gap_bytes) if isinstance(assembly, Whole) else assembly


def _cut(whole: Whole, asked: Mapping[str, Sequence[Index]], gap_bytes: int) -> Assembly:
    bounds = {name: _parts_of(asked.get(name, ()), output.shape) for name, output in whole.outputs.items()}
    parts = {name: some for name, some in bounds.items() if some is not None}
    wanted = sum(volume(part) for some in parts.values() for part in some)
    if len(parts) < len(bounds) or wanted == sum(math.prod(output.shape) for output in whole.outputs.values()):
        return whole
    readings: list[Reading] = []
    for source, name, index in _sources(whole):
        found = [_region(index, number, part, whole.outputs[name].shape) for number, part in enumerate(parts[name])]
        regions = [region for region in found if region is not None]
        if regions:
            reading = _reading(source, name, regions, gap_bytes)
            if reading is None:
                return whole
            readings.append(reading)
    return Parts(whole, parts, sorted(readings, key=lambda one: (one.pieces[0].file, one.pieces[0].start)))


def _reading(source: Plain | Expansion, name: str, regions: Sequence[Region], gap_bytes: int) -> Reading | None:
    if isinstance(source, Plain):
        return plain_reading(source.entry, name, regions, gap_bytes=gap_bytes)
    return expanded_reading(source, name, regions[0], gap_bytes=gap_bytes) if len(regions) == 1 else None


def _sources(whole: Whole) -> list[tuple[Plain | Expansion, str, tuple[int | slice, ...]]]:
    """Return what ``whole`` is made of, each with the name of its value and its index therein."""
    if isinstance(whole, Stack):
        return [(piece.source, piece.name, piece.index) for piece in whole.stacked]
    return [(whole, whole.name, ())]


def _parts_of(indices: Sequence[Index], shape: Sequence[int]) -> list[Bounds] | None:
    """Return the bounds of all parts; None where there are none, one has nothing in it (too rare for a form of its own), or two overlap."""
    found = [bounds_of(index, shape) for index in indices]
    parts = [bounds for bounds in found if bounds is not None and volume(bounds)]
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
