"""A rank's slices of packed weights: no byte more is asked for than they need, in the order of the files, and what comes of them is the slice."""

from __future__ import annotations

import pytest
import torch

from headrace.checkpoint import Entry
from headrace.engines.cuts import cut
from headrace.engines.packed_slice import PackedSlice, StackedSlices, Unwanted
from headrace.engines.placement import Placement
from headrace.quantization.int8 import Int8Group
from headrace.quantization.scheme import Role, StoredPart, WeightQuantization
from headrace.quantization.slices import slice_weight
from headrace.quantization.weight_cuts import WeightCut

ROWS, COLUMNS, GROUP, EXPERTS = 6, 16, 4, 4
SUFFIXES = {Role.CODES: "weight", Role.SCALE: "weight_scale", Role.INPUT_SCALE: "input_scale"}
Tensors = dict[Role, torch.Tensor]


def weight_parts(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, (ROWS, COLUMNS), dtype=torch.int8, generator=generator)
    return {
        Role.CODES: codes,
        Role.SCALE: torch.rand(ROWS, COLUMNS // GROUP, generator=generator),
        Role.INPUT_SCALE: torch.tensor(0.5),
    }


def quantization_of(parts: Tensors) -> WeightQuantization:
    stored = {role: StoredPart(SUFFIXES[role], one.dtype, tuple(one.shape)) for role, one in parts.items()}
    return WeightQuantization(scheme=Int8Group(group_size=GROUP), shape=(ROWS, COLUMNS), parts=stored)


class File:
    """Stored tensors one behind the other; gives bytes of them, and counts these."""

    def __init__(self) -> None:
        self._content = bytearray()
        self.taken: list[Entry] = []

    def add(self, name: str, tensor: torch.Tensor) -> Entry:
        start = len(self._content)
        self._content += tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        kind = {torch.int8: "I8", torch.float32: "F32"}[tensor.dtype]
        return Entry(name, kind, tuple(tensor.shape), "model.safetensors", start, len(self._content))

    def take(self, entry: Entry) -> torch.Tensor:
        self.taken.append(entry)
        octets = torch.frombuffer(self._content, dtype=torch.uint8)[entry.start : entry.stop].clone()
        return octets.view({"I8": torch.int8, "F32": torch.float32}[entry.dtype]).view(entry.shape)

    @property
    def taken_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.taken)


def add_all(file: File, parts: Tensors, prefix: str) -> dict[Role, Entry]:
    return {role: file.add(f"{prefix}.{SUFFIXES[role]}", one) for role, one in parts.items()}


def placed(assembly: PackedSlice | StackedSlices) -> Placement:
    return Placement(
        order=tuple(entry for entry, _ in assembly.pieces),
        targets={entry.name: name for entry, name in assembly.pieces},
    )


@pytest.mark.parametrize("is_narrowed", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [((2, 5), (0, COLUMNS)), ((0, ROWS), (6, 16)), ((1, 3), (4, 8))])
def test_the_parts_are_the_slices(rows: tuple[int, int], columns: tuple[int, int], is_narrowed: bool) -> None:
    file, parts = File(), weight_parts(0)
    entries = add_all(file, parts, "m")
    weight = quantization_of(parts)
    made = PackedSlice(
        cut=WeightCut.of(weight, rows, columns),
        entries=entries,
        names={role: f"m.{name}" for role, name in SUFFIXES.items()},
    )
    placement = placed(made)
    assert list(placement.order) == list(entries.values())
    if is_narrowed:
        [made], placement = cut([made], placement, gap_bytes=0)  # type: ignore[list-item, assignment]
    built = made.build(file.take)
    assert file.taken == list(placement.order)
    expected = slice_weight(weight.scheme, parts, shape=weight.shape, rows=rows, columns=columns).parts
    for role, part in expected.items():
        found = built[f"m.{SUFFIXES[role]}"]
        assert found.equal(part) and found.is_contiguous()
        assert found.untyped_storage().nbytes() == part.nbytes, "nothing else stays in memory"
        assert (made.outputs[f"m.{SUFFIXES[role]}"].shape, found.dtype) == (tuple(part.shape), part.dtype)
    if is_narrowed:
        assert file.taken_bytes == sum(part.nbytes for part in expected.values()), "no byte too many"
        assert all(placement.targets[entry.name].startswith("m.") for entry in placement.order)


