"""Integer weights with a scale per group, and each layout that files keep them in, written number by number from the description of the format."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from headrace.quantization.scheme import Role, Scheme, StoredPart
from headrace.quantization.slices import slice_weight
from tests.support.code_definitions import assert_same
from tests.support.memory_layouts import LAYOUTS, laid_out

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True, kw_only=True)
class IntegerWeight:
    """A weight ``[N, K]``: unsigned codes, and for every group its scale and the code of 0."""

    bits: int
    codes: list[list[int]]
    zeros: list[list[int]]
    """``[N][G]``."""
    scale: torch.Tensor
    """``[N, G]``."""
    index: list[int]
    """Group of each column."""

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes), len(self.index)

    def values(self) -> torch.Tensor:
        """Return what the weight stands for, by the definition: float32 ``[N, K]``."""
        zeros = torch.tensor(self.zeros)[:, self.index]
        return (torch.tensor(self.codes) - zeros).float() * self.scale.float()[:, self.index]


def integer_weight(
    rows: int,
    columns: int,
    *,
    bits: int = 4,
    group_size: int | None = None,
    symmetric: bool = False,
    index: Sequence[int] | None = None,
    scale_dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> IntegerWeight:
    """Return a weight of random codes, scales and, unless ``symmetric``, zero points."""
    chosen = random.Random(seed)
    index = [0 if group_size is None else column // group_size for column in range(columns)] if index is None else index
    groups, most = max(index) + 1, 2**bits - 1
    scale = [[chosen.uniform(1e-3, 1.0) * chosen.choice((1, -1)) for _ in range(groups)] for _ in range(rows)]
    middle = 2 ** (bits - 1)
    return IntegerWeight(
        bits=bits,
        codes=[[chosen.randint(0, most) for _ in range(columns)] for _ in range(rows)],
        zeros=[[middle if symmetric else chosen.randint(0, most) for _ in range(groups)] for _ in range(rows)],
        scale=torch.tensor(scale).to(scale_dtype),
        index=list(index),
    )


def words_of(rows: Sequence[Sequence[int]], bits: int) -> torch.Tensor:
    """Return each row of numbers as one long number, lowest first, cut into words: int32 ``[rows, W]``."""
    made = []
    for row in rows:
        whole = sum(value << (place * bits) for place, value in enumerate(row))
        words = [(whole >> (32 * word)) & 0xFFFFFFFF for word in range(-(-len(row) * bits // 32))]
        made.append([word - (1 << 32) if word >> 31 else word for word in words])
    return torch.tensor(made, dtype=torch.int32)


def turned(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*rows, strict=True)]


def packed_int_parts(
    weight: IntegerWeight, *, zero_points: bool = True, g_idx: bool = False
) -> dict[Role, torch.Tensor]:
    """Return the weight as compressed-tensors packs it."""
    parts = {
        Role.CODES: words_of(weight.codes, weight.bits),
        Role.SCALE: weight.scale,
        Role.SHAPE: torch.tensor(weight.shape),
    }
    if zero_points:
        parts[Role.ZERO_POINT] = words_of(turned(weight.zeros), weight.bits).t().contiguous()
    if g_idx:
        parts[Role.GROUP_INDEX] = torch.tensor(weight.index, dtype=torch.int32)
    return parts


def gptq_parts(weight: IntegerWeight, *, version: int, g_idx: bool = True) -> dict[Role, torch.Tensor]:
    """Return the weight as GPTQ packs it."""
    mask = 2**weight.bits - 1
    stored = [[(zero - 1) & mask if version == 1 else zero for zero in row] for row in weight.zeros]
    parts = {
        Role.CODES: words_of(weight.codes, weight.bits).t().contiguous(),
        Role.ZERO_POINT: words_of(turned(stored), weight.bits),
        Role.SCALE: weight.scale.t().contiguous(),
    }
    if g_idx:
        parts[Role.GROUP_INDEX] = torch.tensor(weight.index, dtype=torch.int32)
    return parts


def awq_parts(weight: IntegerWeight, *, zero_points: bool = True) -> dict[Role, torch.Tensor]:
    """Return the weight as AWQ's gemm layout packs it; the number of rows is a multiple of 8."""
    parts = {Role.CODES: words_of(_in_awq_order(weight.codes), 4), Role.SCALE: weight.scale.t().contiguous()}
    if zero_points:
        parts[Role.ZERO_POINT] = words_of(_in_awq_order(weight.zeros), 4)
    return parts


