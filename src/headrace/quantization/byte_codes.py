"""Weights of one byte per value, FP8 or INT8, with scales on a grid: ``value = (code - zero) * scale`` in float32, then rounded once to the result's type.

On a CPU torch converts FP8 one value at a time, so larger weights go one of three faster ways there, all exact:

- to bfloat16, with one scale for the whole weight or scales that are bfloat16 numbers themselves, in the result's own memory: FP8's bits are a part of bfloat16's, and torch multiplies
  those in float32 and rounds once;
- with one scale otherwise, through a table of the results of all pairs of codes;
- else through float16, whose bits FP8's are a part of, too, and which processors convert many at a time, subnormal values included.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.quantization.code_blocks import result_tensor, rows_per_block
from headrace.quantization.codes import byte_values, nearest_bytes
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
            elif self._widen_in_place(result):
                pass
            elif self.scales.is_single and has_pairs(dtype):
                self._look_up(result)
            elif not self._widen(result):
                self._convert(result)
            return result

    @property
    def _is_small(self) -> bool:
        return self.codes.device.type != "cpu" or self.codes.numel() < _FEWEST

    @property
    def _are_scales_bfloat16(self) -> bool:
        """Whether scales are bfloat16 numbers, over blocks that are wide enough for the speed that it is about."""
        return self.scales.block[1] >= _FEWEST_IN_A_ROW and not bool(
            (self.scales.values.view(torch.int32) & 0xFFFF).any()
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

    def _look_up(self, result: torch.Tensor) -> None:
        """Write the weight, which has one scale, into ``result``."""
        table, codes = PairTable(self._all_values().to(result.dtype)), self.codes.view(torch.uint8)
        rows, columns = codes.shape
        table.write(codes, result, step=min(rows_per_block(columns, codes.device), rows))

    def _widen_in_place(self, result: torch.Tensor) -> bool:
        """Write the weight into ``result`` if that is bfloat16 and can be had from its bits. Return whether it was."""
        widening = _INTO_BFLOAT16.get(self.codes.dtype)
        if widening is None or self.zeros is not None or result.dtype is not torch.bfloat16:
            return False
        if not ((self.scales.is_single or self._are_scales_bfloat16) and _are_subnormals_kept(widening.factor)):
            return False
        scales = widening.rescaled(self.scales)
        if scales is None:
            return False
        # A tensor of no dimensions is taken as float32, whatever it is multiplied with.
        single = scales.values.reshape(()) if scales.is_single else None
        scales = scales.mapped(lambda numbers: numbers.to(torch.bfloat16))
        codes, memory = self.codes.view(torch.int8), result.view(torch.int16)
        rows, columns = codes.shape
        step = min(rows_per_block(columns, codes.device), rows)
        blocks = zip(
            *(torch.split(one, step) for one in (codes, result, memory)), scales.of_blocks(rows, step), strict=True
        )
        for octets, target, bits, factors in blocks:
            if widening.has_other(octets):
                target.copy_(octets.view(self.codes.dtype)).div_(widening.factor)
            else:
                widening.write(octets, bits)
            if single is not None:
                target.mul_(single)
            else:
                scales.change(target, factors, torch.Tensor.mul_)
        return True

    def _widen(self, result: torch.Tensor) -> bool:
        """Write the weight into ``result`` through float16. Return whether this could be: not for types or scales that it would make other values of."""
        widening = _INTO_FLOAT16.get(self.codes.dtype)
        codes = self.codes.view(torch.int8)
        if widening is None or not has_pairs(result.dtype):
            return False
        scales = widening.rescaled(self.scales)
        if scales is None:
            return False
        rows, columns = codes.shape
        step = min(rows_per_block(columns, codes.device), rows)
        # Results of two bytes lend their memory to the bits; that keeps more of the rest in the cache.
        is_float32 = result.dtype is torch.float32
        spare = torch.empty((step, columns), dtype=torch.int16 if is_float32 else torch.float32)
        lent = result if is_float32 else result.view(torch.int16)
        # Split at once, since each cut and view of a tensor takes as long as some thousand values.
        blocks = zip(
            *(torch.split(one, step) for one in (codes, result, lent)), scales.of_blocks(rows, step), strict=True
        )
        for octets, target, memory, factors in blocks:
            other = spare if len(spare) == len(target) else spare[: len(target)]
            bits, values = (other, target) if is_float32 else (memory, other)
            if widening.has_other(octets):
                values.copy_(octets.view(self.codes.dtype)).div_(widening.factor)
            else:
                widening.write(octets, bits)
                values.copy_(bits.view(torch.float16))
            scales.change(values, factors, torch.Tensor.mul_)
            if not is_float32:
                target.copy_(values)
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Widening:
    """How codes of one format become numbers of two bytes: shifted to where these have exponent and mantissa, they stand for their value over ``factor``."""

    shift: int
    factor: float
    kept: int
    """The bits that stay; the code's sign, extended by the shift, fills others of the exponent, too."""
    has_other: Callable[[torch.Tensor], bool]
    """Whether codes, as int8, have one that would become a number that it is not."""

    def rescaled(self, scales: ScaleGrid) -> ScaleGrid | None:
        """Return ``scales`` times `factor`, None where one becomes too large."""
        larger = scales.mapped(lambda numbers: numbers * self.factor)
        return larger if torch.equal(larger.values.isinf(), scales.values.isinf()) else None

    def write(self, octets: torch.Tensor, bits: torch.Tensor) -> None:
        """Write codes (int8) into ``bits`` (int16 of the same shape)."""
        shift, kept = _int16_numbers(1 << self.shift, self.kept)
        bits.copy_(octets).mul_(shift)
        if self.kept != 0xFFFF:
            bits.bitwise_and_(kept)


