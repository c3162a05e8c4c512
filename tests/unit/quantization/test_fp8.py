"""FP8 schemes: values, which parts are taken, and which are refused in what words."""

from __future__ import annotations

import math

import pytest
import torch
from tests.support.code_definitions import assert_same, byte_table

from headrace.errors import UnsupportedQuantization
from headrace.quantization.fp8 import Fp8Block, Fp8Channel, Fp8Tensor
from headrace.quantization.scheme import Role, Scheme, StoredPart

E4M3 = torch.float8_e4m3fn
CODES = StoredPart("weight", E4M3, (320, 160))


def scale(*shape: int, dtype: torch.dtype = torch.float32, suffix: str = "weight_scale") -> StoredPart:
    return StoredPart(suffix, dtype, shape)


def codes_of(*values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8).view(E4M3)


ACCEPTED = [
    (Fp8Tensor(), scale()),
    (Fp8Tensor(), scale(1, dtype=torch.bfloat16)),
    (Fp8Channel(), scale(320)),
    (Fp8Channel(), scale(320, 1, dtype=torch.float16)),
    (Fp8Block(), scale(3, 2)),
    (Fp8Block(), scale(3, 2, dtype=torch.bfloat16, suffix="weight_scale_inv")),
    (Fp8Block(), scale(3, 2, dtype=torch.float8_e8m0fnu)),
    (Fp8Block(), scale(3, 1, 2, 1)),
    (Fp8Block(block=(64, 32)), scale(5, 5)),
    (Fp8Block(row_offset=64, column_offset=100), scale(3, 3)),
]


@pytest.mark.parametrize(("scheme", "part"), ACCEPTED)
def test_parts_that_fit(scheme: Scheme, part: StoredPart) -> None:
    parts = {
        Role.CODES: CODES,
        Role.SCALE: part,
        Role.INPUT_SCALE: StoredPart("input_scale", torch.float32, ()),
        Role.PRE_SCALE: StoredPart("pre_quant_scale", torch.bfloat16, (160,)),
    }
    assert scheme.check(parts, module="m") == (320, 160)


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz])
def test_other_codes_fit_too(dtype: torch.dtype) -> None:
    assert Fp8Tensor().check({Role.CODES: StoredPart("weight", dtype, (4, 6)), Role.SCALE: scale()}, module="m") == (
        4,
        6,
    )


REFUSED = [
    (
        Fp8Tensor(),
        {Role.SCALE: scale()},
        "m.weight is missing. FP8 per tensor needs it; of this module there are: weight_scale.",
    ),
    (Fp8Tensor(), {Role.CODES: CODES}, "m.weight_scale is missing."),
    (
        Fp8Tensor(),
        {Role.CODES: CODES, Role.SCALE: scale(2)},
        "m.weight_scale is float32 [2]. In FP8 per tensor it must be one",
    ),
    (Fp8Tensor(), {Role.CODES: CODES, Role.SCALE: scale(1, 1)}, "m.weight_scale is float32 [1, 1]."),
    (Fp8Tensor(), {Role.CODES: CODES, Role.SCALE: scale(dtype=torch.int32)}, "m.weight_scale is int32 []."),
    (
        Fp8Tensor(),
        {Role.CODES: StoredPart("weight", torch.uint8, (320, 160)), Role.SCALE: scale()},
        "m.weight is uint8 [320, 160]. In FP8 per tensor it must be an FP8 type (float8_e4m3fn as a rule) [N, K].",
    ),
    (
        Fp8Tensor(),
        {Role.CODES: StoredPart("weight", E4M3, (320,)), Role.SCALE: scale()},
        "m.weight is float8_e4m3fn [320].",
    ),
    (
        Fp8Tensor(),
        {Role.CODES: StoredPart("weight", E4M3, (320, 0)), Role.SCALE: scale()},
        "m.weight is float8_e4m3fn [320, 0].",
    ),
    (
        Fp8Tensor(),
        {Role.CODES: CODES, Role.SCALE: scale(dtype=torch.float64)},
        "it must be one floating number, [] or [1]. Floating is bfloat16 or float16 or float32.",
    ),
    (
        Fp8Channel(),
        {Role.CODES: CODES, Role.SCALE: scale(160)},
        "In FP8 per channel it must be floating [320] or [320, 1]",
    ),
    (Fp8Channel(), {Role.CODES: CODES, Role.SCALE: scale(1, 320)}, "m.weight_scale is float32 [1, 320]."),
    (
        Fp8Block(),
        {Role.CODES: CODES, Role.SCALE: scale(2, 2)},
        "In FP8 block 128x128 it must be floating [3, 2] or [3, 1, 2, 1], one per block.",
    ),
    (Fp8Block(), {Role.CODES: CODES, Role.SCALE: scale(2, 3)}, "m.weight_scale is float32 [2, 3]."),
    (Fp8Block(), {Role.CODES: CODES, Role.SCALE: scale(3, 2, dtype=torch.uint8)}, "m.weight_scale is uint8 [3, 2]."),
    (Fp8Block(row_offset=65), {Role.CODES: CODES, Role.SCALE: scale(3, 2)}, "it must be floating [4, 2]"),
    (
        Fp8Tensor(),
        {Role.CODES: CODES, Role.SCALE: scale(), Role.GLOBAL_SCALE: scale(suffix="weight_scale_2")},
        "m.weight_scale_2 is not a part of FP8 per tensor.",
    ),
    (
        Fp8Tensor(),
        {Role.CODES: CODES, Role.SCALE: scale(), Role.PRE_SCALE: StoredPart("pre_quant_scale", torch.bfloat16, (320,))},
        "m.pre_quant_scale is bfloat16 [320]. In FP8 per tensor it must be floating [160]",
    ),
    (
        Fp8Tensor(),
        {Role.CODES: CODES, Role.SCALE: scale(), Role.INPUT_SCALE: StoredPart("input_scale", torch.float32, (3,))},
        "m.input_scale is float32 [3].",
    ),
]


