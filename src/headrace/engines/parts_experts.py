"""Takes experts out of every layer of a model, so that what is left is one rank's share of an expert-parallel model.

Routers stay whole, and so do shared experts. What a token's router chooses and is not here adds nothing, so that the outputs of the experts modules of all ranks sum up to
the whole model's. Experts are known by what Transformers' decorator ``use_experts_implementation`` (5.24) leaves on their class.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headrace.errors import InvalidSetting

_ARGUMENTS = {
    ("hidden_states", "top_k_index", "top_k_weights"): True,
    ("hidden_states", "router_indices", "routing_weights"): False,
}
"""What an experts module's forward takes, to whether one beyond its last expert means an expert of another rank. gpt-oss's does not know that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalExperts:
    """Turns a router's choice among all experts into one among those that are here: a hook before an experts module's forward."""

    experts: tuple[int, ...]
    num_experts: int
    """Of the whole model."""
    arguments: tuple[str, str, str]

    def __call__(self, module: Any, given: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Any]:
        call = {**dict(zip(self.arguments, given, strict=False)), **options}
        # By position: the ways to compute experts have other names for them.
        states, index, weights = (call.pop(name) for name in self.arguments)
        absent = len(self.experts)
        places = torch.full((self.num_experts,), absent, dtype=index.dtype, device=index.device)
        places[list(self.experts)] = torch.arange(absent, dtype=index.dtype, device=index.device)
        local = places[index]
        weights = weights.masked_fill(local == absent, 0)
        return (states, local if _ARGUMENTS[self.arguments] else local.masked_fill(local == absent, 0), weights), call


@dataclass(frozen=True, slots=True)
class ExpertCut:
    """Leaves ``experts`` of each layer, numbered from 0. Names of parameters stay, since a layer's experts are stacked; their first dimension shrinks."""

    experts: tuple[int, ...]
    source: str

    def apply(self, model: Any) -> None:
        """Cut. Raises `InvalidSetting` for a model without experts, or whose experts are built in another way."""
        paths = [path for path, module in model.named_modules() if _holds_experts(module)]
        if not paths:
            raise InvalidSetting(
                f"experts were chosen of {self.source}, which has none.",
                f"No module of {type(model).__name__} holds a stack of experts.",
                "Leave experts out.",
            )
        for path in paths:
            self._shrink(model.get_submodule(path), path)

    def rename(self, name: str) -> str | None:
        return name

    def group(self, name: str) -> str:
        raise AssertionError("no parameter is gone")

    def _shrink(self, module: Any, path: str) -> None:
        total = module.num_experts
        if self.experts[-1] >= total:
            raise InvalidSetting(
                f"Expert {self.experts[-1]} was chosen, and {path} of {self.source} has {total}.",
                mend=f"Stay below {total}.",
            )
        arguments = tuple(inspect.signature(type(module).forward).parameters)[1:]
        if arguments not in _ARGUMENTS:
            raise InvalidSetting(
                f"Some experts of {self.source} cannot be loaded without the others.",
                f"{type(module).__name__} is not told which token goes to which of them.",
                "Load it without experts.",
            )
        for name, value in list(module.named_parameters(recurse=False)):
            assert value.shape[0] == total, f"{path}.{name} is not stacked"
            shape = (len(self.experts), *value.shape[1:])
            module.register_parameter(
                name, nn.Parameter(torch.empty(shape, dtype=value.dtype, device="meta"), value.requires_grad)
            )
        module.num_experts = len(self.experts)
        module._is_expert_parallel = True
        module.register_forward_pre_hook(
            LocalExperts(experts=self.experts, num_experts=total, arguments=arguments), prepend=True, with_kwargs=True
        )


def _holds_experts(module: nn.Module) -> bool:
    """Say whether ``module`` is a stack of experts."""
    total = getattr(module, "num_experts", None)
    own = list(module.parameters(recurse=False))
    return isinstance(total, int) and any(value.dim() == 3 and value.shape[0] == total for value in own)
