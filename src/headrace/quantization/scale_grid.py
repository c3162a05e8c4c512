"""Scales that lie on a grid over a weight: one for all of it, per row, per group of columns, or per block. Knows no codes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Operation = Callable[[torch.Tensor, torch.Tensor], object]
"""Changes its first argument in place by its second, which broadcasts against it: ``torch.Tensor.mul_``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleGrid:
    """One number for each block of a weight ``[N, K]``. The last block of a row or column may be cut; of a slice of a weight also the first one."""

    values: torch.Tensor
    """float32 as a rule, ``[ceil((row_offset + N) / block[0]), ceil((column_offset + K) / block[1])]``, any strides."""
    block: tuple[int, int]
    """Rows and columns of a block."""
    row_offset: int = 0
    """Rows of the first block that lie before the weight's first row; fewer than ``block[0]``."""
    column_offset: int = 0

    @property
    def is_single(self) -> bool:
        """Whether one number serves the whole weight."""
        return self.values.numel() == 1

    def of_blocks(self, num_rows: int, step: int) -> Sequence[torch.Tensor]:
        """Return the numbers for each ``step`` of the weight's ``num_rows`` rows, ``[rows, C]`` or ``[1, C]``: what `change` takes."""
        if self.block[0] == 1:
            return torch.split(self.values, step)
        return [self._of_rows(first, min(step, num_rows - first)) for first in range(0, num_rows, step)]

    def change(self, target: torch.Tensor, numbers: torch.Tensor, operation: Operation) -> None:
        """Change ``target`` (``[rows, K]``, of the numbers' type, any strides) in place: each value with the number of its block, of those in ``numbers`` (see `of_blocks`)."""
        width, columns = self.block[1], target.shape[1]
        if self.column_offset + columns <= width:
            operation(target, numbers)
            return
        head = -self.column_offset % width
        body = (columns - head) // width
        if body * width == columns:  # No block is cut; each view less counts for blocks of a few rows.
            operation(target.view(-1, body, width), numbers.unsqueeze(-1))
            return
        first = 1 if head else 0
        if head:
            operation(target[:, :head], numbers[:, :1])
        if body:
            whole = target[:, head : head + body * width].view(-1, body, width)
            operation(whole, numbers[:, first : first + body, None])
        if head + body * width < columns:
            operation(target[:, head + body * width :], numbers[:, first + body : first + body + 1])

    def mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> ScaleGrid:
        """Return the same grid with other numbers."""
        return ScaleGrid(
            values=change(self.values), block=self.block, row_offset=self.row_offset, column_offset=self.column_offset
        )

    def _of_rows(self, first_row: int, num_rows: int) -> torch.Tensor:
        first, height = self.row_offset + first_row, self.block[0]
        if first // height == (first + num_rows - 1) // height:
            return self.values[first // height : first // height + 1]
        rows = torch.arange(first, first + num_rows, device=self.values.device) // height
        return self.values.index_select(0, rows)


def cut_range(start: int, stop: int, *, size: int, offset: int) -> slice:
    """Return which blocks of ``size``, the first of which begins ``offset`` before 0, positions ``[start, stop)`` lie in."""
    first = (offset + start) // size
    last = -(-(offset + stop) // size)
    return slice(first, last)
