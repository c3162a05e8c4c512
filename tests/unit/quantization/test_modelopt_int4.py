"""ModelOpt's INT4-AWQ and W4A8-AWQ: two rows in a byte, and rounding to E4M3."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.code_definitions import assert_same, float8_value
from tests.support.memory_layouts import LAYOUTS, laid_out
from tests.support.packed_integers import assert_slices, assert_stands_for, integer_weight, modelopt_parts

from headrace.errors import UnsupportedQuantization
from headrace.quantization import code_blocks
from headrace.quantization.int4 import ModeloptInt4
from headrace.quantization.scheme import Role, StoredPart

E4M3 = torch.float8_e4m3fn
FINITE = [float8_value(code, E4M3) for code in range(0x7F)]


def to_e4m3(value: float) -> float:
    """Return the E4M3 value nearest to ``value``; of two, the one with an even code."""
    nearest = min(range(0x7F), key=lambda code: (abs(Fraction(FINITE[code]) - Fraction(abs(value))), code % 2))
    return math.copysign(FINITE[nearest], value)


def w4a8_weight(unit: float, seed: int = 0) -> tuple[dict[Role, torch.Tensor], torch.Tensor]:
    """Return parts of a W4A8 weight of 6 × 32 in groups of 16, and what it stands for, value by value."""
    weight = integer_weight(6, 32, group_size=16, symmetric=True, scale_dtype=torch.float32, seed=seed)
    divisor = torch.tensor(unit)
    steps = (weight.values() / divisor).tolist()
    rounded = torch.tensor([[to_e4m3(step) for step in row] for row in steps])
    return {**modelopt_parts(weight), Role.GLOBAL_SCALE: divisor}, rounded * divisor


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group_size", [8, 32, 96])
def test_values(group_size: int, scale_dtype: torch.dtype) -> None:
    weight = integer_weight(10, 96, group_size=group_size, symmetric=True, scale_dtype=scale_dtype)
    assert_stands_for(ModeloptInt4(group_size=group_size), modelopt_parts(weight), weight.values())


def test_a_byte_holds_two_rows_in_two_s_complement() -> None:
    parts = {Role.CODES: torch.tensor([[0x8F, 0x71]], dtype=torch.uint8), Role.SCALE: torch.ones(2, 1)}
    values = ModeloptInt4(group_size=2).dequantize(parts, shape=(2, 2))
    assert values.tolist() == [[-1.0, 1.0], [-8.0, 7.0]]


@pytest.mark.parametrize("unit", [1.0, 0.01, 3.0])
@pytest.mark.parametrize("seed", range(3))
def test_w4a8_values_are_rounded_to_e4m3(unit: float, seed: int) -> None:
    parts, values = w4a8_weight(unit, seed)
    scheme = ModeloptInt4(group_size=16, fp8_scale=True)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert_same(scheme.dequantize(parts, shape=(6, 32), dtype=dtype), values.to(dtype))
        for layout in LAYOUTS:
            out = laid_out(torch.zeros(6, 32, dtype=dtype), layout)
            assert scheme.dequantize(parts, shape=(6, 32), dtype=dtype, out=out) is out
            assert_same(out, values.to(dtype))
    packed = scheme.pack(values, parts)
    assert scheme.dequantize({**parts, Role.CODES: packed}, shape=(6, 32)).equal(values)


@pytest.mark.parametrize("fp8_scale", [False, True])
def test_values_are_written_into_a_parameter(fp8_scale: bool) -> None:
    parts, _ = w4a8_weight(0.01)
    scheme, out = ModeloptInt4(group_size=16, fp8_scale=fp8_scale), torch.nn.Parameter(torch.zeros(6, 32))
    assert scheme.dequantize(parts, shape=(6, 32), out=out) is out
    assert_same(out.detach(), scheme.dequantize(parts, shape=(6, 32)))


def test_w4a8_values_saturate_and_a_unit_of_0_is_harmless() -> None:
    parts = {
        Role.CODES: torch.tensor([[0x87]], dtype=torch.uint8),
        Role.SCALE: torch.full((2, 1), 100.0),
        Role.GLOBAL_SCALE: torch.tensor([0.5]),
    }
    scheme = ModeloptInt4(group_size=1, fp8_scale=True)
    assert scheme.dequantize(parts, shape=(2, 1)).tolist() == [[224.0], [-224.0]]
    parts = {**parts, Role.SCALE: torch.zeros(2, 1), Role.GLOBAL_SCALE: torch.zeros(())}
    assert scheme.dequantize(parts, shape=(2, 1)).tolist() == [[0.0], [0.0]]


@pytest.mark.parametrize("fp8_scale", [False, True])
@pytest.mark.parametrize("block_values", [1, 70, 200])
def test_values_do_not_depend_on_blocks(block_values: int, fp8_scale: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = integer_weight(22, 32, group_size=16, symmetric=True, scale_dtype=torch.float32)
    parts = {**modelopt_parts(weight), Role.GLOBAL_SCALE: torch.tensor(0.01)}
    scheme = ModeloptInt4(group_size=16, fp8_scale=fp8_scale)
    expected = scheme.dequantize(parts, shape=(22, 32))
    monkeypatch.setattr(code_blocks, "_BLOCK_VALUES", block_values)
    assert_same(scheme.dequantize(parts, shape=(22, 32)), expected)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), fp8_scale=st.booleans(), group_size=st.sampled_from([5, 16, 40]))
def test_slices(data: st.DataObject, fp8_scale: bool, group_size: int) -> None:
    weight = integer_weight(18, 80, group_size=group_size, symmetric=True, scale_dtype=torch.float32)
    parts, scheme = modelopt_parts(weight), ModeloptInt4(group_size=group_size, fp8_scale=fp8_scale)
    if fp8_scale:
        parts[Role.GLOBAL_SCALE] = torch.tensor(0.01)
    assert_slices(scheme, parts, scheme.dequantize(parts, shape=(18, 80)), data)


def headers(**changes: Any) -> dict[Role, StoredPart]:
    """Return right headers of a W4A8 weight of 16 × 64 in groups of 32, with changes by role."""
    right: dict[str, tuple[str, torch.dtype, tuple[int, ...]]] = {
        "codes": ("weight", torch.uint8, (8, 64)),
        "scale": ("weight_scale", torch.float32, (16, 2)),
        "global_scale": ("weight_scale_2", torch.float32, ()),
        "pre_scale": ("pre_quant_scale", torch.bfloat16, (64,)),
        "input_scale": ("input_scale", torch.float32, ()),
    }
    found = {name: StoredPart(*part) for name, part in right.items()}
    for name, change in changes.items():
        found[name] = StoredPart(right[name][0] if name in right else name, *change or (torch.int8, ()))
    return {Role(name): part for name, part in found.items() if name not in changes or changes[name] is not None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codes": None}, "m.weight is missing."),
        ({"scale": None}, "m.weight_scale is missing."),
        ({"global_scale": None}, "m.weight_scale_2 is missing. W4A8 AWQ group 32 needs it"),
        ({"codes": (torch.int8, (8, 64))}, "m.weight is int8 [8, 64]. In W4A8 AWQ group 32 it must be uint8 [N / 2, K], K a multiple of 32."),
        ({"codes": (torch.uint8, (8, 65))}, "m.weight is uint8 [8, 65]."),
        ({"codes": (torch.uint8, (64,))}, "m.weight is uint8 [64]."),
        ({"codes": (torch.uint8, (16, 64))}, "m.weight_scale is float32 [16, 2]. In W4A8 AWQ group 32 it must be floating [32, 2]."),
        ({"scale": (torch.float32, (16, 4))}, "m.weight_scale is float32 [16, 4]."),
        ({"scale": (torch.uint8, (16, 2))}, "m.weight_scale is uint8 [16, 2]."),
        ({"global_scale": (torch.float32, (16,))}, "m.weight_scale_2 is float32 [16]."),
        ({"pre_scale": (torch.bfloat16, (16,))}, "m.pre_quant_scale is bfloat16 [16]. In W4A8 AWQ group 32 it must be floating [64], one per input feature."),
        ({"input_scale": (torch.float32, (64,))}, "m.input_scale is float32 [64]."),
        ({"zero_point": (torch.int8, (16, 2))}, "m.zero_point is not a part of W4A8 AWQ group 32. That format has codes, scale and global_scale only"),
    ],
)  # fmt: skip
def test_wrong_headers_are_named(changes: dict[str, Any], message: str) -> None:
    scheme = ModeloptInt4(group_size=32, fp8_scale=True)
    assert scheme.check(headers(), module="m") == (16, 64)
    with pytest.raises(UnsupportedQuantization) as caught:
        scheme.check(headers(**changes), module="m")
    assert message in str(caught.value)


def test_a_second_scale_belongs_to_w4a8_only() -> None:
    with pytest.raises(UnsupportedQuantization, match=r"m.weight_scale_2 is not a part of INT4 AWQ group 32\."):
        ModeloptInt4(group_size=32).check(headers(), module="m")
    assert ModeloptInt4(group_size=32).check(headers(global_scale=None), module="m") == (16, 64)


def test_empty_groups_are_refused() -> None:
    with pytest.raises(UnsupportedQuantization, match="groups of -1"):
        ModeloptInt4(group_size=-1)
