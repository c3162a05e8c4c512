"""Which tensors are wanted, by name."""

from __future__ import annotations

import re

import pytest

from headrace.checkpoint.entry import Entry
from headrace.errors import InvalidSetting
from headrace.streaming.selection import Wanted, select_entries

NAMES = [
    "model.layers.0.mlp.gate.weight",
    "model.layers.0.mlp.gate_proj.weight",
    "model.layers.10.mlp.gate.weight",
    "lm_head.weight",
]
ENTRIES = {name: Entry(name, "U8", (1,), "f", place, place + 1) for place, name in enumerate(NAMES)}


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        (None, None, [0, 1, 2, 3]),
        ("lm_head*", None, [3]),
        (["*.gate.*", "lm_head.weight"], None, [0, 2, 3]),
        ("model.layers.?.*", None, [0, 1]),
        (None, "model.*", [3]),
        ("model.*", "*gate_proj*", [0, 2]),
        (lambda name: "10" in name, None, [2]),
        (re.compile(r"layers\.1\d"), None, [2]),
        ([re.compile("^lm"), "*.0.mlp.gate.*"], None, [0, 3]),
        (None, re.compile("gate_proj|head"), [0, 2]),
        (None, lambda name: name.startswith("m"), [3]),
    ],
)
def test_selection(include: Wanted, exclude: Wanted, expected: list[int]) -> None:
    assert [entry.name for entry in select_entries(ENTRIES, include=include, exclude=exclude)] == [
        NAMES[place] for place in expected
    ]


def test_selecting_nothing_is_an_error_that_shows_a_name() -> None:
    with pytest.raises(InvalidSetting, match=r"No tensor is left.*4 names.*model\.layers\.0\.mlp\.gate\.weight"):
        select_entries(ENTRIES, include="gate")


def test_an_empty_checkpoint_gives_an_empty_selection() -> None:
    assert select_entries({}, include="anything") == []


def test_what_is_no_pattern_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="3 is not a pattern"):
        select_entries(ENTRIES, include=[3])  # type: ignore[list-item]
