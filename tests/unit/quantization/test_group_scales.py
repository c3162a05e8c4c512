"""Values of integer codes under scales and zero points of groups, and how groups are told and cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.code_definitions import assert_same
from tests.support.memory_layouts import LAYOUTS, laid_out

from headrace.quantization.group_scales import GroupScales, cut_groups, group_of_columns, group_scales

CPU = torch.device("cpu")
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def written(scales: GroupScales, codes: torch.Tensor, starts: list[tuple[int, int]], out: torch.Tensor) -> None:
    """Write ``codes`` into ``out`` in blocks that begin at ``starts``, given row by row of blocks, all of the same width."""
    width = codes.shape[1] // len({column for _, column in starts})
    rows = sorted({row for row, _ in starts})
    stops = dict(zip(rows, [*rows[1:], codes.shape[0]], strict=True))
    scales.write(
        [
            (row, column, codes[row : stops[row], column : column + width].float() - scales.base)
            for row, column in starts
        ],
        out,
    )


def expected_values(
    codes: torch.Tensor, zero: int | torch.Tensor, scale: torch.Tensor, index: torch.Tensor
) -> torch.Tensor:
    zeros = zero if isinstance(zero, int) else zero[:, index].float()
    return (codes.float() - zeros) * scale[:, index].float()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scale_dtype", FLOATS)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_every_code_under_many_scales_is_computed_in_float32_and_rounded_once(
    bits: int, scale_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    codes = torch.arange(2**bits, dtype=torch.uint8).repeat(64, 4)
    scale = (torch.randn(64, 4).exp2() * torch.randn(64, 4)).to(scale_dtype)
    index = torch.arange(4).repeat_interleave(2**bits)
    zeros: list[int | torch.Tensor] = [2 ** (bits - 1), torch.randint(0, 2**bits, (64, 4)), torch.rand(64, 4) * 9]
    for zero in zeros:
        scales = group_scales(scale=scale, zero=zero, bits=bits, num_columns=codes.shape[1], group_size=2**bits)
        out = torch.empty(codes.shape, dtype=dtype)
        written(scales, codes, [(0, 0)], out)
        assert_same(out, expected_values(codes, zero, scale, index).to(dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_any_memory_is_written_and_read(layout: str, dtype: torch.dtype) -> None:
    codes, scale = torch.randint(0, 16, (6, 12), dtype=torch.uint8), torch.rand(6, 3)
    zero = torch.randint(0, 16, (6, 3), dtype=torch.uint8)
    scales = group_scales(
        scale=laid_out(scale, layout), zero=laid_out(zero, layout), bits=4, num_columns=12, group_size=4
    )
    out = laid_out(torch.zeros(6, 12, dtype=dtype), layout)
    written(scales, codes, [(0, 0)], out)
    index = torch.arange(12) // 4
    assert_same(out, expected_values(codes, zero, scale, index).to(dtype))


def test_blocks_may_reach_past_the_last_row_and_column() -> None:
    codes, scale = torch.randint(0, 16, (6, 16), dtype=torch.uint8), torch.rand(5, 3)
    scales = group_scales(scale=scale, zero=8, bits=4, num_columns=12, group_size=4)
    out = torch.empty(5, 12)
    written(scales, codes, [(0, 0), (0, 8), (4, 0), (4, 8)], out)
    assert_same(out, expected_values(codes[:5, :12], 8, scale, torch.arange(12) // 4))


@pytest.mark.parametrize("num_columns", [12, 11, 9])
def test_blocks_within_a_group_have_its_scale(num_columns: int) -> None:
    padded, scale = torch.randint(0, 256, (3, 12), dtype=torch.uint8), torch.rand(3, 2)
    codes, zero = padded[:, :num_columns], torch.randint(0, 256, (3, 2), dtype=torch.uint8)
    scales = group_scales(scale=scale, zero=zero, bits=8, num_columns=num_columns, group_size=8)
    out = torch.empty(3, num_columns)
    written(scales, padded, [(0, start) for start in range(0, 12, 4)], out)
    assert_same(out, expected_values(codes, zero, scale, torch.arange(num_columns) // 8))


@pytest.mark.parametrize("columns", [4, 5, 8, 12])
def test_fewer_columns_than_are_stored_may_be_asked_for(columns: int) -> None:
    codes, scale = torch.randint(0, 16, (3, 16), dtype=torch.uint8), torch.rand(3, 4)
    zero = torch.randint(0, 16, (3, 4))
    expected = expected_values(codes, zero, scale, torch.arange(16) // 4)[:, :columns]
    for starts in ([0], [0, 8]):
        scales = group_scales(scale=scale, zero=zero, bits=4, num_columns=columns, group_size=4)
        out = torch.empty(3, columns)
        written(scales, codes, [(0, start) for start in starts], out)
        assert_same(out, expected)


def test_zero_points_below_0_are_subtracted() -> None:
    scale, zero = torch.ones(2, 2), torch.tensor([[-1, 3], [-2, 20]], dtype=torch.int8)
    out = torch.empty(2, 4)
    scales = group_scales(scale=scale, zero=zero, bits=4, num_columns=4, group_size=2)
    written(scales, torch.tensor([[0, 15, 0, 15]] * 2), [(0, 0)], out)
    assert out.tolist() == [[1, 16, -3, 12], [2, 17, -20, -5]]


def test_values_are_written_into_a_parameter() -> None:
    out = torch.nn.Parameter(torch.zeros(2, 4))
    scale = torch.nn.Parameter(torch.ones(2, 1))
    scales = group_scales(scale=scale, zero=8, bits=4, num_columns=4, group_size=None)
    written(scales, torch.full((2, 4), 9), [(0, 0)], out)
    assert out.eq(1).all()


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16])
def test_every_code_comes_back_under_every_scale(scale_dtype: torch.dtype) -> None:
    scale = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(scale_dtype)
    scale = scale[(scale != 0) & (scale.abs() < 1e37)].unsqueeze(1)
    codes = torch.arange(16, dtype=torch.uint8).expand(len(scale), 16)
    scales = group_scales(scale=scale, zero=5, bits=4, num_columns=16, group_size=None)
    values = torch.empty(codes.shape)
    written(scales, codes, [(0, 0)], values)
    assert scales.nearest(values).equal(codes.to(torch.int16))


def test_one_zero_point_for_all_is_seen() -> None:
    def scales_of(zero: torch.Tensor) -> GroupScales:
        return group_scales(scale=torch.ones(2, 1), zero=zero, bits=4, num_columns=4, group_size=None)

    for zero in (torch.full((2, 1), 8), torch.full((2, 1), 8.0), torch.full((2, 1), 8, dtype=torch.uint8)):
        assert (scales_of(zero).zero, scales_of(zero).base) == (8, 8)
    for zero in (torch.full((2, 1), 7.5), torch.tensor([[7], [8]])):
        assert scales_of(zero).zero is zero
        assert scales_of(zero).base == 0


def test_an_index_that_says_nothing_is_left_out() -> None:
    plain = (torch.arange(12) // 4).int()

    def index_of(index: torch.Tensor | None, num_columns: int = 12) -> torch.Tensor | None:
        return group_scales(
            scale=torch.ones(2, 3), zero=8, bits=4, num_columns=num_columns, group_size=4, index=index
        ).index

    for index in (None, plain, torch.zeros(12, dtype=torch.int32), torch.full((12,), -1)):
        assert index_of(index) is None
    ragged = index_of(None, 10)
    assert ragged is not None
    assert ragged.tolist() == plain[:10].tolist()
    order = plain.flip(0)
    found = index_of(order)
    assert found is not None
    assert found.equal(order.long())


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (None, [0, 0, 1, 1, 2, 2]),
        ([0, 0, 0, 0, 0, 0], [0, 0, 1, 1, 2, 2]),
        ([-1, -1, -1, -1, -1, -1], [0, 0, 1, 1, 2, 2]),
        ([2, 0, 1, 1, 0, 2], [2, 0, 1, 1, 0, 2]),
        ([0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 1]),
    ],
)
def test_group_of_columns(index: list[int] | None, expected: list[int]) -> None:
    stored = None if index is None else torch.tensor(index, dtype=torch.int32)
    assert group_of_columns(stored, num_columns=6, group_size=2, device=CPU).tolist() == expected


@given(data=st.data(), groups=st.integers(1, 4), group_size=st.integers(1, 6), has_index=st.booleans())
def test_a_cut_has_the_groups_of_its_columns(
    data: st.DataObject, groups: int, group_size: int, has_index: bool
) -> None:
    columns = groups * group_size
    index = torch.tensor(data.draw(st.permutations([c // group_size for c in range(columns)]))) if has_index else None
    start = data.draw(st.integers(0, columns - 1))
    stop = data.draw(st.integers(start + 1, columns))
    expected = torch.arange(columns) // group_size if index is None else index
    chosen, cut = cut_groups(
        (start, stop), num_columns=columns, num_groups=groups, group_size=group_size, index=index, device=CPU
    )
    numbers = torch.arange(groups)[chosen]
    if index is None:
        assert set(numbers[[0, -1]].tolist()) <= set(expected[start:stop].tolist())
    else:
        assert len(numbers) == groups, "any feature may be of any group"
        ours = torch.empty_like(index, device="meta")
        planned, without_values = cut_groups(
            (start, stop), num_columns=columns, num_groups=groups, group_size=group_size, index=ours, device=ours.device
        )
        assert planned == chosen and (without_values is None) == (cut is None), "no value is looked at"
    resolved = group_of_columns(
        cut, num_columns=stop - start, group_size=group_size, device=CPU, is_literal=cut is not None
    )
    assert len(numbers) == 1 or numbers[resolved].equal(expected[start:stop])


@pytest.mark.parametrize("first", [0, 1, 3])
def test_groups_that_follow_one_another_from_any_one_on_need_no_index(first: int) -> None:
    """Of a slice; to look up the group of every feature costs several times as much."""
    scale, index = torch.rand(3, 6), torch.arange(first * 4, first * 4 + 12) // 4
    scales = group_scales(scale=scale, zero=8, bits=4, num_columns=12, group_size=4, index=index, is_literal=True)
    assert scales.index is None and scales.scale.equal(scale[:, first : first + 3])


def test_an_index_of_a_slice_that_is_0_throughout_means_group_0() -> None:
    index = torch.zeros(8, dtype=torch.int32)
    assert group_of_columns(index, num_columns=8, group_size=4, device=CPU, is_literal=True).tolist() == [0] * 8
    assert group_of_columns(index, num_columns=8, group_size=4, device=CPU).tolist() == [0] * 4 + [1] * 4


def test_under_a_scale_of_0_every_value_has_the_code_of_0() -> None:
    scale = torch.tensor([[0.0, 2.0]])
    scales = group_scales(scale=scale, zero=torch.tensor([[5, 3]]), bits=4, num_columns=4, group_size=2)
    assert scales.nearest(torch.tensor([[0.0, 0.0, -6.0, 4.9]])).tolist() == [[5, 5, 0, 5]]


def test_values_beyond_the_codes_take_the_last_one() -> None:
    scales = group_scales(scale=torch.ones(1, 1), zero=8, bits=4, num_columns=4, group_size=None)
    assert scales.nearest(torch.tensor([[-100.0, 100.0, 0.5, 1.5]])).tolist() == [[0, 15, 8, 10]]
