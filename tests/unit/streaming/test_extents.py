"""Free extents of a buffer, against a naive model of its bytes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.streaming.extents import ExtentMap

CAPACITY = 64 * 20


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 700), st.tuples(st.just("back"), st.integers(0, 50))), max_size=60))
def test_extents_never_overlap_and_all_come_back(steps: list[int | tuple[str, int]]) -> None:
    extents = ExtentMap(CAPACITY, alignment=64)
    lent: list[tuple[int, int]] = []
    used = [False] * CAPACITY
    for step in steps:
        if isinstance(step, tuple):
            if lent:
                start, size = lent.pop(step[1] % len(lent))
                used[start : start + extents.rounded(size)] = [False] * extents.rounded(size)
                extents.give_back(start, size)
        else:
            start_or_none = extents.take(step)
            longest = max((stop - start for start, stop in runs(used)), default=0)
            assert (start_or_none is None) == (longest < extents.rounded(step))
            if start_or_none is not None:
                size = extents.rounded(step)
                assert start_or_none % 64 == 0 and not any(used[start_or_none : start_or_none + size])
                used[start_or_none : start_or_none + size] = [True] * size
                lent.append((start_or_none, step))
        assert extents.free_extents() == runs(used)
        assert extents.used_bytes == sum(used)


def runs(used: list[bool]) -> list[tuple[int, int]]:
    """Return the maximal runs of free bytes."""
    found, start = [], None
    for at, taken in enumerate([*used, True]):
        if not taken and start is None:
            start = at
        elif taken and start is not None:
            found.append((start, at))
            start = None
    return found


def test_the_lowest_room_is_taken() -> None:
    extents = ExtentMap(CAPACITY, alignment=64)
    starts = [extents.take(64) for _ in range(4)]
    assert starts == [0, 64, 128, 192]
    extents.give_back(64, 64)
    assert extents.take(100) == 256 and extents.take(1) == 64


def test_an_empty_buffer_has_no_room() -> None:
    assert ExtentMap(0, alignment=64).take(1) is None
