"""AWQ's gemm layout: the order of rows in a word, zero points, wrong parts, and slices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.code_definitions import assert_same
from tests.support.packed_integers import assert_slices, assert_stands_for, awq_parts, integer_weight

from headrace.errors import UnsupportedQuantization
from headrace.quantization import awq, code_blocks
from headrace.quantization.awq import Awq
from headrace.quantization.scheme import Role, StoredPart
from headrace.quantization.slices import slice_weight


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [None, 16, 24, 96])
def test_values(group_size: int | None, symmetric: bool, scale_dtype: torch.dtype) -> None:
    weight = integer_weight(16, 96, group_size=group_size, symmetric=symmetric, scale_dtype=scale_dtype)
    assert_stands_for(Awq(group_size=group_size), awq_parts(weight), weight.values())


def test_rows_lie_in_a_word_in_their_own_order() -> None:
    parts = {
        Role.CODES: torch.tensor([[0x75316420]], dtype=torch.int32),
        Role.ZERO_POINT: torch.tensor([[0]], dtype=torch.int32),
        Role.SCALE: torch.ones(1, 8),
    }
    values = Awq(group_size=1).dequantize(parts, shape=(8, 1))
    assert values.flatten().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.int32, torch.int8, torch.uint8])
def test_zero_points_may_be_unpacked(dtype: torch.dtype) -> None:
    """E13."""
    weight = integer_weight(16, 64, group_size=16)
    parts = {**awq_parts(weight), Role.ZERO_POINT: torch.tensor(weight.zeros).t().to(dtype)}
    assert_stands_for(Awq(group_size=16), parts, weight.values())


def test_without_zero_points_8_is_subtracted() -> None:
    weight = integer_weight(16, 64, group_size=16, symmetric=True)
    scheme, parts = Awq(group_size=16, has_zero_point=False), awq_parts(weight, zero_points=False)
    assert_stands_for(scheme, parts, weight.values())
    assert scheme.check_values(parts, "m") is None
    assert scheme.check_values(awq_parts(weight), "m") is None


def test_zero_points_that_should_not_be_there_are_subtracted_with_a_warning() -> None:
    weight = integer_weight(16, 64, group_size=16)
    scheme, parts = Awq(group_size=16, has_zero_point=False), awq_parts(weight)
    assert_stands_for(scheme, parts, weight.values())
    assert scheme.check_values(parts, "m") == (
        "m is said to have no zero points, but has qzeros other than 8; they are subtracted, as the tensors say."
    )
    assert Awq(group_size=16).check_values(parts, "m") is None


@pytest.mark.parametrize("tile", [32, 64])
@pytest.mark.parametrize("block_values", [1, 300, 3000])
def test_values_do_not_depend_on_blocks(block_values: int, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_blocks, "_BLOCK_VALUES", block_values)
    monkeypatch.setattr(awq, "_TILE_COLUMNS", tile)
    weight = integer_weight(40, 192, group_size=32)
    assert_stands_for(Awq(group_size=32), awq_parts(weight), weight.values())


@settings(max_examples=60, deadline=None)
@given(data=st.data(), group_size=st.sampled_from([None, 5, 16, 80]), zero_points=st.booleans())
def test_slices(data: st.DataObject, group_size: int | None, zero_points: bool) -> None:
    weight = integer_weight(24, 80, group_size=group_size, symmetric=not zero_points)
    scheme = Awq(group_size=group_size, has_zero_point=zero_points)
    assert_slices(scheme, awq_parts(weight, zero_points=zero_points), weight.values(), data)


def test_aligned_slices_are_views() -> None:
    parts = awq_parts(integer_weight(24, 64, group_size=16))
    cut = slice_weight(Awq(group_size=16), parts, shape=(24, 64), rows=(8, 24), columns=(16, 64))
    assert cut.parts[Role.CODES].untyped_storage().data_ptr() == parts[Role.CODES].untyped_storage().data_ptr()
    assert Role.GROUP_INDEX not in cut.parts
    assert_same(
        cut.scheme.dequantize(cut.parts, shape=(16, 48)),
        Awq(group_size=16).dequantize(parts, shape=(24, 64))[8:, 16:],
    )


def headers(**changes: Any) -> dict[Role, StoredPart]:
    """Return right headers of a weight of 32 × 64 in groups of 16, with changes by role: (dtype, shape), or None for none."""
    right: dict[str, tuple[str, torch.dtype, tuple[int, ...]]] = {
        "codes": ("qweight", torch.int32, (64, 4)),
        "scale": ("scales", torch.float16, (4, 32)),
        "zero_point": ("qzeros", torch.int32, (4, 4)),
    }
    found = {name: StoredPart(*part) for name, part in right.items() if changes.get(name, ()) is not None}
    for name, change in changes.items():
        if change is not None:
            found[name] = StoredPart(right[name][0] if name in right else name, *change)
    return {Role(name): part for name, part in found.items()}


def test_right_headers_pass() -> None:
    scheme = Awq(group_size=16)
    assert scheme.check(headers(), module="m") == (32, 64)
    assert scheme.check(headers(zero_point=(torch.float16, (4, 32))), module="m") == (32, 64)
    assert Awq(group_size=16, has_zero_point=False).check(headers(zero_point=None), module="m") == (32, 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codes": None}, "m.qweight is missing. AWQ INT4 group 16 asymmetric needs it"),
        ({"scale": None}, "m.scales is missing."),
        ({"zero_point": None}, "m.qzeros is missing."),
        ({"codes": (torch.int16, (64, 4))}, "m.qweight is int16 [64, 4]. In AWQ INT4 group 16 asymmetric it must be int32 [K, N / 8]."),
        ({"codes": (torch.int32, (64, 0))}, "m.qweight is int32 [64, 0]."),
        ({"codes": (torch.int32, (8, 32))}, "m.scales is float16 [4, 32]. In AWQ INT4 group 16 asymmetric it must be floating [1, 256]."),
        ({"scale": (torch.float16, (5, 32))}, "m.scales is float16 [5, 32]."),
        ({"scale": (torch.int8, (4, 32))}, "m.scales is int8 [4, 32]."),
        ({"zero_point": (torch.int32, (4, 3))}, "m.qzeros is int32 [4, 3]. In AWQ INT4 group 16 asymmetric it must be int32 [4, 4], or unpacked [4, 32]."),
        ({"zero_point": (torch.int64, (4, 32))}, "m.qzeros is int64 [4, 32]."),
        ({"group_index": (torch.int32, (64,))}, "m.group_index is not a part of AWQ INT4 group 16 asymmetric."),
        ({"pre_scale": (torch.float16, (32,))}, "m.pre_scale is float16 [32]."),
    ],
)  # fmt: skip
def test_wrong_headers_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedQuantization) as caught:
        Awq(group_size=16).check(headers(**changes), module="m")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {
            "codes": (torch.int32, (32, 32)),
            "zero_point": (torch.int32, (32, 2)),
            "scale": (torch.float16, (32, 16)),
        },
        {
            "codes": (torch.int16, (8, 256)),
            "zero_point": (torch.float16, (16, 32)),
            "scale": (torch.float16, (16, 32)),
        },
    ],
    ids=["gemv", "gemv_fast"],
)
def test_other_layouts_are_refused(changes: dict[str, Any]) -> None:
    """A weight of 32 × 256 in groups of 64, in AutoAWQ's layouts for other kernels."""
    with pytest.raises(UnsupportedQuantization, match="In AWQ INT4 group 64 asymmetric it must be"):
        Awq(group_size=64).check(headers(**changes), module="m")


def test_unknown_parameters_are_refused() -> None:
    with pytest.raises(UnsupportedQuantization, match=r"with 8 bits cannot be read\. Known are 4 bits"):
        Awq(bits=8)
    with pytest.raises(UnsupportedQuantization, match="groups of 0"):
        Awq(group_size=0)


def test_description() -> None:
    assert Awq(group_size=128).describe() == "AWQ INT4 group 128 asymmetric"
    assert Awq(group_size=None, has_zero_point=False).describe() == "AWQ INT4 per row symmetric"
