"""The experts modules of Transformers run on packed stacks as their own eager forward does on the expanded weights."""

from __future__ import annotations

import copy
import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.byte_scheme import byte_weight, fill
from tests.support.closeness import assert_computed_alike
from torch import nn

from headrace.errors import UnsupportedQuantization
from headrace.quantization.stack import PackedStack, install_experts

pytest.importorskip("transformers")

NUM_EXPERTS, HIDDEN, INNER = 4, 16, 12
SPLIT = ("gate_proj", "up_proj", "down_proj")
FUSED = ("gate_up_proj", "down_proj")
CONFIG = SimpleNamespace(
    hidden_size=HIDDEN,
    intermediate_size=INNER,
    moe_intermediate_size=INNER,
    moe_hidden_size=HIDDEN,
    moe_latent_size=None,
    hidden_act="silu",
    mlp_hidden_act="relu2",
    swiglu_limit=7.0,
    swiglu_alpha=1.702,
    post_norm_eps=1e-6,
    num_experts=NUM_EXPERTS,
    n_routed_experts=NUM_EXPERTS,
    num_local_experts=NUM_EXPERTS,
    _experts_implementation="eager",
)


def make(model: str, name: str) -> Any:
    return getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name)(CONFIG)


def expand_into(experts: Any, stacks: dict[str, PackedStack]) -> None:
    """Give the plain ``experts`` the weights of ``stacks``, in the layout of the class."""
    expanded = {name: torch.stack([s.dequantized(e) for e in range(NUM_EXPERTS)]) for name, s in stacks.items()}
    if experts.has_gate and "gate_up_proj" not in expanded:
        halves = [expanded["gate_proj"], expanded["up_proj"]]
        joined = torch.cat(halves, dim=1) if experts.is_concatenated else torch.stack(halves, dim=2).flatten(1, 2)
        expanded["gate_up_proj"] = joined
    for name in ("gate_up_proj", "up_proj", "down_proj"):
        if isinstance(experts._parameters.get(name), nn.Parameter):
            values = expanded[name]
            experts._parameters[name].data.copy_(values.mT if experts.is_transposed else values)


@pytest.mark.parametrize(
    ("model", "name", "names"),
    [
        ("mixtral", "MixtralExperts", SPLIT),
        ("mixtral", "MixtralExperts", FUSED),
        ("qwen3_moe", "Qwen3MoeExperts", SPLIT),
        ("deepseek_v3", "DeepseekV3Experts", SPLIT),
        ("deepseek_v4", "DeepseekV4Experts", SPLIT),
        ("gpt_oss", "GptOssExperts", FUSED),
        ("gpt_oss", "GptOssExperts", SPLIT),
        ("nemotron_h", "NemotronHExperts", ("up_proj", "down_proj")),
    ],
)
def test_they_compute_what_the_eager_forward_does(model: str, name: str, names: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    experts = make(model, name)
    sizes = {"down_proj": (HIDDEN, INNER), "gate_up_proj": (2 * INNER, HIDDEN)}
    stacks = {part: PackedStack(byte_weight(*sizes.get(part, (INNER, HIDDEN))), NUM_EXPERTS) for part in names}
    for seed, stack in enumerate(stacks.values()):
        fill(stack, seed)
    for parameter in experts.parameters():
        nn.init.normal_(parameter)
    plain = copy.deepcopy(experts)
    expand_into(plain, stacks)
    install_experts(experts, stacks)
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(8)) / 8
    index = torch.stack([torch.randperm(NUM_EXPERTS)[:2] for _ in range(9)])
    shares = torch.rand(9, 2)
    expected = plain(x, index, shares)
    assert_computed_alike(experts(x, index, shares), expected)
    assert expected.abs().sum() > 0 and isinstance(experts, type(plain))


def test_a_norm_after_each_expert_is_refused() -> None:
    experts = make("muse_spark", "MuseSparkExperts")
    stack = PackedStack(byte_weight(INNER, HIDDEN), NUM_EXPERTS)
    with pytest.raises(UnsupportedQuantization, match="MuseSparkExperts cannot hold packed weights"):
        install_experts(experts, dict.fromkeys(SPLIT, stack))