def test_a_slice_of_columns_is_read_with_its_rows_where_gaps_are_short() -> None:
    file, parts = File(), weight_parts(0)
    cuts = WeightCut.of(quantization_of(parts), (0, ROWS), (8, 16))
    made = PackedSlice(cut=cuts, entries=add_all(file, parts, "m"), names=SUFFIXES).narrowed(gap_bytes=1 << 20)
    built = made.build(file.take)
    assert [entry.shape for entry in file.taken] == [(ROWS, COLUMNS), (ROWS, COLUMNS // GROUP), ()]
    assert built["weight"].equal(parts[Role.CODES][:, 8:]) and built["weight"].untyped_storage().nbytes() == 8 * ROWS


def stacked(file: File, rows: tuple[int, int], experts: range) -> tuple[StackedSlices, list[Tensors]]:
    """Four experts side by side, of which a rank keeps some rows of some."""
    all_parts = [weight_parts(seed) for seed in range(EXPERTS)]
    cuts = WeightCut.of(quantization_of(all_parts[0]), rows, (0, COLUMNS))
    slices: list[tuple[PackedSlice | Unwanted, int]] = []
    for expert, parts in enumerate(all_parts):
        entries = add_all(file, parts, f"experts.{expert}")
        if expert in experts:
            slices.append((PackedSlice(cut=cuts, entries=entries, names=SUFFIXES), expert - experts.start))
        else:
            slices.append((Unwanted(entries=entries, name="weight"), 0))
    outputs = PackedSlice(cut=cuts, entries={}, names=SUFFIXES, experts=(experts.start, experts.stop)).outputs
    return StackedSlices(outputs=outputs, slices=list(reversed(slices))), all_parts


@pytest.mark.parametrize("is_narrowed", [False, True])
@pytest.mark.parametrize("experts", [range(EXPERTS), range(1, 3)])
def test_stacks_have_their_experts_slices(experts: range, is_narrowed: bool) -> None:
    file = File()
    made, parts = stacked(file, (2, 6), experts)
    placement = placed(made)
    if is_narrowed:
        [made], placement = cut([made], placement, gap_bytes=0)  # type: ignore[list-item, assignment]
    built = made.build(file.take)
    assert file.taken == list(placement.order) == sorted(file.taken, key=lambda entry: entry.start)
    assert built["weight"].equal(torch.stack([parts[expert][Role.CODES][2:6] for expert in experts]))
    assert built["weight_scale"].equal(torch.stack([parts[expert][Role.SCALE][2:6] for expert in experts]))
    assert built["input_scale"].tolist() == [0.5] * len(experts)
    if is_narrowed:
        assert file.taken_bytes == sum(stack.nbytes for stack in built.values())


def test_ranks_that_share_their_reading_ask_for_the_same() -> None:
    orders = [placed(stacked(File(), (0, ROWS), experts)[0]).order for experts in (range(2), range(2, 4))]
    assert orders[0] == orders[1] and len(orders[0]) == 3 * EXPERTS


@pytest.mark.parametrize("is_narrowed", [False, True])
def test_experts_that_the_file_stacks(is_narrowed: bool) -> None:
    file, parts = File(), weight_parts(0)
    whole = {role: torch.stack([weight_parts(seed)[role] for seed in range(EXPERTS)]) for role in parts}
    cuts = WeightCut.of(quantization_of(parts), (0, ROWS), (4, 12))
    made = PackedSlice(cut=cuts, entries=add_all(file, whole, "experts"), names=SUFFIXES, experts=(1, 3))
    built = (made.narrowed(gap_bytes=0) if is_narrowed else made).build(file.take)
    assert built["weight"].equal(whole[Role.CODES][1:3, :, 4:12])
    assert built["weight_scale"].equal(whole[Role.SCALE][1:3, :, 1:3])
    if is_narrowed:
        assert file.taken_bytes == sum(stack.nbytes for stack in built.values())
