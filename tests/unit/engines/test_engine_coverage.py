"""What of a model has been written: by parts, in place, by new memory, and what is left out on purpose."""

from __future__ import annotations

import torch
from torch import nn

from headrace.engines.engine_coverage import Coverage


class UnquantizedLinearMethod:
    """Named as vLLM's class is."""


class UnquantizedEmbeddingMethod:
    """As well."""


class PackedMethod:
    uses_meta_device = False


class MetaMethod:
    uses_meta_device = True


class Layer(nn.Module):
    def __init__(self, method: object | None, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        if method is not None:
            self.quant_method = method
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape), requires_grad=False))


def model(**layers: Layer) -> nn.Module:
    whole = nn.Module()
    for name, layer in layers.items():
        whole.add_module(name, layer)
    return whole


def test_a_fused_layer_is_full_when_all_its_parts_came() -> None:
    layer = Layer(UnquantizedLinearMethod(), weight=(6, 4), bias=(6,))
    coverage = Coverage(model(qkv=layer))
    assert coverage.gaps() == ["qkv.weight (nothing of it)"]
    with coverage:
        layer.weight.data.narrow(0, 0, 2).copy_(torch.ones(2, 4))
        layer.weight.data.narrow(0, 0, 2).copy_(torch.ones(2, 4))  # the same part twice is one part
    assert coverage.gaps() == ["qkv.weight (33 % of it)"]
    with coverage:
        layer.weight[2:].fill_(0)
    assert coverage.gaps() == []


def test_packed_layers_may_be_padded_but_not_forgotten() -> None:
    layer = Layer(PackedMethod(), qweight=(4, 4), scales=(4,))
    coverage = Coverage(model(up=layer))
    assert coverage.gaps() == ["up.qweight (nothing of it)"]
    with coverage:
        layer.qweight.data[:2].copy_(torch.ones(2, 4))
    assert coverage.gaps() == []


def test_padding_that_is_declared_is_not_waited_for() -> None:
    layer = Layer(UnquantizedLinearMethod(), w2_weight=(4, 4))
    layer.w2_weight.weight_loader_numel = 12
    coverage = Coverage(model(experts=layer))
    with coverage:
        layer.w2_weight.data[:3].copy_(torch.ones(3, 4))
    assert coverage.gaps() == []


def test_new_memory_counts_as_filled() -> None:
    layer = Layer(UnquantizedLinearMethod(), weight=(2, 2))
    coverage = Coverage(model(head=layer))
    with coverage:
        layer.weight.data = torch.ones(2, 2)
    assert coverage.gaps() == []


def test_what_has_a_default_or_is_made_while_loading_is_left_out() -> None:
    whole = model(
        norm=Layer(None, weight=(4,)),
        online=Layer(MetaMethod(), weight=(4, 4)),
        scales=Layer(PackedMethod(), input_scale=(1,)),
        empty=Layer(PackedMethod(), qweight=(0,)),
    )
    assert Coverage(whole).gaps() == []


def test_reading_is_not_writing() -> None:
    layer = Layer(UnquantizedLinearMethod(), weight=(2, 2))
    coverage = Coverage(model(head=layer))
    with coverage:
        torch.empty(2, 2).copy_(layer.weight)
    assert coverage.gaps() == ["head.weight (nothing of it)"]


def test_a_draft_may_be_given_its_vocabulary_later() -> None:
    whole = model(embed=Layer(UnquantizedEmbeddingMethod(), weight=(4, 2)), fc=Layer(PackedMethod(), weight=(2, 2)))
    assert Coverage(whole).gaps() == ["embed.weight (nothing of it)", "fc.weight (nothing of it)"]
    assert Coverage(whole, has_vocabulary=False).gaps() == ["fc.weight (nothing of it)"]
