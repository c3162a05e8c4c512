"""NVFP4 weights: E2M1 codes in groups of 16 columns, with an E4M3 scale per group and one float32 scale for the whole weight.

- NVIDIA ModelOpt 0.47.0: ``weight`` uint8 ``[N, K/2]``, the lower half of a byte first; ``weight_scale`` E4M3 ``[N, K/16]``; ``weight_scale_2`` float32 ``[]``, a factor, by its
  own rule ``amax / (6 * 448)``. ``value = code * (scale * scale_2)``. W4A8_NVFP4_FP8 is the same with groups of 32.
- compressed-tensors 0.19.0 (``nvfp4-pack-quantized``): ``weight_packed``, ``weight_scale``, and ``weight_global_scale`` float32 ``[1]``, a divisor, by its rule ``6 * 448 / amax``.
  ``value = code * (scale / global_scale)``.

Scales are in the order of rows and columns, as both tools write them; kernels that want them otherwise reorder them themselves.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from headrace.errors import UnsupportedQuantization
from headrace.quantization.codes import E2M1_MAGNITUDES, byte_values
from headrace.quantization.half_byte_parts import check_half_bytes, cut_half_bytes
from headrace.quantization.nibble_groups import NibbleWeight, nearest_nibbles
from headrace.quantization.packed_parts import PartCheck, require_parameters
from headrace.quantization.scheme import Parts, Role, Scheme, StoredPart

_USUAL_GROUP = 16
_LARGEST_WEIGHT = 65504.0
"""The largest float16 number. No model has weights beyond it, and a global scale that is read the wrong way round makes such ones of any weight below about 100."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nvfp4(Scheme):
    """E2M1 codes with two levels of scales."""

    label: ClassVar[str] = "NVFP4"
    group_size: int = _USUAL_GROUP
    """Columns per group scale."""
    global_is_divisor: bool = False
    """Whether the global scale divides (compressed-tensors' ``weight_global_scale``), or is a factor (ModelOpt's ``weight_scale_2``)."""
    column_offset: int = 0
    """Of a slice of a weight: columns of its first group that lie before it. Codes are stored for whole groups."""

    def __post_init__(self) -> None:
        require_parameters(self.label, group_size=self.group_size)

    def describe(self) -> str:
        return self.label if self.group_size == _USUAL_GROUP else f"{self.label} group {self.group_size}"

    def check(self, parts: Mapping[Role, StoredPart], *, module: str) -> tuple[int, int]:
        check = PartCheck(self, module, parts)
        check.only(Role.CODES, Role.SCALE, Role.GLOBAL_SCALE)
        shape = check_half_bytes(
            check,
            group_size=self.group_size,
            scale_dtypes=(torch.float8_e4m3fn,),
            scale_words="float8_e4m3fn",
            column_offset=self.column_offset,
        )
        factor = check.required(Role.GLOBAL_SCALE, self._global_suffix)
        check.expect(
            factor, factor.dtype is torch.float32 and factor.shape in ((), (1,)), "one float32 number, [] or [1]"
        )
        return shape

    def check_values(self, parts: Parts, module: str) -> str | None:
        """Raise `UnsupportedQuantization` where the global scale cannot be right: not a positive number, or one that makes weights that no model has. Return None.

        Reads the scales. The likely cause is a divisor that is stored under a factor's name, or the other way round.
        """
        stored = float(parts[Role.GLOBAL_SCALE])
        name = f"{module}.{self._global_suffix}"
        largest_scale = int((parts[Role.SCALE].view(torch.uint8) & 0x7F).amax())
        group_scale = float(byte_values(torch.float8_e4m3fn)[min(largest_scale, 0x7E)])
        if not (math.isfinite(stored) and stored > 0):
            what, why = f"{name} is {stored}.", "It must be a positive number."
        else:
            largest = E2M1_MAGNITUDES[-1] * group_scale * (1 / stored if self.global_is_divisor else stored)
            if largest <= _LARGEST_WEIGHT:
                return None
            what = f"{name} is {stored:g}, which makes weights as large as {largest:.3g}."
            kind, other = ("divisor", "factor") if self.global_is_divisor else ("factor", "divisor")
            why = f"By its name it is a {kind}; as a {other} it would make them {self._other_way(group_scale, stored):.3g}."
        raise UnsupportedQuantization(
            what, why, "Ask whoever converted the checkpoint: the tensor has another tool's meaning, or is damaged."
        )

    def dequantize(
        self,
        parts: Parts,
        *,
        shape: tuple[int, int],
        dtype: torch.dtype = torch.float32,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        weight = NibbleWeight(
            codes=parts[Role.CODES].view(torch.uint8),
            scales=parts[Role.SCALE].view(torch.uint8),
            scale_values=self._scaled(byte_values(torch.float8_e4m3fn, parts[Role.SCALE].device), parts),
            group_size=self.group_size,
            num_columns=shape[1],
            column_offset=self.column_offset,
        )
        return weight.dequantize(dtype, out)

    def pack(self, values: torch.Tensor, parts: Parts) -> torch.Tensor:
        """As `Scheme.pack`, for whole groups. What is beyond ±6 times its scale becomes that."""
        return nearest_nibbles(values, self._scaled(parts[Role.SCALE].to(torch.float32), parts), self.group_size)

    def at(self, row: int, column: int) -> Nvfp4:
        """Return the scheme of a slice that begins at ``row`` and ``column`` of a weight of this one."""
        return dataclasses.replace(self, column_offset=(self.column_offset + column) % self.group_size)

    def slice_parts(
        self, parts: Parts, *, shape: tuple[int, int], rows: tuple[int, int], columns: tuple[int, int]
    ) -> dict[Role, torch.Tensor]:
        """Return parts that stand for rows and columns ``[start, stop)`` of the weight of ``shape``, with `at`; views of ``parts``, whole groups of columns."""
        return cut_half_bytes(parts, rows, columns, group_size=self.group_size, column_offset=self.column_offset)

    @property
    def _global_suffix(self) -> str:
        return "weight_global_scale" if self.global_is_divisor else "weight_scale_2"

    def _scaled(self, scales: torch.Tensor, parts: Parts) -> torch.Tensor:
        """Return group scales (float32) with the global scale in them, in the order of operations of the tool that stores it so."""
        stored = parts[Role.GLOBAL_SCALE].to(torch.float32).reshape(())
        return scales / stored if self.global_is_divisor else scales * stored

    def _other_way(self, group_scale: float, stored: float) -> float:
        return E2M1_MAGNITUDES[-1] * group_scale * (stored if self.global_is_divisor else 1 / stored)
