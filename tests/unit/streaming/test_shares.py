"""Who reads what: every byte once, balanced, in blocks that fit."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.checkpoint.entry import Entry
from headrace.streaming.memory import ALIGNMENT, SHARE_BELOW_BYTES, SLAB_BYTES
from headrace.streaming.shares import parts_of, plan_windows
from headrace.units import MIB

SMALL = st.integers(0, 300_000)
LARGE = st.integers(MIB, 12 * MIB)
SIZES = st.lists(st.one_of(SMALL, LARGE), max_size=25)


def entries_of(sizes: list[int], file: str = "model.safetensors") -> list[Entry]:
    found, at = [], 128
    for place, size in enumerate(sizes):
        found.append(Entry(f"t{place}", "U8", (size,), file, at, at + size))
        at += size
    return found


@settings(max_examples=200, deadline=None)
@given(sizes=SIZES, num_ranks=st.integers(1, 9), window_bytes=st.integers(0, 40 * MIB))
def test_every_byte_belongs_to_exactly_one_rank(sizes: list[int], num_ranks: int, window_bytes: int) -> None:
    entries = entries_of(sizes)
    windows = plan_windows(entries, num_ranks=num_ranks, window_bytes=window_bytes)
    ranges = []
    for window in windows:
        for rank in range(num_ranks):
            for part in parts_of(window, entries, rank):
                assert part.entry.size_bytes > 0
                block = window.blocks[part.block]
                assert 0 <= part.offset <= part.offset + part.entry.size_bytes <= block.size_bytes
                ranges.append((part.entry.start, part.entry.stop))
    ranges.sort()
    wanted = [(entry.start, entry.stop) for entry in entries if entry.size_bytes]
    joined: list[tuple[int, int]] = []
    for start, stop in ranges:
        assert not joined or start >= joined[-1][1], "two ranks read the same byte"
        joined.append((start, stop))
    assert sum(stop - start for start, stop in joined) == sum(stop - start for start, stop in wanted)
    # All of them lie in what is wanted, none overlaps and the sums agree: nothing is left out.
    if wanted:
        assert joined[0][0] == wanted[0][0]
        assert joined[-1][1] == wanted[-1][1]


@settings(max_examples=200, deadline=None)
@given(sizes=SIZES, num_ranks=st.integers(1, 9), window_bytes=st.integers(0, 40 * MIB))
def test_windows_and_blocks_keep_their_rules(sizes: list[int], num_ranks: int, window_bytes: int) -> None:
    entries = entries_of(sizes)
    windows = plan_windows(entries, num_ranks=num_ranks, window_bytes=window_bytes)
    assert [place for window in windows for place in range(window.start, window.stop)] == (
        list(range(len(entries))) if any(sizes) else []
    )
    for window in windows:
        inside = entries[window.start : window.stop]
        assert window.size_bytes == sum(entry.size_bytes for entry in inside)
        with_bytes = sum(1 for entry in inside if entry.size_bytes)
        assert window.size_bytes <= max(window_bytes, num_ranks * MIB) or with_bytes == 1
        shares = [0] * num_ranks
        for number, block in enumerate(window.blocks):
            segments = [segment for segment in window.segments if segment.block == number]
            assert segments[0].start == 0
            assert segments[-1].stop == block.size_bytes
            assert all(left.stop == right.start for left, right in pairwise(segments))
            if len(block.places) > 1:
                assert len(segments) == 1
                assert block.size_bytes <= SLAB_BYTES + ALIGNMENT * len(block.places)
                assert all(entries[place].size_bytes < SHARE_BELOW_BYTES for place in block.places)
            assert all(offset % ALIGNMENT == 0 for offset in block.offsets)
            for segment in segments:
                shares[segment.rank] += segment.stop - segment.start
        assert [segment.rank for segment in window.segments] == sorted(segment.rank for segment in window.segments)
        # A border moves by half a small tensor, or by what a cut may not leave, at either side of a share.
        padding = ALIGNMENT * len(inside)
        assert max(shares) <= window.size_bytes / num_ranks + MIB + padding


def test_a_large_tensor_is_read_by_all_ranks_in_equal_parts() -> None:
    entries = entries_of([8 * MIB])
    (window,) = plan_windows(entries, num_ranks=4, window_bytes=0)
    parts = [list(parts_of(window, entries, rank)) for rank in range(4)]
    assert [[(part.offset, part.entry.size_bytes) for part in some] for some in parts] == [
        [(rank * 2 * MIB, 2 * MIB)] for rank in range(4)
    ]
    assert parts[1][0].entry.name == f"t0[{2 * MIB}:{4 * MIB}]"
    assert (parts[1][0].entry.start, parts[1][0].entry.stop) == (128 + 2 * MIB, 128 + 4 * MIB)


def test_small_neighbours_of_one_owner_share_a_block() -> None:
    (window,) = plan_windows(entries_of([1000, 0, 50, 3000, 20]), num_ranks=2, window_bytes=MIB)
    assert [(block.places, block.offsets) for block in window.blocks] == [((0, 2), (0, 1024)), ((3, 4), (0, 3008))]
    assert [(segment.block, segment.rank) for segment in window.segments] == [(0, 0), (1, 1)]


def test_windows_follow_the_order_that_is_given() -> None:
    entries = list(reversed(entries_of([MIB] * 6)))
    windows = plan_windows(entries, num_ranks=2, window_bytes=2 * MIB)
    assert [(window.start, window.stop) for window in windows] == [(0, 2), (2, 4), (4, 6)]
    assert [part.entry.name for part in parts_of(windows[0], entries, 0)] == ["t5"]
    assert [part.entry.name for part in parts_of(windows[0], entries, 1)] == ["t4"]


@pytest.mark.parametrize("sizes", [[], [0, 0]])
def test_nothing_to_read_makes_no_window(sizes: list[int]) -> None:
    assert plan_windows(entries_of(sizes), num_ranks=3, window_bytes=MIB) == ()
