"""Which stored tensors would be taken for plain numbers though they are packed."""

from __future__ import annotations

import pytest

from headrace.checkpoint import Entry
from headrace.engines.packing import find_bare, is_packed


def entries_of(**dtypes: str) -> dict[str, Entry]:
    return {
        name: Entry(name, dtype, (4, 4), "model.safetensors", 0, 16)
        for name, dtype in ((name.replace("__", "."), dtype) for name, dtype in dtypes.items())
    }


@pytest.mark.parametrize(
    ("dtypes", "targets", "bare"),
    [
        ({"a__weight": "BF16"}, {"a.weight": "a.weight"}, []),
        ({"a__weight": "F8_E4M3"}, {"a.weight": "a.weight"}, ["a.weight (F8_E4M3)"]),
        ({"a__weight": "U8"}, {"a.weight": "a.weight"}, ["a.weight (U8)"]),
        # A scale that is used by the same parameter unpacks it; one that goes elsewhere, or belongs to another module, does not.
        (
            {"a__weight": "F8_E4M3", "a__weight_scale_inv": "F32"},
            {"a.weight": "a.weight", "a.weight_scale_inv": "a.weight"},
            [],
        ),
        (
            {"a__weight": "F8_E4M3", "a__weight_scale_inv": "F32"},
            {"a.weight": "a.weight", "a.weight_scale_inv": "a.weight_scale_inv"},
            ["a.weight (F8_E4M3)"],
        ),
        (
            {"e__0__up__weight": "F8_E4M3", "e__0__up__weight_scale_inv": "F32", "e__1__up__weight": "F8_E4M3"},
            {"e.0.up.weight": "e.up", "e.0.up.weight_scale_inv": "e.up", "e.1.up.weight": "e.up"},
            ["e.1.up.weight (F8_E4M3)"],
        ),
        ({"e__up_blocks": "U8", "e__up_scales": "U8"}, {"e.up_blocks": "e.up", "e.up_scales": "e.up"}, []),
        # Packed parameters of a quantizer's own are no plain ones.
        ({"q__weight": "F8_E4M3"}, {"q.weight": "q.weight"}, []),
    ],
)
def test_bare_packed_entries(dtypes: dict[str, str], targets: dict[str, str], bare: list[str]) -> None:
    plain = frozenset({"a.weight", "e.up"})
    assert find_bare(targets, entries_of(**dtypes), plain) == bare


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F8_E8M0", "F6_E2M3", "F4", "U8", "I8", "I32"])
def test_what_needs_a_scale_is_packed(dtype: str) -> None:
    assert is_packed(dtype)


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32", "F64", "BOOL", "I64"])
def test_what_is_a_number_as_it_stands_is_not(dtype: str) -> None:
    assert not is_packed(dtype)
