"""Dense packing of small numbers, against numbers packed one by one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.packed_integers import words_of

from headrace.quantization.bits import num_values, num_words, pack_bits, unpack_bits

BITS = range(1, 9)


@pytest.mark.parametrize(
    ("values", "bits", "word"),
    [
        (list(range(8)), 4, 0x76543210),
        ([0, 2, 4, 6, 1, 3, 5, 7], 4, 0x75316420),
        ([value + 8 for value in (-8, -1, 0, 7, 1, 2, 3, -2)], 4, 0x6BA9F870),
        ([1, 2, 3, 255], 8, 0xFF030201),
        ([3, 0, 1, 2] * 4, 2, 0x93939393),
    ],
)
def test_known_words(values: list[int], bits: int, word: int) -> None:
    packed = pack_bits(torch.tensor([values]), bits)
    assert packed.dtype is torch.int32
    assert packed.tolist() == [[word - (1 << 32) if word >> 31 else word]]
    assert unpack_bits(packed, bits).tolist() == [values]


@given(data=st.data(), bits=st.sampled_from(BITS), rows=st.integers(1, 4), count=st.integers(1, 70))
def test_packing_and_unpacking_follow_the_definition(data: st.DataObject, bits: int, rows: int, count: int) -> None:
    row = st.lists(st.integers(0, 2**bits - 1), min_size=count, max_size=count)
    values = data.draw(st.lists(row, min_size=rows, max_size=rows))
    words = words_of(values, bits)
    assert words.shape[1] == num_words(count, bits)
    assert pack_bits(torch.tensor(values), bits).equal(words)
    unpacked = unpack_bits(words, bits)
    assert unpacked.dtype is torch.uint8
    assert unpacked.shape == (rows, num_values(words.shape[1], bits))
    assert unpacked[:, :count].tolist() == values


@pytest.mark.parametrize("bits", BITS)
def test_words_that_lie_apart_are_read_right(bits: int) -> None:
    words = torch.randint(-(2**31), 2**31 - 1, (6, 7), dtype=torch.int32)
    expected = unpack_bits(words.clone(), bits)
    assert unpack_bits(words.t().contiguous().t(), bits).equal(expected)
    assert unpack_bits(torch.cat([words, words], 1)[:, :7], bits).equal(expected)
    for column in range(7):  # a dimension of one element may have any stride
        one = words[:, column : column + 1]
        assert unpack_bits(one, bits).equal(unpack_bits(one.clone(), bits))
        assert unpack_bits(one.t(), bits).equal(unpack_bits(one.t().clone(), bits))
        assert unpack_bits(one[:1].t(), bits).equal(unpack_bits(one[:1].clone(), bits))


@pytest.mark.parametrize("bits", BITS)
def test_all_words_come_back(bits: int) -> None:
    words = torch.randint(-(2**31), 2**31 - 1, (3, 3 * bits), dtype=torch.int32)
    assert pack_bits(unpack_bits(words, bits), bits).equal(words)
