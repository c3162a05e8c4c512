"""AWQ's integers in the ``gemm`` layout (AutoAWQ 0.2.9, ``modules/linear/gemm.py`` and ``utils/packing_utils.py``; AutoRound 0.15.1, ``auto_awq`` layout).

Stored by columns of the weight:

- ``qweight`` int32 ``[K, N / 8]``: 8 rows of the weight in a word, in the order 0, 2, 4, 6, 1, 3, 5, 7 from the lowest four bits on; unsigned.
- ``qzeros`` int32 ``[G, N / 8]``, packed in the same order; or unpacked, any type, ``[G, N]``. Weights without zero points have 8 for all.
- ``scales`` ``[G, N]``; groups follow one another.

The value is ``(code - zero) * scale``. AutoAWQ's ``gemv`` and ``gemv_fast`` layouts have other shapes and orders, which `Awq.check` refuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from headrace.quantization.bits import pack_bits, without_gaps
from headrace.quantization.code_blocks import WorkAreas, columns_per_block, result_tensor, rows_per_block
from headrace.quantization.group_scales import GroupScales, cut_groups, group_scales
from headrace.quantization.packed_parts import FLOATS, PartCheck, require_parameters, slice_input_parts
from headrace.quantization.scheme import Parts, Role, Scheme, StoredPart

_BITS = 4
_PER_WORD = 8
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_MIDDLE = 8
_TILE_COLUMNS = 512
"""Input features per block. Blocks then have enough rows to read whole cache lines of each stored row, and enough columns to write them."""
_UNPACKED = (torch.int8, torch.uint8, torch.int16, torch.int32, *FLOATS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Awq(Scheme):
    """AWQ, ``gemm`` layout."""

    label: ClassVar[str] = "AWQ"
    bits: int = 4
    group_size: int | None = 128
    """Input features per scale; None (``q_group_size: -1`` in files): one scale per row."""
    has_zero_point: bool = True
    """``zero_point``. Where it is False and there are ``qzeros``, they count all the same."""

    def __post_init__(self) -> None:
        require_parameters("AWQ", group_size=self.group_size, bits=self.bits)

    def describe(self) -> str:
        groups = "per row" if self.group_size is None else f"group {self.group_size}"
        return f"AWQ INT4 {groups} {'asymmetric' if self.has_zero_point else 'symmetric'}"

    def check(self, parts: Mapping[Role, StoredPart], *, module: str) -> tuple[int, int]:
        check = PartCheck(self, module, parts)
        check.only(Role.CODES, Role.SCALE, Role.ZERO_POINT)
        codes, scale = check.required(Role.CODES, "qweight"), check.required(Role.SCALE, "scales")
        columns, words = check.expect_matrix(codes, torch.int32, "int32 [K, N / 8]")
        rows = words * _PER_WORD
        groups = 1 if self.group_size is None else -(-columns // self.group_size)
        check.expect(scale, scale.dtype in FLOATS and scale.shape == (groups, rows), f"floating {[groups, rows]}")
        if self.has_zero_point or Role.ZERO_POINT in parts:
            zeros = check.required(Role.ZERO_POINT, "qzeros")
            is_packed = zeros.dtype is torch.int32 and zeros.shape == (groups, words)
            is_right = is_packed or (zeros.dtype in _UNPACKED and zeros.shape == (groups, rows))
            check.expect(zeros, is_right, f"int32 {[groups, words]}, or unpacked {[groups, rows]}")
        check.expect_inputs(columns)
        return rows, columns

    def check_values(self, parts: Parts, module: str) -> str | None:
        """Return a sentence that warns of zero points that are not 8 although the weight is said to have none, or None. Reads the zero points only."""
        if self.has_zero_point or Role.ZERO_POINT not in parts or bool((self._zero(parts) == _MIDDLE).all()):
            return None
        return f"{module} is said to have no zero points, but has qzeros other than {_MIDDLE}; they are subtracted, as the tensors say."

    def dequantize(
        self,
        parts: Parts,
        *,
        shape: tuple[int, int],
        dtype: torch.dtype = torch.float32,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        words = parts[Role.CODES]
        result = result_tensor(shape, dtype, words.device, out)
        scales = self._scales(parts, shape[1])
        scales.write(_word_blocks(words, scales.base, self.group_size), result)
        return result

    def pack(self, values: torch.Tensor, parts: Parts) -> torch.Tensor:
        return _pack_rows(self._scales(parts, values.shape[1]).nearest(values))

    def slice_parts(
        self, parts: Parts, *, shape: tuple[int, int], rows: tuple[int, int], columns: tuple[int, int]
    ) -> dict[Role, torch.Tensor]:
        """Return parts that stand for rows and columns ``[start, stop)`` of the weight of ``shape``; views of ``parts`` where words need no new packing.

        Zero points come unpacked. Groups that the first column cuts are told by `Role.GROUP_INDEX`, which files of this format do not have.
        """
        groups, index = cut_groups(
            columns,
            num_columns=shape[1],
            num_groups=parts[Role.SCALE].shape[0],
            group_size=self.group_size,
            index=parts.get(Role.GROUP_INDEX),
            device=parts[Role.SCALE].device,
            is_literal=True,
        )
        cut = slice_input_parts(parts, columns)
        words = parts[Role.CODES][slice(*columns), rows[0] // _PER_WORD : -(-rows[1] // _PER_WORD)]
        first = rows[0] % _PER_WORD
        cut[Role.CODES] = (
            words
            if first == 0
            else _pack_rows(_unpack_rows(words, WorkAreas(words.device))[first : first + rows[1] - rows[0]])
        )
        cut[Role.SCALE] = parts[Role.SCALE][groups, slice(*rows)]
        if Role.ZERO_POINT in parts:
            cut[Role.ZERO_POINT] = self._zero(parts)[groups, slice(*rows)]
        if index is not None:
            cut[Role.GROUP_INDEX] = index
        return cut

    def _scales(self, parts: Parts, num_columns: int) -> GroupScales:
        return group_scales(
            scale=parts[Role.SCALE].t(),
            zero=self._zero(parts).t() if Role.ZERO_POINT in parts else _MIDDLE,
            bits=_BITS,
            num_columns=num_columns,
            group_size=self.group_size,
            index=parts.get(Role.GROUP_INDEX),
            is_literal=True,
        )

    def _zero(self, parts: Parts) -> torch.Tensor:
        """Return the zero points ``[G, N]``: int16 out of packed ones, else as they are."""
        stored = parts[Role.ZERO_POINT]
        if stored.shape == parts[Role.SCALE].shape:
            return stored
        return _unpack_rows(stored, WorkAreas(stored.device)).t()


def _word_blocks(words: torch.Tensor, zero: int, group_size: int | None) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield the codes of ``words`` (int32 ``[K, N / 8]``) less ``zero`` as the rows of the weight ``[N, K]``, a tile at a time."""
    areas = WorkAreas(words.device)
    width = columns_per_block(words.shape[0], group_size, words.device, about=_TILE_COLUMNS)
    step = rows_per_block(width, words.device, multiple=_PER_WORD) // _PER_WORD
    for start in range(0, words.shape[1], step):
        for first in range(0, words.shape[0], width):
            codes = _unpack_rows(words[first : first + width, start : start + step], areas)
            values = areas.take("values", tuple(codes.shape), torch.float32).copy_(codes)
            yield start * _PER_WORD, first, values.sub_(zero) if zero else values


