"""NVFP4: values in both spellings of the global scale, which parts are taken, and which are refused in what words."""

from __future__ import annotations

import math

import pytest
import torch
from tests.support.code_definitions import E2M1, assert_same, byte_table

from headrace.errors import UnsupportedQuantization
from headrace.quantization.fp4 import Nvfp4
from headrace.quantization.scheme import Role, StoredPart

E4M3 = torch.float8_e4m3fn


def part(suffix: str, dtype: torch.dtype, *shape: int) -> StoredPart:
    return StoredPart(suffix, dtype, shape)


CODES, SCALE = part("weight", torch.uint8, 4, 24), part("weight_scale", E4M3, 4, 3)
GLOBAL = part("weight_scale_2", torch.float32)
FACTOR, DIVISOR = Nvfp4(), Nvfp4(global_is_divisor=True)


@pytest.mark.parametrize(
    ("scheme", "codes", "scale", "shape"),
    [
        (FACTOR, CODES, SCALE, (4, 48)),
        (DIVISOR, part("weight_packed", torch.float4_e2m1fn_x2, 4, 24), SCALE, (4, 48)),
        (Nvfp4(group_size=32), part("weight", torch.uint8, 4, 48), SCALE, (4, 96)),
        (Nvfp4(column_offset=15), CODES, SCALE, (4, 33)),
    ],
)
@pytest.mark.parametrize("one", [(), (1,)])
def test_parts_that_fit(
    scheme: Nvfp4, codes: StoredPart, scale: StoredPart, shape: tuple[int, int], one: tuple[int, ...]
) -> None:
    parts = {
        Role.CODES: codes,
        Role.SCALE: scale,
        Role.GLOBAL_SCALE: part("weight_scale_2", torch.float32, *one),
        Role.INPUT_SCALE: part("input_scale", torch.float32, *one),
        Role.PRE_SCALE: part("pre_quant_scale", torch.bfloat16, shape[1]),
    }
    assert scheme.check(parts, module="m") == shape


@pytest.mark.parametrize(
    ("scheme", "parts", "message"),
    [
        (FACTOR, {Role.SCALE: SCALE, Role.GLOBAL_SCALE: GLOBAL}, "m.weight is missing."),
        (FACTOR, {Role.CODES: CODES, Role.GLOBAL_SCALE: GLOBAL}, "m.weight_scale is missing."),
        (FACTOR, {Role.CODES: CODES, Role.SCALE: SCALE}, "m.weight_scale_2 is missing. NVFP4 needs it"),
        (DIVISOR, {Role.CODES: CODES, Role.SCALE: SCALE}, "m.weight_global_scale is missing."),
        (
            FACTOR,
            {Role.CODES: CODES, Role.SCALE: part("weight_scale", torch.uint8, 4, 3), Role.GLOBAL_SCALE: GLOBAL},
            "m.weight_scale is uint8 [4, 3]. In NVFP4 it must be float8_e4m3fn [4, 3], one per 16 columns.",
        ),
        (
            Nvfp4(group_size=32),
            {Role.CODES: CODES, Role.SCALE: SCALE, Role.GLOBAL_SCALE: GLOBAL},
            "m.weight is uint8 [4, 24]. In NVFP4 group 32 it must be uint8 [N, K / 2] with whole groups of 32 columns.",
        ),
        (
            FACTOR,
            {Role.CODES: part("weight", torch.bfloat16, 4, 24), Role.SCALE: SCALE, Role.GLOBAL_SCALE: GLOBAL},
            "m.weight is bfloat16 [4, 24].",
        ),
        (
            FACTOR,
            {Role.CODES: CODES, Role.SCALE: SCALE, Role.GLOBAL_SCALE: part("weight_scale_2", torch.float32, 2)},
            "m.weight_scale_2 is float32 [2]. In NVFP4 it must be one float32 number, [] or [1].",
        ),
        (
            FACTOR,
            {Role.CODES: CODES, Role.SCALE: SCALE, Role.GLOBAL_SCALE: part("weight_scale_2", E4M3)},
            "m.weight_scale_2 is float8_e4m3fn [].",
        ),
        (
            FACTOR,
            {
                Role.CODES: CODES,
                Role.SCALE: SCALE,
                Role.GLOBAL_SCALE: GLOBAL,
                Role.ZERO_POINT: part("weight_zero_point", torch.int8, 4, 3),
            },
            "m.weight_zero_point is not a part of NVFP4.",
        ),
    ],
)
def test_parts_that_do_not_fit(scheme: Nvfp4, parts: dict[Role, StoredPart], message: str) -> None:
    with pytest.raises(UnsupportedQuantization) as caught:
        scheme.check(parts, module="m")
    assert message in str(caught.value)


def test_impossible_groups() -> None:
    with pytest.raises(UnsupportedQuantization, match="groups of -16"):
        Nvfp4(group_size=-16)


def test_descriptions() -> None:
    assert [scheme.describe() for scheme in (FACTOR, DIVISOR, Nvfp4(group_size=32))] == [
        "NVFP4",
        "NVFP4",
        "NVFP4 group 32",
    ]


