"""The parts of tensors that ranks keep: which bytes are asked for, and that the part comes out of them as slicing would give it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.checkpoint import Entry
from headrace.engines.cuts import Parts, bounds_of, cut
from headrace.engines.placement import Placement
from headrace.engines.readings import MOST_RUNS, PlainReading
from headrace.engines.values import Assembly, Output, Plain, Stack, StackPiece, state_dict

FILE_START = 1000


def entry_of(shape: tuple[int, ...], dtype: str = "I32", item_bytes: int = 4) -> Entry:
    size = math.prod(shape) * item_bytes
    return Entry("w", dtype, shape, "model.safetensors", FILE_START, FILE_START + size)


def cut_one(entry: Entry, index: Any, gap_bytes: int = 0) -> tuple[Assembly, Placement]:
    placement = Placement(order=(entry,), targets={"w": "w"}, asked={"w": [index]})
    cuts, placed = cut([Plain(entry, "w")], placement, gap_bytes=gap_bytes)
    return cuts[0], placed


def reads_rows(parts: Parts) -> bool:
    [reading] = parts.readings
    assert isinstance(reading, PlainReading)
    return reading.reads_rows


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
    assert isinstance(assembly, Parts) and not reads_rows(assembly)


def test_short_runs_are_read_with_their_rows_and_long_ones_by_themselves() -> None:
    """Experts [E, N, K] split over N: each expert's rows are a run; a matrix split over its columns is not worth its ranges."""
    experts, _ = cut_one(entry_of((4, 1024, 256)), (slice(None), slice(0, 512), slice(None)), gap_bytes=256 << 10)
    assert isinstance(experts, Parts) and len(experts.pieces) == 4
    matrix, placement = cut_one(entry_of((64, 256)), (slice(0, 32), slice(0, 128)), gap_bytes=256 << 10)
    assert isinstance(matrix, Parts) and reads_rows(matrix)
    assert [(one.start, one.stop) for one in placement.order] == [(FILE_START, FILE_START + 32 * 256 * 4)]
    many, _ = cut_one(entry_of((MOST_RUNS + 1, 4)), (slice(None), slice(0, 2)))
    assert isinstance(many, Parts) and reads_rows(many)


def test_of_rows_that_were_read_nothing_stays() -> None:
    file = File((64, 256))
    index = (slice(None), slice(128, 256))
    assembly, placement = cut_one(entry_of((64, 256)), index, gap_bytes=1 << 20)
    part = state_dict([assembly], file.take, asked=placement.asked)["w"][index]
    assert part.untyped_storage().nbytes() == 64 * 128 * 4


@pytest.mark.parametrize("gap_bytes", [0, 1 << 20])
def test_two_parts_of_one_tensor_are_read_once(gap_bytes: int) -> None:
    """Gate and up in one matrix: a rank has rows of both."""
    file = File((64, 256))
    indices = [(slice(0, 8),), (slice(32, 40), slice(0, 100))]
    placement = Placement(order=(entry_of((64, 256)),), targets={"w": "w"}, asked={"w": indices})
    [assembly], placed = cut([Plain(entry_of((64, 256)), "w")], placement, gap_bytes=gap_bytes)
    value = state_dict([assembly], file.take, asked=placed.asked)["w"]
    for index in indices:
        part = value[index]
        assert torch.equal(part, file.whole[index])
        assert part.untyped_storage().nbytes() == part.numel() * 4, "of the rest nothing stays"
    assert file.taken_bytes == (40 * 256 * 4 if gap_bytes else 8 * 256 * 4 + 8 * 100 * 4)


def test_parts_that_overlap_are_taken_of_the_whole() -> None:
    file = File((64, 256))
    plain = Plain(entry_of((64, 256)), "w")
    asked = {"w": [(slice(0, 8),), (slice(4, 12),)]}
    [assembly], placed = cut([plain], Placement(order=(plain.entry,), targets={"w": "w"}, asked=asked), gap_bytes=0)
    assert assembly is plain
    value = state_dict([assembly], file.take, asked=placed.asked)["w"]
    first, second = value[(slice(0, 8),)], value[(slice(4, 12),)]
    assert torch.equal(first, file.whole[:8]) and torch.equal(second, file.whole[4:12])
    assert first.untyped_storage().nbytes() == second.untyped_storage().nbytes() == 8 * 256 * 4
    assert file.taken_bytes == 64 * 256 * 4, "it is read once for both"


