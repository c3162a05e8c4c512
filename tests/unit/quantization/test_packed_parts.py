"""How many input features packed words stand for, and what orders of groups can be. Checks of single parts are tried with the schemes that make them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import UnsupportedQuantization
from headrace.quantization.bits import num_words
from headrace.quantization.packed_parts import columns_of, index_warning, require_parameters, slice_input_parts
from headrace.quantization.scheme import Role

SIZES = st.sampled_from([2, 3, 4, 8])


def groups_of(columns: int, group_size: int | None) -> int:
    return 1 if group_size is None else -(-columns // group_size)


@given(columns=st.integers(1, 500), bits=SIZES, group_size=st.one_of(st.none(), st.integers(1, 200)))
def test_columns_are_known_up_to_the_last_word_or_group(columns: int, bits: int, group_size: int | None) -> None:
    words, groups = num_words(columns, bits), groups_of(columns, group_size)
    found = columns_of(words, bits, num_groups=groups, group_size=group_size)
    assert found is not None
    assert found >= columns
    assert (num_words(found, bits), groups_of(found, group_size)) == (words, groups)
    if group_size is not None and columns % group_size == 0:
        assert found == columns
    assert columns_of(words, bits, num_groups=groups, group_size=group_size, index_length=columns) == columns


@given(words=st.integers(1, 60), bits=SIZES, groups=st.integers(1, 60), group_size=st.integers(1, 60))
def test_sizes_that_do_not_fit_are_no_columns(words: int, bits: int, groups: int, group_size: int) -> None:
    fitting = [
        columns
        for columns in range(1, words * 32 // bits + 1)
        if (num_words(columns, bits), groups_of(columns, group_size)) == (words, groups)
    ]
    found = columns_of(words, bits, num_groups=groups, group_size=group_size)
    assert found == (max(fitting) if fitting else None)
    for length in (fitting[0], fitting[0] - 1, fitting[-1] + 1) if fitting else (1, words * 32 // bits):
        expected = length if length in fitting else None
        found = columns_of(words, bits, num_groups=groups, group_size=group_size, index_length=length)
        assert found == expected


@pytest.mark.parametrize(
    ("index", "told"),
    [
        ([0, 0, 1, 1], None),
        ([1, 0, 1, 0], None),
        ([-1, -1, -1, -1], None),
        ([0, 0, 0, 0], "m.g_idx is 0 throughout, but there are 2 groups; groups are taken to follow one another."),
    ],
)
def test_orders_of_groups(index: list[int], told: str | None) -> None:
    assert index_warning(torch.tensor(index), 2, "m.g_idx") == told


@pytest.mark.parametrize(
    ("index", "group"), [([0, 2, 1, 1], 2), ([0, -1, 1, 1], -1), ([-2, -2, -2, -1], -2), ([-2], -2)]
)
def test_orders_that_name_absent_groups(index: list[int], group: int) -> None:
    with pytest.raises(UnsupportedQuantization) as caught:
        index_warning(torch.tensor(index), 2, "m.g_idx")
    assert caught.value.what == f"m.g_idx names group {group}."


def test_with_one_group_there_is_no_order() -> None:
    assert index_warning(None, 3, "m.g_idx") is None
    assert index_warning(torch.tensor([7, 7]), 1, "m.g_idx") is None


def test_parts_of_the_input_are_cut_with_its_features() -> None:
    parts = {
        Role.PRE_SCALE: torch.arange(6.0),
        Role.INPUT_SCALE: torch.tensor(2.0),
        Role.INPUT_ZERO_POINT: torch.tensor(3),
        Role.CODES: torch.zeros(2, 6),
    }
    cut = slice_input_parts(parts, (2, 5))
    assert cut.keys() == parts.keys() - {Role.CODES}
    assert cut[Role.PRE_SCALE].tolist() == [2.0, 3.0, 4.0]
    assert cut[Role.INPUT_SCALE] is parts[Role.INPUT_SCALE]


def test_parameters_that_cannot_be_read_are_named() -> None:
    require_parameters("GPTQ", group_size=None, bits=8, known_bits=(4, 8))
    with pytest.raises(UnsupportedQuantization) as caught:
        require_parameters("GPTQ", group_size=None, bits=6, known_bits=(2, 4, 8))
    assert str(caught.value) == (
        "Weights of GPTQ with 6 bits cannot be read. Known are 2, 4 or 8 bits. "
        "Use a checkpoint of the same model with one of these."
    )
    with pytest.raises(UnsupportedQuantization, match="Weights of GPTQ are said to have groups of 0"):
        require_parameters("GPTQ", group_size=0)