def modelopt_parts(weight: IntegerWeight) -> dict[Role, torch.Tensor]:
    """Return the weight as ModelOpt packs two rows into bytes; codes are signed there."""
    octets = [
        [
            ((low - 8) & 15) | ((high - 8) & 15) << 4
            for low, high in zip(weight.codes[row], weight.codes[row + 1], strict=True)
        ]
        for row in range(0, len(weight.codes), 2)
    ]
    return {Role.CODES: torch.tensor(octets, dtype=torch.uint8), Role.SCALE: weight.scale}


def stored_parts(parts: dict[Role, torch.Tensor], suffixes: dict[Role, str] | None = None) -> dict[Role, StoredPart]:
    """Return the headers of ``parts``, under the names of their roles or of ``suffixes``."""
    return {
        role: StoredPart((suffixes or {}).get(role, role), part.dtype, tuple(part.shape))
        for role, part in parts.items()
    }


def _in_awq_order(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    columns = turned(rows)
    return [[column[start + place] for start in range(0, len(column), 8) for place in AWQ_ORDER] for column in columns]


def assert_stands_for(scheme: Scheme, parts: dict[Role, torch.Tensor], values: torch.Tensor) -> None:
    """Assert that ``parts`` are right by their headers, stand for ``values`` in every dtype and memory, stay as they were, and come back when these are packed."""
    before = {role: part.clone() for role, part in parts.items()}
    shape = (values.shape[0], values.shape[1])
    assert scheme.check(stored_parts(parts), module="m") == shape
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert_same(scheme.dequantize(parts, shape=shape, dtype=dtype), values.to(dtype))
        for layout in LAYOUTS:
            out = laid_out(torch.full(shape, 7.0, dtype=dtype), layout)
            assert scheme.dequantize(parts, shape=shape, dtype=dtype, out=out) is out
            assert_same(out, values.to(dtype))
    packed = scheme.pack(values, {role: part for role, part in parts.items() if role is not Role.CODES})
    assert_same(packed, parts[Role.CODES])
    for role, part in parts.items():
        assert part.equal(before[role])


def assert_slices(scheme: Scheme, parts: dict[Role, torch.Tensor], values: torch.Tensor, data: st.DataObject) -> None:
    """Assert that a slice at any place, and a slice of it, stand for that part of ``values``, and come back when it is packed."""
    pre_scale = torch.rand(values.shape[1])
    parts = {**parts, Role.PRE_SCALE: pre_scale, Role.INPUT_SCALE: torch.tensor(0.5)}
    for _ in range(2):
        starts = [data.draw(st.integers(0, size - 1)) for size in values.shape]
        rows, columns = (
            (start, data.draw(st.integers(start + 1, size))) for start, size in zip(starts, values.shape, strict=True)
        )
        cut = slice_weight(scheme, parts, shape=(values.shape[0], values.shape[1]), rows=rows, columns=columns)
        scheme, parts = cut.scheme, cut.parts
        values, pre_scale = values[slice(*rows), slice(*columns)], pre_scale[slice(*columns)]
        assert cut.shape == values.shape
        assert_same(scheme.dequantize(parts, shape=cut.shape), values)
        assert_same(scheme.dequantize(parts, shape=cut.shape, dtype=torch.bfloat16), values.bfloat16())
        packed = {**parts, Role.CODES: scheme.pack(values, parts)}
        assert_same(scheme.dequantize(packed, shape=cut.shape), values)
        assert parts[Role.PRE_SCALE].equal(pre_scale)
        assert parts[Role.INPUT_SCALE].item() == 0.5
