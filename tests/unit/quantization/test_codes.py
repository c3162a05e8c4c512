"""All codes of all formats against their definitions, and back."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.code_definitions import E2M1, assert_same, byte_table, byte_value, e8m0_value

from headrace.quantization.codes import (
    E2M1_MAGNITUDES,
    FLOAT8_DTYPES,
    byte_values,
    e2m1_values,
    e8m0_values,
    nearest_bytes,
    nearest_e2m1,
)

DTYPES = [*FLOAT8_DTYPES, torch.int8]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_bytes_stand_for_what_the_format_defines(dtype: torch.dtype) -> None:
    assert_same(byte_values(dtype), byte_table(dtype))


def test_known_codes() -> None:
    fn, fnuz = byte_values(torch.float8_e4m3fn), byte_values(torch.float8_e4m3fnuz)
    assert_same(fn[[0x7F, 0xFF, 0x80, 0x7E]], torch.tensor([math.nan, math.nan, -0.0, 448.0]))
    assert_same(fnuz[[0x7F, 0x80, 0xFF]], torch.tensor([240.0, math.nan, -240.0]))
    assert byte_values(torch.float8_e5m2)[0x7B] == 57344
    assert byte_values(torch.float8_e5m2)[0x7C] == math.inf
    assert byte_values(torch.int8)[[0, 127, 128, 255]].tolist() == [0, 127, -128, -1]


def test_a_code_means_twice_as_much_in_e4m3_as_with_the_other_bias() -> None:
    codes = [code for code in range(256) if code not in (0x7F, 0x80, 0xFF)]
    assert_same(byte_values(torch.float8_e4m3fn)[codes], 2 * byte_values(torch.float8_e4m3fnuz)[codes])


def test_all_exponents() -> None:
    assert_same(e8m0_values(), torch.tensor([e8m0_value(code) for code in range(256)]))
    found = e8m0_values()
    assert found[[0, 120, 127, 128]].tolist() == [2.0**-127, 7.81250000e-03, 1.0, 2.0]
    assert found[254] == 2.0**127
    assert found[255].isnan()


def test_exponents_are_not_numbers() -> None:
    assert torch.tensor(120.0) / e8m0_values()[120] == 15360


def test_all_half_byte_codes() -> None:
    assert_same(e2m1_values(), torch.tensor(E2M1))
    assert tuple(E2M1[:8]) == E2M1_MAGNITUDES


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_of_codes_give_the_codes_back(dtype: torch.dtype) -> None:
    values = byte_table(dtype)
    assert_same(byte_values(dtype)[nearest_bytes(values, dtype).view(torch.uint8).long()], values)
    numbers = ~values.isnan()
    codes = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(nearest_bytes(values, dtype).view(torch.uint8)[numbers], codes[numbers])


def test_half_byte_values_give_the_codes_back() -> None:
    assert nearest_e2m1(torch.tensor(E2M1)).tolist() == list(range(16))


@pytest.mark.parametrize(
    ("dtype", "value", "expected"),
    [
        (torch.float8_e4m3fn, 1e9, 448.0),
        (torch.float8_e4m3fn, -math.inf, -448.0),
        (torch.float8_e4m3fn, math.nan, math.nan),
        (torch.float8_e4m3fnuz, 1e9, 240.0),
        (torch.float8_e4m3fnuz, -0.0, 0.0),
        (torch.float8_e5m2, 1e9, 57344.0),
        (torch.float8_e5m2, math.inf, math.inf),
        (torch.float8_e5m2fnuz, -1e9, -57344.0),
        (torch.int8, 1e9, 127.0),
        (torch.int8, -128.4, -128.0),
        (torch.int8, math.nan, 0.0),
    ],
)
def test_what_no_code_stands_for(dtype: torch.dtype, value: float, expected: float) -> None:
    code = int(nearest_bytes(torch.tensor([value]), dtype).view(torch.uint8))
    assert_same(byte_values(dtype)[code], torch.tensor(expected))


@pytest.mark.parametrize("value", [6.5, 1e9, math.inf])
def test_beyond_the_largest_half_byte_code(value: float) -> None:
    assert nearest_e2m1(torch.tensor([value, -value, math.nan])).tolist() == [7, 15, 0]


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def nearest(value: float, table: dict[int, float]) -> set[int]:
    """Return the codes nearest to ``value``; of two equally near numbers the one whose code is even."""
    exact = {code: abs(Fraction(number) - Fraction(value)) for code, number in table.items() if math.isfinite(number)}
    least = min(exact.values())
    best = {code for code, distance in exact.items() if distance == least}
    if len({table[code] for code in best}) > 1:
        best = {code for code in best if code % 2 == 0}
    return best


@given(value=st.one_of(finite, st.floats(-500, 500, width=32), st.floats(-0.015625, 0.015625, width=32)))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_nearest_code_is_chosen(dtype: torch.dtype, value: float) -> None:
    code = int(nearest_bytes(torch.tensor([value]), dtype).view(torch.uint8))
    assert code in nearest(value, {code: byte_value(code, dtype) for code in range(256)})


@given(value=st.one_of(finite, st.floats(-8, 8, width=32), st.sampled_from([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])))
def test_the_nearest_half_byte_code_is_chosen(value: float) -> None:
    code = int(nearest_e2m1(torch.tensor([value])))
    assert code in nearest(value, dict(enumerate(E2M1)))
    assert (code >= 8) == (math.copysign(1, value) < 0)
