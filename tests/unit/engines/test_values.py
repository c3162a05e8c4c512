from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from headrace.checkpoint import Entry
from headrace.engines.values import (
    Assembly,
    Expansion,
    Output,
    Plain,
    Stack,
    StackPiece,
    rehearsed_state_dict,
    state_dict,
)
from headrace.quantization.scheme import Role, Scheme, StoredPart, WeightQuantization


@dataclass(frozen=True)
class Halved(Scheme):
    """Codes are int8, values twice the code times the scale."""

    label = "halved"

    def describe(self) -> str:
        return self.label

    def check(self, parts: Mapping[Role, StoredPart], *, module: str) -> tuple[int, int]:
        rows, columns = parts[Role.CODES].shape
        return rows, columns

    def dequantize(
        self,
        parts: Mapping[Role, torch.Tensor],
        *,
        shape: tuple[int, int],
        dtype: torch.dtype = torch.float32,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        values = (parts[Role.CODES].float() * 2 * parts[Role.SCALE].float()).to(dtype)
        return values if out is None else out.copy_(values)

    def pack(self, values: torch.Tensor, parts: Mapping[Role, torch.Tensor]) -> torch.Tensor:
        return (values / parts[Role.SCALE].float() / 2).to(torch.int8)


def entry(name: str, dtype: str, shape: tuple[int, ...], start: int = 0, file: str = "a") -> Entry:
    return Entry(name, dtype, shape, file, start, start + 4)


def weight(rows: int, columns: int, *, pre_scale: bool = False) -> WeightQuantization:
    parts = {
        Role.CODES: StoredPart("weight", torch.int8, (rows, columns)),
        Role.SCALE: StoredPart("weight_scale", torch.float32, ()),
    }
    if pre_scale:
        parts[Role.PRE_SCALE] = StoredPart("pre_quant_scale", torch.float32, (columns,))
    return WeightQuantization(scheme=Halved(), shape=(rows, columns), parts=parts)


class Source:
    """Tensors by name, each handed out once; notes the order."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.tensors = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
        self.taken: list[str] = []

    def __call__(self, wanted: Entry) -> torch.Tensor:
        self.taken.append(wanted.name)
        return self.tensors.pop(wanted.name)


def test_a_plain_value_is_the_tensor_itself() -> None:
    tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    source = Source(w=tensor)
    values = state_dict([Plain(entry("w", "F32", (2, 3)), "model.w")], source)
    value = values["model.w"]
    assert (value.get_shape(), value.get_dtype(), value.numel(), value.ndim) == ([2, 3], "F32", 6, 2)
    assert source.taken == []
    assert value[...].data_ptr() == tensor.data_ptr()


def test_an_expansion_takes_its_parts_in_the_order_of_the_file_and_leaves_input_scales() -> None:
    entries = {
        Role.SCALE: entry("m.weight_scale", "F32", (), start=0),
        Role.INPUT_SCALE: entry("m.input_scale", "F32", (), start=4),
        Role.CODES: entry("m.weight", "I8", (2, 2), start=8),
    }
    source = Source(m__weight=torch.tensor([[1, 2], [3, 4]], dtype=torch.int8), m__weight_scale=torch.tensor(0.5))
    made = Expansion(name="m.weight", weight=weight(2, 2), entries=entries, dtype=torch.bfloat16)
    value = state_dict([made], source)["m.weight"]
    assert value.dtype is torch.bfloat16 and value.get_dtype() == "BF16"
    assert value[...].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert source.taken == ["m.weight_scale", "m.weight"]


def test_an_expansion_can_fold_the_scale_of_its_input_into_the_columns() -> None:
    entries = {
        Role.CODES: entry("m.weight", "I8", (2, 2)),
        Role.SCALE: entry("m.weight_scale", "F32", (), start=4),
        Role.PRE_SCALE: entry("m.pre_quant_scale", "F32", (2,), start=8),
    }
    source = Source(
        m__weight=torch.tensor([[1, 2], [3, 4]], dtype=torch.int8),
        m__weight_scale=torch.tensor(0.5),
        m__pre_quant_scale=torch.tensor([10.0, 100.0]),
    )
    made = Expansion(
        name="m.weight",
        weight=weight(2, 2, pre_scale=True),
        entries=entries,
        dtype=torch.float32,
        fold_input_scale=True,
    )
    assert made.build(source)["m.weight"].tolist() == [[10.0, 200.0], [30.0, 400.0]]


@pytest.mark.parametrize("is_transposed", [False, True])
def test_stacked_experts_expand_one_by_one(is_transposed: bool) -> None:
    codes = torch.arange(12, dtype=torch.int8).reshape(2, 2, 3)
    source = Source(m=codes, m_scales=torch.tensor([0.5, 1.0]))
    entries = {Role.CODES: entry("m", "I8", (2, 2, 3)), Role.SCALE: entry("m_scales", "F32", (2,), start=4)}
    made = Expansion(
        name="m",
        weight=weight(2, 3),
        entries=entries,
        dtype=torch.float32,
        num_experts=2,
        is_transposed=is_transposed,
    )
    value = made.build(source)["m"]
    expected = codes.float() * torch.tensor([1.0, 2.0])[:, None, None]
    assert value.shape == made.output.shape
    assert torch.equal(value, expected.transpose(1, 2) if is_transposed else expected)


def stack() -> Stack:
    """Two experts: gate above up in one value, down in another; files in an order of their own."""
    pieces = []
    for expert in range(2):
        for position, name in enumerate(("gate", "up")):
            source = Plain(entry(f"{expert}.{name}", "F32", (1, 2), start=10 * expert + position), "")
            pieces.append(StackPiece(source, "gate_up", (expert, slice(position, position + 1))))
        down = Plain(entry(f"{expert}.down", "F32", (2, 1), start=10 * expert + 5), "")
        pieces.append(StackPiece(down, "down", (expert,)))
    outputs = {"gate_up": Output((2, 2, 2), torch.float32), "down": Output((2, 2, 1), torch.float32)}
    return Stack(outputs=outputs, stacked=pieces[::-1])


def stacked_source() -> Source:
    tensors: dict[str, Any] = {}
    for expert in range(2):
        tensors[f"{expert}__gate"] = torch.full((1, 2), 10.0 * expert + 1)
        tensors[f"{expert}__up"] = torch.full((1, 2), 10.0 * expert + 2)
        tensors[f"{expert}__down"] = torch.full((2, 1), 10.0 * expert + 3)
    return Source(**tensors)


def test_a_stack_is_filled_in_the_order_of_the_file_whichever_value_is_asked_for_first() -> None:
    source = stacked_source()
    values = state_dict([stack()], source)
    assert values["down"][...].flatten().tolist() == [3.0, 3.0, 13.0, 13.0]
    assert source.taken == ["0.gate", "0.up", "0.down", "1.gate", "1.up", "1.down"]
    assert values["gate_up"][...].tolist() == [[[1, 1], [2, 2]], [[11, 11], [12, 12]]]
    assert source.taken == ["0.gate", "0.up", "0.down", "1.gate", "1.up", "1.down"]


def test_a_rehearsal_notes_every_assembly_once_and_what_is_asked_and_needs_no_memory() -> None:
    noted: list[Assembly] = []
    asked: dict[str, list[Any]] = {}
    stacked = stack()
    values = rehearsed_state_dict([stacked], noted.append, asked)
    assert values["gate_up"][...].is_meta and values["gate_up"].shape == (2, 2, 2)
    part = values["down"][(slice(0, 1),)]
    assert part.is_meta and len(part) == 1
    assert noted == [stacked]
    assert [entry.name for entry, _ in stacked.pieces] == ["0.gate", "0.up", "0.down", "1.gate", "1.up", "1.down"]
    assert asked == {"gate_up": [...], "down": [(slice(0, 1),)]}
