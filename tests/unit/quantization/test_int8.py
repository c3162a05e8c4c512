"""INT8 schemes: values, zero points, which parts are taken, and which are refused in what words."""

from __future__ import annotations

import pytest
import torch

from headrace.errors import UnsupportedQuantization
from headrace.quantization.int8 import Int8Channel, Int8Group, Int8Tensor
from headrace.quantization.scheme import Role, Scheme, StoredPart

CODES = StoredPart("weight", torch.int8, (4, 20))


def scale(*shape: int, dtype: torch.dtype = torch.float32) -> StoredPart:
    return StoredPart("weight_scale", dtype, shape)


def zero(*shape: int, dtype: torch.dtype = torch.int8) -> StoredPart:
    return StoredPart("weight_zero_point", dtype, shape)


@pytest.mark.parametrize(
    ("scheme", "parts"),
    [
        (Int8Tensor(), {Role.SCALE: scale()}),
        (Int8Tensor(), {Role.SCALE: scale(1, dtype=torch.bfloat16), Role.ZERO_POINT: zero(1)}),
        (Int8Channel(), {Role.SCALE: scale(4)}),
        (Int8Channel(), {Role.SCALE: scale(4, 1, dtype=torch.bfloat16), Role.ZERO_POINT: zero(4, 1)}),
        (Int8Group(group_size=8), {Role.SCALE: scale(4, 3)}),
        (Int8Group(group_size=8, column_offset=5), {Role.SCALE: scale(4, 4), Role.ZERO_POINT: zero(4, 4)}),
    ],
)
def test_parts_that_fit(scheme: Scheme, parts: dict[Role, StoredPart]) -> None:
    inputs = {
        Role.INPUT_SCALE: StoredPart("input_scale", torch.float32, (1,)),
        Role.INPUT_ZERO_POINT: StoredPart("input_zero_point", torch.int8, (1,)),
    }
    assert scheme.check({Role.CODES: CODES, **parts, **inputs}, module="m") == (4, 20)


@pytest.mark.parametrize(
    ("scheme", "parts", "message"),
    [
        (Int8Tensor(), {Role.SCALE: scale()}, "m.weight is missing."),
        (Int8Tensor(), {Role.CODES: CODES}, "m.weight_scale is missing."),
        (Int8Tensor(), {Role.CODES: CODES, Role.SCALE: scale(4)}, "In INT8 per tensor it must be floating [] or [1]."),
        (Int8Channel(), {Role.CODES: CODES, Role.SCALE: scale(20)}, "it must be floating [4] or [4, 1]."),
        (Int8Channel(), {Role.CODES: CODES, Role.SCALE: scale(4, dtype=torch.uint8)}, "m.weight_scale is uint8 [4]."),
        (
            Int8Group(group_size=8),
            {Role.CODES: CODES, Role.SCALE: scale(4, 2)},
            "In INT8 group 8 it must be floating [4, 3].",
        ),
        (
            Int8Channel(),
            {Role.CODES: StoredPart("weight", torch.uint8, (4, 20)), Role.SCALE: scale(4)},
            "m.weight is uint8 [4, 20]. In INT8 per channel it must be int8 [N, K].",
        ),
        (
            Int8Channel(),
            {Role.CODES: CODES, Role.SCALE: scale(4), Role.ZERO_POINT: zero(4, dtype=torch.uint8)},
            "m.weight_zero_point is uint8 [4]. In INT8 per channel it must be int8 [4] or [4, 1].",
        ),
        (
            Int8Channel(),
            {Role.CODES: CODES, Role.SCALE: scale(4), Role.GROUP_INDEX: StoredPart("g_idx", torch.int32, (20,))},
            "m.g_idx is not a part of INT8 per channel.",
        ),
    ],
)
def test_parts_that_do_not_fit(scheme: Scheme, parts: dict[Role, StoredPart], message: str) -> None:
    with pytest.raises(UnsupportedQuantization) as caught:
        scheme.check(parts, module="m")
    assert message in str(caught.value)


def test_impossible_groups() -> None:
    with pytest.raises(UnsupportedQuantization, match="groups of 0"):
        Int8Group(group_size=0)


def test_descriptions() -> None:
    schemes = (Int8Tensor(), Int8Channel(), Int8Group(group_size=64))
    assert [scheme.describe() for scheme in schemes] == ["INT8 per tensor", "INT8 per channel", "INT8 group 64"]


CODE_VALUES = torch.tensor([[-128, -1, 0], [1, 127, 5]], dtype=torch.int8)


@pytest.mark.parametrize(
    ("scheme", "numbers", "zeros", "expected"),
    [
        (Int8Tensor(), [0.5], None, [[-64.0, -0.5, 0.0], [0.5, 63.5, 2.5]]),
        (Int8Tensor(), [0.5], [-2], [[-63.0, 0.5, 1.0], [1.5, 64.5, 3.5]]),
        (Int8Channel(), [[0.5], [2.0]], None, [[-64.0, -0.5, 0.0], [2.0, 254.0, 10.0]]),
        (Int8Channel(), [0.5, 2.0], [-128, 127], [[0.0, 63.5, 64.0], [-252.0, 0.0, -244.0]]),
        (Int8Group(group_size=2), [[0.5, 3.0], [2.0, 4.0]], None, [[-64.0, -0.5, 0.0], [2.0, 254.0, 20.0]]),
        (
            Int8Group(group_size=2),
            [[0.5, 3.0], [2.0, 4.0]],
            [[0, 1], [127, -5]],
            [[-64.0, -0.5, -3.0], [-252.0, 0.0, 40.0]],
        ),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values(
    scheme: Scheme, numbers: list[float], zeros: list[int] | None, expected: list[float], dtype: torch.dtype
) -> None:
    parts = {Role.CODES: CODE_VALUES, Role.SCALE: torch.tensor(numbers, dtype=dtype)}
    if zeros is not None:
        parts[Role.ZERO_POINT] = torch.tensor(zeros, dtype=torch.int8)
    values = scheme.dequantize(parts, shape=(2, 3))
    assert values.tolist() == expected
    assert torch.equal(scheme.pack(values, parts), CODE_VALUES)
