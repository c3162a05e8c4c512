"""Weights of one byte per value, FP8 or INT8, with scales on a grid: ``value = (code - zero) * scale`` in float32, then rounded once to the result's type.

On a CPU torch converts FP8 one value at a time, so larger weights go one of three faster ways there, all exact:

- with one scale for the whole weight, through a table of the results of all pairs of codes;
- to bfloat16 with scales that are bfloat16 numbers themselves, through a table of unscaled values, which are then multiplied in place: four significant bits times eight fit
  into float32, so the product is rounded once, as it would be there;
- else through float16, whose bits FP8's are a part of, and which processors convert many at a time, subnormal values included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.quantization.code_blocks import result_tensor, rows_per_block
from headrace.quantization.codes import FLOAT8_DTYPES, byte_values, nearest_bytes
from headrace.quantization.pair_tables import PairTable, has_pairs
from headrace.quantization.scale_grid import ScaleGrid

_FEWEST = 1 << 15
"""Values from which on a faster way is worth its preparation."""
_FEWEST_IN_A_ROW = 32
"""Columns of a block from which on torch multiplies bfloat16 many at a time; below, its time per value is five times as much (2.13, measured 2026-11)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteWeight:
    """A weight of one byte per value."""

    codes: torch.Tensor
    """``[N, K]``, FP8 or int8, any strides."""
    scales: ScaleGrid
    zeros: ScaleGrid | None = None
    """Zero points, on the grid of the scales."""

    def dequantize(self, dtype: torch.dtype, out: torch.Tensor | None) -> torch.Tensor:
        """Return the weight as ``[N, K]`` in ``dtype``, in ``out`` where that is given."""
        rows, columns = self.codes.shape
        with torch.no_grad():
            result = result_tensor((rows, columns), dtype, self.codes.device, out)
            if self._is_small:
                self._convert(result)
            elif self.scales.is_single and has_pairs(dtype):
                self._look_up(result, self._all_values(), None)
            elif self._is_exact_in(dtype):
                scales = self.scales.mapped(lambda numbers: numbers.to(dtype))
                self._look_up(result, byte_values(self.codes.dtype), scales)
            elif not self._widen(result):
                self._convert(result)
            return result

    @property
    def _is_small(self) -> bool:
        return self.codes.device.type != "cpu" or self.codes.numel() < _FEWEST

    def _is_exact_in(self, dtype: torch.dtype) -> bool:
        """Say whether products of codes and scales may be computed from operands in ``dtype``, and are so without loss of speed."""
        return (
            dtype is torch.bfloat16
            and self.codes.dtype in FLOAT8_DTYPES
            and self.scales.block[1] >= _FEWEST_IN_A_ROW
            and not bool((self.scales.values.view(torch.int32) & 0xFFFF).any())
        )

    def _all_values(self) -> torch.Tensor:
        """Return what all 256 codes stand for where the whole weight has one scale: float32 ``[256]``."""
        values = byte_values(self.codes.dtype)
        if self.zeros is not None:
            values -= self.zeros.values.reshape(())
        return values * self.scales.values.reshape(())

    def _convert(self, result: torch.Tensor) -> None:
        """Write the weight into ``result`` the plain way, block of rows by block of rows."""
        rows, columns = self.codes.shape
        if not self.codes.numel():
            return
        step = min(rows_per_block(columns, self.codes.device), rows)
        is_float32 = result.dtype is torch.float32
        spare = result if is_float32 else torch.empty(step, columns, dtype=torch.float32, device=self.codes.device)
        scales, zeros = self.scales.of_blocks(rows, step), self.zeros.of_blocks(rows, step) if self.zeros else None
        blocks = zip(torch.split(self.codes, step), torch.split(result, step), scales, strict=True)
        for number, (codes, target, factors) in enumerate(blocks):
            values = target if is_float32 else spare[: len(target)]
            values.copy_(codes)
            if self.zeros is not None and zeros is not None:
                self.zeros.change(values, zeros[number], torch.Tensor.sub_)
            self.scales.change(values, factors, torch.Tensor.mul_)
            if not is_float32:
                target.copy_(values)

    def _look_up(self, result: torch.Tensor, values: torch.Tensor, scales: ScaleGrid | None) -> None:
        """Write into ``result`` what ``values`` (``[256]``) has for the codes, times ``scales`` where they are given."""
        table, codes = PairTable(values.to(result.dtype)), self.codes.view(torch.uint8)
        rows, columns = codes.shape
        step = min(rows_per_block(columns, codes.device), rows)
        if scales is None:
            table.write(codes, result, step=step)
            return
        blocks = zip(torch.split(codes, step), torch.split(result, step), scales.of_blocks(rows, step), strict=True)
        for some, target, factors in blocks:
            table.write(some, target, step=step)
            scales.change(target, factors, torch.Tensor.mul_)

    def _widen(self, result: torch.Tensor) -> bool:
        """Write the weight into ``result`` through float16. Return whether this could be: not for types or scales that it would make other values of."""
        widening = _WIDENINGS.get(self.codes.dtype)
        codes = self.codes.view(torch.int8)
        if widening is None or not has_pairs(result.dtype):
            return False
        scales = self.scales.mapped(lambda numbers: numbers * widening.factor)
        if not torch.equal(scales.values.isinf(), self.scales.values.isinf()):
            return False
        rows, columns = codes.shape
        step = min(rows_per_block(columns, codes.device), rows)
        # Results of two bytes lend their memory to the bits; that keeps more of the rest in the cache.
        is_float32 = result.dtype is torch.float32
        spare = torch.empty((step, columns), dtype=torch.int16 if is_float32 else torch.float32)
        lent = result if is_float32 else result.view(torch.int16)
        # A number would become a tensor anew in each call.
        mask, shift = torch.tensor(~0x4000, dtype=torch.int16), torch.tensor(1 << widening.shift, dtype=torch.int16)
        # Split at once, since each cut and view of a tensor takes as long as some thousand values.
        blocks = zip(
            *(torch.split(one, step) for one in (codes, result, lent)), scales.of_blocks(rows, step), strict=True
        )
        for octets, target, memory, factors in blocks:
            other = spare if len(spare) == len(target) else spare[: len(target)]
            bits, values = (other, target) if is_float32 else (memory, other)
            if widening.has_nan(octets):
                values.copy_(octets.view(self.codes.dtype)).div_(widening.factor)
            else:
                bits.copy_(octets).mul_(shift)
                if widening.fills_sign:
                    bits.bitwise_and_(mask)
                values.copy_(bits.view(torch.float16))
            scales.change(values, factors, torch.Tensor.mul_)
            if not is_float32:
                target.copy_(values)
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Widening:
    """How codes of one format become float16 numbers: shifted to where float16 has exponent and mantissa, they stand for their value over ``factor``."""

    shift: int
    factor: float
    fills_sign: bool
    """Whether the code's sign, extended by the shift, also fills a bit of the exponent, which then must be cleared."""
    has_nan: Callable[[torch.Tensor], bool]
    """Whether codes, as int8, have one for NaN that float16 takes for a number."""


