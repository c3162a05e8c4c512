"""MX schemes: values, exponents that are bytes and not numbers, which parts are taken, and which are refused in what words."""

from __future__ import annotations

import pytest
import torch
from tests.support.code_definitions import E2M1, assert_same, byte_table, e8m0_value

from headrace.errors import UnsupportedQuantization
from headrace.quantization.mx import Mxfp4, Mxfp4Blocks, Mxfp8
from headrace.quantization.scheme import Role, Scheme, StoredPart

E4M3 = torch.float8_e4m3fn


def part(suffix: str, dtype: torch.dtype, *shape: int) -> StoredPart:
    return StoredPart(suffix, dtype, shape)


FP8, HALVES = part("weight", E4M3, 4, 70), part("weight_packed", torch.uint8, 4, 48)
BLOCKS = part("blocks", torch.uint8, 4, 3, 16)


@pytest.mark.parametrize(
    ("scheme", "codes", "scale", "shape"),
    [
        (Mxfp8(), FP8, part("weight_scale", torch.uint8, 4, 3), (4, 70)),
        (Mxfp8(), FP8, part("weight_scale", torch.float8_e8m0fnu, 4, 3), (4, 70)),
        (Mxfp8(column_offset=31), FP8, part("weight_scale", torch.uint8, 4, 4), (4, 70)),
        (Mxfp4(), HALVES, part("weight_scale", torch.uint8, 4, 3), (4, 96)),
        (Mxfp4(), HALVES, part("weight_scale", torch.float8_e8m0fnu, 4, 3), (4, 96)),
        (Mxfp4(group_size=16, column_offset=5), HALVES, part("weight_scale", torch.uint8, 4, 6), (4, 91)),
        (
            Mxfp4(),
            part("weight", torch.float4_e2m1fn_x2, 4, 48),
            part("weight_scale", torch.uint8, 4, 3),
            (4, 96),
        ),
        (Mxfp4Blocks(), BLOCKS, part("scales", torch.uint8, 4, 3), (4, 96)),
        (Mxfp4Blocks(column_offset=1), BLOCKS, part("scales", torch.float8_e8m0fnu, 4, 3), (4, 95)),
    ],
)
def test_parts_that_fit(scheme: Scheme, codes: StoredPart, scale: StoredPart, shape: tuple[int, int]) -> None:
    assert scheme.check({Role.CODES: codes, Role.SCALE: scale}, module="m") == shape


@pytest.mark.parametrize(
    ("scheme", "parts", "message"),
    [
        (Mxfp8(), {Role.CODES: FP8}, "m.weight_scale is missing."),
        (
            Mxfp8(),
            {Role.CODES: FP8, Role.SCALE: part("weight_scale", torch.float32, 4, 3)},
            "m.weight_scale is float32 [4, 3]. In MXFP8 it must be bytes of E8M0 exponents (uint8 or float8_e8m0fnu) [4, 3].",
        ),
        (
            Mxfp8(),
            {Role.CODES: FP8, Role.SCALE: part("weight_scale", torch.uint8, 4, 2)},
            "m.weight_scale is uint8 [4, 2].",
        ),
        (Mxfp8(), {Role.CODES: HALVES, Role.SCALE: part("weight_scale", torch.uint8, 4, 3)}, "it must be an FP8 type"),
        (Mxfp4(), {Role.SCALE: part("weight_scale", torch.uint8, 4, 3)}, "m.weight is missing."),
        (
            Mxfp4(),
            {Role.CODES: HALVES, Role.SCALE: part("weight_scale", torch.bfloat16, 4, 3)},
            "m.weight_scale is bfloat16 [4, 3]. In MXFP4 it must be bytes of E8M0 exponents",
        ),
        (
            Mxfp4(),
            {Role.CODES: HALVES, Role.SCALE: part("weight_scale", torch.uint8, 4, 6)},
            "[4, 3], one per 32 columns.",
        ),
        (
            Mxfp4(),
            {Role.CODES: part("weight", torch.uint8, 4, 40), Role.SCALE: part("weight_scale", torch.uint8, 4, 3)},
            "m.weight is uint8 [4, 40]. In MXFP4 it must be uint8 [N, K / 2] with whole groups of 32 columns.",
        ),
        (
            Mxfp4(),
            {Role.CODES: part("weight", torch.int8, 4, 48), Role.SCALE: part("weight_scale", torch.uint8, 4, 3)},
            "m.weight is int8 [4, 48].",
        ),
        (
            Mxfp4(),
            {
                Role.CODES: HALVES,
                Role.SCALE: part("weight_scale", torch.uint8, 4, 3),
                Role.GLOBAL_SCALE: part("weight_scale_2", torch.float32),
            },
            "m.weight_scale_2 is not a part of MXFP4.",
        ),
        (
            Mxfp4Blocks(),
            {Role.CODES: part("blocks", torch.uint8, 4, 3, 8), Role.SCALE: part("scales", torch.uint8, 4, 3)},
            "In MXFP4 blocks it must be uint8 [N, K / 32, 16].",
        ),
        (Mxfp4Blocks(), {Role.CODES: HALVES, Role.SCALE: part("scales", torch.uint8, 4, 3)}, "is uint8 [4, 48]."),
        (Mxfp4Blocks(), {Role.CODES: BLOCKS, Role.SCALE: part("scales", torch.uint8, 3, 4)}, "is uint8 [3, 4]."),
        (Mxfp4Blocks(), {Role.CODES: BLOCKS, Role.SCALE: part("scales", torch.float32, 4, 3)}, "is float32 [4, 3]."),
    ],
)
def test_parts_that_do_not_fit(scheme: Scheme, parts: dict[Role, StoredPart], message: str) -> None:
    with pytest.raises(UnsupportedQuantization) as caught:
        scheme.check(parts, module="m")
    assert message in str(caught.value)


