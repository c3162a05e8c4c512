"""The parts of tensors that ranks keep: which bytes are asked for, and that the part comes out of them as slicing would give it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.checkpoint import Entry
from headrace.engines.cuts import MOST_RUNS, Cut, bounds_of, cut
from headrace.engines.placement import Placement
from headrace.engines.values import Assembly, Plain, state_dict

FILE_START = 1000


def entry_of(shape: tuple[int, ...], dtype: str = "I32", item_bytes: int = 4) -> Entry:
    size = math.prod(shape) * item_bytes
    return Entry("w", dtype, shape, "model.safetensors", FILE_START, FILE_START + size)


def cut_one(entry: Entry, index: Any, gap_bytes: int = 0) -> tuple[Assembly, Placement]:
    placement = Placement(order=(entry,), targets={"w": "w"}, asked={"w": [index]})
    cuts, placed = cut([Plain(entry, "w")], placement, gap_bytes=gap_bytes)
    return cuts[0], placed


class File:
    """A stored int32 tensor; counts the bytes that are taken of it."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.whole = torch.arange(math.prod(shape), dtype=torch.int32).view(shape)
        self.taken_bytes = 0

    def take(self, entry: Entry) -> torch.Tensor:
        assert (entry.start - FILE_START) % 4 == 0 and entry.size_bytes == 4 * math.prod(entry.shape)
        first = (entry.start - FILE_START) // 4
        self.taken_bytes += entry.size_bytes
        return self.whole.flatten()[first : first + entry.size_bytes // 4].view(entry.shape).clone()


@st.composite
def parts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[slice, ...]], int]:
    """A shape, one index per rank that together cover it, and a gap."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    num_ranks = draw(st.integers(1, 4))
    dimension = draw(st.integers(0, len(shape) - 1))
    step = -(-shape[dimension] // num_ranks)
    indices = []
    for rank in range(num_ranks):
        bounds = slice(min(rank * step, shape[dimension]), min((rank + 1) * step, shape[dimension]))
        indices.append(tuple(bounds if place == dimension else slice(0, size) for place, size in enumerate(shape)))
    return shape, indices, draw(st.sampled_from([0, 8, 1 << 20]))


@given(parts())
def test_the_ranks_parts_are_the_slices_and_together_the_tensor(
    case: tuple[tuple[int, ...], list[tuple[slice, ...]], int],
) -> None:
    shape, indices, gap_bytes = case
    seen = torch.zeros(shape, dtype=torch.int32)
    for index in indices:
        file = File(shape)
        assembly, placement = cut_one(entry_of(shape), index, gap_bytes)
        values = state_dict([assembly], file.take, asked=placement.asked)
        part = values["w"][index]
        assert torch.equal(part, file.whole[index]) and part.is_contiguous()
        assert values["w"].get_shape() == list(shape), "the engine slices the whole"
        seen[index] += 1
        assert [entry for entry, _ in assembly.pieces] == list(placement.order)
        if gap_bytes == 0 and part.numel():
            assert file.taken_bytes == part.numel() * 4, "no byte too many"
    assert bool((seen == 1).all())


def test_rows_are_one_range_and_nothing_else_is_asked_for() -> None:
    assembly, placement = cut_one(entry_of((8, 6)), (slice(2, 4), slice(0, 6)))
    assert [(one.start, one.stop, one.shape) for one in placement.order] == [(FILE_START + 48, FILE_START + 96, (2, 6))]
    assert placement.targets[placement.order[0].name] == "w"
    assert isinstance(assembly, Cut) and not assembly.reads_rows


def test_short_runs_are_read_with_their_rows_and_long_ones_by_themselves() -> None:
    """Experts [E, N, K] split over N: each expert's rows are a run; a matrix split over its columns is not worth its ranges."""
    experts, _ = cut_one(entry_of((4, 1024, 256)), (slice(None), slice(0, 512), slice(None)), gap_bytes=256 << 10)
    assert isinstance(experts, Cut) and len(experts.pieces) == 4
    matrix, placement = cut_one(entry_of((64, 256)), (slice(0, 32), slice(0, 128)), gap_bytes=256 << 10)
    assert isinstance(matrix, Cut) and matrix.reads_rows
    assert [(one.start, one.stop) for one in placement.order] == [(FILE_START, FILE_START + 32 * 256 * 4)]
    many, _ = cut_one(entry_of((MOST_RUNS + 1, 4)), (slice(None), slice(0, 2)))
    assert isinstance(many, Cut) and many.reads_rows


def test_of_rows_that_were_read_nothing_stays() -> None:
    file = File((64, 256))
    index = (slice(None), slice(128, 256))
    assembly, placement = cut_one(entry_of((64, 256)), index, gap_bytes=1 << 20)
    part = state_dict([assembly], file.take, asked=placement.asked)["w"][index]
    assert part.untyped_storage().nbytes() == 64 * 128 * 4


def test_a_part_of_an_uncut_value_keeps_nothing_of_the_rest() -> None:
    file = File((64, 256))
    plain = Plain(entry_of((64, 256)), "w")
    asked = {"w": [(slice(0, 8),), (slice(32, 40),)]}
    value = state_dict([plain], file.take, asked=asked)["w"]
    first, second = value[(slice(0, 8),)], value[(slice(32, 40),)]
    assert torch.equal(first, file.whole[:8]) and torch.equal(second, file.whole[32:40])
    assert first.untyped_storage().nbytes() == second.untyped_storage().nbytes() == 8 * 256 * 4
    assert file.taken_bytes == 64 * 256 * 4, "it is read once for both"


@pytest.mark.parametrize(
    "index", [..., (slice(0, 8), slice(0, 6)), (slice(None),), (3,), (slice(0, 8, 2),), (slice(4, 4),)], ids=str
)
def test_what_is_no_part_stays_whole(index: Any) -> None:
    entry = entry_of((8, 6))
    assembly, placement = cut_one(entry, index)
    assert assembly == Plain(entry, "w") and placement.order == (entry,)


def test_types_below_a_byte_stay_whole() -> None:
    entry = Entry("w", "F4", (8, 6), "model.safetensors", FILE_START, FILE_START + 24)
    assembly, _ = cut_one(entry, (slice(0, 4), slice(None)))
    assert isinstance(assembly, Plain)


def test_bounds() -> None:
    assert bounds_of(slice(1, 3), (4, 5)) == ((1, 3), (0, 5))
    assert bounds_of((slice(None), slice(-2, None)), (4, 5)) == ((0, 4), (3, 5))
    assert bounds_of((slice(3, 1),), (4,)) == ((3, 3),)
    assert bounds_of((0, slice(None)), (4, 5)) is None
    assert bounds_of((slice(None),) * 3, (4, 5)) is None
