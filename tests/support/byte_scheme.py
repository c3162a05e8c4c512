"""A scheme for tests of the layers: one signed byte for each value, times a scale, and a second one where there is one. Nothing stores weights so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from headrace.quantization.scheme import InputQuantization, Parts, Role, Scheme, StoredPart, WeightQuantization


@dataclass(frozen=True, slots=True)
class ByteScheme(Scheme):
    """``code * (scale * global scale)``."""

    label: ClassVar[str] = "BYTES"

    def describe(self) -> str:
        return "BYTES per tensor"

    def check(self, parts: Mapping[Role, StoredPart], *, module: str) -> tuple[int, int]:
        rows, columns = parts[Role.CODES].shape
        return rows, columns

    def dequantize(
        self, parts: Parts, *, shape: tuple[int, int], dtype: torch.dtype = torch.float32, out: Tensor | None = None
    ) -> Tensor:
        scale = parts[Role.SCALE].float() * parts.get(Role.GLOBAL_SCALE, torch.ones(())).float()
        values = (parts[Role.CODES].float() * scale).to(dtype)
        assert values.shape == shape
        return values if out is None else out.copy_(values)

    def pack(self, values: Tensor, parts: Parts) -> Tensor:
        raise NotImplementedError


SUFFIXES = {
    Role.CODES: "weight",
    Role.SCALE: "weight_scale",
    Role.GLOBAL_SCALE: "weight_scale_2",
    Role.INPUT_SCALE: "input_scale",
    Role.INPUT_ZERO_POINT: "input_zero_point",
    Role.PRE_SCALE: "pre_quant_scale",
}


def byte_weight(rows: int, columns: int, *extra: Role, inputs: InputQuantization | None = None) -> WeightQuantization:
    """Return a weight of ``rows`` × ``columns`` with an E5M2 scale, which every cast would change, and the ``extra`` parts."""
    kinds: dict[Role, tuple[torch.dtype, tuple[int, ...]]] = {
        Role.CODES: (torch.int8, (rows, columns)),
        Role.SCALE: (torch.float8_e5m2, ()),
        Role.GLOBAL_SCALE: (torch.float32, ()),
        Role.INPUT_SCALE: (torch.float32, ()),
        Role.INPUT_ZERO_POINT: (torch.int8, ()),
        Role.PRE_SCALE: (torch.bfloat16, (columns,)),
    }
    parts = {role: StoredPart(SUFFIXES[role], *kinds[role]) for role in (Role.CODES, Role.SCALE, *extra)}
    return WeightQuantization(scheme=ByteScheme(), shape=(rows, columns), parts=parts, inputs=inputs)


def fill(module: nn.Module, seed: int = 0) -> None:
    """Give every parameter of ``module`` values that do not repeat: codes from -8 to 7, scales that are powers of two from ½ to 4."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        if parameter.dtype == torch.int8:
            values = torch.randint(-8, 8, parameter.shape, generator=generator)
        elif parameter.requires_grad:
            values = torch.randn(parameter.shape, generator=generator)
        else:
            values = torch.exp2(torch.randint(-1, 3, parameter.shape, generator=generator).float())
        parameter.data.copy_(values)
