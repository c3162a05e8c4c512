"""compressed-tensors' pack-quantized: what it stands for, what it must be, and slices of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.code_definitions import assert_same
from tests.support.packed_integers import (
    assert_slices,
    assert_stands_for,
    integer_weight,
    packed_int_parts,
    stored_parts,
)

from headrace.errors import UnsupportedQuantization
from headrace.quantization import code_blocks
from headrace.quantization.int4 import PackedInt
from headrace.quantization.scheme import Role, StoredPart
from headrace.quantization.slices import slice_weight

ASYMMETRIC = PackedInt(group_size=8, symmetric=False)


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [None, 8, 32, 48])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_values(bits: int, group_size: int | None, symmetric: bool, scale_dtype: torch.dtype) -> None:
    weight = integer_weight(11, 96, bits=bits, group_size=group_size, symmetric=symmetric, scale_dtype=scale_dtype)
    scheme = PackedInt(bits=bits, group_size=group_size, symmetric=symmetric)
    assert_stands_for(scheme, packed_int_parts(weight, zero_points=not symmetric), weight.values())


def test_known_words() -> None:
    """E16: the values -8, -1, 0, 7, 1, 2, 3, -2, each stored plus 8."""
    packed = torch.tensor([[0x6BA9F870]], dtype=torch.int32)
    values = PackedInt().dequantize({Role.CODES: packed, Role.SCALE: torch.tensor([[0.5]])}, shape=(1, 8))
    assert values.tolist() == [[-4.0, -0.5, 0.0, 3.5, 0.5, 1.0, 1.5, -1.0]]


def test_zero_points_are_biased_and_packed_along_rows() -> None:
    """Rows 0 to 7 with zero points -8 to -1, all codes -8."""
    parts = {
        Role.CODES: torch.zeros(8, 1, dtype=torch.int32),
        Role.SCALE: torch.ones(8, 1),
        Role.ZERO_POINT: torch.tensor([[0x76543210]], dtype=torch.int32),
    }
    values = PackedInt(group_size=8, symmetric=False).dequantize(parts, shape=(8, 8))
    assert values[:, 0].tolist() == [0.0, -1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [None, 8])
def test_zero_points_may_be_unpacked(group_size: int | None, bits: int) -> None:
    weight = integer_weight(5, 24, bits=bits, group_size=group_size)
    parts = packed_int_parts(weight)
    parts[Role.ZERO_POINT] = (torch.tensor(weight.zeros) - 2 ** (bits - 1)).to(torch.int8)
    scheme = PackedInt(bits=bits, group_size=group_size, symmetric=False)
    assert_stands_for(scheme, parts, weight.values())
    if group_size is None:
        parts = {**parts, Role.SCALE: weight.scale[:, 0], Role.ZERO_POINT: parts[Role.ZERO_POINT][:, 0]}
        assert_stands_for(scheme, parts, weight.values())


@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_scale_may_serve_all_rows(shape: tuple[int, ...]) -> None:
    weight = integer_weight(5, 24, symmetric=True)
    weight = replace(weight, scale=torch.full((5, 1), 0.25))
    parts = {**packed_int_parts(weight, zero_points=False), Role.SCALE: torch.full(shape, 0.25)}
    assert_stands_for(PackedInt(), parts, weight.values())


def test_an_order_of_groups_is_followed() -> None:
    index = [2, 0, 1, 1, 0, 2, 2, 2, 0, 0, 1, 1]
    weight = integer_weight(9, 12, group_size=4, index=index)
    scheme = PackedInt(group_size=4, symmetric=False)
    assert_stands_for(scheme, packed_int_parts(weight, g_idx=True), weight.values())


@pytest.mark.parametrize("unwritten", [0, -1])
def test_an_order_that_was_never_written_is_none(unwritten: int) -> None:
    weight = integer_weight(9, 12, group_size=4)
    parts = packed_int_parts(weight, g_idx=True)
    parts[Role.GROUP_INDEX].fill_(unwritten)
    scheme = PackedInt(group_size=4, symmetric=False)
    assert_same(scheme.dequantize(parts, shape=(9, 12)), weight.values())
    told = "m.weight_g_idx is 0 throughout, but there are 3 groups; groups are taken to follow one another."
    assert scheme.check_values(parts, "m") == (told if unwritten == 0 else None)


@pytest.mark.parametrize("shape_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(("group_size", "known"), [(16, 16), (4, 12), (None, 16)])
def test_a_partly_used_last_word_is_trimmed(group_size: int | None, known: int, shape_dtype: torch.dtype) -> None:
    """E16: 12 columns in two words. Full groups tell the size before ``weight_shape`` is read, where they are small enough."""
    weight = integer_weight(2, 12, group_size=group_size, symmetric=True)
    parts = packed_int_parts(weight, zero_points=False)
    parts[Role.SHAPE] = parts[Role.SHAPE].to(shape_dtype)
    scheme = PackedInt(group_size=group_size)
    assert scheme.check(stored_parts(parts), module="m") == (2, known)
    for asked in (12, 16):
        assert_same(scheme.dequantize(parts, shape=(2, asked)), weight.values())
    out = torch.zeros(2, 12)
    assert scheme.dequantize(parts, shape=(2, known), out=out) is out
    assert_same(out, weight.values())
    del parts[Role.SHAPE]
    assert_same(scheme.dequantize(parts, shape=(2, 12)), weight.values())
    assert scheme.pack(weight.values(), parts).equal(parts[Role.CODES])


@pytest.mark.parametrize("block_values", [1, 100, 1000])
def test_values_do_not_depend_on_blocks(block_values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_blocks, "_BLOCK_VALUES", block_values)
    weight = integer_weight(21, 96, group_size=16)
    assert_stands_for(PackedInt(group_size=16, symmetric=False), packed_int_parts(weight), weight.values())


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    bits=st.sampled_from([2, 4, 8]),
    group_size=st.sampled_from([None, 5, 8, 16]),
    symmetric=st.booleans(),
    has_order=st.booleans(),
)
def test_slices(data: st.DataObject, bits: int, group_size: int | None, symmetric: bool, has_order: bool) -> None:
    columns = 80
    index = data.draw(st.permutations([c // group_size for c in range(columns)])) if group_size and has_order else None
    weight = integer_weight(19, columns, bits=bits, group_size=group_size, symmetric=symmetric, index=index)
    parts = packed_int_parts(weight, zero_points=not symmetric, g_idx=index is not None)
    scheme = PackedInt(bits=bits, group_size=group_size, symmetric=symmetric)
    assert_slices(scheme, parts, weight.values(), data)


def test_slices_of_input_features_take_their_own_scales() -> None:
    """E03: two ranks, the second of which begins inside a group."""
    weight = integer_weight(8, 64, group_size=32, symmetric=True)
    scheme, parts = PackedInt(group_size=32), packed_int_parts(weight, zero_points=False)
    halves = [slice_weight(scheme, parts, shape=(8, 64), columns=columns) for columns in ((0, 40), (40, 64))]
    assert [half.parts[Role.SCALE].shape[1] for half in halves] == [2, 1]
    assert_same(
        torch.cat([half.scheme.dequantize(half.parts, shape=half.shape) for half in halves], 1), weight.values()
    )
    assert [half.parts[Role.SHAPE].tolist() for half in halves] == [[8, 40], [8, 24]]


def test_aligned_slices_are_views() -> None:
    weight = integer_weight(8, 64, group_size=32, symmetric=True)
    parts = packed_int_parts(weight, zero_points=False)
    cut = slice_weight(PackedInt(group_size=32), parts, shape=(8, 64), rows=(3, 7), columns=(32, 64))
    for role in (Role.CODES, Role.SCALE):
        assert cut.parts[role].untyped_storage().data_ptr() == parts[role].untyped_storage().data_ptr()


def headers(**changes: Any) -> dict[Role, StoredPart]:
    """Return right headers of an asymmetric weight of 16 × 24 in groups of 8, with changes by role: (dtype, shape), or None for none."""
    right: dict[Role, tuple[str, torch.dtype, tuple[int, ...]]] = {
        Role.CODES: ("weight_packed", torch.int32, (16, 3)),
        Role.SCALE: ("weight_scale", torch.bfloat16, (16, 3)),
        Role.ZERO_POINT: ("weight_zero_point", torch.int32, (2, 3)),
        Role.SHAPE: ("weight_shape", torch.int64, (2,)),
    }
    suffixes = {Role.GROUP_INDEX: "weight_g_idx", Role.GLOBAL_SCALE: "weight_scale_2"}
    found = {role: StoredPart(*part) for role, part in right.items()}
    for name, change in changes.items():
        role = Role(name)
        if change is None:
            del found[role]
        else:
            suffix = found[role].suffix if role in found else suffixes.get(role, name)
            found[role] = StoredPart(suffix, *change)
    return found


def test_right_headers_pass() -> None:
    assert ASYMMETRIC.check(headers(), module="m") == (16, 24)
    assert ASYMMETRIC.check(headers(zero_point=(torch.int8, (16, 3))), module="m") == (16, 24)
    assert ASYMMETRIC.check(headers(shape=None), module="m") == (16, 24)
    assert ASYMMETRIC.check(headers(pre_scale=(torch.bfloat16, (24,))), module="m") == (16, 24)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codes": None}, "m.weight_packed is missing. INT4 group 8 asymmetric needs it; of this module there are: weight_scale, weight_shape, weight_zero_point."),
        ({"scale": None}, "m.weight_scale is missing."),
        ({"zero_point": None}, "m.weight_zero_point is missing."),
        ({"codes": (torch.uint8, (16, 3))}, "m.weight_packed is uint8 [16, 3]. In INT4 group 8 asymmetric it must be int32 [N, ceil(K * 4 / 32)]."),
        ({"codes": (torch.int32, (16, 3, 1))}, "m.weight_packed is int32 [16, 3, 1]."),
        ({"codes": (torch.int32, (0, 3))}, "m.weight_packed is int32 [0, 3]."),
        ({"codes": (torch.int32, (16, 2))}, "m.weight_scale is bfloat16 [16, 3]."),
        ({"codes": (torch.int32, (16, 4))}, "m.weight_scale is bfloat16 [16, 3]."),
        ({"scale": (torch.float8_e4m3fn, (16, 3))}, "m.weight_scale is float8_e4m3fn [16, 3]."),
        ({"scale": (torch.bfloat16, (15, 3))}, "m.weight_scale is bfloat16 [15, 3]. In INT4 group 8 asymmetric it must be floating [16, ceil(K / 8)]."),
        ({"scale": (torch.bfloat16, (16,))}, "m.weight_scale is bfloat16 [16]."),
        ({"zero_point": (torch.int32, (16, 3))}, "m.weight_zero_point is int32 [16, 3]. In INT4 group 8 asymmetric it must be int32 [2, 3] packed along rows, or int8 [16, 3]."),
        ({"zero_point": (torch.int8, (2, 3))}, "m.weight_zero_point is int8 [2, 3]."),
        ({"zero_point": (torch.uint8, (16, 3))}, "m.weight_zero_point is uint8 [16, 3]."),
        ({"shape": (torch.float32, (2,))}, "m.weight_shape is float32 [2]."),
        ({"shape": (torch.int64, (3,))}, "m.weight_shape is int64 [3]."),
        ({"group_index": (torch.int32, (25,))}, "m.weight_scale is bfloat16 [16, 3]."),
        ({"group_index": (torch.int16, (24,))}, "m.weight_g_idx is int16 [24]."),
        ({"group_index": (torch.int32, (24, 1))}, "m.weight_g_idx is int32 [24, 1]."),
        ({"global_scale": (torch.float32, ())}, "m.weight_scale_2 is not a part of INT4 group 8 asymmetric. That format has codes, scale, zero_point, group_index and shape only; this is its global_scale."),
        ({"pre_scale": (torch.bfloat16, (16,))}, "m.pre_scale is bfloat16 [16]. In INT4 group 8 asymmetric it must be floating [24], one per input feature."),
        ({"pre_scale": (torch.int32, (24,))}, "m.pre_scale is int32 [24]."),
        ({"input_scale": (torch.float32, (2,))}, "m.input_scale is float32 [2]."),
    ],
)  # fmt: skip
def test_wrong_headers_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedQuantization) as caught:
        ASYMMETRIC.check(headers(**changes), module="m")
    assert message in str(caught.value)


def test_per_row_scales_must_be_per_row() -> None:
    with pytest.raises(UnsupportedQuantization, match=r"m.weight_scale is bfloat16 \[16, 3\].*floating \[16, 1\]"):
        PackedInt().check(headers(zero_point=None), module="m")


@pytest.mark.parametrize("bits", [1, 3, 5, 6, 7, 16])
def test_sizes_that_were_packed_in_two_ways_are_refused(bits: int) -> None:
    with pytest.raises(UnsupportedQuantization, match=f"with {bits} bits cannot be read. Known are 2, 4 or 8 bits"):
        PackedInt(bits=bits)


def test_empty_groups_are_refused() -> None:
    with pytest.raises(UnsupportedQuantization, match="groups of 0"):
        PackedInt(group_size=0)


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        (PackedInt(group_size=32), "INT4 group 32 symmetric"),
        (PackedInt(bits=8), "INT8 per row symmetric"),
        (ASYMMETRIC, "INT4 group 8 asymmetric"),
    ],
)
def test_description(scheme: PackedInt, words: str) -> None:
    assert scheme.describe() == words


@pytest.mark.parametrize("stored", [[9, 12], [8, 16], [8, 17], [8, 8]])
def test_a_stored_shape_that_cannot_be_is_refused(stored: list[int]) -> None:
    weight = integer_weight(8, 12, symmetric=True)
    parts = packed_int_parts(weight, zero_points=False)
    assert PackedInt().check_values(parts, "m") is None
    parts[Role.SHAPE] = torch.tensor(stored)
    if stored == [8, 16]:
        assert PackedInt().check_values(parts, "m") is None
        return
    with pytest.raises(UnsupportedQuantization) as caught:
        PackedInt().check_values(parts, "m")
    assert f"m.weight_shape says {stored}, but weight_packed is [8, 2]." in str(caught.value)


@pytest.mark.parametrize("absent", [3, -1])
def test_an_order_that_names_absent_groups_is_refused(absent: int) -> None:
    weight = integer_weight(8, 12, group_size=4, symmetric=True)
    parts = packed_int_parts(weight, zero_points=False, g_idx=True)
    parts[Role.GROUP_INDEX][3] = absent
    with pytest.raises(
        UnsupportedQuantization, match=rf"m\.weight_g_idx names group {absent}\. The weight has 3 groups"
    ):
        PackedInt(group_size=4).check_values(parts, "m")


def test_zero_points_of_a_symmetric_weight_are_subtracted_with_a_warning() -> None:
    weight = integer_weight(8, 12, group_size=4)
    parts, scheme = packed_int_parts(weight), PackedInt(group_size=4)
    assert scheme.check_values(parts, "m") == (
        "m is said to be symmetric, but has a weight_zero_point that is not 0; it is subtracted, as the tensors say."
    )
    assert_stands_for(scheme, parts, weight.values())
    symmetric = integer_weight(8, 12, group_size=4, symmetric=True)
    assert scheme.check_values(packed_int_parts(symmetric), "m") is None
    assert PackedInt(group_size=4, symmetric=False).check_values(parts, "m") is None
