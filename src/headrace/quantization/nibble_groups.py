"""Weights of E2M1 codes, two in a byte, with one scale byte per group of columns: ``value = code * (what the scale byte stands for)``, in float32, then rounded once.

What the 256 scale bytes stand for is given as a table, a global scale included, so one way serves NVFP4 and MXFP4. On a CPU a table of all pairs of codes under all
scale bytes gives results directly; its index is a scale byte and a byte of codes, side by side.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.quantization.code_blocks import result_tensor, rows_per_block
from headrace.quantization.codes import e2m1_values, nearest_e2m1
from headrace.quantization.pair_tables import as_pairs, has_pairs, pair_table

_FEWEST = 1 << 14
"""Values from which on a table is worth making."""
_SPREAD_CODES = 16
"""Codes whose scale byte is written beside theirs at a time: 8 pairs, 16 bytes, the size of torch's largest numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NibbleWeight:
    """A weight of E2M1 codes in groups. The lower half of a byte is the column before that of the upper half."""

    codes: torch.Tensor
    """uint8 ``[N, G * group_size / 2]``, any strides."""
    scales: torch.Tensor
    """uint8 ``[N, G]``, any strides."""
    scale_values: torch.Tensor
    """float32 ``[256]``: what each scale byte stands for."""
    group_size: int
    """Even."""
    num_columns: int
    column_offset: int = 0
    """Columns of the first group that are not the weight's."""

    def dequantize(self, dtype: torch.dtype, out: torch.Tensor | None) -> torch.Tensor:
        """Return the weight as ``[N, num_columns]`` in ``dtype``, in ``out`` where that is given."""
        with torch.no_grad():
            result = result_tensor((self.codes.shape[0], self.num_columns), dtype, self.codes.device, out)
            if result.numel():
                self._write(result)
            return result

    def _write(self, result: torch.Tensor) -> None:
        """Write the weight into ``result``, block of rows by block of rows."""
        rows, stored = self.codes.shape[0], 2 * self.codes.shape[1]
        step = min(rows_per_block(stored, self.codes.device), rows)
        lookup = _Lookup(self, result.dtype, step) if self._has_table_for(result.dtype) else None
        if lookup is not None and self.num_columns == stored:
            pairs = as_pairs(result)
            if pairs is not None and self.codes.is_contiguous() and self.scales.is_contiguous():
                lookup.write(self.codes.view(-1), self.scales.view(-1), pairs)
                return
        columns = slice(self.column_offset, self.column_offset + self.num_columns)
        blocks = zip(*(torch.split(one, step) for one in (self.codes, self.scales, result)), strict=True)
        for codes, scales, target in blocks:
            if lookup is None:
                values = self._plain(codes, scales)
            else:
                values = torch.empty(len(codes), stored, dtype=result.dtype)
                pairs = as_pairs(values)
                assert pairs is not None
                lookup.write(codes.reshape(-1), scales.reshape(-1), pairs)
            target.copy_(values[:, columns])

    def _has_table_for(self, dtype: torch.dtype) -> bool:
        return (
            self.codes.device.type == "cpu"
            and self.codes.numel() >= _FEWEST // 2
            and self.group_size % _SPREAD_CODES == 0
            and has_pairs(dtype)
        )

    def _plain(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Return the values of some rows, those of columns that are not the weight's among them: float32 ``[rows, G * group_size]``."""
        halves = torch.stack((codes & 15, codes >> 4), dim=-1)
        values = e2m1_values(codes.device).index_select(0, halves.int().reshape(-1))
        groups = values.view(*scales.shape, self.group_size)
        return groups.mul_(self._per_group(scales).unsqueeze(-1)).flatten(1)

    def _per_group(self, scales: torch.Tensor) -> torch.Tensor:
        return self.scale_values.index_select(0, scales.int().reshape(-1)).view(scales.shape)


class _Lookup:
    """Looks up results in a table, so many rows at a time. Has working memory for these."""

    def __init__(self, weight: NibbleWeight, dtype: torch.dtype, num_rows: int) -> None:
        # Row by row of the table: a scale byte; in it byte by byte of codes.
        self._results = pair_table((weight.scale_values[:, None] * e2m1_values()).to(dtype)).view(-1)
        self._groups = num_rows * weight.scales.shape[1]
        self._bytes_per_group = weight.group_size // 2
        self._repeats = weight.group_size // _SPREAD_CODES
        num_bytes = self._groups * self._bytes_per_group
        self._codes = torch.empty(num_bytes, dtype=torch.int16)
        self._index = torch.empty(num_bytes, dtype=torch.int32)
        self._spread = torch.empty(self._groups * self._repeats, dtype=torch.complex128)
        self._scales = torch.empty(self._groups, self._repeats, dtype=torch.int32)
        upper = (torch.arange(256, dtype=torch.int32) << 8).to(torch.int16)
        self._upper = _as_sixteen_bytes(upper[:, None].repeat(1, _SPREAD_CODES // 2).view(-1))
        """For each scale byte, eight numbers of 16 bits that have it as their upper byte: written with one lookup."""

    def write(self, codes: torch.Tensor, scales: torch.Tensor, pairs: torch.Tensor) -> None:
        """Write the results for ``codes`` and ``scales`` (flat) to ``pairs`` (flat, integers that hold two results each)."""
        size = self._groups * self._bytes_per_group
        # Split at once, since each cut and view of a tensor takes as long as some thousand values.
        blocks = zip(torch.split(codes, size), torch.split(scales, self._groups), torch.split(pairs, size), strict=True)
        memory = self._codes, self._index, self._spread, self._scales
        for some, bytes_of_scales, target in blocks:
            if len(some) < size:
                count, groups = len(some), len(bytes_of_scales)
                memory = (
                    self._codes[:count],
                    self._index[:count],
                    self._spread[: groups * self._repeats],
                    self._scales[:groups],
                )
            numbers, index, spread, units = memory
            numbers.copy_(some)
            units.copy_(bytes_of_scales.unsqueeze(1))
            torch.index_select(self._upper, 0, units.view(-1), out=spread)
            numbers.view(torch.int64).bitwise_or_(torch.view_as_real(spread).view(torch.int64).view(-1))
            index.copy_(numbers.view(torch.uint16))
            torch.index_select(self._results, 0, index, out=target)


def nearest_nibbles(values: torch.Tensor, scales: torch.Tensor, group_size: int) -> torch.Tensor:
    """Return the bytes of codes (uint8 ``[N, K / 2]``) nearest to ``values`` (float32 ``[N, K]``) under ``scales`` (float32 ``[N, G]``). Where a scale is 0 they are those of 0."""
    groups = values.reshape(*scales.shape, group_size) / torch.where(scales == 0, 1.0, scales).unsqueeze(-1)
    codes = nearest_e2m1(groups).view(values.shape[0], -1, 2)
    return codes[..., 0] | (codes[..., 1] << 4)


def _as_sixteen_bytes(numbers: torch.Tensor) -> torch.Tensor:
    """Return ``numbers`` (int16) as elements of 16 bytes: torch has no such integer, and copies complex ones bit by bit."""
    return torch.view_as_complex(numbers.view(torch.float64).view(-1, 2).clone())
