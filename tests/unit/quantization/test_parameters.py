"""Stored parts are parameters that no cast changes."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.support.byte_scheme import byte_weight, fill
from torch import nn

from headrace.quantization.parameters import FixedTypes, add_parts, parts_of, round_scaled, scale_inputs
from headrace.quantization.scheme import InputQuantization, Role

TYPES = {"weight": torch.int8, "weight_scale": torch.float8_e5m2, "input_scale": torch.float32}


class Holder(FixedTypes):
    """A module with parts, a plain parameter and a plain child."""

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        add_parts(self, byte_weight(3, 4, Role.INPUT_SCALE), stack=(2,), device=device)
        self.plain = nn.Parameter(torch.ones(2, device=device))
        self.child = nn.Linear(2, 2, device=device)


def types(module: nn.Module) -> dict[str, torch.dtype]:
    return {name: parameter.dtype for name, parameter in module.named_parameters()}


def test_parts_have_their_stored_names_types_and_shapes() -> None:
    holder = Holder("meta")
    assert {name: types(holder)[name] for name in TYPES} == TYPES
    shapes = {name: tuple(parameter.shape) for name, parameter in holder.named_parameters(recurse=False)}
    assert shapes == {"weight": (2, 3, 4), "weight_scale": (2,), "input_scale": (2,), "plain": (2,)}
    assert not any(holder.get_parameter(name).requires_grad for name in TYPES)
    assert all(parameter.device.type == "meta" for parameter in holder.parameters())


@pytest.mark.parametrize("cast", ["half", "bfloat16", "double"])
def test_a_cast_changes_what_is_plain_and_nothing_else(cast: str) -> None:
    holder = Holder()
    fill(holder)
    before = copy.deepcopy(holder.state_dict())
    getattr(nn.Sequential(holder), cast)()
    dtype = {"half": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64}[cast]
    plain = dict.fromkeys(["plain", "child.weight", "child.bias"], dtype)
    assert types(holder) == TYPES | plain
    for name in TYPES:
        assert torch.equal(holder.get_parameter(name).view(torch.uint8), before[name].view(torch.uint8))


def test_a_move_with_a_cast_moves_all() -> None:
    holder = Holder().to("meta", torch.float16)
    assert {parameter.device.type for parameter in holder.parameters()} == {"meta"}
    assert {name: types(holder)[name] for name in TYPES} == TYPES and holder.plain.dtype == torch.float16
    holder.to_empty(device="cpu")
    assert {parameter.device.type for parameter in holder.parameters()} == {"cpu"}
    assert {name: types(holder)[name] for name in TYPES} == TYPES


def test_parts_are_told_apart_and_taken_by_row() -> None:
    holder = Holder()
    fill(holder)
    weight = byte_weight(3, 4, Role.INPUT_SCALE)
    assert set(parts_of(holder, weight, of_input=True)) == {Role.INPUT_SCALE}
    row = parts_of(holder, weight, of_input=False, index=1)
    assert set(row) == {Role.CODES, Role.SCALE}
    assert torch.equal(row[Role.CODES], holder.get_parameter("weight")[1]) and row[Role.SCALE].shape == ()


def test_the_pre_scale_comes_first_and_in_the_inputs_dtype() -> None:
    x = torch.tensor([[1.0, 2.0]], dtype=torch.float16)
    scaled = scale_inputs(x, {Role.PRE_SCALE: torch.tensor([3.0, 0.5], dtype=torch.bfloat16)})
    assert scaled.dtype == torch.float16 and scaled.tolist() == [[3.0, 1.0]]
    assert scale_inputs(x, {}) is x
    static = InputQuantization(format="int8", granularity="tensor", is_dynamic=False)
    weight = byte_weight(1, 2, Role.INPUT_SCALE, Role.INPUT_ZERO_POINT, inputs=static)
    parts = {Role.INPUT_SCALE: torch.tensor(2.0), Role.INPUT_ZERO_POINT: torch.tensor(127, dtype=torch.int8)}
    # Codes are x / 2 + 127, of which 127 is the largest.
    assert round_scaled(torch.tensor([[3.0, -5.1]]), weight, parts).tolist() == [[0.0, -6.0]]
    assert round_scaled(x, byte_weight(1, 2), {}) is x
