"""Which part of each packed layer a rank of a tensor- or expert-parallel model keeps: Transformers' own plan decides, as it does of plain layers.

Transformers knows no packed parts, so while it divides a model (on the meta device) it is shown plain weights in their place. It cuts these by the layer's rule and wraps the layer's
forward, which brings its inputs and outputs between the ranks. What it cut the plain weights to is then what the layer keeps of the packed ones. ``tests/engines/test_contract.py`` pins
the private names of Transformers that this relies on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from headrace.engines.installation import Installation
from headrace.engines.packed_slice import PackedSlice
from headrace.engines.parallel import refuse_packed
from headrace.engines.rank_experts import ShownExperts, expert_slices
from headrace.engines.sharding import Sharding
from headrace.engines.values import Assembly, Plain, Stack
from headrace.errors import UnsupportedQuantization
from headrace.quantization.attention import KvRounding
from headrace.quantization.linear import QuantizedLinear
from headrace.quantization.stack import PackedExperts
from headrace.quantization.weight_cuts import WeightCut

_WEIGHT = "weight"
_TAKES_LOCAL_TENSORS = "_hf_quantized_needs_local_tp"
"""Of a layer whose forward computes with this rank's part of plain tensors, whatever its class: what Transformers' parallel styles ask for."""


class _Shown(Protocol):
    """A packed layer that is shown as a plain one."""

    def settle(self) -> None:
        """Put the packed parts back, those of the slice that the plain weights were cut to."""


@contextmanager
def shown_plain(model: Any) -> Iterator[None]:
    """Show whoever divides ``model`` among ranks its packed layers as plain ones, and let each keep what its plain weights were cut to.

    Raises `UnsupportedQuantization` for a layer that cannot be cut so, on all ranks alike.
    """
    shown: list[_Shown] = []
    for path, layer in list(model.named_modules()):
        if isinstance(layer, QuantizedLinear):
            shown.append(_ShownLinear(path, layer, model.dtype))
        elif isinstance(layer, PackedExperts):
            shown.append(ShownExperts(path, layer, model.dtype))
    yield
    for one in shown:
        one.settle()
    for path, layer in model.named_modules():
        rounding = getattr(layer, "kv_rounding", None)
        if isinstance(rounding, KvRounding) and _divides_heads(layer):
            why = "Its keys and values have a scale for each head."
            raise refuse_packed(path, f"{rounding.format} keys and values", model._tp_size, why)


def with_slices(model: Any, installation: Installation) -> Installation:
    """Return ``installation`` with what fills the packed layers of ``model`` bringing the slices that this rank keeps, where it keeps slices."""
    plain = {item.name: item for item in installation.assemblies if isinstance(item, Plain)}
    stacks = {name: item for item in installation.assemblies if isinstance(item, Stack) for name in item.outputs}
    slices: list[Assembly] = []
    replaced: set[str] = set()
    for path, layer in model.named_modules():
        if isinstance(layer, QuantizedLinear) and layer.cut is not None:
            stored = {role: plain[f"{path}.{part.suffix}"] for role, part in layer.stored.parts.items()}
            names = {role: f"{path}.{part.suffix}" for role, part in layer.quantization.parts.items()}
            entries = {role: item.entry for role, item in stored.items() if role in names}
            slices.append(PackedSlice(cut=layer.cut, entries=entries, names=names))
            replaced |= {item.name for item in stored.values()}
            installation.left_out.update(item.entry.name for role, item in stored.items() if role not in names)
        elif isinstance(layer, PackedExperts) and layer.is_sliced:
            slices += expert_slices(path, layer, plain, stacks)
            replaced |= {name for name in (*plain, *stacks) if name.startswith(f"{path}.")}
    kept = [item for item in installation.assemblies if replaced.isdisjoint(item.outputs)]
    return replace(installation, assemblies=[*kept, *slices])


def _divides_heads(attention: nn.Module) -> bool:
    """Say whether ranks divide the heads of an ``attention`` whose keys and values have a scale for each head."""
    if attention.get_parameter("k_scale").numel() == 1:
        return False
    packed = any(isinstance(one, QuantizedLinear) and one.cut is not None for one in attention.modules())
    return packed or any(isinstance(one, DTensor) for one in attention.parameters())


class _ShownLinear:
    def __init__(self, path: str, layer: QuantizedLinear, dtype: torch.dtype) -> None:
        self._path, self._layer = path, layer
        self._parts = {name: layer._parameters.pop(name) for name in layer.fixed_names}
        weight = torch.empty(layer.out_features, layer.in_features, dtype=dtype, device="meta")
        layer.register_parameter(_WEIGHT, nn.Parameter(weight, requires_grad=False))

    def settle(self) -> None:
        layer, sharding = self._layer, Sharding.taken_from(self._layer, _WEIGHT)
        layer._parameters.update(self._parts)
        if sharding.too_few is not None:
            raise self._refusal(sharding, sharding.too_few)
        if sharding.is_whole:
            return
        if len(sharding.kept) != 1 or sharding.kept[0] is None:
            raise self._refusal(sharding, "Its rule gives each rank several parts of it.")
        rows, columns = sharding.kept[0]
        is_cut = columns != (0, layer.in_features)
        input_slice = sharding.input_slice(layer.in_features) if is_cut else None
        layer.keep_slice(WeightCut.of(layer.quantization, rows, columns), input_slice)
        setattr(layer, _TAKES_LOCAL_TENSORS, True)

    def _refusal(self, sharding: Sharding, why: str) -> UnsupportedQuantization:
        scheme = self._layer.quantization.scheme
        return refuse_packed(self._path, scheme.describe(), sharding.num_ranks, why)