def test_impossible_groups() -> None:
    with pytest.raises(UnsupportedQuantization, match="groups of 0"):
        Mxfp4(group_size=0)


def test_descriptions() -> None:
    schemes = (Mxfp8(), Mxfp4(), Mxfp4(group_size=16), Mxfp4Blocks())
    assert [scheme.describe() for scheme in schemes] == ["MXFP8", "MXFP4", "MXFP4 group 16", "MXFP4 blocks"]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
@pytest.mark.parametrize("result", [torch.float32, torch.bfloat16, torch.float16])
def test_every_code_under_every_exponent(dtype: torch.dtype, result: torch.dtype) -> None:
    exponents = torch.arange(256, dtype=torch.uint8)[:, None]
    powers = torch.tensor([e8m0_value(code) for code in range(256)])[:, None]
    bytewise = {
        Role.CODES: torch.arange(256, dtype=torch.uint8).expand(256, -1).contiguous().view(E4M3),
        Role.SCALE: exponents.expand(-1, 8).contiguous().view(dtype),
    }
    found = Mxfp8().dequantize(bytewise, shape=(256, 256), dtype=result)
    assert_same(found, (byte_table(E4M3) * powers).to(result))
    halves = {
        Role.CODES: torch.arange(256, dtype=torch.uint8).expand(256, -1),
        Role.SCALE: exponents.expand(-1, 16).contiguous().view(dtype),
    }
    pairs = torch.tensor([value for byte in range(256) for value in (E2M1[byte % 16], E2M1[byte // 16])])
    expected = (pairs * powers).to(result)
    assert_same(Mxfp4().dequantize(halves, shape=(256, 512), dtype=result), expected)
    halves[Role.CODES] = halves[Role.CODES].reshape(256, 16, 16)
    assert_same(Mxfp4Blocks().dequantize(halves, shape=(256, 512), dtype=result), expected)


def test_an_exponent_is_not_its_byte_as_a_number() -> None:
    codes = torch.full((5, 32), 1.0).to(E4M3)
    octets = torch.tensor([[0], [120], [127], [128], [255]], dtype=torch.uint8)
    found = Mxfp8().dequantize({Role.CODES: codes, Role.SCALE: octets}, shape=(5, 32))[:, 0]
    assert found[:4].tolist() == [2.0**-127, 2.0**-7, 1.0, 2.0]
    assert found[4].isnan()


def test_the_lower_half_of_a_byte_comes_first_and_experts_stay_apart() -> None:
    # Two experts of four rows and one group each, as gpt-oss stacks them.
    blocks = torch.zeros(2, 4, 1, 16, dtype=torch.uint8)
    blocks[1, 2, 0, :2] = torch.tensor([0x21, 0xF7])
    scales = torch.full((2, 4, 1), 127, dtype=torch.uint8)
    scales[1, 2] = 130
    values = Mxfp4Blocks().dequantize({Role.CODES: blocks[1], Role.SCALE: scales[1]}, shape=(4, 32))
    assert values[2, :5].tolist() == [4.0, 8.0, 48.0, -48.0, 0.0]
    assert int(values.count_nonzero()) == 4
    assert (
        int(Mxfp4Blocks().dequantize({Role.CODES: blocks[0], Role.SCALE: scales[0]}, shape=(4, 32)).count_nonzero())
        == 0
    )


@pytest.mark.parametrize(("scheme", "codes"), [(Mxfp8(), (8, 70)), (Mxfp4(), (8, 48)), (Mxfp4Blocks(), (8, 3, 16))])
def test_packing_values_gives_their_codes_back(scheme: Scheme, codes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    octets = torch.randint(0, 256, codes, dtype=torch.uint8)
    if isinstance(scheme, Mxfp8):
        octets[(octets & 0x7F) == 0x7F] = 0
        octets = octets.view(E4M3)
    parts = {Role.CODES: octets, Role.SCALE: torch.randint(100, 140, (8, 3), dtype=torch.uint8)}
    stored = {role: StoredPart(role, tensor.dtype, tuple(tensor.shape)) for role, tensor in parts.items()}
    values = scheme.dequantize(parts, shape=scheme.check(stored, module="m"))
    packed = scheme.pack(values, parts)
    assert packed.shape == octets.shape
    assert torch.equal(packed.view(torch.uint8), octets.view(torch.uint8))
