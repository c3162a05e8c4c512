"""INT8 weights: one signed number per byte, and a scale per tensor, row or group of columns. ``value = (code - zero) * scale``.

- NVIDIA ModelOpt 0.47.0 (``int8_sq``, ``int8_wo``): ``weight`` int8 ``[N, K]``, ``weight_scale`` float32 ``[N]``, no zero point.
- compressed-tensors 0.19.0 (``int-quantized``, ``naive-quantized``): ``weight_scale`` in the model's type, ``[1]``, ``[N, 1]`` or ``[N, ceil(K / group)]``; where the range is not
  symmetric, ``weight_zero_point`` int8 in the scale's shape.

Eight-bit numbers that are packed into 32-bit words are another format.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from headrace.quantization.byte_codes import ByteWeight, nearest_byte_codes
from headrace.quantization.packed_parts import FLOATS, PartCheck, require_parameters, slice_input_parts
from headrace.quantization.scale_grid import ScaleGrid, cut_range
from headrace.quantization.scheme import Parts, Role, Scheme, StoredPart


class _Int8(Scheme):
    """What the three have in common: all but where the scales lie."""

    @abstractmethod
    def _grid(self, numbers: torch.Tensor, shape: tuple[int, int]) -> ScaleGrid:
        """Return scales or zero points on the grid of a weight of ``shape``."""

    @abstractmethod
    def _scale_shapes(self, shape: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
        """Return the shapes that scales of a weight of ``shape`` may have."""

    @abstractmethod
    def _cut_numbers(
        self, numbers: torch.Tensor, shape: tuple[int, int], rows: tuple[int, int], columns: tuple[int, int]
    ) -> torch.Tensor:
        """Return those scales or zero points of a weight of ``shape`` that a slice of it needs."""

    def check(self, parts: Mapping[Role, StoredPart], *, module: str) -> tuple[int, int]:
        check = PartCheck(self, module, parts)
        check.only(Role.CODES, Role.SCALE, Role.ZERO_POINT)
        codes, scale = check.required(Role.CODES, "weight"), check.required(Role.SCALE, "weight_scale")
        shape = check.expect_matrix(codes, torch.int8, "int8 [N, K]")
        shapes = self._scale_shapes(shape)
        must = " or ".join(map(str, map(list, shapes)))
        check.expect(scale, scale.dtype in FLOATS and scale.shape in shapes, f"floating {must}")
        if Role.ZERO_POINT in parts:
            zero = parts[Role.ZERO_POINT]
            check.expect(zero, zero.dtype is torch.int8 and zero.shape in shapes, f"int8 {must}")
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
        scales, zeros = self._grids(parts, shape)
        return ByteWeight(codes=parts[Role.CODES], scales=scales, zeros=zeros).dequantize(dtype, out)

    def pack(self, values: torch.Tensor, parts: Parts) -> torch.Tensor:
        """As `Scheme.pack`. What is beyond -128 or 127 becomes that."""
        scales, zeros = self._grids(parts, (values.shape[0], values.shape[1]))
        return nearest_byte_codes(values, torch.int8, scales, zeros)

    def slice_parts(
        self, parts: Parts, *, shape: tuple[int, int], rows: tuple[int, int], columns: tuple[int, int]
    ) -> dict[Role, torch.Tensor]:
        """Return parts that stand for rows and columns ``[start, stop)`` of the weight of ``shape``; views of ``parts``."""
        cut = slice_input_parts(parts, columns)
        cut[Role.CODES] = parts[Role.CODES][slice(*rows), slice(*columns)]
        for role in {Role.SCALE, Role.ZERO_POINT} & parts.keys():
            cut[role] = self._cut_numbers(parts[role], shape, rows, columns)
        return cut

    def _grids(self, parts: Parts, shape: tuple[int, int]) -> tuple[ScaleGrid, ScaleGrid | None]:
        zeros = self._grid(parts[Role.ZERO_POINT], shape) if Role.ZERO_POINT in parts else None
        return self._grid(parts[Role.SCALE], shape), zeros


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Tensor(_Int8):
    """One scale for the whole weight, ``[]`` or ``[1]``."""

    label: ClassVar[str] = "INT8 per tensor"

    def describe(self) -> str:
        return self.label

    def _grid(self, numbers: torch.Tensor, shape: tuple[int, int]) -> ScaleGrid:
        return ScaleGrid(values=numbers.to(torch.float32).reshape(1, 1), block=shape)

    def _scale_shapes(self, shape: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
        return (), (1,)

    def _cut_numbers(
        self, numbers: torch.Tensor, shape: tuple[int, int], rows: tuple[int, int], columns: tuple[int, int]
    ) -> torch.Tensor:
        return numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Channel(_Int8):
    """One scale per row, ``[N]`` or ``[N, 1]``."""

    label: ClassVar[str] = "INT8 per channel"

    def describe(self) -> str:
        return self.label

    def _grid(self, numbers: torch.Tensor, shape: tuple[int, int]) -> ScaleGrid:
        return ScaleGrid(values=numbers.to(torch.float32).reshape(-1, 1), block=(1, shape[1]))

    def _scale_shapes(self, shape: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
        return (shape[0],), (shape[0], 1)

    def _cut_numbers(
        self, numbers: torch.Tensor, shape: tuple[int, int], rows: tuple[int, int], columns: tuple[int, int]
    ) -> torch.Tensor:
        return numbers[slice(*rows)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Group(_Int8):
    """One scale per row and group of columns, ``[N, ceil(K / group_size)]``. The last group may be cut."""

    label: ClassVar[str] = "INT8 group"
    group_size: int = 128
    column_offset: int = 0
    """Of a slice of a weight: columns of its first group that lie before it."""

    def __post_init__(self) -> None:
        require_parameters("INT8", group_size=self.group_size)

    def describe(self) -> str:
        return f"{self.label} {self.group_size}"

    def at(self, row: int, column: int) -> Int8Group:
        """Return the scheme of a slice that begins at ``row`` and ``column`` of a weight of this one."""
        return dataclasses.replace(self, column_offset=(self.column_offset + column) % self.group_size)

    def _grid(self, numbers: torch.Tensor, shape: tuple[int, int]) -> ScaleGrid:
        return ScaleGrid(values=numbers.to(torch.float32), block=(1, self.group_size), column_offset=self.column_offset)

    def _scale_shapes(self, shape: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
        return ((shape[0], -(-(self.column_offset + shape[1]) // self.group_size)),)

    def _cut_numbers(
        self, numbers: torch.Tensor, shape: tuple[int, int], rows: tuple[int, int], columns: tuple[int, int]
    ) -> torch.Tensor:
        groups = cut_range(*columns, size=self.group_size, offset=self.column_offset)
        return numbers[slice(*rows), groups]
