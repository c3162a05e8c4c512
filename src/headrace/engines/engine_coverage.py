"""Which parts of a model's parameters are written while it is filled. Knows torch and the shape of the modules of vLLM and SGLang; imports neither.

vLLM checks names, and leaves out the parameters of every layer that is processed after loading, which is every linear layer. A fused parameter counts as loaded once one of
its parts is. So a projection that a checkpoint lacks is served with whatever was in memory. Here the writes themselves are watched.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

MAIN_WEIGHTS = frozenset(
    f"{part}{kind}" for part in ("", "w13_", "w2_") for kind in ("weight", "qweight", "weight_packed")
)
"""The names of a layer's parameters that no engine has a default for. Scales, zero points and biases may be absent from a checkpoint."""
VOCABULARY_METHOD = "UnquantizedEmbeddingMethod"
PLAIN_METHODS = frozenset({"UnquantizedLinearMethod", VOCABULARY_METHOD, "UnquantizedFusedMoEMethod"})
"""vLLM's classes for layers that keep the stored tensors as they are. Packed layers may be padded, which only their own code knows."""

_View = tuple[int, tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _Target:
    """A parameter that must be filled: where its memory is, and how many elements a checkpoint has for it."""

    name: str
    parameter: torch.nn.Parameter
    storage: int
    num_elements: int
    is_plain: bool
    is_vocabulary: bool
    """Whether it is an embedding or a head."""


class Coverage(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, notes every write into the parameters of ``model`` that a checkpoint must fill.

    ``has_vocabulary`` False leaves embedding and head out: a draft model may be given those of the model that it drafts for, once it is loaded.
    """

    def __init__(self, model: torch.nn.Module, *, has_vocabulary: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        found = _targets(model)
        self._targets = tuple(one for one in found if has_vocabulary or not one.is_vocabulary)
        self._written: dict[int, set[_View]] = {target.storage: set() for target in self._targets}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.is_mutable and args and isinstance(args[0], torch.Tensor):
            written = self._written.get(_storage_of(args[0]))
            if written is not None:
                written.add((int(args[0].storage_offset()), tuple(args[0].shape), tuple(args[0].stride())))
        return result

    def gaps(self) -> list[str]:
        """Return what has not been filled, each with how much of it has: parameters that got nothing, and plain ones that got a part. Sorted."""
        return sorted(text for target in self._targets if (text := self._gap(target)))

    def _gap(self, target: _Target) -> str:
        if _storage_of(target.parameter) != target.storage:
            return ""  # it was given other memory, so somebody has filled that
        num_written = sum(math.prod(shape) for _, shape, _ in self._written[target.storage])
        if num_written == 0:
            return f"{target.name} (nothing of it)"
        if target.is_plain and num_written < target.num_elements:
            return f"{target.name} ({100 * num_written // target.num_elements} % of it)"
        return ""


def _targets(model: torch.nn.Module) -> Iterator[_Target]:
    for prefix, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is None or getattr(method, "uses_meta_device", False):
            continue  # no layer with weights, or one that is packed while it is filled
        for name, parameter in module.named_parameters(recurse=False):
            if name not in MAIN_WEIGHTS or is_lazy(parameter) or parameter.numel() == 0:
                continue
            storage = _storage_of(parameter)
            if storage == 0:
                continue  # on the meta device, or made of several tensors
            yield _Target(
                name=f"{prefix}.{name}" if prefix else name,
                parameter=parameter,
                storage=storage,
                num_elements=int(getattr(parameter, "weight_loader_numel", parameter.numel())),
                is_plain=type(method).__name__ in PLAIN_METHODS,
                is_vocabulary=type(method).__name__ == VOCABULARY_METHOD,
            )


def _storage_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory; 0 where it has none that could be asked for."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0
