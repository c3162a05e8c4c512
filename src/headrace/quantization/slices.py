"""Parts of a slice of a weight, out of the parts of the whole: what a rank of a tensor-parallel group needs, wherever its first row or column falls.

Blocks and groups are counted on the whole weight. A slice that begins inside one keeps how far inside in the scheme, because the block's scale serves only the rest of it;
scales that were cut up by the slice's own sizes would be those of other rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from headrace.quantization.scheme import Parts, Role, Scheme


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSlice:
    """Some rows and columns of a weight, packed: ``slice.scheme.dequantize(slice.parts, shape=slice.shape)`` are their values."""

    scheme: Scheme
    parts: dict[Role, torch.Tensor]
    """Views of the whole weight's parts where they can be."""
    shape: tuple[int, int]


@runtime_checkable
class Sliceable(Protocol):
    """A scheme that can be cut."""

    def slice_parts(
        self, parts: Parts, *, shape: tuple[int, int], rows: tuple[int, int], columns: tuple[int, int]
    ) -> dict[Role, torch.Tensor]:
        """Return parts that stand for rows and columns ``[start, stop)`` of the weight of ``shape``."""
        ...


@runtime_checkable
class _HasOffsets(Protocol):
    def at(self, row: int, column: int) -> Scheme: ...


def slice_weight(
    scheme: Scheme,
    parts: Parts,
    *,
    shape: tuple[int, int],
    rows: tuple[int, int] | None = None,
    columns: tuple[int, int] | None = None,
) -> WeightSlice:
    """Return rows and columns ``[start, stop)`` of a weight of ``shape``; None takes all of them. A slice can be cut again.

    Raises `ValueError` for an empty range or one outside the weight, and for a scheme that cannot be cut.
    """
    rows, columns = _checked(rows, shape[0], "rows"), _checked(columns, shape[1], "columns")
    if not isinstance(scheme, Sliceable):
        raise ValueError(f"{scheme.describe()} cannot be cut into slices")  # noqa: TRY004  The type is right; the format is not.
    return WeightSlice(
        scheme=scheme.at(rows[0], columns[0]) if isinstance(scheme, _HasOffsets) else scheme,
        parts=scheme.slice_parts(parts, shape=shape, rows=rows, columns=columns),
        shape=(rows[1] - rows[0], columns[1] - columns[0]),
    )


def _checked(chosen: tuple[int, int] | None, size: int, what: str) -> tuple[int, int]:
    if chosen is None:
        return 0, size
    if not 0 <= chosen[0] < chosen[1] <= size:
        raise ValueError(f"{what} {list(chosen)} are not a part of {size}")
    return chosen
