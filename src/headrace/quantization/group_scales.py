"""Integer codes with a scale, and perhaps a zero point, per row and group of input features: ``value = (code - zero) * scale``, in float32. Knows no storage layout."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.quantization.code_blocks import Blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupScales:
    """Scale and zero point of every value of a weight ``[N, K]`` with ``G`` groups."""

    scale: torch.Tensor
    """``[N, G]``, any floating type, any strides."""
    zero: int | torch.Tensor
    """The code of the value 0: one for the whole weight, or ``[N, G]`` of any type."""
    bits: int
    """Codes are in ``[0, 2**bits)``."""
    group_size: int
    index: torch.Tensor | None
    """Group of each input feature, int64 ``[K]``; None where groups of ``group_size`` follow one another and the last one is full."""

    @property
    def base(self) -> int:
        """What blocks of codes for `write` are counted from: the zero point where there is one for the whole weight, else 0."""
        return self.zero if isinstance(self.zero, int) else 0

    @torch.no_grad()
    def write(self, blocks: Blocks, out: torch.Tensor) -> None:
        """Write the values of ``blocks`` (codes less `base`) into ``out`` (``[N, K]``, floating, any strides), each computed in float32 and rounded once.

        Blocks that do not span all columns hold whole groups, or lie within one.
        """
        scale, zero = self.scale.float(), None if isinstance(self.zero, int) else self.zero
        for row, column, codes in blocks:
            result = out[row : row + codes.shape[0], column : column + codes.shape[1]]
            if not result.numel():
                continue
            if codes.shape != result.shape:
                codes = codes[: result.shape[0], : result.shape[1]]
            rows, columns = slice(row, row + result.shape[0]), slice(column, column + result.shape[1])
            grouped = self.by_group(codes)
            if zero is not None:
                grouped.sub_(self.spread(zero[rows].float(), columns))
            if out.dtype is torch.float32:
                torch.mul(grouped, self.spread(scale[rows], columns), out=self.by_group(result))
            else:
                grouped.mul_(self.spread(scale[rows], columns))
                result.copy_(codes)

    def nearest(self, values: torch.Tensor) -> torch.Tensor:
        """Return the codes that come nearest to ``values`` (float32 ``[N, K]``): int16 ``[N, K]``. Under a scale of 0, the code of 0."""
        zero = self.zero if isinstance(self.zero, int) else self.spread(self.zero.float())
        codes = self.by_group(values) / self.spread(self.scale.float()) + zero
        codes = torch.where(codes.isnan(), zero, codes)
        return codes.round_().clamp_(0, (1 << self.bits) - 1).to(torch.int16).reshape(values.shape)

    def by_group(self, values: torch.Tensor) -> torch.Tensor:
        """Return ``values`` of some columns as a view ``[rows, groups, features]``; where there is an index, as they are."""
        rows, columns = values.shape
        return values if self.index is not None else values.view(rows, -1, min(self.group_size, columns))

    def spread(self, per_group: torch.Tensor, columns: slice = slice(0, None)) -> torch.Tensor:
        """Return what ``per_group`` (``[rows, G]``) has for some columns, so that it broadcasts against their `by_group`."""
        if self.index is not None:
            return per_group.contiguous().index_select(1, self.index[columns])
        if columns.stop is not None and per_group.shape[1] > 1:
            per_group = per_group[:, columns.start // self.group_size : -(-columns.stop // self.group_size)]
        return per_group.unsqueeze(-1)


def group_scales(
    *,
    scale: torch.Tensor,
    zero: int | torch.Tensor,
    bits: int,
    num_columns: int,
    group_size: int | None,
    index: torch.Tensor | None = None,
    is_literal: bool = False,
) -> GroupScales:
    """Return the scales of a weight with ``num_columns`` input features from its stored parts; without a ``group_size`` there is one group.

    ``index`` is a stored ``g_idx``, or that of a slice, which is literal: see `group_of_columns`.
    """
    groups: torch.Tensor | None = None
    if group_size is None or scale.shape[1] == 1:
        group_size = num_columns
    elif index is not None or num_columns % group_size:
        groups = group_of_columns(
            index, num_columns=num_columns, group_size=group_size, device=scale.device, is_literal=is_literal
        )
        if groups.device.type == "cpu" and num_columns % group_size == 0:
            # Most stored indices are plain, those of slices from some group on. Elsewhere the look would have to wait for the device.
            first, count = int(groups[0]), num_columns // group_size
            plain = group_of_columns(None, num_columns=num_columns, group_size=group_size, device=groups.device)
            if torch.equal(groups, plain + first):
                groups, scale = None, scale[:, first : first + count]
                zero = zero if isinstance(zero, int) else zero[:, first : first + count]
    return GroupScales(scale=scale.detach(), zero=_single(zero), bits=bits, group_size=group_size, index=groups)


def _single(zero: int | torch.Tensor) -> int | torch.Tensor:
    """Return the one zero point that all have, where that is so and can be seen without waiting for a device: it costs less."""
    if isinstance(zero, int) or zero.device.type != "cpu":
        return zero
    first = float(zero[0, 0])
    return int(first) if first.is_integer() and bool((zero == first).all()) else zero


def group_of_columns(
    index: torch.Tensor | None, *, num_columns: int, group_size: int, device: torch.device, is_literal: bool = False
) -> torch.Tensor:
    """Return the group of each input feature of a weight that has several groups: int64 ``[K]``, on ``device``.

    A stored ``index`` that is zero throughout stands for none, and so does one with a negative entry: compressed-tensors 0.9 marks one that was never written with -1. One that
    ``is_literal`` means what it says: features of a slice may all be of group 0.
    """
    if index is not None and is_literal:
        return index.long()[:num_columns]
    plain = torch.arange(num_columns, device=device) // group_size
    if index is None:
        return plain
    is_real = (index.amin() >= 0) & (index.amax() > 0)
    return torch.where(is_real, index.long()[:num_columns], plain)


def cut_groups(
    columns: tuple[int, int],
    *,
    num_columns: int,
    num_groups: int,
    group_size: int | None,
    index: torch.Tensor | None,
    device: torch.device,
    is_literal: bool = False,
) -> tuple[slice, torch.Tensor | None]:
    """Return which groups input features ``[start, stop)`` use, and the index (int32 ``[stop - start]``, on ``device``) that they then need, counted from the first of these groups.

    None where groups of ``group_size`` follow one another from the first feature on. Without an ``index`` the range is as tight as can be, so that one that is zero throughout comes
    with one group only. Of a weight with an index any feature may be of any group: all groups are kept, whatever the values, which need not be there; what comes is literal.
    """
    start, stop = columns
    if group_size is None or num_groups == 1:
        return slice(0, 1), None
    if index is not None:
        groups = group_of_columns(
            index, num_columns=num_columns, group_size=group_size, device=index.device, is_literal=is_literal
        )
        return slice(0, num_groups), groups[start:stop].to(torch.int32)
    first, end = start // group_size, -(-stop // group_size)
    if start % group_size == 0:
        return slice(first, end), None
    return slice(first, end), (torch.arange(start, stop, device=device) // group_size - first).to(torch.int32)
