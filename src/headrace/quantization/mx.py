"""OCP Microscaling weights (Microscaling Formats Specification 1.0): codes in groups of 32 columns with one power of two, an E8M0 byte, per group. ``value = code * 2**(byte - 127)``.

- MXFP8: E4M3 codes ``[N, K]``, exponents ``[N, ceil(K/32)]``. NVIDIA ModelOpt 0.47.0 and compressed-tensors 0.20.1: ``weight``, ``weight_scale``.
- MXFP4: E2M1 codes, two in a byte, the lower half first: uint8 ``[N, K/2]``, exponents ``[N, K/32]``. ModelOpt 0.47.0: ``weight``; compressed-tensors 0.19.0
  (``mxfp4-pack-quantized``): ``weight_packed``; both ``weight_scale``.
- MXFP4 in OpenAI's gpt-oss, where experts are stacked: ``…_blocks`` uint8 ``[experts, N, K/32, 16]``, ``…_scales`` uint8 ``[experts, N, K/32]``; the same bytes in the same order.

Exponents are bytes, of dtype uint8 or float8_e8m0fnu. Byte 255 is NaN. Floating scales are another format's: a byte that was copied as a number (120.0 for 2**-7) is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from headrace.quantization.byte_codes import ByteWeight, nearest_byte_codes
from headrace.quantization.codes import FLOAT8_DTYPES, e8m0_values
from headrace.quantization.half_byte_parts import check_half_bytes, cut_half_bytes
from headrace.quantization.nibble_groups import NibbleWeight, nearest_nibbles
from headrace.quantization.packed_parts import PartCheck, require_parameters, slice_input_parts
from headrace.quantization.scale_grid import ScaleGrid, cut_range
from headrace.quantization.scheme import Parts, Role, Scheme, StoredPart

GROUP_SIZE = 32
_EXPONENT_DTYPES = (torch.uint8, torch.float8_e8m0fnu)
_EXPONENTS = "bytes of E8M0 exponents (uint8 or float8_e8m0fnu)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mxfp8(Scheme):
    """E4M3 codes with E8M0 exponents. The last group may be cut."""

    label: ClassVar[str] = "MXFP8"
    column_offset: int = 0
    """Of a slice of a weight: columns of its first group that lie before it."""

    def describe(self) -> str:
        return self.label

    def check(self, parts: Mapping[Role, StoredPart], *, module: str) -> tuple[int, int]:
        check = PartCheck(self, module, parts)
        check.only(Role.CODES, Role.SCALE)
        codes, scale = check.required(Role.CODES, "weight"), check.required(Role.SCALE, "weight_scale")
        is_right = codes.dtype in FLOAT8_DTYPES and len(codes.shape) == 2 and 0 not in codes.shape
        check.expect(codes, is_right, "an FP8 type (float8_e4m3fn as a rule) [N, K]")
        rows, columns = codes.shape
        groups = -(-(self.column_offset + columns) // GROUP_SIZE)
        is_right = scale.dtype in _EXPONENT_DTYPES and scale.shape == (rows, groups)
        check.expect(scale, is_right, f"{_EXPONENTS} [{rows}, {groups}]")
        check.expect_inputs(columns)
        return rows, columns

    def dequantize(
        self,
        parts: Parts,
        *,
        shape: tuple[int, int],
        dtype: torch.dtype = torch.float32,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return ByteWeight(codes=parts[Role.CODES], scales=self._grid(parts[Role.SCALE])).dequantize(dtype, out)

    def pack(self, values: torch.Tensor, parts: Parts) -> torch.Tensor:
        """As `Scheme.pack`, to E4M3 where ``parts`` has no codes that say another format. What is beyond the largest code becomes that."""
        dtype = parts[Role.CODES].dtype if Role.CODES in parts else FLOAT8_DTYPES[0]
        return nearest_byte_codes(values, dtype, self._grid(parts[Role.SCALE]))

    def at(self, row: int, column: int) -> Mxfp8:
        """Return the scheme of a slice that begins at ``row`` and ``column`` of a weight of this one."""
        return dataclasses.replace(self, column_offset=(self.column_offset + column) % GROUP_SIZE)

    def slice_parts(
        self, parts: Parts, *, shape: tuple[int, int], rows: tuple[int, int], columns: tuple[int, int]
    ) -> dict[Role, torch.Tensor]:
        """Return parts that stand for rows and columns ``[start, stop)`` of the weight of ``shape``, with `at`; views of ``parts``."""
        cut = slice_input_parts(parts, columns)
        cut[Role.CODES] = parts[Role.CODES][slice(*rows), slice(*columns)]
        groups = cut_range(*columns, size=GROUP_SIZE, offset=self.column_offset)
        cut[Role.SCALE] = parts[Role.SCALE][slice(*rows), groups]
        return cut

    def _grid(self, scale: torch.Tensor) -> ScaleGrid:
        return ScaleGrid(values=_powers(scale), block=(1, GROUP_SIZE), column_offset=self.column_offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mxfp4(Scheme):
    """E2M1 codes with E8M0 exponents, each row's bytes in one piece."""

    label: ClassVar[str] = "MXFP4"
    group_size: int = GROUP_SIZE
    column_offset: int = 0
    """Of a slice of a weight: columns of its first group that lie before it. Codes are stored for whole groups."""

    def __post_init__(self) -> None:
        require_parameters(self.label, group_size=self.group_size)

    def describe(self) -> str:
        return self.label if self.group_size == GROUP_SIZE else f"{self.label} group {self.group_size}"

    def check(self, parts: Mapping[Role, StoredPart], *, module: str) -> tuple[int, int]:
        check = PartCheck(self, module, parts)
        check.only(Role.CODES, Role.SCALE)
        return check_half_bytes(
            check,
            group_size=self.group_size,
            scale_dtypes=_EXPONENT_DTYPES,
            scale_words=_EXPONENTS,
            column_offset=self.column_offset,
        )

    def dequantize(
        self,
        parts: Parts,
        *,
        shape: tuple[int, int],
        dtype: torch.dtype = torch.float32,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return _half_bytes(parts, shape, self.group_size, self.column_offset).dequantize(dtype, out)

    def pack(self, values: torch.Tensor, parts: Parts) -> torch.Tensor:
        """As `Scheme.pack`, for whole groups. What is beyond ±6 times its scale becomes that."""
        return nearest_nibbles(values, _powers(parts[Role.SCALE]), self.group_size)

    def at(self, row: int, column: int) -> Mxfp4:
        """Return the scheme of a slice that begins at ``row`` and ``column`` of a weight of this one."""
        return dataclasses.replace(self, column_offset=(self.column_offset + column) % self.group_size)

    def slice_parts(
        self, parts: Parts, *, shape: tuple[int, int], rows: tuple[int, int], columns: tuple[int, int]
    ) -> dict[Role, torch.Tensor]:
        """Return parts that stand for rows and columns ``[start, stop)`` of the weight of ``shape``, with `at`; views of ``parts``, whole groups of columns."""
        return cut_half_bytes(parts, rows, columns, group_size=self.group_size, column_offset=self.column_offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mxfp4Blocks(Scheme):
    """E2M1 codes with E8M0 exponents in gpt-oss's layout: codes ``[N, G, 16]``, exponents ``[N, G]``. The weight is ``[N, 32 * G]``, in the file's order of rows."""

    label: ClassVar[str] = "MXFP4"
    column_offset: int = 0
    """Of a slice of a weight: columns of its first group that lie before it. Codes are stored for whole groups."""

    def describe(self) -> str:
        return f"{self.label} blocks"

    def check(self, parts: Mapping[Role, StoredPart], *, module: str) -> tuple[int, int]:
        check = PartCheck(self, module, parts)
        check.only(Role.CODES, Role.SCALE)
        codes, scale = check.required(Role.CODES, "blocks"), check.required(Role.SCALE, "scales")
        is_right = (
            codes.dtype is torch.uint8
            and len(codes.shape) == 3
            and codes.shape[2] == GROUP_SIZE // 2
            and 0 not in codes.shape
        )
        check.expect(codes, is_right, f"uint8 [N, K / {GROUP_SIZE}, {GROUP_SIZE // 2}]")
        is_right = scale.dtype in _EXPONENT_DTYPES and scale.shape == codes.shape[:2]
        check.expect(scale, is_right, f"{_EXPONENTS} {list(codes.shape[:2])}")
        columns = GROUP_SIZE * codes.shape[1] - self.column_offset
        check.expect_inputs(columns)
        return codes.shape[0], columns

    def dequantize(
        self,
        parts: Parts,
        *,
        shape: tuple[int, int],
        dtype: torch.dtype = torch.float32,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return _half_bytes(parts, shape, GROUP_SIZE, self.column_offset).dequantize(dtype, out)

    def pack(self, values: torch.Tensor, parts: Parts) -> torch.Tensor:
        """As `Scheme.pack`, for whole groups. What is beyond ±6 times its scale becomes that."""
        packed = nearest_nibbles(values, _powers(parts[Role.SCALE]), GROUP_SIZE)
        return packed.view(values.shape[0], -1, GROUP_SIZE // 2)

    def at(self, row: int, column: int) -> Mxfp4Blocks:
        """Return the scheme of a slice that begins at ``row`` and ``column`` of a weight of this one."""
        return dataclasses.replace(self, column_offset=(self.column_offset + column) % GROUP_SIZE)

    def slice_parts(
        self, parts: Parts, *, shape: tuple[int, int], rows: tuple[int, int], columns: tuple[int, int]
    ) -> dict[Role, torch.Tensor]:
        """Return parts that stand for rows and columns ``[start, stop)`` of the weight of ``shape``, with `at`; views of ``parts``, whole groups of columns."""
        cut = slice_input_parts(parts, columns)
        groups = cut_range(*columns, size=GROUP_SIZE, offset=self.column_offset)
        for role in (Role.CODES, Role.SCALE):
            cut[role] = parts[role][slice(*rows), groups]
        return cut


def _half_bytes(parts: Parts, shape: tuple[int, int], group_size: int, column_offset: int) -> NibbleWeight:
    scale = parts[Role.SCALE]
    return NibbleWeight(
        codes=parts[Role.CODES].view(torch.uint8).flatten(1),
        scales=scale.view(torch.uint8),
        scale_values=e8m0_values(scale.device),
        group_size=group_size,
        num_columns=shape[1],
        column_offset=column_offset,
    )


def _powers(scale: torch.Tensor) -> torch.Tensor:
    """Return what exponents stand for: float32, in their shape."""
    octets = scale.view(torch.uint8)
    return e8m0_values(scale.device).index_select(0, octets.int().reshape(-1)).view(octets.shape)
