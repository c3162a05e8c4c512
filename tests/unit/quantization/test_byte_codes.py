"""Fast ways of expanding bytes against the definition: all codes, extreme scales, every layout of memory."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.code_definitions import assert_same, byte_table
from tests.support.memory_layouts import LAYOUTS, laid_out

from headrace.quantization import byte_codes
from headrace.quantization.byte_codes import ByteWeight, nearest_byte_codes
from headrace.quantization.codes import FLOAT8_DTYPES
from headrace.quantization.scale_grid import ScaleGrid

CODES = [*FLOAT8_DTYPES, torch.int8]
RESULTS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
LARGEST = torch.finfo(torch.float32).max
COMMON = [
    1.0,
    -1.0,
    0.0,
    -0.0,
    0.0123,
    1 / 448,
    3.0e-5,
    float.fromhex("0x1.fffffep-8"),
    float.fromhex("0x1.010101p-7"),
    1e10,
    -1e-10,
    2.0**-126,
    2.0**-127,
    2.0**-149,
    3 * 2.0**-149,
    1e-40,
    math.nan,
    math.inf,
    -math.inf,
    2.0**118,
    2.0**119,
]
"""Scales for which FP8 need not be converted the slow way."""
HUGE = [2.0**120, -(2.0**127), LARGEST]


def scales() -> list[float]:
    torch.manual_seed(1)
    mantissas, exponents = 1 + torch.rand(43), torch.randint(-130, 100, (43,))
    return [*COMMON, *torch.ldexp(mantissas, exponents).tolist()]


def all_codes(dtype: torch.dtype, *, with_nan: bool = True) -> torch.Tensor:
    codes = torch.arange(256, dtype=torch.uint8)
    if not with_nan:
        codes = codes[~byte_table(dtype).isnan()]
    return codes.view(dtype)


def expected(codes: torch.Tensor, factors: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    values = byte_table(codes.dtype)[codes.view(torch.uint8).long()]
    return (values * factors).to(dtype)


@pytest.mark.parametrize("result", RESULTS, ids=str)
@pytest.mark.parametrize("dtype", CODES, ids=str)
@pytest.mark.parametrize("with_nan", [False, True])
def test_all_codes_under_many_scales_by_row(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, result: torch.dtype, with_nan: bool
) -> None:
    monkeypatch.setattr(byte_codes, "_FEWEST", 1)
    is_widened = dtype in byte_codes._INTO_FLOAT16 and result is not torch.float64
    if is_widened and not (with_nan and "e4m3" in str(dtype)):
        monkeypatch.setattr(ByteWeight, "_convert", None)  # The slow way is not to be taken.
    row = all_codes(dtype, with_nan=with_nan)
    factors = torch.tensor(scales())[:, None]
    assert bool((factors.view(torch.int32) & 0xFFFF).any())
    codes = row.expand(len(factors), -1)
    weight = ByteWeight(codes=codes, scales=ScaleGrid(values=factors, block=(1, row.numel())))
    assert_same(weight.dequantize(result, None), expected(codes, factors, result))


@pytest.mark.parametrize("dtype", FLOAT8_DTYPES, ids=str)
@pytest.mark.parametrize("width", [32, 48])
@pytest.mark.parametrize("with_other", [False, True])
def test_scales_that_are_bfloat16_numbers_multiply_in_place(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, width: int, with_other: bool
) -> None:
    """``with_other``: codes for infinities and NaN among the others."""
    monkeypatch.setattr(byte_codes, "_FEWEST", 1)
    for slower in ("_widen", "_look_up", "_convert"):
        monkeypatch.setattr(ByteWeight, slower, None)
    numbers = torch.tensor(scales()).to(torch.bfloat16).to(torch.float32)
    numbers = numbers[~(numbers.abs() >= 128) | numbers.isinf()][:, None]
    row = all_codes(dtype) if with_other else all_codes(dtype)[byte_table(dtype).isfinite()]
    codes = row.expand(len(numbers), -1)
    grid = ScaleGrid(values=numbers.expand(-1, -(-row.numel() // width)), block=(1, width))
    found = ByteWeight(codes=codes, scales=grid).dequantize(torch.bfloat16, None)
    assert_same(found, expected(codes, numbers, torch.bfloat16))


@pytest.mark.parametrize("dtype", FLOAT8_DTYPES, ids=str)
@pytest.mark.parametrize("single", [False, True])
def test_scales_too_large_to_multiply_in_place(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, single: bool
) -> None:
    monkeypatch.setattr(byte_codes, "_FEWEST", 1)
    for number in [*HUGE[:2], 2.0**9]:
        codes, factor = all_codes(dtype).expand(3, -1), torch.full((1 if single else 3, 1), number)
        grid = ScaleGrid(values=factor, block=(3 if single else 1, 256))
        found = ByteWeight(codes=codes, scales=grid).dequantize(torch.bfloat16, None)
        assert_same(found, expected(codes, factor, torch.bfloat16))


@pytest.mark.parametrize("dtype", FLOAT8_DTYPES, ids=str)
def test_small_codes_are_kept_where_torch_takes_subnormal_numbers_for_zero(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(byte_codes, "_FEWEST", 1)
    numbers = torch.tensor([[0.5], [2.0], [0.0123]])
    codes, wanted = all_codes(dtype).expand(3, -1), expected(all_codes(dtype).expand(3, -1), numbers, torch.bfloat16)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no such mode")
    try:
        by_row = ByteWeight(codes=codes, scales=ScaleGrid(values=numbers, block=(1, 256)))
        whole = ByteWeight(codes=codes[:1], scales=ScaleGrid(values=numbers[:1], block=(1, 256)))
        found = by_row.dequantize(torch.bfloat16, None), whole.dequantize(torch.bfloat16, None)
    finally:
        torch.set_flush_denormal(False)
    assert_same(found[0], wanted)
    assert_same(found[1], wanted[:1])


@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_huge_scales_take_the_slow_way(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(byte_codes, "_FEWEST", 1)
    # Without codes for NaN, which take the slow way by themselves.
    row = all_codes(dtype, with_nan=False)
    codes = row.expand(len(HUGE), -1)
    factors = torch.tensor(HUGE)[:, None]
    weight = ByteWeight(codes=codes, scales=ScaleGrid(values=factors, block=(1, row.numel())))
    assert_same(weight.dequantize(torch.float32, None), expected(codes, factors, torch.float32))


@pytest.mark.parametrize("result", RESULTS, ids=str)
@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_all_pairs_of_codes_under_one_scale(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, result: torch.dtype
) -> None:
    if result is not torch.float64:
        monkeypatch.setattr(ByteWeight, "_convert", None)
    codes = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.uint8).view(dtype).view(256, 512)
    values = expected(codes, torch.tensor(1.0), torch.float32)
    for factor in [0.0123, 3 * 2.0**-149, -0.0, math.nan, math.inf, LARGEST]:
        weight = ByteWeight(codes=codes, scales=ScaleGrid(values=torch.tensor([[factor]]), block=(256, 512)))
        assert_same(weight.dequantize(result, None), (values * factor).to(result))


@pytest.mark.parametrize("fewest", [1, 1 << 40])
def test_zero_points_are_subtracted_before_the_scale(monkeypatch: pytest.MonkeyPatch, fewest: int) -> None:
    monkeypatch.setattr(byte_codes, "_FEWEST", fewest)
    codes = all_codes(torch.int8).expand(4, -1)
    factors, zeros = torch.tensor([[0.1], [0.3], [-2.0], [1e-3]]), torch.tensor([[-128.0], [127.0], [5.0], [0.0]])
    by_row = ByteWeight(
        codes=codes, scales=ScaleGrid(values=factors, block=(1, 256)), zeros=ScaleGrid(values=zeros, block=(1, 256))
    )
    numbers = byte_table(torch.int8)
    assert_same(by_row.dequantize(torch.bfloat16, None), ((numbers - zeros) * factors).to(torch.bfloat16))
    for row in range(4):
        one = ByteWeight(
            codes=codes[:1],
            scales=ScaleGrid(values=factors[row : row + 1], block=(1, 256)),
            zeros=ScaleGrid(values=zeros[row : row + 1], block=(1, 256)),
        )
        assert_same(one.dequantize(torch.float32, None)[0], (numbers - zeros[row]) * factors[row])


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_sizes_blocks_and_memory(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 23)), data.draw(st.integers(1, 41))
    dtype, result = data.draw(st.sampled_from(CODES)), data.draw(st.sampled_from(RESULTS))
    block = data.draw(
        st.sampled_from([(rows + 7, columns + 50), (1, columns), (4, 8), (5, 7), (1, 16), (30, 3), (3, 32)])
    )
    offset = (data.draw(st.integers(0, block[0] - 1)), data.draw(st.integers(0, block[1] - 1)))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8).view(dtype)
    grid = [-(-(offset[axis] + size) // block[axis]) for axis, size in enumerate((rows, columns))]
    numbers = torch.randn(grid).to(data.draw(st.sampled_from([torch.float32, torch.bfloat16]))).to(torch.float32)
    factors = numbers.repeat_interleave(block[0], 0)[offset[0] :][:rows]
    factors = factors.repeat_interleave(block[1], 1)[:, offset[1] :][:, :columns]
    weight = ByteWeight(
        codes=laid_out(codes, data.draw(st.sampled_from(LAYOUTS))),
        scales=ScaleGrid(
            values=laid_out(numbers, data.draw(st.sampled_from(LAYOUTS))),
            block=block,
            row_offset=offset[0],
            column_offset=offset[1],
        ),
    )
    out = None
    if data.draw(st.booleans()):
        out = laid_out(torch.full((rows, columns), 7, dtype=result), data.draw(st.sampled_from(LAYOUTS)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(byte_codes, "_FEWEST", data.draw(st.sampled_from([1, 1 << 40])))
        patch.setattr(byte_codes, "rows_per_block", lambda *_, multiple=1: data_rows * multiple)
        data_rows = data.draw(st.integers(1, 9))
        found = weight.dequantize(result, out)
    assert out is None or found is out
    assert_same(found, expected(codes, factors, result))


def test_a_result_elsewhere_leaves_its_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_codes, "_FEWEST", 1)
    whole = torch.full((5, 3, 7), 9.0, dtype=torch.bfloat16)
    codes = all_codes(torch.float8_e4m3fn)[:35].view(5, 7)
    weight = ByteWeight(codes=codes, scales=ScaleGrid(values=torch.tensor([[2.0]]), block=(5, 7)))
    weight.dequantize(torch.bfloat16, whole[:, 1])
    assert_same(whole[:, 1], expected(codes, torch.tensor(2.0), torch.bfloat16))
    assert bool((whole[:, [0, 2]] == 9).all())


@pytest.mark.parametrize("wrong", [torch.empty(4, 3), torch.empty(3, 4, dtype=torch.bfloat16)])
def test_a_result_of_another_shape_or_dtype_is_refused(wrong: torch.Tensor) -> None:
    codes = torch.zeros(3, 4, dtype=torch.int8)
    weight = ByteWeight(codes=codes, scales=ScaleGrid(values=torch.ones(1, 1), block=(3, 4)))
    with pytest.raises(ValueError, match="out is"):
        weight.dequantize(torch.float32, wrong)


def test_inputs_are_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_codes, "_FEWEST", 1)
    codes, numbers = all_codes(torch.float8_e4m3fn).view(16, 16).clone(), torch.rand(16, 1)
    kept = codes.view(torch.uint8).clone(), numbers.clone()
    weight = ByteWeight(codes=codes, scales=ScaleGrid(values=numbers, block=(1, 16)))
    values = weight.dequantize(torch.float32, None)
    nearest_byte_codes(values, codes.dtype, weight.scales)
    assert torch.equal(codes.view(torch.uint8), kept[0])
    assert torch.equal(numbers, kept[1])


@settings(max_examples=150, deadline=None)
@given(
    dtype=st.sampled_from(CODES),
    seed=st.integers(0, 999),
    exponent=st.integers(-140, 100),
    zero=st.integers(-128, 127),
)
def test_packing_values_gives_their_codes_back(dtype: torch.dtype, seed: int, exponent: int, zero: int) -> None:
    torch.manual_seed(seed)
    codes = torch.randint(0, 256, (9, 20), dtype=torch.uint8).view(dtype)
    numbers = torch.ldexp(torch.rand(5, 3) + 0.5, torch.tensor(exponent)) * torch.tensor([1.0, -1.0, 0.0])
    grid = ScaleGrid(values=numbers, block=(2, 7))
    zeros = ScaleGrid(values=torch.full((5, 3), float(zero)), block=(2, 7)) if dtype is torch.int8 else None
    values = ByteWeight(codes=codes, scales=grid, zeros=zeros).dequantize(torch.float32, None)
    again = nearest_byte_codes(values, dtype, grid, zeros)
    # Equal but for the signs of zeros, which a scale of 0 loses.
    assert_same(ByteWeight(codes=again, scales=grid, zeros=zeros).dequantize(torch.float32, None) + 0.0, values + 0.0)


def test_values_of_another_type_and_strides_are_packed_too() -> None:
    grid = ScaleGrid(values=torch.tensor([[0.5], [2.0]]), block=(1, 3))
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], dtype=torch.bfloat16).t()
    codes = nearest_byte_codes(values, torch.float8_e4m3fn, grid)
    assert codes.float().tolist() == [[2.0, 6.0, 10.0], [1.0, 2.0, 3.0]]
