"""A slice of a packed weight that is planned without values is the slice: of every scheme, wherever it begins and ends, and of no more than what is read of each part."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.quantization.awq import Awq
from headrace.quantization.fp4 import Nvfp4
from headrace.quantization.fp8 import Fp8Block, Fp8Channel, Fp8Tensor
from headrace.quantization.gptq import Gptq
from headrace.quantization.int4 import PackedInt
from headrace.quantization.int8 import Int8Channel, Int8Group
from headrace.quantization.modelopt_int4 import ModeloptInt4
from headrace.quantization.mx import Mxfp4, Mxfp4Blocks, Mxfp8
from headrace.quantization.scheme import Role, Scheme, StoredPart, WeightQuantization
from headrace.quantization.slices import slice_weight
from headrace.quantization.weight_cuts import WeightCut

E4M3 = torch.float8_e4m3fn
ROWS, COLUMNS = 48, 96
NAMES = {Role.CODES: "qweight", Role.GROUP_INDEX: "g_idx"}


def words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)


def octets(*shape: int) -> torch.Tensor:
    return torch.randint(0, 127, shape, dtype=torch.uint8)


def weights() -> list[tuple[Scheme, dict[Role, torch.Tensor]]]:
    """Weights of 48 × 96 in every scheme, each group with another scale."""
    torch.manual_seed(0)
    order = torch.randperm(COLUMNS).to(torch.int32) // 32
    plain = torch.arange(COLUMNS, dtype=torch.int32) // 32
    symmetric = torch.full((3, ROWS // 8), 0x77777777, dtype=torch.int32)
    fp8, by_group, turned = octets(ROWS, COLUMNS).view(E4M3), torch.rand(ROWS, 3), torch.rand(3, ROWS)
    shape = torch.tensor([ROWS, COLUMNS])
    made: list[tuple[Scheme, torch.Tensor, torch.Tensor, dict[Role, torch.Tensor]]] = [
        (Fp8Tensor(), fp8, torch.tensor(0.5), {}),
        (Fp8Channel(), fp8, torch.rand(ROWS, 1), {}),
        (Fp8Block(block=(16, 40)), fp8, torch.rand(3, 3), {}),
        (Fp8Block(block=(16, 32)), fp8, torch.rand(3, 1, 3, 1), {}),
        (Int8Channel(), fp8.view(torch.int8), torch.rand(ROWS), {Role.ZERO_POINT: octets(ROWS).view(torch.int8)}),
        (Int8Group(group_size=32), fp8.view(torch.int8), by_group, {}),
        (Mxfp8(), fp8, octets(ROWS, 3), {}),
        (Mxfp4(), octets(ROWS, 48), octets(ROWS, 3), {}),
        (Mxfp4Blocks(), octets(ROWS, 3, 16), octets(ROWS, 3), {}),
        (Nvfp4(), octets(ROWS, 48), octets(ROWS, 6).view(E4M3), {Role.GLOBAL_SCALE: torch.tensor(0.01)}),
        (Gptq(group_size=32), words(12, ROWS), turned, {Role.ZERO_POINT: symmetric}),
        (Gptq(group_size=32, symmetric=False), words(12, ROWS), turned, {Role.ZERO_POINT: words(3, 6), Role.GROUP_INDEX: order}),
        (Gptq(group_size=32), words(12, ROWS), turned, {Role.ZERO_POINT: symmetric, Role.GROUP_INDEX: plain}),
        (Gptq(group_size=32), words(12, ROWS), turned, {Role.ZERO_POINT: symmetric, Role.GROUP_INDEX: 0 * plain}),
        (Awq(group_size=32), words(COLUMNS, 6), turned, {Role.ZERO_POINT: words(3, 6)}),
        (ModeloptInt4(group_size=32), octets(ROWS // 2, COLUMNS), by_group, {}),
        (PackedInt(), words(ROWS, 12), torch.rand(ROWS, 1), {Role.SHAPE: shape}),
        (PackedInt(group_size=32, symmetric=False), words(ROWS, 12), by_group, {Role.SHAPE: shape, Role.ZERO_POINT: words(6, 3)}),
        (PackedInt(group_size=32), words(ROWS, 12), by_group, {Role.SHAPE: shape, Role.GROUP_INDEX: order}),
    ]  # fmt: skip
    return [(scheme, {Role.CODES: codes, Role.SCALE: scale, **more}) for scheme, codes, scale, more in made]


WEIGHTS = weights()


def quantization_of(scheme: Scheme, parts: dict[Role, torch.Tensor]) -> WeightQuantization:
    stored = {role: StoredPart(NAMES.get(role, role), one.dtype, tuple(one.shape)) for role, one in parts.items()}
    assert scheme.check(stored, module="m") == (ROWS, COLUMNS)
    return WeightQuantization(scheme=scheme, shape=(ROWS, COLUMNS), parts=stored)


def read(cut: WeightCut, parts: dict[Role, torch.Tensor]) -> dict[Role, torch.Tensor]:
    """Return what a reader brings: of each part what is asked for, in memory of its own."""
    regions = {
        role: tuple(slice(*bound) for bound in cut.bounds(role)) for role in cut.whole if role in cut.slice.parts
    }
    return {role: parts[role][region].clone(memory_format=torch.contiguous_format) for role, region in regions.items()}


@settings(max_examples=40, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize(
    ("scheme", "parts"), WEIGHTS, ids=lambda value: value.describe() if isinstance(value, Scheme) else ""
)
def test_parts_planned_without_values_are_the_slices(
    scheme: Scheme, parts: dict[Role, torch.Tensor], data: st.DataObject
) -> None:
    parts = {**parts, Role.PRE_SCALE: torch.rand(COLUMNS), Role.INPUT_SCALE: torch.tensor(0.5)}
    bounds = [
        sorted(data.draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True))) for n in (ROWS, COLUMNS)
    ]
    rows, columns = ((low, high) for low, high in bounds)
    weight = quantization_of(scheme, parts)
    cut = WeightCut.of(weight, rows, columns)
    planned, made = cut.narrowed(weight), cut.parts_of(read(cut, parts))
    # All of a weight stays as it is stored.
    is_all = (rows, columns) == ((0, ROWS), (0, COLUMNS))
    expected = parts if is_all else slice_weight(scheme, parts, shape=(ROWS, COLUMNS), rows=rows, columns=columns).parts
    assert made.keys() == planned.parts.keys() == expected.keys()
    for role, part in planned.parts.items():
        assert (made[role].dtype, tuple(made[role].shape)) == (part.dtype, part.shape), role
        assert made[role].double().equal(expected[role].double()), role
    owned = {role: one.contiguous() for role, one in made.items()}
    whole = scheme.dequantize(parts, shape=(ROWS, COLUMNS))[slice(*rows), slice(*columns)]
    assert planned.scheme.dequantize(owned, shape=planned.shape).equal(whole)


@pytest.mark.parametrize(
    ("scheme", "parts"), WEIGHTS, ids=lambda value: value.describe() if isinstance(value, Scheme) else ""
)
def test_of_half_the_rows_half_the_codes_are_read_and_no_more(scheme: Scheme, parts: dict[Role, torch.Tensor]) -> None:
    cut = WeightCut.of(quantization_of(scheme, parts), (ROWS // 2, ROWS), (0, COLUMNS))
    assert 2 * read(cut, parts)[Role.CODES].numel() == parts[Role.CODES].numel()


def test_an_index_that_files_lack_has_a_name() -> None:
    scheme, parts = next(one for one in WEIGHTS if isinstance(one[0], Awq))
    weight = quantization_of(scheme, parts)
    assert WeightCut.of(weight, (0, ROWS), (16, 64)).narrowed(weight).parts[Role.GROUP_INDEX].suffix == "g_idx"
    assert Role.GROUP_INDEX not in WeightCut.of(weight, (0, ROWS), (32, 64)).narrowed(weight).parts
