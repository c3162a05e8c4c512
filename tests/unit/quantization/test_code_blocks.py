"""Blocks of codes cover a weight once, whatever their size; words are cut where they must be."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.quantization import code_blocks
from headrace.quantization.bits import num_values, unpack_bits
from headrace.quantization.code_blocks import (
    Blocks,
    WorkAreas,
    columns_per_block,
    result_tensor,
    rows_per_block,
    slice_words,
    turned_word_blocks,
    word_blocks,
)

CPU = torch.device("cpu")
BITS = [2, 3, 4, 8]


def words(rows: int, columns: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31 - 1, (rows, columns), dtype=torch.int32)


def put_together(blocks: Blocks, rows: int, columns: int) -> torch.Tensor:
    """Return the codes of all blocks, after checking that each value came once."""
    whole, seen = torch.zeros(rows, columns), torch.zeros(rows, columns, dtype=torch.int32)
    for row, column, codes in blocks:
        place = slice(row, row + codes.shape[0]), slice(column, column + codes.shape[1])
        assert codes.is_contiguous()
        whole[place] = codes
        seen[place] += 1
    assert seen.eq(1).all()
    return whole


@pytest.mark.parametrize("block_values", [1, 40, 500, 1 << 17])
@pytest.mark.parametrize("zero", [0, 2, 200])
@pytest.mark.parametrize("bits", BITS)
def test_word_blocks_are_the_weight(bits: int, zero: int, block_values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_blocks, "_BLOCK_VALUES", block_values)
    stored = words(11, 6)
    found = put_together(word_blocks(stored, bits, zero), 11, num_values(6, bits))
    assert found.equal(unpack_bits(stored, bits).float() - zero)


@pytest.mark.parametrize("tile", [32, 64, 1024])
@pytest.mark.parametrize("block_values", [1, 200, 1 << 17])
@pytest.mark.parametrize("bits", BITS)
def test_turned_word_blocks_are_the_weight(
    bits: int, block_values: int, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_blocks, "_BLOCK_VALUES", block_values)
    monkeypatch.setattr(code_blocks.columns_per_block, "__defaults__", (tile,))
    stored = words(12, 7)
    found = put_together(turned_word_blocks(stored, bits, 3, 32), 7, num_values(12, bits))
    assert found.equal(unpack_bits(stored.t(), bits).float() - 3)


@pytest.mark.parametrize("bits", BITS)
def test_blocks_may_be_changed(bits: int) -> None:
    stored = words(12, 7)
    before = stored.clone()
    for blocks in (word_blocks(stored, bits, 1), turned_word_blocks(stored, bits, 1, 32)):
        for _, _, codes in blocks:
            codes.fill_(-1)
    assert stored.equal(before)


@given(columns=st.integers(1, 20_000), group_size=st.one_of(st.none(), st.integers(1, 5000)))
def test_tiles_hold_whole_groups_and_words_or_lie_in_a_group(columns: int, group_size: int | None) -> None:
    width = columns_per_block(columns, group_size, CPU)
    assert 1 <= width <= columns
    if width < columns:
        assert width % 32 == 0
        assert group_size is None or width % group_size == 0 or group_size % width == 0


def test_blocks_fit_into_the_cache_of_a_processor_and_are_larger_elsewhere() -> None:
    assert rows_per_block(4096, CPU) * 4096 == 1 << 17
    assert rows_per_block(1 << 20, CPU) == 1
    assert rows_per_block(4096, CPU, multiple=8) % 8 == 0
    assert rows_per_block(1 << 20, CPU, multiple=8) == 8
    assert rows_per_block(4096, torch.device("meta")) > rows_per_block(4096, CPU)
    assert columns_per_block(50_000, 128, torch.device("meta")) == 50_000


@given(data=st.data(), bits=st.sampled_from(BITS))
def test_words_are_cut_at_any_value(data: st.DataObject, bits: int) -> None:
    stored = words(3, 6)
    count = num_values(6, bits)
    start = data.draw(st.integers(0, count - 1))
    stop = data.draw(st.integers(start + 1, count))
    cut = slice_words(stored, bits, (start, stop))
    assert unpack_bits(cut, bits)[:, : stop - start].equal(unpack_bits(stored, bits)[:, start:stop])
    if start * bits % 32 == 0:
        assert cut.untyped_storage().data_ptr() == stored.untyped_storage().data_ptr()


def test_work_areas_are_used_again() -> None:
    areas = WorkAreas(CPU)
    first = areas.take("a", (4, 6), torch.int16)
    assert areas.take("a", (4, 6), torch.int16) is first
    assert areas.take("a", (3, 5), torch.int16).data_ptr() == first.data_ptr()
    assert areas.take("b", (4, 6), torch.int16).data_ptr() != first.data_ptr()
    larger = areas.take("a", (50, 60), torch.int16)
    assert larger.shape == (50, 60)
    assert larger.is_contiguous()


def test_a_larger_area_after_a_smaller_one_overlaps_nothing() -> None:
    areas = WorkAreas(CPU)
    areas.take("a", (2, 2), torch.int32).fill_(1)
    areas.take("a", (9, 9), torch.int32).fill_(2)
    again = areas.take("a", (2, 2), torch.int32).fill_(3)
    assert again.eq(3).all()


@pytest.mark.parametrize("shape", [(1, 1), (70, 90), (5, 200)])
def test_a_matrix_is_turned(shape: tuple[int, int]) -> None:
    wide = words(shape[0], shape[1] + 3)
    turned = WorkAreas(CPU).turned("x", wide[:, 1:-2])
    assert turned.is_contiguous()
    assert turned.equal(wide[:, 1:-2].t())


def test_a_result_is_made_or_checked() -> None:
    made = result_tensor((2, 3), torch.float16, CPU, None)
    assert (made.shape, made.dtype) == ((2, 3), torch.float16)
    assert result_tensor((2, 3), torch.float16, CPU, made) is made
    for wrong in (made.float(), made.t()):
        with pytest.raises(ValueError, match=r"out is .* the result torch.float16 \(2, 3\)"):
            result_tensor((2, 3), torch.float16, CPU, wrong)
