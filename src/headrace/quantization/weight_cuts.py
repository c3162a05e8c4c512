"""How the parts of a slice of a packed weight come out of the parts of the whole, found without a value: what must be read of each, and what is made of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from headrace.quantization.scheme import Role, Scheme, StoredPart, WeightQuantization
from headrace.quantization.slices import WeightSlice, slice_weight

Bounds = tuple[tuple[int, int], ...]
"""For each dimension where a part starts and where it stops."""

_INDEX = "g_idx"
"""Name of the index of a slice that begins within a group, where files of the format have none."""


@dataclass(frozen=True)
class WeightCut:
    """How the parts of a slice of a weight come out of the whole weight's, tried out on the meta device.

    Raises `ValueError` or `RuntimeError`, where it is looked at, for a scheme that cannot be cut there.
    """

    scheme: Scheme
    shape: tuple[int, int]
    rows: tuple[int, int]
    columns: tuple[int, int]
    whole: Mapping[Role, torch.Tensor]
    """On the meta device, as they are stored."""

    @classmethod
    def of(cls, weight: WeightQuantization, rows: tuple[int, int], columns: tuple[int, int]) -> WeightCut:
        """Return the cut of rows and columns ``[start, stop)`` of ``weight``."""
        whole = {role: torch.empty(part.shape, dtype=part.dtype, device="meta") for role, part in weight.parts.items()}
        return cls(weight.scheme, weight.shape, rows, columns, whole)

    @cached_property
    def slice(self) -> WeightSlice:
        return self._slice(self.whole)

    @cached_property
    def repacked(self) -> frozenset[Role]:
        """The parts that are no views of the whole weight's."""
        return frozenset(role for role, part in self.slice.parts.items() if not self._is_view(role, part))

    def narrowed(self, weight: WeightQuantization) -> WeightQuantization:
        """Return what the slice is packed as, where ``weight`` is the whole: parts in its order, under its names."""
        made = self.slice.parts
        names = {role: part.suffix for role, part in weight.parts.items() if role in made}
        names |= dict.fromkeys(made.keys() - names, _INDEX)
        parts = {role: StoredPart(name, made[role].dtype, tuple(made[role].shape)) for role, name in names.items()}
        return replace(weight, scheme=self.slice.scheme, shape=self.slice.shape, parts=parts)

    def bounds(self, role: Role) -> Bounds:
        """Return what must be read of the whole part: the part where that is a slice of it, else all."""
        whole, part = self.whole[role], self.slice.parts[role]
        if not self._is_slice(role):
            return tuple((0, size) for size in whole.shape)
        rest, bounds = int(part.storage_offset()), []
        for size, stride in zip(part.shape, whole.stride(), strict=True):
            start, rest = divmod(rest, stride)
            bounds.append((start, start + size))
        return tuple(bounds)

    def parts_of(self, found: Mapping[Role, torch.Tensor]) -> dict[Role, torch.Tensor]:
        """Return the parts of the slice out of what was read (see `bounds`)."""
        parts = {}
        for role, part in self.slice.parts.items():
            if role in self.repacked:
                continue
            values = found[role]
            start = values.storage_offset() + part.storage_offset()
            parts[role] = values if self._is_slice(role) else values.as_strided(part.shape, part.stride(), start)
        if self.repacked:
            anew = self._slice({role: self._repacking(role, found) for role in self.whole})
            parts |= {role: anew.parts[role] for role in self.repacked}
        return parts

    def _repacking(self, role: Role, found: Mapping[Role, torch.Tensor]) -> torch.Tensor:
        """Return the whole part ``role`` where its values are needed to pack parts anew, else one that has none. An index that is made lies where the scales do."""
        if role in self.repacked:
            return found[role]
        whole = self.whole[role]
        makes_index = not self.repacked <= self.whole.keys()
        return torch.empty_like(whole, device=found[role].device) if makes_index and role is Role.SCALE else whole

    def _is_view(self, role: Role, part: torch.Tensor) -> bool:
        whole = self.whole.get(role)
        return whole is not None and (part is whole or part._base is whole)

    def _is_slice(self, role: Role) -> bool:
        """Say whether a part is cut out of the whole one along its dimensions, or is that; another view of it is not."""
        whole, part = self.whole[role], self.slice.parts[role]
        return role not in self.repacked and part.stride() == whole.stride()

    def _slice(self, parts: Mapping[Role, torch.Tensor]) -> WeightSlice:
        if (self.rows, self.columns) == ((0, self.shape[0]), (0, self.shape[1])):
            return WeightSlice(scheme=self.scheme, parts=dict(parts), shape=self.shape)
        return slice_weight(self.scheme, parts, shape=self.shape, rows=self.rows, columns=self.columns)
