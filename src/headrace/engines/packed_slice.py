"""A rank's slices of packed weights on their way from the store: which bytes of each stored part are asked for, and how the slice's parts come out of them. Pure; knows no engine.

At first a slice asks for whole tensors, as ranks that share their reading must, which all ask for the same. `narrowed` it asks for what it needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from headrace.checkpoint import Entry
from headrace.engines.readings import PlainReading, Region, plain_reading
from headrace.engines.values import FindBlock, Output, Take, no_block
from headrace.quantization.scheme import Role
from headrace.quantization.weight_cuts import Bounds, WeightCut


@dataclass(frozen=True, kw_only=True)
class PackedSlice:
    """The parts of a slice of a packed weight, each under its name."""

    cut: WeightCut
    entries: Mapping[Role, Entry]
    """All parts of the whole weight that the slice has something of."""
    names: Mapping[Role, str]
    """Of all parts of the slice, those that are not stored among them."""
    experts: tuple[int, int] | None = None
    """Where the file itself stacks experts: those ``[start, stop)`` that are wanted. All parts then have a dimension for experts before all others."""
    readings: Mapping[Role, PlainReading] = field(default_factory=dict)
    """What is asked for of those parts that are not read whole."""

    @cached_property
    def pieces(self) -> Sequence[tuple[Entry, str]]:
        return [(piece, self.names[role]) for role in self._order for piece in self._pieces_of(role)]

    @cached_property
    def outputs(self) -> Mapping[str, Output]:
        parts, stack = self.cut.slice.parts, () if self.experts is None else (self.experts[1] - self.experts[0],)
        return {name: Output((*stack, *parts[role].shape), parts[role].dtype) for role, name in self.names.items()}

    @property
    def replaced(self) -> Mapping[str, Sequence[Entry]]:
        """Stored tensor → what is asked for in its place."""
        return {reading.entry.name: reading.pieces for reading in self.readings.values()}

    def narrowed(self, *, gap_bytes: int) -> PackedSlice:
        """Return the same slice, for which no more is asked than it needs, but for gaps that cost less than a request."""
        found = {
            role: plain_reading(entry, self.names[role], [Region(self._bounds(role), 0, ())], gap_bytes=gap_bytes)
            for role, entry in self.entries.items()
        }
        return replace(self, readings={role: reading for role, reading in found.items() if reading is not None})

    def build(self, take: Take, block: FindBlock = no_block) -> dict[str, torch.Tensor]:
        """Return the parts; each owns its memory, and of what was read beyond them nothing stays."""
        found = {role: self._take(role, take) for role in self._order}
        if self.experts is not None:
            return self._stacked(found)
        parts = self.cut.parts_of(found)
        return {
            name: parts[role] if self._is_all_that_was_read(role, parts[role]) else _alone(parts[role])
            for role, name in self.names.items()
        }

    def _stacked(self, found: Mapping[Role, torch.Tensor]) -> dict[str, torch.Tensor]:
        built = {name: torch.empty(output.shape, dtype=output.dtype) for name, output in self.outputs.items()}
        for place in range(len(next(iter(found.values())))):
            parts = self.cut.parts_of({role: tensor[place] for role, tensor in found.items()})
            for role, name in self.names.items():
                built[name][place].copy_(parts[role])
        return built

    @cached_property
    def _order(self) -> Sequence[Role]:
        """The parts in the order of the files."""
        return sorted(self.entries, key=lambda role: _place(self.entries[role]))

    def _pieces_of(self, role: Role) -> Sequence[Entry]:
        return self.readings[role].pieces if role in self.readings else (self.entries[role],)

    def _take(self, role: Role, take: Take) -> torch.Tensor:
        if role in self.readings:
            return self.readings[role].take(take)[0]
        return take(self.entries[role])[tuple(slice(*bound) for bound in self._bounds(role))]

    def _bounds(self, role: Role) -> Bounds:
        bounds = self.cut.bounds(role)
        return bounds if self.experts is None else (self.experts, *bounds)

    def _is_all_that_was_read(self, role: Role, part: torch.Tensor) -> bool:
        if role in self.cut.repacked or not part.is_contiguous():
            return False
        return not self.readings[role].gives_views if role in self.readings else self._is_whole(role, part)

    def _is_whole(self, role: Role, part: torch.Tensor) -> bool:
        return part.numel() == self.cut.whole[role].numel()


@dataclass(frozen=True, kw_only=True)
class Unwanted:
    """The parts of a weight of another rank's. They are asked for, in the order in which that rank asks, where ranks share their reading, and dropped."""

    entries: Mapping[Role, Entry]
    name: str
    """The stack that this rank does not put them into."""
    is_taken: bool = True

    @cached_property
    def pieces(self) -> Sequence[tuple[Entry, str]]:
        return [(entry, self.name) for entry in sorted(self.entries.values(), key=_place)] if self.is_taken else ()

    @property
    def replaced(self) -> Mapping[str, Sequence[Entry]]:
        return {} if self.is_taken else {entry.name: () for entry in self.entries.values()}

    def narrowed(self, *, gap_bytes: int) -> Unwanted:
        return replace(self, is_taken=False)

    def build(self, take: Take, block: FindBlock = no_block) -> dict[str, torch.Tensor]:
        for entry, _ in self.pieces:
            take(entry)
        return {}


@dataclass(frozen=True, kw_only=True)
class StackedSlices:
    """The parts of slices of many experts' weights, stacked: some experts, and of each some rows and columns."""

    outputs: Mapping[str, Output]
    """Of all stacks that are filled together, since their pieces lie side by side in the files."""
    slices: Sequence[tuple[PackedSlice | Unwanted, int]]
    """One of each expert and stack, with the expert's place among this rank's."""

    @cached_property
    def pieces(self) -> Sequence[tuple[Entry, str]]:
        return [piece for one, _ in self._ordered for piece in one.pieces]

    @property
    def replaced(self) -> Mapping[str, Sequence[Entry]]:
        """Stored tensor → what is asked for in its place."""
        return {name: some for one, _ in self.slices for name, some in one.replaced.items()}

    def narrowed(self, *, gap_bytes: int) -> StackedSlices:
        """Return the same slices, for which no more is asked than they need, and nothing of other experts."""
        return replace(self, slices=[(one.narrowed(gap_bytes=gap_bytes), place) for one, place in self.slices])

    def build(self, take: Take, block: FindBlock = no_block) -> dict[str, torch.Tensor]:
        """Return the stacks. A piece is in memory only until it has been put into its place."""
        built = {name: torch.empty(output.shape, dtype=output.dtype) for name, output in self.outputs.items()}
        for one, place in self._ordered:
            for name, part in one.build(take).items():
                built[name][place].copy_(part)
        return built

    @cached_property
    def _ordered(self) -> Sequence[tuple[PackedSlice | Unwanted, int]]:
        """The slices in the order of the files."""
        return sorted(self.slices, key=lambda item: min(map(_place, item[0].entries.values())))


def _place(entry: Entry) -> tuple[str, int]:
    return entry.file, entry.start


def _alone(part: torch.Tensor) -> torch.Tensor:
    """Return ``part`` without what lies around it in memory: itself where that is nothing."""
    is_alone = part.is_contiguous() and part.untyped_storage().nbytes() == part.nbytes
    return part if is_alone else part.clone(memory_format=torch.contiguous_format)
