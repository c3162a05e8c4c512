"""Weights of one byte per value, FP8 or INT8, with scales on a grid: ``value = (code - zero) * scale`` in float32, then rounded once to the result's type.

On a CPU torch converts FP8 one value at a time, so larger weights go one of two faster ways there, both exact: with one scale for the whole weight, through a table of
the results of all pairs of codes; else through float16, whose bits FP8's are a part of, and which processors convert many at a time, subnormal values included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.quantization.code_blocks import result_tensor, rows_per_block
from headrace.quantization.codes import byte_values, nearest_bytes
from headrace.quantization.pair_tables import as_pairs, as_words, has_pairs, pair_table
from headrace.quantization.scale_grid import ScaleGrid

_FEWEST = 1 << 15
"""Values from which on a faster way is worth its preparation."""

Decoder = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Writes what codes ``[rows, K]`` stand for into float32 ``[rows, K]``. Third comes the memory of the result, which may be used until the result is written."""


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
                self._convert(result, _to_float32, self.scales)
            elif self.scales.is_single and has_pairs(dtype):
                self._look_up(result)
            else:
                self._widen(result)
            return result

    @property
    def _is_small(self) -> bool:
        return self.codes.device.type != "cpu" or self.codes.numel() < _FEWEST

    def _convert(self, result: torch.Tensor, decode: Decoder, scales: ScaleGrid) -> None:
        """Write the weight into ``result``, block of rows by block of rows."""
        if not self.codes.numel():
            return
        step = rows_per_block(self.codes.shape[1], self.codes.device)
        scratch = None
        first = 0
        for codes, target in zip(torch.split(self.codes, step), torch.split(result, step), strict=True):
            if result.dtype is torch.float32:
                values = target
            else:
                if scratch is None:
                    scratch = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
                values = scratch if len(scratch) == len(codes) else scratch[: len(codes)]
            decode(codes, values, target)
            if self.zeros is not None:
                self.zeros.change(values, first, torch.Tensor.sub_)
            scales.change(values, first, torch.Tensor.mul_)
            if values is not target:
                target.copy_(values)
            first += step

    def _look_up(self, result: torch.Tensor) -> None:
        """Write the weight into ``result`` where all of it has one scale."""
        values = byte_values(self.codes.dtype)
        if self.zeros is not None:
            values -= self.zeros.values.reshape(())
        values = (values * self.scales.values.reshape(())).to(result.dtype)
        table = pair_table(values)
        rows, columns = self.codes.shape
        # An even number of values in every block but the last.
        step = rows_per_block(columns, self.codes.device, multiple=2)
        index = torch.empty((min(step, rows) * columns + 1) // 2, dtype=torch.int32)
        for start in range(0, rows, step):
            codes, target = self.codes[start : start + step].view(torch.uint8), result[start : start + step]
            pairs, copied = as_pairs(target), None
            if pairs is None:
                copied = torch.empty(codes.numel() + codes.numel() % 2, dtype=result.dtype)
                pairs = as_pairs(copied)
                assert pairs is not None
            if codes.numel() % 2:
                codes = torch.nn.functional.pad(codes.reshape(-1), (0, 1))
            words = as_words(codes, torch.uint16)
            torch.index_select(table, 0, index[: words.numel()].copy_(words), out=pairs)
            if copied is not None:
                target.copy_(copied[: target.numel()].view(target.shape))

    def _widen(self, result: torch.Tensor) -> None:
        """Write the weight into ``result``, whatever its scales."""
        widening = _WIDENINGS.get(self.codes.dtype)
        if widening is not None and not widening.has_nan(self.codes.view(torch.int8)):
            scales = self.scales.mapped(lambda numbers: numbers * widening.factor)
            if torch.equal(scales.values.isinf(), self.scales.values.isinf()):
                self._convert(result, widening.decoder(), scales)
                return
        self._convert(result, _to_float32, self.scales)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Widening:
    """How codes of one format become float16 numbers: shifted to where float16 has exponent and mantissa, they stand for their value over ``factor``."""

    shift: int
    factor: float
    fills_sign: bool
    """Whether the code's sign, extended by the shift, also fills a bit of the exponent, which then must be cleared."""
    has_nan: Callable[[torch.Tensor], bool]
    """Whether codes, as int8, have one for NaN that float16 takes for a number."""

    def decoder(self) -> Decoder:
        """Return a decoder to value over ``factor``."""
        # A number would become a tensor anew in each call.
        mask = torch.tensor(~0x4000, dtype=torch.int16)

        def decode(codes: torch.Tensor, values: torch.Tensor, memory: torch.Tensor) -> None:
            if memory.dtype.itemsize == 2:
                bits = memory.view(torch.int16)
            else:
                bits = torch.empty(codes.shape, dtype=torch.int16)
            bits.copy_(codes.view(torch.int8)).mul_(1 << self.shift)
            if self.fills_sign:
                bits.bitwise_and_(mask)
            values.copy_(bits.view(torch.float16))

        return decode


def nearest_byte_codes(
    values: torch.Tensor, dtype: torch.dtype, scales: ScaleGrid, zeros: ScaleGrid | None = None
) -> torch.Tensor:
    """Return the codes (``[N, K]`` in ``dtype``) nearest to ``values`` (float32 ``[N, K]``) under ``scales``. Where a scale is 0 they are those of 0."""
    quotients = values.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    scales.mapped(lambda numbers: torch.where(numbers == 0, 1.0, numbers)).change(quotients, 0, torch.Tensor.div_)
    if zeros is not None:
        zeros.change(quotients, 0, torch.Tensor.add_)
    return nearest_bytes(quotients, dtype)


def _to_float32(codes: torch.Tensor, values: torch.Tensor, memory: torch.Tensor) -> None:
    values.copy_(codes)


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