@pytest.mark.parametrize(("scheme", "parts", "message"), REFUSED)
def test_parts_that_do_not_fit(scheme: Scheme, parts: dict[Role, StoredPart], message: str) -> None:
    with pytest.raises(UnsupportedQuantization) as caught:
        scheme.check(parts, module="m")
    assert message in str(caught.value)
    assert caught.value.mend


@pytest.mark.parametrize("block", [(0, 128), (128, -1)])
def test_impossible_blocks(block: tuple[int, int]) -> None:
    with pytest.raises(UnsupportedQuantization, match="each at least 1"):
        Fp8Block(block=block)


def test_descriptions() -> None:
    assert [scheme.describe() for scheme in (Fp8Tensor(), Fp8Channel(), Fp8Block(), Fp8Block(block=(64, 32)))] == [
        "FP8 per tensor",
        "FP8 per channel",
        "FP8 block 128x128",
        "FP8 block 64x32",
    ]


def test_values_per_tensor() -> None:
    parts = {Role.CODES: codes_of([0x38, 0xB8, 0x80], [0x7E, 0x7F, 0x01]), Role.SCALE: torch.tensor(0.5)}
    expected = torch.tensor([[0.5, -0.5, -0.0], [224.0, math.nan, 2.0**-10]])
    assert_same(Fp8Tensor().dequantize(parts, shape=(2, 3)), expected)
    parts[Role.SCALE] = torch.tensor([0.5], dtype=torch.bfloat16)
    assert_same(Fp8Tensor().dequantize(parts, shape=(2, 3)), expected)


@pytest.mark.parametrize("shape", [(2,), (2, 1)])
def test_values_per_row(shape: tuple[int, ...]) -> None:
    parts = {Role.CODES: codes_of([0x38, 0x40], [0x38, 0x40]), Role.SCALE: torch.tensor([0.5, 3.0]).view(shape)}
    assert Fp8Channel().dequantize(parts, shape=(2, 2)).tolist() == [[0.5, 1.0], [3.0, 6.0]]


@pytest.mark.parametrize("shape", [(2, 3), (2, 1, 3, 1)])
def test_values_per_block_at_ragged_edges(shape: tuple[int, ...]) -> None:
    numbers = torch.arange(1.0, 7.0)
    parts = {Role.CODES: torch.ones(5, 7).to(E4M3), Role.SCALE: numbers.view(shape)}
    found = Fp8Block(block=(3, 3)).dequantize(parts, shape=(5, 7))
    row, last = [1.0, 1, 1, 2, 2, 2, 3], [4.0, 4, 4, 5, 5, 5, 6]
    assert found.tolist() == [row, row, row, last, last]


def test_scales_in_bfloat16_and_as_exponents() -> None:
    codes = torch.full((2, 2), 3.0).to(E4M3)
    brain = {Role.CODES: codes, Role.SCALE: torch.tensor([[0.3]], dtype=torch.bfloat16)}
    assert Fp8Block().dequantize(brain, shape=(2, 2))[0, 0] == 3 * 0.30078125
    octets = torch.tensor([[120], [255]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    found = Fp8Block(block=(1, 2)).dequantize({Role.CODES: codes, Role.SCALE: octets}, shape=(2, 2))
    assert found[0].tolist() == [3 * 2.0**-7] * 2
    assert bool(found[1].isnan().all())


def test_the_value_is_rounded_once_to_float32_and_once_to_the_result() -> None:
    numbers, codes = torch.linspace(0.1, 0.2, 50), torch.full((50, 1), 1.875).to(E4M3)
    found = Fp8Channel().dequantize({Role.CODES: codes, Role.SCALE: numbers}, shape=(50, 1), dtype=torch.bfloat16)
    assert_same(found, (1.875 * numbers[:, None]).to(torch.bfloat16))
    early = 1.875 * numbers[:, None].to(torch.bfloat16)
    assert 0 < int((found != early).sum()) < 50


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz]
)
def test_codes_tell_their_own_format(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).view(16, 16)
    parts = {Role.CODES: codes, Role.SCALE: torch.tensor(2.0)}
    found = Fp8Tensor().dequantize(parts, shape=(16, 16))
    assert_same(found, byte_table(dtype).view(16, 16) * 2)
    packed = Fp8Tensor().pack(found, parts)
    assert packed.dtype is dtype
    assert_same(packed.float(), codes.float())


@pytest.mark.parametrize(
    ("scheme", "numbers"),
    [
        (Fp8Tensor(), torch.tensor([0.01])),
        (Fp8Channel(), torch.rand(160, 1) + 0.1),
        (Fp8Block(), torch.rand(2, 3) + 0.1),
        (Fp8Block(block=(50, 100)), torch.rand(4, 1, 4, 1) + 0.1),
    ],
)
def test_packing_without_codes_makes_e4m3(scheme: Scheme, numbers: torch.Tensor) -> None:
    codes = (torch.randn(160, 320) * 50).to(E4M3)
    values = scheme.dequantize({Role.CODES: codes, Role.SCALE: numbers}, shape=(160, 320))
    packed = scheme.pack(values, {Role.SCALE: numbers})
    assert packed.dtype is E4M3
    assert torch.equal(packed.view(torch.uint8), codes.view(torch.uint8))
