"""NVIDIA ModelOpt's INT4-AWQ and W4A8-AWQ (ModelOpt 0.47.0, ``export/quant_utils.py: pack_int4_in_uint8``).

``weight`` uint8 ``[N / 2, K]``, the even row in the low half of each byte, two's complement; ``weight_scale`` ``[N, K / group]``. The value is ``code * scale``.
W4A8-AWQ adds ``weight_scale_2``, ``[]``: the value is divided by it, rounded to E4M3, and multiplied by it again, as its kernels read weights as FP8
(``quantization/tensor_quant.py: fp8_eager``, which multiplies by the reciprocal).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from headrace.quantization.code_blocks import WorkAreas, result_tensor, rows_per_block
from headrace.quantization.group_scales import GroupScales, cut_groups, group_scales
from headrace.quantization.packed_parts import FLOATS, PartCheck, require_parameters, slice_input_parts
from headrace.quantization.scheme import Parts, Role, Scheme, StoredPart

_E4M3_MAX = 448.0
_BITS = 4
_NUM_CODES = 1 << _BITS


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeloptInt4(Scheme):
    """ModelOpt's INT4-AWQ; with ``fp8_scale`` its W4A8-AWQ."""

    label: ClassVar[str] = "INT4 AWQ"
    group_size: int = 128
    fp8_scale: bool = False
    """Values are rounded to E4M3 in units of ``weight_scale_2``."""

    def __post_init__(self) -> None:
        require_parameters("INT4-AWQ", group_size=self.group_size)

    def describe(self) -> str:
        return f"{'W4A8' if self.fp8_scale else 'INT4'} AWQ group {self.group_size}"

    def check(self, parts: Mapping[Role, StoredPart], *, module: str) -> tuple[int, int]:
        check = PartCheck(self, module, parts)
        check.only(Role.CODES, Role.SCALE, *([Role.GLOBAL_SCALE] if self.fp8_scale else []))
        codes, scale = check.required(Role.CODES, "weight"), check.required(Role.SCALE, "weight_scale")
        must = f"uint8 [N / 2, K], K a multiple of {self.group_size}"
        pairs, columns = check.expect_matrix(codes, torch.uint8, must)
        check.expect(codes, columns % self.group_size == 0, must)
        wanted = (2 * pairs, columns // self.group_size)
        check.expect(scale, scale.dtype in FLOATS and scale.shape == wanted, f"floating {list(wanted)}")
        if self.fp8_scale:
            unit = check.required(Role.GLOBAL_SCALE, "weight_scale_2")
            check.expect(unit, unit.dtype in FLOATS and unit.shape in ((), (1,)), "one floating number")
        check.expect_inputs(columns)
        return 2 * pairs, columns

    def dequantize(
        self,
        parts: Parts,
        *,
        shape: tuple[int, int],
        dtype: torch.dtype = torch.float32,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        octets = parts[Role.CODES]
        result = result_tensor(shape, dtype, octets.device, out)
        if self.fp8_scale:
            self._write_rounded(parts, result)
        else:
            self._scales(parts, shape[1]).write(_value_blocks(octets), result)
        return result

    def pack(self, values: torch.Tensor, parts: Parts) -> torch.Tensor:
        if self.fp8_scale:
            codes = self._nearest_rounded(values, parts)
        else:
            codes = self._scales(parts, values.shape[1]).nearest(values)
        return _pack_pairs(codes - _NUM_CODES // 2)

    def slice_parts(
        self, parts: Parts, *, shape: tuple[int, int], rows: tuple[int, int], columns: tuple[int, int]
    ) -> dict[Role, torch.Tensor]:
        """Return parts that stand for rows and columns ``[start, stop)`` of the weight of ``shape``; views of ``parts`` where rows need no new pairing.

        Groups that the first column cuts are told by `Role.GROUP_INDEX`, which files of this format do not have. An odd number of rows leaves half a byte unused.
        """
        scale = parts[Role.SCALE]
        groups, index = cut_groups(
            columns,
            num_columns=shape[1],
            num_groups=scale.shape[1],
            group_size=self.group_size,
            index=parts.get(Role.GROUP_INDEX),
            device=scale.device,
            is_literal=True,
        )
        cut = slice_input_parts(parts, columns)
        octets = parts[Role.CODES][rows[0] // 2 : -(-rows[1] // 2), slice(*columns)]
        cut[Role.CODES] = (
            octets
            if rows[0] % 2 == 0
            else _pack_pairs(_unpack_pairs(octets, WorkAreas(octets.device))[1 : 1 + rows[1] - rows[0]])
        )
        cut[Role.SCALE] = scale[slice(*rows), groups]
        if Role.GLOBAL_SCALE in parts:
            cut[Role.GLOBAL_SCALE] = parts[Role.GLOBAL_SCALE]
        if index is not None:
            cut[Role.GROUP_INDEX] = index
        return cut

    def _scales(self, parts: Parts, num_columns: int) -> GroupScales:
        return group_scales(
            scale=parts[Role.SCALE],
            zero=_NUM_CODES // 2,
            bits=_BITS,
            num_columns=num_columns,
            group_size=self.group_size,
            index=parts.get(Role.GROUP_INDEX),
            is_literal=True,
        )

    @torch.no_grad()
    def _write_rounded(self, parts: Parts, out: torch.Tensor) -> None:
        """Look every value up among the 16 that its group has, since rounding to E4M3 costs more than all else."""
        rows, columns = out.shape
        scale, rounded = parts[Role.SCALE], _RoundedValues(parts[Role.GLOBAL_SCALE])
        scales, num_groups = self._scales(parts, columns), scale.shape[1]
        step = min(rows_per_block(columns, out.device, multiple=2), rows + rows % 2)
        places = torch.empty(step, columns, dtype=torch.int32, device=out.device)
        first = torch.arange(step * num_groups, dtype=torch.int32, device=out.device) * _NUM_CODES + _NUM_CODES // 2
        offsets = scales.spread(first.view(step, num_groups))
        for start, codes in _code_blocks(parts[Role.CODES], step):
            stop = min(start + codes.shape[0], rows)
            table = rounded.of(scale[start:stop]).to(out.dtype).view(-1)
            block = places[: stop - start].copy_(codes[: stop - start])
            scales.by_group(block).add_(offsets[: stop - start])
            if out.is_contiguous():
                torch.index_select(table, 0, block.view(-1), out=out[start:stop].view(-1))
            else:
                out[start:stop] = table.index_select(0, block.view(-1)).view(block.shape)

    def _nearest_rounded(self, values: torch.Tensor, parts: Parts) -> torch.Tensor:
        scales = self._scales(parts, values.shape[1])
        table = _RoundedValues(parts[Role.GLOBAL_SCALE]).of(parts[Role.SCALE])
        nearest = torch.zeros(values.shape, dtype=torch.int16, device=values.device)
        least = torch.full_like(values, torch.inf)
        for code in range(_NUM_CODES):
            distance = (scales.by_group(values) - scales.spread(table[:, :, code])).abs_().view(values.shape)
            nearest[distance < least] = code
            least = torch.minimum(least, distance)
        return nearest


class _RoundedValues:
    """What the 16 codes, -8 first, stand for under a scale, after rounding to E4M3 in units of ``unit``."""

    def __init__(self, unit: torch.Tensor) -> None:
        device = unit.device
        self._unit = unit.float().reshape(())
        self._divisor = torch.where(self._unit == 0, 1.0, self._unit)  # 0 belongs to a weight that is 0 throughout
        self._codes = torch.arange(-_NUM_CODES // 2, _NUM_CODES // 2, device=device, dtype=torch.float32)
        # Looking 256 codes up is eight times as fast as torch's own way back from E4M3 (2.13, CPU).
        self._decoded = (
            torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).float() * self._unit
        )

    def of(self, scale: torch.Tensor) -> torch.Tensor:
        """Return the values for ``scale`` (``[rows, G]``): float32 ``[rows, G, 16]``."""
        exact = scale.float().unsqueeze(-1) * self._codes
        octets = exact.div_(self._divisor).clamp_(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
        return self._decoded.index_select(0, octets.view(-1).int()).view(octets.shape)


def _value_blocks(octets: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield the codes of ``octets`` (uint8 ``[N / 2, K]``) as float32."""
    areas = WorkAreas(octets.device)
    for start, codes in _code_blocks(octets, rows_per_block(octets.shape[1], octets.device, multiple=2)):
        yield start, 0, areas.take("values", tuple(codes.shape), torch.float32).copy_(codes)


def _code_blocks(octets: torch.Tensor, step: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the first row and the codes of every ``step`` rows, an even number of them."""
    areas = WorkAreas(octets.device)
    for start in range(0, octets.shape[0], step // 2):
        yield 2 * start, _unpack_pairs(octets[start : start + step // 2], areas)


def _unpack_pairs(octets: torch.Tensor, areas: WorkAreas) -> torch.Tensor:
    """Return the codes: uint8 ``[R, K]`` → int8 ``[2 * R, K]``, in a work area."""
    codes = areas.take("codes", (octets.shape[0], 2, octets.shape[1]), torch.int8)
    signed = octets.view(torch.int8)
    torch.bitwise_left_shift(signed, 4, out=codes[:, 0])
    codes[:, 0].bitwise_right_shift_(4)  # shifts of signed numbers keep the sign
    torch.bitwise_right_shift(signed, 4, out=codes[:, 1])
    return codes.view(-1, octets.shape[1])


def _pack_pairs(codes: torch.Tensor) -> torch.Tensor:
    """Return the inverse of `_unpack_pairs`, of codes of any integer type; the half after an odd last row is zero."""
    rows, columns = codes.shape
    padded = torch.zeros(-(-rows // 2) * 2, columns, dtype=torch.uint8, device=codes.device)
    padded[:rows] = codes & 0x0F
    return padded[0::2] | (padded[1::2] << 4)