def _unpack_rows(words: torch.Tensor, areas: WorkAreas) -> torch.Tensor:
    """Return the codes of ``words`` (int32 ``[C, W]``): int16 ``[8 * W, C]``, in a work area.

    Four bits of a word's lower half are an even row of the weight, the same four bits of its upper half the odd row after it.
    """
    count, width = words.shape
    halves = areas.turned("halves", _as_halves(words)).view(width, 2, count)
    codes = areas.take("codes", (width, _PER_WORD // 2, 2, count), torch.int16)
    for place in range(_PER_WORD // 2):
        torch.bitwise_right_shift(halves, _BITS * place, out=codes[:, place])
    return codes.bitwise_and_(0x0F).view(width * _PER_WORD, count)


def _as_halves(words: torch.Tensor) -> torch.Tensor:
    return (words if words.stride(1) == 1 else without_gaps(words)).view(torch.int16)


def _pack_rows(codes: torch.Tensor) -> torch.Tensor:
    """Return the inverse of `_unpack_rows`: ``[R, C]`` → int32 ``[C, ceil(R / 8)]``; rows that fill the last word are zero."""
    rows, count = codes.shape
    width = -(-rows // _PER_WORD)
    padded = torch.zeros(count, width * _PER_WORD, dtype=torch.int16, device=codes.device)
    padded[:, :rows] = codes.t()
    ordered = padded.view(count, width, _PER_WORD)[:, :, list(_ORDER)]
    return pack_bits(ordered.reshape(count, -1), _BITS)
