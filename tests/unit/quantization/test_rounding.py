"""Rounded inputs are what the definition of their format says, worked out here with Python's own numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import UnsupportedQuantization
from headrace.quantization.rounding import (
    check_inputs,
    describe_inputs,
    round_inputs,
    round_kv,
    to_e2m1,
    to_e4m3,
    to_int8,
)
from headrace.quantization.scheme import InputQuantization

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = [
    mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    for exponent in range(16)
    for mantissa in range(8)
][:127]
"""The positive codes in order: code 127 is NaN."""

FP8 = InputQuantization(format="e4m3", granularity="tensor", is_dynamic=False)
FP8_TOKEN = InputQuantization(format="e4m3", granularity="token")
FP8_GROUP = InputQuantization(format="e4m3", granularity="group", group_size=128)
INT8 = InputQuantization(format="int8", granularity="tensor", is_dynamic=False)
INT8_TOKEN = InputQuantization(format="int8", granularity="token")
NVFP4 = InputQuantization(format="nvfp4", granularity="group", group_size=16, is_dynamic=False)
NVFP4_DIVISOR = InputQuantization(format="nvfp4", granularity="group", group_size=16, is_dynamic=False, divisor=True)
MXFP4 = InputQuantization(format="mxfp4", granularity="group", group_size=32)
MXFP8 = InputQuantization(format="mxfp8", granularity="group", group_size=32)
ALL = [
    (FP8, 0.037),
    (FP8_TOKEN, None),
    (FP8_GROUP, None),
    (InputQuantization(format="e4m3", granularity="tensor"), None),
    (INT8, 0.11),
    (INT8_TOKEN, None),
    (InputQuantization(format="int8", granularity="token", symmetric=False), None),
    (NVFP4, 0.004),
    (NVFP4_DIVISOR, 250.0),
    (MXFP4, None),
    (MXFP8, None),
    (InputQuantization(format="mxfp4", granularity="group", group_size=32, power_of_two="nearest"), None),
    (InputQuantization(format="e4m3", granularity="group", group_size=128, power_of_two="up"), None),
]
NAMES = [f"{describe_inputs(inputs)} {number}" for number, (inputs, _) in enumerate(ALL)]


def nearest(codes: list[float], value: float) -> float:
    """Return the code nearest to ``value``; of two as near, the one with the even number."""
    magnitude = min(abs(value), codes[-1])
    number = min(range(len(codes)), key=lambda number: (abs(codes[number] - magnitude), number % 2))
    return math.copysign(codes[number], value)


def row(*values: float, size: int = 0) -> torch.Tensor:
    """Return one row that holds ``values``, then zeros up to ``size``."""
    return torch.tensor([list(values) + [0.0] * (size - len(values))])


def scale_of(value: float | None) -> torch.Tensor | None:
    return None if value is None else torch.tensor([value])


def test_the_codes_are_those_of_the_formats() -> None:
    assert E4M3[-1] == 448 and E4M3[1] == 2**-9 and sorted(set(E4M3)) == E4M3
    stored = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert stored.tolist() == E4M3


@pytest.mark.parametrize(("to_code", "codes"), [(to_e2m1, E2M1), (to_e4m3, E4M3)], ids=["E2M1", "E4M3"])
def test_a_value_becomes_the_nearest_code_and_the_even_one_in_the_middle(
    to_code: Callable[[torch.Tensor], torch.Tensor], codes: list[float]
) -> None:
    middles = [(low + high) / 2 for low, high in pairwise(codes)]
    values = [
        *codes,
        *middles,
        codes[-1] * 1.01,
        codes[-1] * 9,
        *(m * (1 + s * 2**-20) for m in middles for s in (-1, 1)),
    ]
    values += [-value for value in values]
    rounded = to_code(torch.tensor(values))
    assert rounded.tolist() == [nearest(codes, value) for value in values]


def test_whole_numbers_saturate_and_are_even_in_the_middle() -> None:
    values = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 126.6, 127.5, 300.0, -128.5, -300.0])
    assert to_int8(values).tolist() == [0, 2, 2, 0, -2, 127, 127, 127, -128, -128]


@given(st.lists(st.floats(-1000, 1000, width=32), min_size=1, max_size=40))
def test_a_static_scale_divides_and_multiplies(values: list[float]) -> None:
    rounded = round_inputs(row(*values), FP8, torch.tensor([0.125]))
    assert rounded.tolist() == [[nearest(E4M3, value / 0.125) * 0.125 for value in values]]


def test_static_int8_keeps_its_zero_point() -> None:
    x = row(1.0, 0.3, -100.0, 100.0)
    assert round_inputs(x, INT8, torch.tensor(0.5)).tolist() == [[1.0, 0.5, -64.0, 63.5]]
    # Codes are x / 0.5 + 100, from -128 to 127.
    zero = torch.tensor([100], dtype=torch.int8)
    assert round_inputs(x, INT8, torch.tensor(0.5), zero).tolist() == [[1.0, 0.5, -100.0, 13.5]]


def test_each_row_has_its_own_dynamic_scale() -> None:
    x = torch.tensor([[448.0, 1.0, 17.0], [4.48, 0.01, -0.17], [0.0, 0.0, 0.0]])
    # 17 is between 16 and 18, and 16 has the even code.
    expected = torch.tensor([[448.0, 1.0, 16.0], [4.48, 0.01, -0.16], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(round_inputs(x, FP8_TOKEN, None), expected, rtol=1e-6, atol=0)
    assert round_inputs(x[0], FP8_TOKEN, None).tolist() == [448.0, 1.0, 16.0]


def test_a_dynamic_scale_for_the_whole_input() -> None:
    x = torch.tensor([[448.0, 1.0], [17.0, 0.0]])
    inputs = InputQuantization(format="e4m3", granularity="tensor")
    assert round_inputs(x, inputs, None).tolist() == [[448.0, 1.0], [16.0, 0.0]]


def test_dynamic_int8_has_255_steps() -> None:
    # The step is 127.5 / 127.5.
    assert round_inputs(row(127.5, -127.5, 0.4, 2.5), INT8_TOKEN, None).tolist() == [[127.0, -128.0, 0.0, 2.0]]
    # From 0 to 255: the step is 1, and zero has the code -128.
    asymmetric = InputQuantization(format="int8", granularity="token", symmetric=False)
    assert round_inputs(row(255.0, 3.4, 0.0), asymmetric, None).tolist() == [[255.0, 3.0, 0.0]]
    assert round_inputs(row(-55.0, 200.0, 3.4), asymmetric, None).tolist() == [[-55.0, 200.0, 3.0]]


def test_groups_are_rounded_apart_and_the_last_may_be_short() -> None:
    x = torch.randn(2, 3, 200, generator=torch.Generator().manual_seed(1)) * 10
    x[..., 150] = 1000
    rounded = round_inputs(x, FP8_GROUP, None)
    assert rounded.shape == x.shape
    assert torch.equal(rounded[..., :128], round_inputs(x[..., :128], FP8_TOKEN, None))
    assert torch.equal(rounded[..., 128:], round_inputs(x[..., 128:], FP8_TOKEN, None))


def test_nvfp4_rounds_the_scales_of_its_groups_too() -> None:
    # The scale wanted is 6.6 / 6 / 0.25 = 4.4, whose nearest E4M3 number is 4.5; the step is 4.5 * 0.25.
    step = 1.125
    x = row(6.6, 1.0, -0.2, 3.0, size=16)
    expected = [nearest(E2M1, value / step) * step for value in (6.6, 1.0, -0.2, 3.0)]
    assert round_inputs(x, NVFP4, torch.tensor(0.25))[0, :4].tolist() == expected == [6.75, 1.125, 0.0, 3.375]
    assert torch.equal(round_inputs(x, NVFP4, torch.tensor(0.25)), round_inputs(x, NVFP4_DIVISOR, torch.tensor([4.0])))


def test_nvfp4_scales_saturate_and_vanish() -> None:
    # Wanted are 6000 / 6 = 1000, of which 448 can be had, and 0.0006 / 6, which rounds to zero.
    x = torch.cat([row(6000.0, 500.0, size=16), row(0.0006, size=16), row(0.0, size=16)], dim=-1)
    rounded = round_inputs(x, NVFP4, torch.tensor(1.0))
    assert rounded[0, :2].tolist() == [2688.0, 448.0]
    assert not rounded[0, 2:].any()


def test_without_a_stored_scale_nvfp4_has_one_level() -> None:
    x = row(6.6, 1.0, -0.2, 3.0, size=16)
    assert torch.equal(round_inputs(x, NVFP4, None), round_inputs(x, NVFP4, torch.tensor(1.0)))


def with_rule(rule: str | None, format: str = "mxfp4") -> InputQuantization:
    return InputQuantization(format=format, granularity="group", group_size=32, power_of_two=rule)


@pytest.mark.parametrize(
    ("rule", "largest", "step"),
    [
        ("up", 6.0, 1.0),
        ("up", 6.01, 2.0),
        ("up", 3.01, 1.0),
        (None, 6.01, 2.0),
        # compressed-tensors goes to the next power from 1.75 times one on, and saturates below.
        ("nearest", 6.0, 1.0),
        ("nearest", 6.99, 1.0),
        ("nearest", 7.0, 2.0),
        ("nearest", 4.0, 1.0),
        ("nearest", 3.99, 1.0),
        ("nearest", 3.49, 0.5),
    ],
)
def test_shared_exponents_follow_the_rule_of_the_tool(rule: str | None, largest: float, step: float) -> None:
    values = [largest, 1.3, -0.3, 0.7]
    rounded = round_inputs(row(*values, size=32), with_rule(rule), None)
    assert rounded[0, :4].tolist() == [nearest(E2M1, value / step) * step for value in values]


@pytest.mark.parametrize(
    ("rule", "largest", "step"),
    [("up", 448.0, 1.0), ("up", 449.0, 2.0), ("nearest", 448.0, 2.0), ("nearest", 447.0, 1.0)],
)
def test_shared_exponents_of_mxfp8(rule: str, largest: float, step: float) -> None:
    values = [largest, 0.0048828125]  # 2.5 times the smallest code: of the two around it, 2 is even
    rounded = round_inputs(row(*values, size=32), with_rule(rule, "mxfp8"), None)
    assert rounded[0, :2].tolist() == [nearest(E4M3, value / step) * step for value in values]


def test_shared_exponents_end_at_two_to_minus_127() -> None:
    tiny = 2.0**-140
    rounded = round_inputs(row(tiny, 2.0**-127, size=32), MXFP4, None)
    assert rounded[0, :2].tolist() == [0.0, 2.0**-127]
    assert not round_inputs(torch.zeros(1, 32), MXFP4, None).any()
    assert not round_inputs(torch.zeros(1, 32), with_rule("nearest"), None).any()


def test_fp8_groups_can_have_powers_of_two() -> None:
    inputs = InputQuantization(format="e4m3", granularity="group", group_size=128, power_of_two="up")
    # 500 / 448 is above 1: the step is 2, and 500 is 250 steps, between the codes 240 and 256.
    assert round_inputs(row(500.0, 17.0, size=128), inputs, None)[0, :2].tolist() == [512.0, 16.0]
    assert round_inputs(row(448.0, 17.0, size=128), inputs, None)[0, :2].tolist() == [448.0, 16.0]


# Symmetric dynamic INT8 is not so: its largest code is 127 of 127.5 steps, and the second step is smaller.
@pytest.mark.parametrize(("inputs", "scale"), [case for case in ALL if case[0] != INT8_TOKEN])
def test_rounding_twice_is_rounding_once(inputs: InputQuantization, scale: float | None) -> None:
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(2)) * 5
    once = round_inputs(x, inputs, scale_of(scale))
    assert not torch.equal(once, x)
    # The step of a dynamic rounding is found anew, and may be one unit in its last place away.
    torch.testing.assert_close(round_inputs(once, inputs, scale_of(scale)), once, rtol=3e-7, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("inputs", "scale"), ALL, ids=NAMES)
def test_the_result_is_rounded_once_to_the_dtype_of_the_input(
    inputs: InputQuantization, scale: float | None, dtype: torch.dtype
) -> None:
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(3)).to(dtype)
    kept = x.clone()
    rounded = round_inputs(x, inputs, scale_of(scale))
    assert rounded.dtype == dtype and torch.equal(x, kept)
    assert torch.equal(rounded, round_inputs(x.float(), inputs, scale_of(scale)).to(dtype))


@pytest.mark.parametrize(("inputs", "scale"), ALL, ids=NAMES)
def test_nothing_stays_nothing_and_nan_stays_nan(inputs: InputQuantization, scale: float | None) -> None:
    assert round_inputs(torch.empty(0, 256), inputs, scale_of(scale)).shape == (0, 256)
    x = torch.ones(2, 256)
    x[0, 3] = math.nan
    rounded = round_inputs(x, inputs, scale_of(scale))
    assert rounded[0, 3].isnan()
    if inputs.granularity != "tensor":
        assert not rounded[1].isnan().any()


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        (InputQuantization(format="fp6", granularity="group", group_size=32), "'fp6'"),
        (InputQuantization(format="nvfp4", granularity="token"), "NVFP4 per token"),
        (InputQuantization(format="e4m3", granularity="group"), "No group size"),
        (FP8, "The checkpoint has none"),
        (with_rule("down"), "'down'"),
    ],
)
def test_what_is_not_known_is_refused(inputs: InputQuantization, says: str) -> None:
    with pytest.raises(UnsupportedQuantization, match=says):
        check_inputs(inputs, has_scale=False)
    with pytest.raises(UnsupportedQuantization, match=says):
        round_inputs(torch.ones(1, 32), inputs, None)


def test_inputs_are_described_in_words() -> None:
    described = [describe_inputs(inputs) for inputs in (None, FP8, FP8_TOKEN, FP8_GROUP, INT8, NVFP4, MXFP4)]
    expected = ["as they are", "FP8 static", "FP8 per token", "FP8 groups of 128", "INT8 static", "NVFP4", "MXFP4"]
    assert described == expected
    asymmetric = InputQuantization(format="int8", granularity="token", symmetric=False)
    assert describe_inputs(asymmetric) == "INT8 per token asymmetric"


def test_keys_are_rounded_by_one_scale_or_by_one_for_each_head() -> None:
    x = torch.tensor([17.0, 1.0, -500.0, 0.3]).expand(1, 2, 3, 4)
    whole = round_kv(x, "e4m3", None, torch.tensor([0.5], dtype=torch.bfloat16))
    assert whole[0, 1, 2].tolist() == [nearest(E4M3, value / 0.5) * 0.5 for value in x[0, 1, 2].tolist()]
    heads = round_kv(x, "e4m3", None, torch.tensor([0.5, 2.0]).reshape(2, 1, 1))
    assert torch.equal(heads[:, :1], whole[:, :1])
    assert heads[0, 1, 2].tolist() == [nearest(E4M3, value / 2) * 2 for value in x[0, 1, 2].tolist()]
    assert round_kv(x, "e4m3", None, None)[0, 0, 0].tolist() == [nearest(E4M3, value) for value in x[0, 0, 0].tolist()]


def test_keys_are_rounded_by_groups() -> None:
    x = torch.randn(2, 3, 5, 32, generator=torch.Generator().manual_seed(4)).bfloat16()
    scale = torch.tensor(0.01)
    rounded = round_kv(x, "nvfp4", 16, scale)
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded, round_inputs(x, NVFP4, scale))
    heads = round_kv(x, "nvfp4", 16, torch.tensor([0.01, 0.02, 0.03]))
    assert torch.equal(heads[:, 1], round_inputs(x[:, 1], NVFP4, torch.tensor(0.02)))
    with pytest.raises(UnsupportedQuantization, match="'int8'"):
        round_kv(x, "int8", None, scale)
