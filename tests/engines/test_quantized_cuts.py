"""Packed weights of real checkpoints, expanded on ranks that each want a part: rows of one, columns of another, and nothing of a third's experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from headrace.checkpoint import Entry, open_checkpoint
from headrace.engines.cuts import Parts, cut
from headrace.engines.placement import Placement
from headrace.engines.quantized import detect_quantization
from headrace.engines.values import Expansion, Output, Stack, StackPiece, state_dict
from headrace.quantization.scheme import Role
from headrace.settings import Settings
from headrace.storage import open_store
from headrace.storage.uri import parse_uri
from tests.support.quantized import QuantizedCheckpoints, readable_names

NAMES = readable_names()
QUIET = Settings.from_environment({}, progress=False)
REPACKED = {"ar-auto_awq-llama", "ar-auto_gptq-llama"}
"""Words along the other dimension, or several weights of one, are packed anew in a slice that does not begin with one."""
PARTS: dict[str, Any] = {
    "first rows": lambda rows, columns: (slice(0, rows // 2), slice(None)),
    "last rows": lambda rows, columns: (slice(rows // 2, rows), slice(0, columns)),
    "last columns": lambda rows, columns: (slice(None), slice(columns // 2, columns)),
    "odd": lambda rows, columns: (slice(3, rows - 2), slice(5, columns - 1)),
}


class Taken:
    """Takes entries out of a checkpoint's files, and counts their bytes."""

    def __init__(self, folder: Any) -> None:
        self._folder = folder
        self.num_bytes = 0

    def __call__(self, entry: Entry) -> torch.Tensor:
        from headrace.streaming import torch_dtype, torch_shape

        self.num_bytes += entry.size_bytes
        with (self._folder / entry.file).open("rb") as file:
            file.seek(entry.start)
            raw = bytearray(file.read(entry.size_bytes))
        # As tensors that share memory with others: not at the start of it.
        shared = torch.cat([torch.zeros(64, dtype=torch.uint8), torch.frombuffer(raw, dtype=torch.uint8)])
        return shared[64:].view(torch_dtype(entry)).view(torch_shape(entry))


def expansions(folder: Any) -> list[Expansion]:
    """Return one weight of each shape and scheme that ``folder`` holds, experts' among them."""
    with open_checkpoint(open_store(parse_uri(str(folder)), settings=QUIET), settings=QUIET) as checkpoint:
        detected = detect_quantization(folder, checkpoint.entries, source="it")
    assert detected is not None
    found = {}
    for module in detected.modules.values():
        if module.num_experts is None:
            made = Expansion(
                name=f"{module.name}.weight",
                weight=module.weight,
                entries=module.entries,
                dtype=torch.float32,
                fold_input_scale=Role.PRE_SCALE in module.entries,
            )
            found[module.weight.scheme, module.weight.shape] = made
    return list(found.values())


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", NAMES)
def test_a_part_of_an_expanded_weight_is_the_slice_of_it(quantized: QuantizedCheckpoints, name: str, part: str) -> None:
    folder = quantized[name].folder
    for whole in expansions(folder):
        index, entries = PARTS[part](*whole.weight.shape), [entry for entry, _ in whole.pieces]
        everything = whole.build(Taken(folder))[whole.name]
        placement = Placement(
            order=tuple(entries), targets={one.name: whole.name for one in entries}, asked={whole.name: [index]}
        )
        [assembly], placed = cut([whole], placement, gap_bytes=0)
        assert [entry for entry, _ in assembly.pieces] == list(placed.order)
        taken = Taken(folder)
        found = state_dict([assembly], taken, asked=placed.asked)[whole.name][index]
        assert torch.equal(found, everything[index]) and found.is_contiguous()
        assert found.untyped_storage().nbytes() == found.nbytes
        total = sum(entry.size_bytes for entry in entries)
        if isinstance(assembly, Parts):
            assert taken.num_bytes < 0.75 * total or part == "odd"
        else:
            assert part == "odd" or name in REPACKED, f"{whole.weight.scheme.describe()} is not cut"


@pytest.mark.parametrize("name", NAMES)
def test_experts_of_other_ranks_are_not_asked_for(quantized: QuantizedCheckpoints, name: str) -> None:
    folder = quantized[name].folder
    one = expansions(folder)[0]
    rows, columns = one.weight.shape
    others = [
        Expansion(
            name=f"e{number}",
            weight=one.weight,
            entries={role: replace(entry, name=f"{number}.{entry.name}") for role, entry in one.entries.items()},
            dtype=torch.bfloat16,
        )
        for number in (0, 1)
    ]
    stack = Stack(
        outputs={"experts": Output((2, rows, columns), torch.bfloat16)},
        stacked=[StackPiece(made, "experts", (number, slice(0, rows))) for number, made in enumerate(others)],
    )
    index = (slice(1, 2), slice(None), slice(None))
    entries = [entry for entry, _ in stack.pieces]
    placement = Placement(
        order=tuple(entries), targets={entry.name: "experts" for entry in entries}, asked={"experts": [index]}
    )
    [assembly], placed = cut([stack], placement, gap_bytes=0)
    assert isinstance(assembly, Parts) and len(assembly.readings) == 1
    assert [entry for entry, _ in assembly.pieces] == list(placed.order)
    taken = Taken(folder)
    found = state_dict([assembly], taken, asked={"experts": [index]})["experts"][index]
    assert torch.equal(found[0], others[1].build(Taken(folder))["e1"])
    assert taken.num_bytes == sum(entry.size_bytes for entry, _ in others[1].pieces)
