"""A slice, expanded, is the slice of the expanded weight: for every scheme, wherever it begins and ends."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.code_definitions import assert_same

from headrace.quantization.fp4 import Nvfp4
from headrace.quantization.fp8 import Fp8Block, Fp8Channel, Fp8Tensor
from headrace.quantization.int8 import Int8Channel, Int8Group, Int8Tensor
from headrace.quantization.mx import Mxfp4, Mxfp4Blocks, Mxfp8
from headrace.quantization.scheme import Parts, Role, Scheme, StoredPart
from headrace.quantization.slices import slice_weight

E4M3 = torch.float8_e4m3fn
ROWS, COLUMNS = 19, 96


def weights() -> list[tuple[Scheme, dict[Role, torch.Tensor]]]:
    """One weight of each scheme, 19 × 96, each block or group with another scale."""
    torch.manual_seed(0)
    octets, halves = (torch.randint(0, 256, (ROWS, size), dtype=torch.uint8) for size in (COLUMNS, COLUMNS // 2))
    octets[(octets & 0x7F) == 0x7F] = 0
    fp8, int8 = octets.view(E4M3), octets.view(torch.int8)
    exponents = torch.randint(110, 130, (ROWS, 3), dtype=torch.uint8)
    one, by_row, by_group = torch.tensor([0.3]), torch.rand(ROWS), torch.rand(ROWS, 14)

    def zeros(*shape: int) -> torch.Tensor:
        return torch.randint(-128, 128, shape, dtype=torch.int8)

    made: list[tuple[Scheme, torch.Tensor, torch.Tensor, dict[Role, torch.Tensor]]] = [
        (Fp8Tensor(), fp8, one, {}),
        (Fp8Channel(), fp8, by_row, {}),
        (Fp8Channel(), fp8, by_row[:, None], {}),
        (Fp8Block(block=(8, 32)), fp8, torch.rand(3, 3), {}),
        (Fp8Block(block=(8, 40)), fp8, torch.rand(3, 1, 3, 1), {}),
        (Fp8Block(block=(64, 128)), fp8, torch.rand(1, 1), {}),
        (Mxfp8(), fp8, exponents, {}),
        (Int8Tensor(), int8, one, {Role.ZERO_POINT: zeros(1)}),
        (Int8Channel(), int8, by_row, {Role.ZERO_POINT: zeros(ROWS)}),
        (Int8Group(group_size=7), int8, by_group, {Role.ZERO_POINT: zeros(ROWS, 14)}),
        (Mxfp4(), halves, exponents, {}),
        (Mxfp4Blocks(), halves.view(ROWS, 3, 16), exponents, {}),
        (Nvfp4(), halves, (torch.rand(ROWS, 6) * 400).to(E4M3), {Role.GLOBAL_SCALE: torch.tensor(0.01)}),
        (
            Nvfp4(group_size=32, global_is_divisor=True),
            halves,
            (torch.rand(ROWS, 3) * 400).to(E4M3),
            {Role.GLOBAL_SCALE: torch.tensor([50.0])},
        ),
    ]
    return [(scheme, {Role.CODES: codes, Role.SCALE: scale, **more}) for scheme, codes, scale, more in made]


WEIGHTS = weights()


def stored(parts: Parts) -> dict[Role, StoredPart]:
    return {role: StoredPart(role, tensor.dtype, tuple(tensor.shape)) for role, tensor in parts.items()}


@settings(max_examples=40, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize(
    ("scheme", "parts"), WEIGHTS, ids=lambda value: value.describe() if isinstance(value, Scheme) else ""
)
def test_a_slice_has_the_values_of_the_whole(
    scheme: Scheme, parts: dict[Role, torch.Tensor], data: st.DataObject
) -> None:
    shape = scheme.check(stored(parts), module="m")
    assert shape == (ROWS, COLUMNS)
    whole = scheme.dequantize(parts, shape=shape)
    parts = {**parts, Role.PRE_SCALE: torch.rand(COLUMNS), Role.INPUT_SCALE: torch.tensor(0.5)}
    kept = parts[Role.PRE_SCALE]
    for _ in range(2):  # a slice, and a slice of it
        start, stop = (sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2))) for size in shape)
        rows, columns = ((a, b) if a < b else (0, size) for (a, b), size in zip((start, stop), shape, strict=True))
        cut = slice_weight(scheme, parts, shape=shape, rows=rows, columns=columns)
        whole, kept = whole[slice(*rows), slice(*columns)], kept[slice(*columns)]
        assert cut.shape == whole.shape
        assert_same(cut.scheme.dequantize(cut.parts, shape=cut.shape), whole)
        out = torch.empty(cut.shape, dtype=torch.bfloat16)
        assert_same(cut.scheme.dequantize(cut.parts, shape=cut.shape, dtype=out.dtype, out=out), whole.to(out.dtype))
        assert torch.equal(cut.parts[Role.PRE_SCALE], kept)
        assert torch.equal(cut.parts[Role.INPUT_SCALE], torch.tensor(0.5))
        # The parts are those of a weight at least as large: 4-bit codes come in whole groups.
        found = cut.scheme.check(
            stored({role: part for role, part in cut.parts.items() if role is not Role.PRE_SCALE}), module="m"
        )
        assert found[0] == cut.shape[0]
        assert found[1] >= cut.shape[1]
        scheme, parts, shape = cut.scheme, cut.parts, cut.shape


@pytest.mark.parametrize(
    ("sizes", "scale_rows"),
    [
        ((64, 64, 64, 64), [(0, 1, 0), (0, 1, 64), (1, 2, 0), (1, 2, 64)]),
        ((192, 192), [(0, 2, 0), (1, 3, 64)]),
        ((384, 64, 64), [(0, 3, 0), (3, 4, 0), (3, 4, 64)]),
        ((128, 128), [(0, 1, 0), (1, 2, 0)]),
    ],
)
@pytest.mark.parametrize("axis", [0, 1])
def test_shards_that_are_no_multiples_of_a_block(
    sizes: tuple[int, ...], scale_rows: list[tuple[int, int, int]], axis: int
) -> None:
    total = sum(sizes)
    shape = (total, 2) if axis == 0 else (2, total)
    numbers = torch.arange(1.0, -(-total // 128) + 1)
    parts = {Role.CODES: torch.ones(shape).to(E4M3), Role.SCALE: numbers[:, None] if axis == 0 else numbers[None]}
    whole, start, found = Fp8Block().dequantize(parts, shape=shape), 0, []
    for size, (first, last, offset) in zip(sizes, scale_rows, strict=True):
        name = ("rows", "columns")[axis]
        cut = slice_weight(Fp8Block(), parts, shape=shape, **{name: (start, start + size)})
        assert cut.parts[Role.SCALE].reshape(-1).tolist() == numbers[first:last].tolist()
        assert isinstance(cut.scheme, Fp8Block)
        assert (cut.scheme.row_offset, cut.scheme.column_offset)[axis] == offset
        found.append(cut.scheme.dequantize(cut.parts, shape=cut.shape))
        start += size
    assert torch.equal(torch.cat(found, dim=axis), whole)


def test_gathered_shards_are_the_whole_though_they_have_more_blocks() -> None:
    parts = {Role.CODES: torch.ones(1, 258).to(E4M3), Role.SCALE: torch.tensor([[1.0, 2.0, 3.0]])}
    cuts = [slice_weight(Fp8Block(), parts, shape=(1, 258), columns=columns) for columns in ((0, 129), (129, 258))]
    assert sum(cut.parts[Role.SCALE].shape[1] for cut in cuts) == 4
    gathered = torch.cat([cut.scheme.dequantize(cut.parts, shape=cut.shape) for cut in cuts], dim=1)
    assert gathered.tolist() == [[1.0] * 128 + [2.0] * 128 + [3.0] * 2]


def test_a_cut_along_inputs_takes_its_groups_of_scales() -> None:
    parts = {
        Role.CODES: torch.ones(8, 64).to(E4M3),
        Role.SCALE: torch.arange(16, dtype=torch.uint8).view(8, 2) + 120,
    }
    cut = slice_weight(Mxfp8(), parts, shape=(8, 64), columns=(32, 64))
    assert torch.equal(cut.parts[Role.SCALE], parts[Role.SCALE][:, 1:])
    assert cut.scheme == Mxfp8()


def test_slices_share_memory_with_the_whole() -> None:
    for scheme, parts in WEIGHTS:
        cut = slice_weight(scheme, parts, shape=(ROWS, COLUMNS), rows=(3, 9), columns=(5, 50))
        memory = {part.untyped_storage().data_ptr() for part in parts.values()}
        assert {part.untyped_storage().data_ptr() for part in cut.parts.values()} <= memory


@pytest.mark.parametrize("rows", [(3, 3), (-1, 2), (0, 20), (5, 4)])
def test_impossible_ranges(rows: tuple[int, int]) -> None:
    scheme, parts = WEIGHTS[0]
    with pytest.raises(ValueError, match=r"rows \[.*\] are not a part of 19"):
        slice_weight(scheme, parts, shape=(ROWS, COLUMNS), rows=rows)


def test_a_scheme_that_cannot_be_cut_says_so() -> None:
    class Other(Fp8Tensor):
        slice_parts = None  # type: ignore[assignment]

    with pytest.raises(ValueError, match="FP8 per tensor cannot be cut"):
        slice_weight(Other(), WEIGHTS[0][1], shape=(ROWS, COLUMNS))
