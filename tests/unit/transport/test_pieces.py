from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.transport.pieces import PieceCursor, scatter


def _cut(memory: bytearray, sizes: list[int]) -> list[memoryview]:
    pieces, place = [], 0
    for size in sizes:
        pieces.append(memoryview(memory)[place : place + size])
        place += size
    return pieces


@given(
    sizes=st.lists(st.integers(0, 40), max_size=12),
    step=st.integers(1, 50),
    most_pieces=st.integers(1, 4),
    data=st.data(),
)
def test_every_byte_goes_to_its_place_whatever_the_steps(
    sizes: list[int], step: int, most_pieces: int, data: st.DataObject
) -> None:
    total = sum(sizes)
    source = bytes(range(256)) * 2
    memory = bytearray(total)
    cursor = PieceCursor(_cut(memory, sizes), total)
    while cursor.num_left:
        rooms = cursor.rooms(most_pieces, step) if data.draw(st.booleans()) else [cursor.room(step)]
        offered = sum(len(room) for room in rooms)
        assert 0 < offered <= min(step, cursor.num_left)
        assert len(rooms) <= most_pieces
        taken = data.draw(st.integers(1, offered))
        left = taken
        for room in rooms:
            part = min(left, len(room))
            room[:part] = source[cursor.num_filled + taken - left : cursor.num_filled + taken - left + part]
            left -= part
        cursor.advance(taken)
    assert memory == source[:total]
    assert cursor.num_filled == total


def test_pieces_of_another_size_or_read_only_are_refused() -> None:
    with pytest.raises(ValueError, match="a read of 5 bytes was given 4 bytes"):
        PieceCursor([memoryview(bytearray(4))], 5)
    with pytest.raises(ValueError, match="read-only"):
        PieceCursor([memoryview(b"abcd")], 4)


def test_wider_elements_are_seen_as_bytes() -> None:
    memory = bytearray(8)
    cursor = PieceCursor([memoryview(memory).cast("I")], 8)
    cursor.room(8)[:] = b"12345678"
    assert memory == b"12345678"


def test_scatter_copies_over_all_pieces() -> None:
    memory = bytearray(10)
    scatter(memoryview(b"0123456789"), _cut(memory, [3, 0, 1, 6]))
    assert memory == b"0123456789"
