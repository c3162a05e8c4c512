"""compressed-tensors' ``pack-quantized`` (compressed-tensors 0.19.0, ``compressors/pack_quantized``); ModelOpt's INT4 beside it is from its own module.

- ``weight_packed`` int32 ``[N, ceil(K * bits / 32)]``: low bits first along K, each value stored plus ``2**(bits - 1)``.
- ``weight_scale`` ``[N, G]``; ``[N, 1]`` per row.
- ``weight_zero_point``, where the range is not symmetric: int32 ``[ceil(N * bits / 32), G]``, packed along rows with the same bias, or int8 ``[N, G]`` as it is.
- ``weight_g_idx`` int32 ``[K]``, the group of each input feature: written by 0.9 for ``actorder: group``. ``actorder: static`` and ``weight`` leave no trace in the file.
- ``weight_shape`` ``[2]``: the weight's sizes, because the last word of a row may be partly used.

The value is ``(code - zero) * scale``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from headrace.errors import UnsupportedQuantization
from headrace.quantization.bits import num_words, pack_bits, unpack_bits
from headrace.quantization.code_blocks import result_tensor, slice_words, word_blocks
from headrace.quantization.group_scales import GroupScales, cut_groups, group_scales
from headrace.quantization.modelopt_int4 import ModeloptInt4
from headrace.quantization.packed_parts import (
    FLOATS,
    PartCheck,
    columns_of,
    index_warning,
    require_parameters,
    slice_input_parts,
)
from headrace.quantization.scheme import Parts, Role, Scheme, StoredPart

__all__ = ["ModeloptInt4", "PackedInt"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedInt(Scheme):
    """compressed-tensors' ``pack-quantized``."""

    label: ClassVar[str] = "packed INT"
    bits: int = 4
    """2, 4 or 8. Other sizes were packed in two ways (densely since 0.19, before with unused bits in each word) that no file tells apart."""
    group_size: int | None = None
    """Input features per scale; None: one scale per row."""
    symmetric: bool = True
    """False: there must be zero points. True: there may be; they count all the same."""
    is_slice: bool = False
    """Of a slice of a weight: an index means what it says, also where it is 0 throughout."""

    def __post_init__(self) -> None:
        require_parameters("pack-quantized", group_size=self.group_size, bits=self.bits, known_bits=(2, 4, 8))

    def describe(self) -> str:
        groups = "per row" if self.group_size is None else f"group {self.group_size}"
        return f"INT{self.bits} {groups} {'symmetric' if self.symmetric else 'asymmetric'}"

    def check(self, parts: Mapping[Role, StoredPart], *, module: str) -> tuple[int, int]:
        check = PartCheck(self, module, parts)
        check.only(Role.CODES, Role.SCALE, Role.ZERO_POINT, Role.GROUP_INDEX, Role.SHAPE)
        codes, scale = check.required(Role.CODES, "weight_packed"), check.required(Role.SCALE, "weight_scale")
        rows, words = check.expect_matrix(codes, torch.int32, f"int32 [N, ceil(K * {self.bits} / 32)]")
        groups = self._check_scale(check, scale, rows)
        columns = columns_of(
            words, self.bits, num_groups=groups, group_size=self.group_size, index_length=check.expect_index()
        )
        must = f"floating [{rows}, G], G groups of {self.group_size} that {words} words per row hold"
        check.expect(scale, columns is not None, must)
        assert columns is not None
        if not self.symmetric or Role.ZERO_POINT in parts:
            self._check_zero_point(check, rows, groups)
        if Role.SHAPE in parts:
            shape = parts[Role.SHAPE]
            check.expect(shape, shape.dtype in (torch.int32, torch.int64) and shape.shape == (2,), "int64 or int32 [2]")
        check.expect_inputs(columns)
        return rows, columns

    def check_values(self, parts: Parts, module: str) -> str | None:
        """Return a sentence that warns of stored values that contradict the configuration, or None. Reads the small parts only.

        Raises `UnsupportedQuantization` for a ``weight_shape`` or a ``weight_g_idx`` that the packed weight cannot have.
        """
        rows, words = parts[Role.CODES].shape
        if Role.SHAPE in parts:
            stored = [int(size) for size in parts[Role.SHAPE]]
            if stored[0] != rows or num_words(stored[1], self.bits) != words:
                raise UnsupportedQuantization(
                    f"{module}.weight_shape says {stored}, but weight_packed is {[rows, words]}.",
                    f"A weight of that shape fills {[stored[0], num_words(stored[1], self.bits)]} words of {self.bits}-bit values.",
                    "Take both tensors from where the model was made.",
                )
        groups = _matrix(parts[Role.SCALE], rows).shape[1]
        index, name = parts.get(Role.GROUP_INDEX), f"{module}.weight_g_idx"
        found = [index_warning(index, groups, name, is_literal=self.is_slice)]
        if self.symmetric and Role.ZERO_POINT in parts and bool((self._zero(parts, rows) != self._bias).any()):
            found.append(
                f"{module} is said to be symmetric, but has a weight_zero_point that is not 0; it is subtracted, as the tensors say."
            )
        return " ".join(sentence for sentence in found if sentence) or None

    def dequantize(
        self,
        parts: Parts,
        *,
        shape: tuple[int, int],
        dtype: torch.dtype = torch.float32,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `Scheme.dequantize`; columns past what ``weight_shape`` says are left out, where it is among ``parts`` and lies in the memory of the CPU.

        On another device to look at it would have to wait for all work there; ``shape`` then decides.
        """
        words, stored = parts[Role.CODES], parts.get(Role.SHAPE)
        if stored is not None and stored.device.type == "cpu":
            shape = (shape[0], min(shape[1], int(stored[1])))
        result = result_tensor(shape, dtype, words.device, out)
        scales = self._scales(parts, shape)
        scales.write(word_blocks(words, self.bits, scales.base), result)
        return result

    def pack(self, values: torch.Tensor, parts: Parts) -> torch.Tensor:
        shape = (values.shape[0], values.shape[1])
        return pack_bits(self._scales(parts, shape).nearest(values), self.bits)

    def at(self, row: int, column: int) -> PackedInt:
        """Return the scheme of a slice of a weight of this one."""
        return replace(self, is_slice=True)

    def slice_parts(
        self, parts: Parts, *, shape: tuple[int, int], rows: tuple[int, int], columns: tuple[int, int]
    ) -> dict[Role, torch.Tensor]:
        """Return parts that stand for rows and columns ``[start, stop)`` of the weight of ``shape``; views of ``parts`` where words need no new packing."""
        words, scale = parts[Role.CODES], _matrix(parts[Role.SCALE], shape[0])
        index = parts.get(Role.GROUP_INDEX)
        groups, index = cut_groups(
            columns,
            num_columns=shape[1],
            num_groups=scale.shape[1],
            group_size=self.group_size,
            index=index,
            device=scale.device,
            is_literal=self.is_slice,
        )
        cut = slice_input_parts(parts, columns)
        cut[Role.CODES] = slice_words(words[slice(*rows)], self.bits, columns)
        cut[Role.SCALE] = scale[slice(*rows), groups]
        if Role.ZERO_POINT in parts:
            zero = self._zero(parts, shape[0])[slice(*rows), groups]
            cut[Role.ZERO_POINT] = (zero - self._bias).to(torch.int8)
        if index is not None:
            cut[Role.GROUP_INDEX] = index
        if Role.SHAPE in parts:
            cut[Role.SHAPE] = parts[Role.SHAPE].new_tensor([rows[1] - rows[0], columns[1] - columns[0]])
        return cut

    @property
    def _bias(self) -> int:
        return 1 << (self.bits - 1)

    def _check_scale(self, check: PartCheck, scale: StoredPart, rows: int) -> int:
        is_float, shape = scale.dtype in FLOATS, scale.shape
        if self.group_size is None:
            check.expect(
                scale, is_float and shape in ((rows, 1), (rows,), (1,), ()), f"floating [{rows}, 1], or one number"
            )
            return 1
        is_right = is_float and len(shape) == 2 and shape[0] == rows and shape[1] > 0
        check.expect(scale, is_right, f"floating [{rows}, ceil(K / {self.group_size})]")
        return shape[1]

    def _check_zero_point(self, check: PartCheck, rows: int, groups: int) -> None:
        part = check.required(Role.ZERO_POINT, "weight_zero_point")
        packed, plain = (num_words(rows, self.bits), groups), (rows, groups)
        shapes: dict[torch.dtype, tuple[tuple[int, ...], ...]] = {torch.int32: (packed,), torch.int8: (plain,)}
        if self.group_size is None:
            shapes[torch.int8] += ((rows,), (1,), ())
        is_right = part.shape in shapes.get(part.dtype, ())
        check.expect(part, is_right, f"int32 {list(packed)} packed along rows, or int8 {list(plain)}")

    def _scales(self, parts: Parts, shape: tuple[int, int]) -> GroupScales:
        rows, columns = shape
        return group_scales(
            scale=_matrix(parts[Role.SCALE], rows),
            zero=self._zero(parts, rows) if Role.ZERO_POINT in parts else self._bias,
            bits=self.bits,
            num_columns=columns,
            group_size=self.group_size,
            index=parts.get(Role.GROUP_INDEX),
            is_literal=self.is_slice,
        )

    def _zero(self, parts: Parts, rows: int) -> torch.Tensor:
        """Return the zero points as the codes have them, biased: ``[N, G]``, uint8 or int16."""
        stored = parts[Role.ZERO_POINT]
        if stored.dtype is torch.int32:
            return unpack_bits(stored.t(), self.bits)[:, :rows].t()
        return _matrix(stored, rows).to(torch.int16) + self._bias


def _matrix(per_row: torch.Tensor, rows: int) -> torch.Tensor:
    """Return ``[rows, G]``: scales or zero points as they are, or one column of those that have no dimension for groups."""
    if per_row.dim() == 2:
        return per_row
    return per_row.reshape(-1, 1).expand(rows, 1)