def parts_of(stored: float, *, group_size: int = 16) -> dict[Role, torch.Tensor]:
    """Return all bytes of codes under all group scales."""
    row = torch.arange(256, dtype=torch.uint8)
    return {
        Role.CODES: row.expand(256, -1),
        Role.SCALE: row[:, None].expand(-1, 512 // group_size).contiguous().view(E4M3),
        Role.GLOBAL_SCALE: torch.tensor([stored]),
    }


PAIRS = torch.tensor([value for byte in range(256) for value in (E2M1[byte % 16], E2M1[byte // 16])])


@pytest.mark.parametrize("result", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group_size", [16, 32])
@pytest.mark.parametrize("stored", [1.0, 2.79018e-4, 3584.0, 1e-38, 1e38, math.nan])
def test_every_code_under_every_scale(group_size: int, stored: float, result: torch.dtype) -> None:
    parts, one = parts_of(stored, group_size=group_size), torch.tensor(stored)
    factors = (byte_table(E4M3) * one)[:, None]
    found = Nvfp4(group_size=group_size).dequantize(parts, shape=(256, 512), dtype=result)
    assert_same(found, (PAIRS * factors).to(result))
    factors = (byte_table(E4M3) / one)[:, None]
    scheme = Nvfp4(group_size=group_size, global_is_divisor=True)
    assert_same(scheme.dequantize(parts, shape=(256, 512), dtype=result), (PAIRS * factors).to(result))


def test_a_factor_and_its_reciprocal_as_a_divisor_make_the_same_weight() -> None:
    # 1 / 4096 is exact, so both orders of operations give the same bits.
    factor = FACTOR.dequantize(parts_of(1 / 4096), shape=(256, 512))
    assert_same(DIVISOR.dequantize(parts_of(4096.0), shape=(256, 512)), factor)


def test_gate_and_up_keep_their_own_global_scales() -> None:
    codes = torch.full((1, 8), 0x22, dtype=torch.uint8)
    scale = torch.ones(1, 1).to(E4M3)
    gate, up = (
        FACTOR.dequantize({Role.CODES: codes, Role.SCALE: scale, Role.GLOBAL_SCALE: torch.tensor(one)}, shape=(1, 16))
        for one in (3.85e-5, 4.83e-5)
    )
    assert float(up[0, 0] / gate[0, 0]) == pytest.approx(1.2545454545454546)


def usual_parts(stored: float) -> dict[Role, torch.Tensor]:
    return {
        Role.CODES: torch.full((1, 8), 0x77, dtype=torch.uint8),
        Role.SCALE: torch.tensor([[448.0]]).to(E4M3),
        Role.GLOBAL_SCALE: torch.tensor(stored),
    }


@pytest.mark.parametrize(("scheme", "stored"), [(FACTOR, 2.79e-4), (DIVISOR, 3584.0), (FACTOR, 1.0), (DIVISOR, 1.0)])
def test_usual_global_scales_pass(scheme: Nvfp4, stored: float) -> None:
    assert scheme.check_values(usual_parts(stored), "m") is None


@pytest.mark.parametrize(
    ("scheme", "stored", "message"),
    [
        (
            FACTOR,
            3584.0,
            "m.weight_scale_2 is 3584, which makes weights as large as 9.63e+06. By its name it is a factor; as a divisor it would make them 0.75.",
        ),
        (
            DIVISOR,
            1 / 3584,
            "m.weight_global_scale is 0.000279018, which makes weights as large as 9.63e+06. By its name it is a divisor; as a factor it would make them 0.75.",
        ),
        (FACTOR, 0.0, "m.weight_scale_2 is 0.0. It must be a positive number."),
        (FACTOR, -1.0, "m.weight_scale_2 is -1.0."),
        (DIVISOR, math.nan, "m.weight_global_scale is nan."),
        (DIVISOR, math.inf, "m.weight_global_scale is inf."),
    ],
)
def test_global_scales_that_cannot_be_right(scheme: Nvfp4, stored: float, message: str) -> None:
    with pytest.raises(UnsupportedQuantization) as caught:
        scheme.check_values(usual_parts(stored), "m")
    assert message in str(caught.value)
    assert caught.value.mend


@pytest.mark.parametrize("scheme", [FACTOR, DIVISOR, Nvfp4(group_size=32)])
def test_packing_values_gives_their_codes_back(scheme: Nvfp4) -> None:
    torch.manual_seed(0)
    groups = 96 // scheme.group_size
    parts = {
        Role.CODES: torch.randint(0, 256, (8, 48), dtype=torch.uint8),
        Role.SCALE: (torch.rand(8, groups) * 400 + 1).to(E4M3),
        Role.GLOBAL_SCALE: torch.tensor([3584.0 if scheme.global_is_divisor else 1 / 3584]),
    }
    packed = scheme.pack(scheme.dequantize(parts, shape=(8, 96)), parts)
    assert torch.equal(packed, parts[Role.CODES])