def nearest_byte_codes(
    values: torch.Tensor, dtype: torch.dtype, scales: ScaleGrid, zeros: ScaleGrid | None = None
) -> torch.Tensor:
    """Return the codes (``[N, K]`` in ``dtype``) nearest to ``values`` (float32 ``[N, K]``) under ``scales``. Where a scale is 0 they are those of 0."""
    quotients = values.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    divisors = scales.mapped(lambda numbers: torch.where(numbers == 0, 1.0, numbers))
    rows = len(quotients)
    divisors.change(quotients, divisors.of_blocks(rows, rows)[0], torch.Tensor.div_)
    if zeros is not None:
        zeros.change(quotients, zeros.of_blocks(rows, rows)[0], torch.Tensor.add_)
    return nearest_bytes(quotients, dtype)


def _has_e4m3_nan(codes: torch.Tensor) -> bool:
    return int(codes.amax()) == 127 or int(codes.view(torch.uint8).amax()) == 255


def _has_fnuz_nan(codes: torch.Tensor) -> bool:
    return int(codes.amin()) == -128


# E5M2 with the "fnuz" bias is not here: its largest exponent is a number's, float16's is not.
_WIDENINGS = {
    torch.float8_e4m3fn: _Widening(shift=7, factor=256.0, fills_sign=True, has_nan=_has_e4m3_nan),
    torch.float8_e4m3fnuz: _Widening(shift=7, factor=128.0, fills_sign=True, has_nan=_has_fnuz_nan),
    torch.float8_e5m2: _Widening(shift=8, factor=1.0, fills_sign=False, has_nan=lambda codes: False),
}
