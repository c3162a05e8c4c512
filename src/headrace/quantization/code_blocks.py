"""Blocks of unsigned codes out of packed words, small enough that what lies between words and results stays in the processor's cache."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch

from headrace.quantization.bits import (
    WORD_BITS,
    num_values,
    num_words,
    pack_bits,
    split_octets,
    unpack_bits,
    without_gaps,
)

_BLOCK_VALUES = 1 << 17
"""Values per block on a CPU: 512 KiB in float32, so that they stay in a core's second-level cache with their codes."""
_BLOCK_VALUES_ELSEWHERE = 1 << 24
"""On other devices each call costs more than a miss of the cache."""
_TILE_COLUMNS = 1024
"""Input features per block of a weight that is stored by columns. Blocks are then wide enough to read and write whole cache lines both ways."""

Blocks = Iterable[tuple[int, int, torch.Tensor]]
"""First row, first column, and codes ``[rows, columns]``, uint8 or int16, which may reach past the weight's last row or column. The next block may overwrite them."""


class WorkAreas:
    """Memory that one pass over a weight uses again and again, by name: the system's allocator gives areas of this size back, and has them zeroed anew, too often."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._areas: dict[str, torch.Tensor] = {}
        self._tensors: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous tensor of any content, in the memory of the last one of that name where it is large enough."""
        found = self._tensors.get((name, shape))
        if found is not None:
            return found
        count, area = math.prod(shape), self._areas.get(name)
        if area is None or area.numel() < count:
            area = self._areas[name] = torch.empty(count, dtype=dtype, device=self._device)
        found = self._tensors[name, shape] = area[:count].view(shape)
        return found

    def turned(self, name: str, matrix: torch.Tensor) -> torch.Tensor:
        """Return the transpose of ``matrix``, contiguous. torch is fast at this only where ``matrix`` has no gaps between its rows, so these are closed first."""
        rows, columns = matrix.shape
        closed = self.take(f"{name} closed", (rows, columns), matrix.dtype).copy_(matrix)
        return self.take(f"{name} turned", (columns, rows), matrix.dtype).copy_(closed.t())


def rows_per_block(num_columns: int, device: torch.device, multiple: int = 1) -> int:
    """Return how many rows to work on at a time: a positive multiple of ``multiple``."""
    values = _BLOCK_VALUES if device.type == "cpu" else _BLOCK_VALUES_ELSEWHERE
    return max(1, values // (max(1, num_columns) * multiple)) * multiple


def columns_per_block(
    num_columns: int, group_size: int | None, device: torch.device, about: int = _TILE_COLUMNS
) -> int:
    """Return how many columns of a weight that is stored by columns to work on at a time: whole groups or whole parts of one, and whole words, or all."""
    unit = WORD_BITS if group_size is None or group_size % about == 0 else math.lcm(group_size, WORD_BITS)
    if device.type != "cpu" or unit > 8 * about:
        return num_columns
    return min(num_columns, max(1, about // unit) * unit)


def word_blocks(words: torch.Tensor, bits: int) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield the codes of ``words`` (int32 ``[N, W]``, packed along the row), some rows at a time."""
    areas, words = WorkAreas(words.device), without_gaps(words)
    step = rows_per_block(num_values(words.shape[1], bits), words.device)
    for start in range(0, words.shape[0], step):
        yield start, 0, _unpack(words[start : start + step], bits, areas)


def turned_word_blocks(
    words: torch.Tensor, bits: int, group_size: int | None
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield the codes of ``words`` (int32 ``[W, N]``, packed along the column) as the rows of the weight ``[N, K]``, a tile at a time."""
    areas = WorkAreas(words.device)
    columns = columns_per_block(num_values(words.shape[0], bits), group_size, words.device)
    height, step = num_words(columns, bits), rows_per_block(columns, words.device)
    for start in range(0, words.shape[1], step):
        for first in range(0, words.shape[0], height):
            tile = areas.turned("words", words[first : first + height, start : start + step])
            yield start, num_values(first, bits), _unpack(tile, bits, areas)


def slice_words(words: torch.Tensor, bits: int, columns: tuple[int, int]) -> torch.Tensor:
    """Return words that hold values ``[start, stop)`` of every row of ``words`` (int32 ``[N, W]``): a view where the first value begins a word, else packed anew.

    After the last value a view may hold values that follow it.
    """
    start, stop = columns
    if start * bits % WORD_BITS == 0:
        return words[:, start * bits // WORD_BITS : num_words(stop, bits)]
    return pack_bits(unpack_bits(words, bits)[:, start:stop], bits)


def result_tensor(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device, out: torch.Tensor | None
) -> torch.Tensor:
    """Return ``out``, or a new tensor where there is none. Raises `ValueError` for an ``out`` of another shape or dtype."""
    if out is None:
        return torch.empty(shape, dtype=dtype, device=device)
    if tuple(out.shape) != tuple(shape) or out.dtype != dtype:
        raise ValueError(f"out is {out.dtype} {tuple(out.shape)}, the result {dtype} {tuple(shape)}")
    return out


def _unpack(words: torch.Tensor, bits: int, areas: WorkAreas) -> torch.Tensor:
    if bits != 4:
        return unpack_bits(words, bits)
    octets, shape = words.view(torch.uint8), (words.shape[0], 4 * words.shape[1])
    return split_octets(octets, areas.take("pairs", shape, torch.int16), areas.take("halves", shape, torch.int16))
