"""GPTQ: both versions, its orders of groups, contradictions, wrong parts, and slices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.code_definitions import assert_same
from tests.support.packed_integers import assert_slices, assert_stands_for, gptq_parts, integer_weight, words_of

from headrace.errors import UnsupportedQuantization
from headrace.quantization import code_blocks
from headrace.quantization.gptq import Gptq
from headrace.quantization.scheme import Role, StoredPart
from headrace.quantization.slices import slice_weight

BITS = [2, 3, 4, 8]


@pytest.mark.parametrize("g_idx", [True, False])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("group_size", [None, 16, 32])
@pytest.mark.parametrize("bits", BITS)
def test_values(bits: int, group_size: int | None, version: int, g_idx: bool) -> None:
    weight = integer_weight(13, 64, bits=bits, group_size=group_size, scale_dtype=torch.float16)
    scheme = Gptq(bits=bits, group_size=group_size, version=version, symmetric=False)
    assert_stands_for(scheme, gptq_parts(weight, version=version, g_idx=g_idx), weight.values())


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bits", BITS)
def test_symmetric_values(bits: int, scale_dtype: torch.dtype) -> None:
    weight = integer_weight(13, 64, bits=bits, group_size=16, symmetric=True, scale_dtype=scale_dtype)
    assert_stands_for(Gptq(bits=bits, group_size=16), gptq_parts(weight, version=1), weight.values())


def test_an_order_of_groups_is_followed() -> None:
    """E14: a real order."""
    index = [3, 0, 1, 2, 2, 1, 0, 3, 3, 3, 1, 1, 0, 0, 2, 2]
    weight = integer_weight(9, 16, group_size=4, index=index)
    assert_stands_for(Gptq(group_size=4, symmetric=False), gptq_parts(weight, version=1), weight.values())


def test_an_order_of_groups_survives_a_split_of_input_features() -> None:
    """E14: two ranks, each of which has all groups."""
    index = [3, 0, 1, 2, 2, 1, 0, 3, 3, 3, 1, 1, 0, 0, 2, 2]
    weight = integer_weight(9, 16, group_size=4, index=index)
    scheme, parts = Gptq(group_size=4, symmetric=False), gptq_parts(weight, version=1)
    halves = [slice_weight(scheme, parts, shape=(9, 16), columns=columns) for columns in ((0, 8), (8, 16))]
    assert [half.parts[Role.GROUP_INDEX].tolist() for half in halves] == [index[:8], index[8:]]
    assert_same(torch.cat([half.scheme.dequantize(half.parts, shape=(9, 8)) for half in halves], 1), weight.values())


def test_an_order_of_zeros_is_none_and_told() -> None:
    """E14: zero throughout beside several groups."""
    weight = integer_weight(8, 16, group_size=4, symmetric=True)
    parts, scheme = gptq_parts(weight, version=1), Gptq(group_size=4)
    assert scheme.check_values(parts, "m") is None
    parts[Role.GROUP_INDEX].zero_()
    assert scheme.check_values(parts, "m") == (
        "m.g_idx is 0 throughout, but there are 4 groups; groups are taken to follow one another."
    )
    assert_same(scheme.dequantize(parts, shape=(8, 16)), weight.values())
    one = gptq_parts(integer_weight(8, 16, symmetric=True), version=1)
    assert Gptq().check_values(one, "m") is None


def test_an_order_that_names_absent_groups_is_refused() -> None:
    parts = gptq_parts(integer_weight(8, 16, group_size=4, symmetric=True), version=1)
    parts[Role.GROUP_INDEX][0] = 4
    with pytest.raises(UnsupportedQuantization, match=r"m.g_idx names group 4. The weight has 4 groups"):
        Gptq(group_size=4).check_values(parts, "m")


def one_code(code: int, stored_zero: int) -> dict[Role, torch.Tensor]:
    """Return 8 × 8 codes that are all alike, under a scale of 1."""
    return {
        Role.CODES: words_of([[code] * 8] * 8, 4).t().contiguous(),
        Role.ZERO_POINT: words_of([[stored_zero] * 8], 4),
        Role.SCALE: torch.ones(1, 8),
    }


@pytest.mark.parametrize(
    ("version", "stored", "value"), [(1, 7, 0.0), (2, 8, 0.0), (1, 15, 8.0), (2, 0, 8.0), (1, 0, 7.0), (2, 15, -7.0)]
)
def test_versions_differ_by_one_and_wrap(version: int, stored: int, value: float) -> None:
    """E11 and E12: code 8 under stored zero points."""
    values = Gptq(version=version, symmetric=False).dequantize(one_code(8, stored), shape=(8, 8))
    assert values.eq(value).all()


@pytest.mark.parametrize(("version", "stored", "other"), [(1, 8, 2), (2, 7, 1)])
def test_symmetric_zero_points_of_the_other_version_are_read_as_it_and_told(
    version: int, stored: int, other: int
) -> None:
    """E11: the label is wrong or missing."""
    scheme, parts = Gptq(version=version), one_code(8, stored)
    assert scheme.dequantize(parts, shape=(8, 8)).eq(0).all()
    assert scheme.check_values(parts, "m") == (
        f"All zero points of m are stored as {stored}, as symmetric weights of version {other} have them, "
        f"but the checkpoint is labelled version {version}; read as version {other}."
    )
    asymmetric = Gptq(version=version, symmetric=False)
    assert asymmetric.dequantize(parts, shape=(8, 8)).eq(-1.0 if version == 1 else 1.0).all()
    warning = asymmetric.check_values(parts, "m")
    assert warning is not None
    assert warning.endswith(f"but the checkpoint is labelled version {version} and asymmetric; read by the label.")


@pytest.mark.parametrize(("version", "stored"), [(1, 7), (2, 8)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_right_labels_are_silent(version: int, stored: int, symmetric: bool) -> None:
    assert Gptq(version=version, symmetric=symmetric).check_values(one_code(3, stored), "m") is None


@pytest.mark.parametrize("bits", BITS)
def test_the_symmetric_zero_point_depends_on_the_size_of_codes(bits: int) -> None:
    weight = integer_weight(8, 32, bits=bits, symmetric=True)
    for version, label in ((1, 2), (2, 1)):
        parts, scheme = gptq_parts(weight, version=version), Gptq(bits=bits, version=label)
        assert_same(scheme.dequantize(parts, shape=(8, 32)), weight.values())
        assert scheme.check_values(parts, "m") is not None


def test_symmetric_weights_with_other_zero_points_are_refused() -> None:
    parts = gptq_parts(integer_weight(16, 64, group_size=16), version=1)
    with pytest.raises(UnsupportedQuantization) as caught:
        Gptq(group_size=16).check_values(parts, "m")
    assert str(caught.value) == (
        "m is said to be symmetric, but its zero points are stored as 0 to 15. Symmetric weights of version 1 have 7 throughout. "
        'If the zero points are right, write "sym": false into the quantization section of config.json.'
    )
    assert Gptq(group_size=16, symmetric=False).check_values(parts, "m") is None
    mixed = one_code(8, 7)
    mixed[Role.ZERO_POINT] = words_of([[7, 8] * 4], 4)
    with pytest.raises(UnsupportedQuantization, match="stored as 7 to 8"):
        Gptq().check_values(mixed, "m")


@pytest.mark.parametrize("dtype", [torch.float16, torch.int32, torch.int8, torch.int16, torch.float32])
@pytest.mark.parametrize("version", [1, 2])
def test_zero_points_may_be_unpacked(version: int, dtype: torch.dtype) -> None:
    """E13."""
    weight = integer_weight(16, 64, group_size=16)
    stored = torch.tensor(weight.zeros).t() - int(version == 1)
    parts = {**gptq_parts(weight, version=version), Role.ZERO_POINT: stored.to(dtype)}
    scheme = Gptq(group_size=16, version=version, symmetric=False)
    assert_stands_for(scheme, parts, weight.values())
    symmetric = integer_weight(16, 64, group_size=16, symmetric=True)
    parts = {**gptq_parts(symmetric, version=1), Role.ZERO_POINT: torch.full((4, 16), 8 - (version == 1), dtype=dtype)}
    assert Gptq(group_size=16, version=version).check_values(parts, "m") is None
    assert_same(Gptq(group_size=16, version=3 - version).dequantize(parts, shape=(16, 64)), symmetric.values())


def test_zero_points_between_codes_are_kept() -> None:
    parts = {**one_code(8, 0), Role.ZERO_POINT: torch.full((1, 8), 6.5)}
    assert Gptq(symmetric=False).dequantize(parts, shape=(8, 8)).eq(0.5).all()
    assert Gptq(symmetric=False, version=2).dequantize(parts, shape=(8, 8)).eq(1.5).all()


@pytest.mark.parametrize("tile", [32, 64])
@pytest.mark.parametrize("block_values", [1, 300, 3000])
@pytest.mark.parametrize("index", [None, [(7 * c) % 6 for c in range(192)]])
def test_values_do_not_depend_on_blocks(
    index: list[int] | None, block_values: int, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_blocks, "_BLOCK_VALUES", block_values)
    monkeypatch.setattr(code_blocks.columns_per_block, "__defaults__", (tile,))
    weight = integer_weight(37, 192, group_size=32, index=index)
    assert_stands_for(Gptq(group_size=32, symmetric=False), gptq_parts(weight, version=1), weight.values())


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    bits=st.sampled_from(BITS),
    group_size=st.sampled_from([None, 5, 16, 32]),
    version=st.sampled_from([1, 2]),
    has_order=st.booleans(),
    symmetric=st.booleans(),
)
def test_slices(
    data: st.DataObject, bits: int, group_size: int | None, version: int, has_order: bool, symmetric: bool
) -> None:
    columns = 64
    index = data.draw(st.permutations([c // group_size for c in range(columns)])) if group_size and has_order else None
    weight = integer_weight(19, columns, bits=bits, group_size=group_size, symmetric=symmetric, index=index)
    parts = gptq_parts(weight, version=version, g_idx=index is not None)
    scheme = Gptq(bits=bits, group_size=group_size, version=version, symmetric=symmetric)
    assert_slices(scheme, parts, weight.values(), data)


def headers(**changes: Any) -> dict[Role, StoredPart]:
    """Return right headers of a weight of 32 × 64 in groups of 16, with changes by role: (dtype, shape), or None for none."""
    right: dict[str, tuple[str, torch.dtype, tuple[int, ...]]] = {
        "codes": ("qweight", torch.int32, (8, 32)),
        "scale": ("scales", torch.float16, (4, 32)),
        "zero_point": ("qzeros", torch.int32, (4, 4)),
        "group_index": ("g_idx", torch.int32, (64,)),
    }
    found = {name: StoredPart(*part) for name, part in right.items() if changes.get(name, ()) is not None}
    for name, change in changes.items():
        if change is not None:
            found[name] = StoredPart(right[name][0] if name in right else name, *change)
    return {Role(name): part for name, part in found.items()}


def test_right_headers_pass() -> None:
    scheme = Gptq(group_size=16)
    assert scheme.check(headers(), module="m") == (32, 64)
    assert scheme.check(headers(group_index=None), module="m") == (32, 64)
    assert scheme.check(headers(zero_point=(torch.float16, (4, 32))), module="m") == (32, 64)
    assert scheme.check(headers(group_index=(torch.int32, (60,))), module="m") == (32, 60)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codes": None}, "m.qweight is missing. GPTQ v1 INT4 group 16 symmetric needs it; of this module there are: g_idx, qzeros, scales."),
        ({"scale": None}, "m.scales is missing."),
        ({"zero_point": None}, "m.qzeros is missing."),
        ({"codes": (torch.uint8, (8, 32))}, "m.qweight is uint8 [8, 32]. In GPTQ v1 INT4 group 16 symmetric it must be int32 [K * 4 / 32, N]."),
        ({"codes": (torch.int32, (8,))}, "m.qweight is int32 [8]."),
        ({"codes": (torch.int32, (64, 4))}, "m.scales is float16 [4, 32]. In GPTQ v1 INT4 group 16 symmetric it must be floating [ceil(K / 16), 4]."),
        ({"codes": (torch.int32, (9, 32))}, "m.scales is float16 [4, 32]. In GPTQ v1 INT4 group 16 symmetric it must be floating [ceil(K / 16), 32], where K is what 9 words in qweight hold."),
        ({"scale": (torch.int32, (4, 32))}, "m.scales is int32 [4, 32]."),
        ({"scale": (torch.float16, (32, 4))}, "m.scales is float16 [32, 4]."),
        ({"scale": (torch.float16, (5, 32))}, "m.scales is float16 [5, 32]."),
        ({"zero_point": (torch.int32, (4, 5))}, "m.qzeros is int32 [4, 5]. In GPTQ v1 INT4 group 16 symmetric it must be int32 [4, 4], or unpacked [4, 32]."),
        ({"zero_point": (torch.float16, (4, 4))}, "m.qzeros is float16 [4, 4]."),
        ({"zero_point": (torch.int64, (4, 32))}, "m.qzeros is int64 [4, 32]."),
        ({"group_index": (torch.int32, (65,))}, "m.scales is float16 [4, 32]."),
        ({"group_index": (torch.float32, (64,))}, "m.g_idx is float32 [64]."),
        ({"global_scale": (torch.float32, ())}, "m.global_scale is not a part of GPTQ v1 INT4 group 16 symmetric."),
        ({"pre_scale": (torch.float16, (32,))}, "m.pre_scale is float16 [32]."),
    ],
)  # fmt: skip
def test_wrong_headers_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedQuantization) as caught:
        Gptq(group_size=16).check(headers(**changes), module="m")
    assert message in str(caught.value)


def test_unknown_parameters_are_refused() -> None:
    with pytest.raises(UnsupportedQuantization, match=r"with 5 bits cannot be read\. Known are 2, 3, 4 or 8 bits"):
        Gptq(bits=5)
    with pytest.raises(UnsupportedQuantization, match="GPTQ version 3 cannot be read"):
        Gptq(version=3)
    with pytest.raises(UnsupportedQuantization, match="groups of -1"):
        Gptq(group_size=-1)


def test_description() -> None:
    assert Gptq(group_size=128, version=2, symmetric=False).describe() == "GPTQ v2 INT4 group 128 asymmetric"
    assert Gptq(bits=8).describe() == "GPTQ v1 INT8 per row symmetric"