@functools.cache
def _int16_numbers(*bits: int) -> tuple[torch.Tensor, ...]:
    """Return tensors of no dimensions: a number would become one anew in each call."""
    return tuple(torch.tensor(number, dtype=torch.int32).to(torch.int16) for number in bits)


def _are_subnormals_kept(factor: float) -> bool:
    """Say whether this thread multiplies subnormal numbers as they are: `torch.set_flush_denormal` has them taken for 0."""
    smallest = torch.tensor(1, dtype=torch.int16).view(torch.bfloat16)
    return bool(smallest.mul(factor) != 0)


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


def _has_e5m2_infinity_or_nan(codes: torch.Tensor) -> bool:
    return int(codes.amax()) >= 0x7C or int(codes.view(torch.uint8).amax()) >= 0xFC


def _has_none(codes: torch.Tensor) -> bool:
    return False


_INTO_FLOAT16 = {
    torch.float8_e4m3fn: _Widening(shift=7, factor=2.0**8, kept=0xBFFF, has_other=_has_e4m3_nan),
    torch.float8_e4m3fnuz: _Widening(shift=7, factor=2.0**7, kept=0xBFFF, has_other=_has_fnuz_nan),
    torch.float8_e5m2: _Widening(shift=8, factor=1.0, kept=0xFFFF, has_other=_has_none),
}
"""Exponents of 5 bits, bias 15. E5M2 with the "fnuz" bias is not here: its largest exponent is a number's, float16's is not."""
_INTO_BFLOAT16 = {
    torch.float8_e4m3fn: _Widening(shift=4, factor=2.0**120, kept=0x87F0, has_other=_has_e4m3_nan),
    torch.float8_e4m3fnuz: _Widening(shift=4, factor=2.0**119, kept=0x87F0, has_other=_has_fnuz_nan),
    torch.float8_e5m2: _Widening(shift=5, factor=2.0**112, kept=0x8FE0, has_other=_has_e5m2_infinity_or_nan),
    torch.float8_e5m2fnuz: _Widening(shift=5, factor=2.0**111, kept=0x8FE0, has_other=_has_fnuz_nan),
}
"""Exponents of 8 bits, bias 127, so that all of these formats' numbers are small ones, subnormal as there."""
