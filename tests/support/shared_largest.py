"""Ranks as threads that find the largest of what each of them sees, as a process group would."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from headrace.quantization.input_slices import InputSlice

T = TypeVar("T")
PATIENCE_S = 30.0


class SharedLargest:
    """``len(starts)`` ranks that divide ``num_features`` features; counts how often they ask one another."""

    def __init__(self, starts: tuple[int, ...], num_features: int) -> None:
        self._starts, self._num_features = starts, num_features
        self._barrier = threading.Barrier(len(starts), timeout=PATIENCE_S)
        self._seen: list[torch.Tensor] = [torch.empty(0)] * len(starts)
        self.num_asked = 0

    def run(self, function: Callable[[InputSlice, slice], T]) -> list[T]:
        """Return what ``function`` gives on each rank, for its slice and the features that these are."""
        with ThreadPoolExecutor(len(self._starts)) as pool:
            return list(
                pool.map(lambda rank: function(self._slice_of(rank), self._features(rank)), range(len(self._starts)))
            )

    def _features(self, rank: int) -> slice:
        return slice(self._starts[rank], (*self._starts, self._num_features)[rank + 1])

    def _slice_of(self, rank: int) -> InputSlice:
        def share(largest: torch.Tensor) -> torch.Tensor:
            self._seen[rank] = largest
            if self._barrier.wait() == 0:
                self.num_asked += 1
            assert len({tuple(one.shape) for one in self._seen}) == 1, "all ranks ask for a tensor of the same shape"
            found = torch.stack(self._seen).amax(dim=0)
            self._barrier.wait()
            return found

        return InputSlice(starts=self._starts, rank=rank, num_features=self._num_features, share=share)