class Experts:
    """A layer's experts as a file has them, one after the other, each a gate, an up and a down matrix; and the two stacks that a model has of them."""

    def __init__(self, num_experts: int, inner: int, hidden: int) -> None:
        self.file = File((num_experts * 3 * inner * hidden,))
        self.entries: list[Entry] = []
        pieces = []
        for expert in range(num_experts):
            for place, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
                number = len(self.entries)
                start = FILE_START + number * inner * hidden * 4
                name = f"experts.{expert}.{place}"
                self.entries.append(Entry(name, "I32", shape, "model.safetensors", start, start + inner * hidden * 4))
                index = {"gate": slice(0, inner), "up": slice(inner, 2 * inner)}.get(place)
                pieces.append(
                    StackPiece(Plain(self.entries[-1], name), "down", (expert,))
                    if index is None
                    else StackPiece(Plain(self.entries[-1], name), "gate_up", (expert, index))
                )
        self.stack = Stack(
            outputs={
                "gate_up": Output((num_experts, 2 * inner, hidden), torch.int32),
                "down": Output((num_experts, hidden, inner), torch.int32),
            },
            stacked=pieces,
        )
        matrices = self.file.whole.view(num_experts, 3, -1)
        self.whole = {
            "gate_up": matrices[:, :2].reshape(num_experts, 2 * inner, hidden),
            "down": matrices[:, 2].reshape(num_experts, hidden, inner),
        }

    def ask(self, asked: dict[str, list[Any]], gap_bytes: int) -> tuple[Assembly, Placement]:
        targets = {entry.name: "gate_up" if entry.name[-4:] != "down" else "down" for entry in self.entries}
        placement = Placement(order=tuple(self.entries), targets=targets, asked=asked)
        [assembly], placed = cut([self.stack], placement, gap_bytes=gap_bytes)
        assert [entry for entry, _ in assembly.pieces] == list(placed.order)
        assert all(placed.targets[entry.name] in self.whole for entry in placed.order)
        return assembly, placed

    def fetch(self, asked: dict[str, list[Any]], gap_bytes: int) -> dict[str, list[torch.Tensor]]:
        assembly, placed = self.ask(asked, gap_bytes)
        values = state_dict([assembly], self.file.take, asked=placed.asked)
        return {name: [values[name][index] for index in indices] for name, indices in asked.items()}


@given(
    num_experts=st.integers(1, 5),
    inner=st.integers(1, 4),
    hidden=st.integers(1, 5),
    num_ranks=st.integers(2, 3),
    by_expert=st.booleans(),
    gap_bytes=st.sampled_from([0, 8, 1 << 20]),
)
def test_ranks_parts_of_stacks_of_experts(
    num_experts: int, inner: int, hidden: int, num_ranks: int, by_expert: bool, gap_bytes: int
) -> None:
    """As a tensor-parallel model has them (rows of gate and of up, columns of down), or an expert-parallel one (some experts whole)."""
    seen = {"gate_up": 0, "down": 0}
    size = num_experts if by_expert else inner
    step = -(-size // num_ranks)
    for rank in range(num_ranks):
        start, stop = min(rank * step, size), min((rank + 1) * step, size)
        experts = Experts(num_experts, inner, hidden)
        whole = slice(None)
        asked: dict[str, list[Any]] = (
            {"gate_up": [(slice(start, stop),)], "down": [(slice(start, stop),)]}
            if by_expert
            else {
                "gate_up": [(whole, slice(start, stop)), (whole, slice(inner + start, inner + stop))],
                "down": [(whole, whole, slice(start, stop))],
            }
        )
        found = experts.fetch(asked, gap_bytes)
        for name, indices in asked.items():
            for index, part in zip(indices, found[name], strict=True):
                assert torch.equal(part, experts.whole[name][index]) and part.is_contiguous()
                seen[name] += part.numel()
        if gap_bytes == 0 and start < stop:
            wanted = sum(part.nbytes for parts in found.values() for part in parts)
            assert experts.file.taken_bytes == wanted, "no byte too many"
    assert seen == {"gate_up": 2 * num_experts * inner * hidden, "down": num_experts * inner * hidden}


def test_experts_of_other_ranks_are_not_asked_for() -> None:
    experts = Experts(8, 4, 6)
    asked = {name: [(slice(2, 4), slice(None), slice(None))] for name in experts.whole}
    assembly, placed = experts.ask(asked, gap_bytes=1 << 20)
    assert isinstance(assembly, Parts)
    assert [entry.name for entry in placed.order] == [
        f"experts.{expert}.{part}" for expert in (2, 3) for part in ("gate", "up", "down")
    ]


def test_stacks_of_which_all_is_asked_stay_as_they_are() -> None:
    experts = Experts(2, 4, 6)
    assembly, _ = experts.ask({"gate_up": [...], "down": [(slice(0, 2),)]}, gap_bytes=0)
    assert assembly is experts.stack


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
