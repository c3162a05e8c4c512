"""What a layer whose input features are divided among ranks has to know to round its inputs as one process would: where its part begins, and the magnitudes of the others'.

A step that is found from the largest magnitude of a row, or of a group that a boundary between ranks cuts, is found from all of it. What only one rank sees, it need not ask for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from headrace.quantization.scheme import InputQuantization

Share = Callable[[Tensor], Tensor]
"""Largest values that this process sees → the largest that any does, of one shape: float32, none below 0."""


def alone(largest: Tensor) -> Tensor:
    """Return ``largest`` itself: this process sees everything."""
    return largest


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSlice:
    """The input features ``[starts[rank], starts[rank + 1])`` of a layer, of which there are ``num_features`` for all ranks together."""

    starts: tuple[int, ...]
    """First feature of each rank, in order."""
    rank: int
    num_features: int
    share: Share
    """Asks all ranks; every one of them calls it at the same place, for a tensor of the same shape, which it may change."""

    def of_rows(self) -> Share:
        """Return how the largest values of whole rows become known."""
        return self.share

    def of_groups(self, group_size: int) -> Share:
        """Return how the largest values of groups, ``[…, num_groups, n]`` of those that this rank has a part of, become those of the whole groups."""
        if not self._cuts_groups(group_size):
            return alone
        first, total = self.starts[self.rank] // group_size, -(-self.num_features // group_size)

        def share(largest: Tensor) -> Tensor:
            own = slice(first, first + largest.shape[-2])
            everywhere = largest.new_zeros(*largest.shape[:-2], total, largest.shape[-1])
            everywhere[..., own, :] = largest
            return self.share(everywhere)[..., own, :]

        return share

    def features_before(self, group_size: int) -> int:
        """Return how many features of this rank's first group lie before its part."""
        return self.starts[self.rank] % group_size

    def asks_others(self, inputs: InputQuantization) -> bool:
        """Say whether a rounding as ``inputs`` says needs anything of other ranks."""
        if inputs.granularity == "group":
            return self._cuts_groups(int(inputs.group_size or 1))
        return inputs.is_dynamic

    def _cuts_groups(self, group_size: int) -> bool:
        return any(start % group_size for start in self.starts)
