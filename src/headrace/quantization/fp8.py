"""FP8 weights: one floating code per byte, and a scale per tensor, row or block. ``value = code * scale``.

- NVIDIA ModelOpt 0.47.0 (``export_hf_checkpoint``): ``weight`` E4M3 ``[N, K]`` with ``weight_scale`` float32 ``[]`` per tensor, ``[N]`` per row (``fp8_pc_pt``), or
  ``[ceil(N/128), 1, ceil(K/128), 1]`` per block (``fp8_pb_wo``).
- compressed-tensors 0.19.0 (``float-quantized``, ``naive-quantized``): ``weight_scale`` in the model's type, ``[1]``, ``[N, 1]``, or per block ``[ceil(N/b0), ceil(K/b1)]``.
- DeepSeek V3 and what follows its layout (Qwen3, …): ``weight_scale_inv`` ``[ceil(N/128), ceil(K/128)]``, float32 or bfloat16. Despite its name it is a factor. With
  ``scale_fmt: ue8m0`` it is a power of two; float8_e8m0fnu is read too.

The codes' own dtype tells their format: E4M3 ("fn") as a rule; E5M2 and the "fnuz" formats are read by the same schemes.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from headrace.errors import UnsupportedQuantization
from headrace.quantization.byte_codes import ByteWeight, nearest_byte_codes
from headrace.quantization.codes import FLOAT8_DTYPES
from headrace.quantization.packed_parts import FLOATS, PartCheck, slice_input_parts
from headrace.quantization.scale_grid import ScaleGrid, cut_range
from headrace.quantization.scheme import Parts, Role, Scheme, StoredPart

_SCALE_DTYPES = (*FLOATS, torch.float8_e8m0fnu)


class _Fp8(Scheme):
    """What the three have in common: all but where the scales lie."""

    @abstractmethod
    def _grid(self, scale: torch.Tensor, shape: tuple[int, int]) -> ScaleGrid:
        """Return ``scale`` on the grid of a weight of ``shape``."""

    @abstractmethod
    def _check_scale(self, check: PartCheck, scale: StoredPart, shape: tuple[int, int]) -> None:
        """Raise where ``scale`` does not fit a weight of ``shape``."""

    def check(self, parts: Mapping[Role, StoredPart], *, module: str) -> tuple[int, int]:
        check = PartCheck(self, module, parts)
        check.only(Role.CODES, Role.SCALE)
        codes, scale = check.required(Role.CODES, "weight"), check.required(Role.SCALE, "weight_scale")
        is_right = codes.dtype in FLOAT8_DTYPES and len(codes.shape) == 2 and 0 not in codes.shape
        check.expect(codes, is_right, "an FP8 type (float8_e4m3fn as a rule) [N, K]")
        shape = (codes.shape[0], codes.shape[1])
        self._check_scale(check, scale, shape)
        check.expect_inputs(shape[1])
        return shape

    def dequantize(
        self,
        parts: Parts,
        *,
        shape: tuple[int, int],
        dtype: torch.dtype = torch.float32,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return ByteWeight(codes=parts[Role.CODES], scales=self._grid(parts[Role.SCALE], shape)).dequantize(dtype, out)

    def pack(self, values: torch.Tensor, parts: Parts) -> torch.Tensor:
        """As `Scheme.pack`, to E4M3 where ``parts`` has no codes that say another format. What is beyond the largest code becomes that."""
        dtype = parts[Role.CODES].dtype if Role.CODES in parts else FLOAT8_DTYPES[0]
        shape = (values.shape[0], values.shape[1])
        return nearest_byte_codes(values, dtype, self._grid(parts[Role.SCALE], shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Tensor(_Fp8):
    """One scale for the whole weight, ``[]`` or ``[1]``."""

    label: ClassVar[str] = "FP8 per tensor"

    def describe(self) -> str:
        return self.label

    def slice_parts(
        self, parts: Parts, *, shape: tuple[int, int], rows: tuple[int, int], columns: tuple[int, int]
    ) -> dict[Role, torch.Tensor]:
        """Return parts that stand for rows and columns ``[start, stop)`` of the weight of ``shape``; views of ``parts``."""
        cut = slice_input_parts(parts, columns)
        return cut | {Role.CODES: parts[Role.CODES][slice(*rows), slice(*columns)], Role.SCALE: parts[Role.SCALE]}

    def _grid(self, scale: torch.Tensor, shape: tuple[int, int]) -> ScaleGrid:
        return ScaleGrid(values=scale.to(torch.float32).reshape(1, 1), block=shape)

    def _check_scale(self, check: PartCheck, scale: StoredPart, shape: tuple[int, int]) -> None:
        is_right = scale.dtype in _SCALE_DTYPES and scale.shape in ((), (1,))
        check.expect(scale, is_right, "one floating number, [] or [1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Channel(_Fp8):
    """One scale per row, ``[N]`` or ``[N, 1]``."""

    label: ClassVar[str] = "FP8 per channel"

    def describe(self) -> str:
        return self.label

    def slice_parts(
        self, parts: Parts, *, shape: tuple[int, int], rows: tuple[int, int], columns: tuple[int, int]
    ) -> dict[Role, torch.Tensor]:
        """Return parts that stand for rows and columns ``[start, stop)`` of the weight of ``shape``; views of ``parts``."""
        cut = slice_input_parts(parts, columns)
        scale = parts[Role.SCALE][slice(*rows)]
        return cut | {Role.CODES: parts[Role.CODES][slice(*rows), slice(*columns)], Role.SCALE: scale}

    def _grid(self, scale: torch.Tensor, shape: tuple[int, int]) -> ScaleGrid:
        return ScaleGrid(values=scale.to(torch.float32).reshape(-1, 1), block=(1, shape[1]))

    def _check_scale(self, check: PartCheck, scale: StoredPart, shape: tuple[int, int]) -> None:
        is_right = scale.dtype in _SCALE_DTYPES and scale.shape in ((shape[0],), (shape[0], 1))
        check.expect(scale, is_right, f"floating [{shape[0]}] or [{shape[0]}, 1], one per row")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Block(_Fp8):
    """One scale per block of rows and columns, ``[ceil(N/b0), ceil(K/b1)]`` or ModelOpt's ``[ceil(N/b0), 1, ceil(K/b1), 1]``. Blocks at the end may be cut."""

    label: ClassVar[str] = "FP8 block"
    block: tuple[int, int] = (128, 128)
    """Rows and columns of a block."""
    row_offset: int = 0
    """Of a slice of a weight: rows of its first block that lie before it."""
    column_offset: int = 0

    def __post_init__(self) -> None:
        if len(self.block) != 2 or min(self.block) < 1:
            raise UnsupportedQuantization(
                f"Weights of block FP8 are said to have blocks of {list(self.block)}.",
                "A block has a number of rows and one of columns, each at least 1.",
                "Take config.json from where the model was made.",
            )

    def describe(self) -> str:
        return f"{self.label} {self.block[0]}x{self.block[1]}"

    def at(self, row: int, column: int) -> Fp8Block:
        """Return the scheme of a slice that begins at ``row`` and ``column`` of a weight of this one."""
        return dataclasses.replace(
            self,
            row_offset=(self.row_offset + row) % self.block[0],
            column_offset=(self.column_offset + column) % self.block[1],
        )

    def slice_parts(
        self, parts: Parts, *, shape: tuple[int, int], rows: tuple[int, int], columns: tuple[int, int]
    ) -> dict[Role, torch.Tensor]:
        """Return parts that stand for rows and columns ``[start, stop)`` of the weight of ``shape``, with `at`; views of ``parts``."""
        scale = _as_grid(parts[Role.SCALE])
        block_rows = cut_range(*rows, size=self.block[0], offset=self.row_offset)
        block_columns = cut_range(*columns, size=self.block[1], offset=self.column_offset)
        cut = slice_input_parts(parts, columns)
        cut[Role.CODES] = parts[Role.CODES][slice(*rows), slice(*columns)]
        cut[Role.SCALE] = scale[block_rows, block_columns]
        return cut

    def _grid(self, scale: torch.Tensor, shape: tuple[int, int]) -> ScaleGrid:
        return ScaleGrid(
            values=_as_grid(scale).to(torch.float32),
            block=self.block,
            row_offset=self.row_offset,
            column_offset=self.column_offset,
        )

    def _check_scale(self, check: PartCheck, scale: StoredPart, shape: tuple[int, int]) -> None:
        rows = -(-(self.row_offset + shape[0]) // self.block[0])
        columns = -(-(self.column_offset + shape[1]) // self.block[1])
        is_right = scale.dtype in _SCALE_DTYPES and scale.shape in ((rows, columns), (rows, 1, columns, 1))
        check.expect(scale, is_right, f"floating [{rows}, {columns}] or [{rows}, 1, {columns}, 1], one per block")


def _as_grid(scale: torch.Tensor) -> torch.Tensor:
    """Return ``scale`` without the dimensions that ModelOpt puts between."""
    return scale.reshape(scale.shape[0], scale.shape[2]) if scale.dim() == 4 else scale
