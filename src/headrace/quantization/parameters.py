"""The stored tensors of packed weights as parameters of modules: under their stored names, in their stored types, and never cast to others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headrace.quantization.input_slices import InputSlice
from headrace.quantization.rounding import round_inputs
from headrace.quantization.scheme import ROLES_OF_INPUT, Parts, Role, WeightQuantization


class FixedTypes(nn.Module):
    """Mixin: the parameters of this module (not of its children) that are named in ``fixed_names`` keep their types whatever the module is cast to.

    ``module.to(torch.float16)`` would turn E4M3 codes into plain values and round scales. Moves to another device, sharing and ``to_empty`` work as everywhere.
    """

    fixed_names: tuple[str, ...] = ()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        fixed = {id(self._parameters[name]) for name in self.fixed_names}

        def apply(tensor: Tensor) -> Tensor:
            applied = fn(tensor)
            is_cast = id(tensor) in fixed and applied.dtype != tensor.dtype
            return tensor.to(applied.device) if is_cast else applied

        return super()._apply(apply, recurse)  # type: ignore[no-untyped-call]


def add_parts(
    module: FixedTypes, weight: WeightQuantization, *, stack: tuple[int, ...], device: torch.device | str | None
) -> None:
    """Give ``module`` one parameter for each part of ``weight``, of the stored type and of shape ``stack`` plus the stored shape, with undefined values."""
    for part in weight.parts.values():
        values = torch.empty((*stack, *part.shape), dtype=part.dtype, device=device)
        module.register_parameter(part.suffix, nn.Parameter(values, requires_grad=False))
    module.fixed_names = tuple(part.suffix for part in weight.parts.values())


def drop_parts(module: FixedTypes) -> None:
    """Take the parameters that `add_parts` gave ``module`` out of it."""
    for name in module.fixed_names:
        del module._parameters[name]
    module.fixed_names = ()


def parts_of(module: nn.Module, weight: WeightQuantization, *, of_input: bool, index: int | None = None) -> Parts:
    """Return the parts of ``module`` that say something of the layer's input, or else those of the weight itself. With ``index``, that row of each."""
    parts = {}
    for role, part in weight.parts.items():
        if (role in ROLES_OF_INPUT) == of_input:
            parameter = module.get_parameter(part.suffix)
            parts[role] = parameter if index is None else parameter[index]
    return parts


def scale_inputs(x: Tensor, parts: Parts) -> Tensor:
    """Return ``x`` times the pre-scale, in ``x``'s dtype, or ``x`` itself where ``parts`` (those of the input) have none."""
    scale = parts.get(Role.PRE_SCALE)
    return x if scale is None else x * scale.to(x.dtype)


def round_scaled(x: Tensor, weight: WeightQuantization, parts: Parts, part: InputSlice | None = None) -> Tensor:
    """Return ``x``, which `scale_inputs` has seen, rounded as ``weight`` wants its inputs; ``parts`` are those of the input, of which ``part`` says which features ``x`` has."""
    if weight.inputs is None:
        return x
    return round_inputs(x, weight.inputs, parts.get(Role.INPUT_SCALE), parts.get(Role.INPUT_ZERO_POINT), part)
