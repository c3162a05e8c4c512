"""Blocks of codes out of packed words, small enough that what lies between words and results stays in the processor's cache."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch

from headrace.quantization.bits import (
    WORD_BITS,
    num_values,
    num_words,
    pack_bits,
    unpack_bits,
    without_gaps,
)
from headrace.quantization.pair_tables import pair_table

_BLOCK_VALUES = 1 << 17
"""Values per block on a CPU: 512 KiB in float32, so that they stay in a core's second-level cache with their codes."""
_BLOCK_VALUES_ELSEWHERE = 1 << 24
"""On other devices each call costs more than a miss of the cache."""
_TILE_COLUMNS = 1024
"""Input features per block of a weight that is stored by columns. Blocks are then wide enough to read and write whole cache lines both ways."""

Blocks = Iterable[tuple[int, int, torch.Tensor]]
"""First row, first column, and codes as float32 ``[rows, columns]``, which may reach past the weight's last row or column. They lie in a work area, without gaps: who takes them may change
them, and the next block overwrites them."""


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


def word_blocks(words: torch.Tensor, bits: int, zero: int) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield the codes of ``words`` (int32 ``[N, W]``, packed along the row) less ``zero``, some rows at a time."""
    reader = _WordReader(bits, zero, words.device)
    step = rows_per_block(num_values(words.shape[1], bits), words.device)
    for start in range(0, words.shape[0], step):
        yield start, 0, reader.read(words[start : start + step])


def turned_word_blocks(
    words: torch.Tensor, bits: int, zero: int, group_size: int | None
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield the codes of ``words`` (int32 ``[W, N]``, packed along the column) less ``zero`` as the rows of the weight ``[N, K]``, a tile at a time."""
    reader, areas = _WordReader(bits, zero, words.device), WorkAreas(words.device)
    columns = columns_per_block(num_values(words.shape[0], bits), group_size, words.device)
    height, step = num_words(columns, bits), rows_per_block(columns, words.device)
    for start in range(0, words.shape[1], step):
        for first in range(0, words.shape[0], height):
            tile = areas.turned("words", words[first : first + height, start : start + step])
            yield start, num_values(first, bits), reader.read(tile)


class _WordReader:
    """Makes float32 codes of words. Two 4-bit codes at a time are looked up, which takes fewer steps than to cut them out and convert them."""

    def __init__(self, bits: int, zero: int, device: torch.device) -> None:
        self._bits, self._zero, self._areas = bits, zero, WorkAreas(device)
        single = torch.arange(16, device=device, dtype=torch.float32) - zero
        self._pairs = pair_table(single)

    def read(self, words: torch.Tensor) -> torch.Tensor:
        if self._bits != 4:
            codes = unpack_bits(words, self._bits)
            return self._areas.take("codes", tuple(codes.shape), torch.float32).copy_(codes).sub_(self._zero)
        octets = without_gaps(words).view(torch.uint8)
        index = self._areas.take("index", tuple(octets.shape), torch.int32).copy_(octets)
        pairs = self._areas.take("pairs", tuple(octets.shape), torch.int64)
        torch.index_select(self._pairs, 0, index.view(-1), out=pairs.view(-1))
        return pairs.view(torch.float32)


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
