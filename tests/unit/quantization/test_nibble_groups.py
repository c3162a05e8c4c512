"""Fast ways of expanding half bytes against the definition: all codes under all scale bytes, every layout of memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.code_definitions import E2M1, assert_same, e8m0_value
from tests.support.memory_layouts import LAYOUTS, laid_out

from headrace.quantization import nibble_groups
from headrace.quantization.nibble_groups import NibbleWeight, nearest_nibbles

RESULTS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
EXPONENTS = torch.tensor([e8m0_value(code) for code in range(256)])


def expected(weight: NibbleWeight, dtype: torch.dtype) -> torch.Tensor:
    codes = torch.empty(weight.codes.shape[0], 2 * weight.codes.shape[1], dtype=torch.int64)
    codes[:, 0::2], codes[:, 1::2] = weight.codes % 16, weight.codes // 16
    factors = weight.scale_values[weight.scales.long()].repeat_interleave(weight.group_size, 1)
    values = (torch.tensor(E2M1)[codes] * factors).to(dtype)
    return values[:, weight.column_offset :][:, : weight.num_columns]


def every_byte_under_every_scale(group_size: int, scale_values: torch.Tensor) -> NibbleWeight:
    """256 rows: in each, all bytes of codes, under one scale byte."""
    row = torch.arange(256, dtype=torch.uint8)
    return NibbleWeight(
        codes=row.expand(256, -1),
        scales=row[:, None].expand(-1, 512 // group_size),
        scale_values=scale_values,
        group_size=group_size,
        num_columns=512,
    )


@pytest.mark.parametrize("result", RESULTS, ids=str)
@pytest.mark.parametrize("group_size", [16, 32, 64, 8])
@pytest.mark.parametrize("scale", [1.0, 2.79e-4, 3 * 2.0**-149])
def test_every_code_under_every_scale(group_size: int, result: torch.dtype, scale: float) -> None:
    weight = every_byte_under_every_scale(group_size, EXPONENTS * scale)
    assert_same(weight.dequantize(result, None), expected(weight, result))


def test_larger_weights_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NibbleWeight, "_plain", None)
    weight = every_byte_under_every_scale(16, EXPONENTS)
    assert_same(weight.dequantize(torch.bfloat16, None), expected(weight, torch.bfloat16))


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_sizes_groups_and_memory(data: st.DataObject) -> None:
    rows, groups = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 5))
    size = data.draw(st.sampled_from([2, 8, 16, 32, 48]))
    offset = data.draw(st.integers(0, size - 1))
    columns = data.draw(st.integers(1, groups * size - offset))
    result = data.draw(st.sampled_from(RESULTS))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    codes = torch.randint(0, 256, (rows, groups * size // 2), dtype=torch.uint8)
    scales = torch.randint(0, 256, (rows, groups), dtype=torch.uint8)
    weight = NibbleWeight(
        codes=laid_out(codes, data.draw(st.sampled_from(LAYOUTS))),
        scales=laid_out(scales, data.draw(st.sampled_from(LAYOUTS))),
        scale_values=torch.randn(256),
        group_size=size,
        num_columns=columns,
        column_offset=offset,
    )
    out = None
    if data.draw(st.booleans()):
        out = laid_out(torch.full((rows, columns), 7, dtype=result), data.draw(st.sampled_from(LAYOUTS)))
    step = data.draw(st.integers(1, 4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nibble_groups, "_FEWEST", data.draw(st.sampled_from([1, 1 << 40])))
        patch.setattr(nibble_groups, "rows_per_block", lambda *_: step)
        found = weight.dequantize(result, out)
    assert out is None or found is out
    assert_same(found, expected(weight, result))


def test_a_result_of_another_shape_is_refused() -> None:
    weight = every_byte_under_every_scale(16, EXPONENTS)
    with pytest.raises(ValueError, match="out is"):
        weight.dequantize(torch.float32, torch.empty(256, 511))


def test_inputs_are_not_changed() -> None:
    weight = every_byte_under_every_scale(16, EXPONENTS.clone())
    weight.dequantize(torch.bfloat16, None)
    again = every_byte_under_every_scale(16, EXPONENTS)
    assert torch.equal(weight.codes, again.codes)
    assert torch.equal(weight.scales, again.scales)
    assert_same(weight.scale_values, again.scale_values)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 999), exponent=st.integers(-140, 100), size=st.sampled_from([2, 16, 32]))
def test_packing_values_gives_their_codes_back(seed: int, exponent: int, size: int) -> None:
    torch.manual_seed(seed)
    scale_values = torch.ldexp(torch.rand(256) + 0.5, torch.tensor(exponent))
    scale_values[::7] = 0
    scale_values[1::7] *= -1
    weight = NibbleWeight(
        codes=torch.randint(0, 256, (5, 2 * size), dtype=torch.uint8),
        scales=torch.randint(0, 256, (5, 4), dtype=torch.uint8),
        scale_values=scale_values,
        group_size=size,
        num_columns=4 * size,
    )
    values = weight.dequantize(torch.float32, None)
    codes = nearest_nibbles(values, scale_values[weight.scales.long()], size)
    assert codes.dtype is torch.uint8
    assert codes.shape == weight.codes.shape
    again = NibbleWeight(
        codes=codes, scales=weight.scales, scale_values=scale_values, group_size=size, num_columns=4 * size
    )
    # Equal but for the signs of zeros, which a scale of 0 loses.
    assert_same(again.dequantize(torch.float32, None) + 0.0, values + 0.0)
