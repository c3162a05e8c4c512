"""Where experts' weights go in stacked parameters, asked of Transformers' own conversions."""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, MixtralConfig, MixtralForCausalLM

from headrace.checkpoint import Entry
from headrace.engines.renaming import Renamer, StackSlot
from headrace.engines.stacking import stack_experts
from headrace.engines.values import Assembly, Plain, Stack


@pytest.fixture(scope="module")
def deepseek() -> Renamer:
    config = DeepseekV3Config(
        hidden_size=8, intermediate_size=16, moe_intermediate_size=4, num_hidden_layers=2, first_k_dense_replace=1,
        n_routed_experts=2, num_attention_heads=2, num_key_value_heads=2, q_lora_rank=4, kv_lora_rank=4,
        qk_rope_head_dim=2, qk_nope_head_dim=2, v_head_dim=2, vocab_size=16, n_group=1, topk_group=1, num_experts_per_tok=1,
    )  # fmt: skip
    with torch.device("meta"):
        return Renamer(DeepseekV3ForCausalLM(config))


def expert(number: int, projection: str, shape: tuple[int, int], dtype: str = "BF16") -> Plain:
    name = f"model.layers.1.mlp.experts.{number}.{projection}.weight"
    return Plain(Entry(name, dtype, shape, "a", 100 * number, 100 * number + 1), name)


def experts(num_experts: int = 2) -> list[Assembly]:
    return [
        expert(number, projection, shape)
        for number in range(num_experts)
        for projection, shape in (("gate_proj", (4, 8)), ("up_proj", (4, 8)), ("down_proj", (8, 4)))
    ]


def test_an_expert_has_its_slot(deepseek: Renamer) -> None:
    path = "model.layers.1.mlp.experts"
    assert deepseek.slot(f"{path}.1.up_proj.weight") == StackSlot(f"{path}.gate_up_proj", 1, 1, 2)
    assert deepseek.slot(f"{path}.0.down_proj.weight") == StackSlot(f"{path}.down_proj", 0, 0, 1)
    assert deepseek.slot("model.layers.0.mlp.up_proj.weight") is None
    assert deepseek.slot("model.layers.1.mlp.shared_experts.up_proj.weight") is None
    assert deepseek.slot(f"{path}.1.up_proj.weight_scale") is None


def test_a_renamed_model_has_slots_too() -> None:
    config = MixtralConfig(
        hidden_size=8, intermediate_size=4, num_hidden_layers=1, num_local_experts=2, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=16,
    )  # fmt: skip
    with torch.device("meta"):
        renamer = Renamer(MixtralForCausalLM(config))
    slot = renamer.slot("model.layers.0.block_sparse_moe.experts.1.w3.weight")
    assert slot == StackSlot("model.layers.0.mlp.experts.gate_up_proj", 1, 1, 2)


def test_all_experts_of_a_layer_become_one_stack(deepseek: Renamer) -> None:
    other = Plain(Entry("model.norm.weight", "BF16", (8,), "a", 0, 16), "model.norm.weight")
    joined = stack_experts(deepseek, [other, *experts()])
    assert joined[0] is other and len(joined) == 2
    stack = joined[1]
    assert isinstance(stack, Stack)
    assert {name: output.shape for name, output in stack.outputs.items()} == {
        "model.layers.1.mlp.experts.gate_up_proj": (2, 8, 8),
        "model.layers.1.mlp.experts.down_proj": (2, 8, 4),
    }
    regions = {piece.source.name.split("experts.")[1]: piece.index for piece in stack.stacked}
    assert regions["1.up_proj.weight"] == (1, slice(4, 8))
    assert regions["0.gate_proj.weight"] == (0, slice(0, 4))
    assert regions["1.down_proj.weight"] == (1, slice(0, 8))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda items: items[:-2],
        lambda items: [*items, expert(2, "up_proj", (4, 8))],
        lambda items: [expert(0, "gate_proj", (5, 8)), *items[1:]],
        lambda items: [expert(0, "gate_proj", (4, 8), "F32"), *items[1:]],
    ],
    ids=["an expert too few", "one too many", "another shape", "another type"],
)
def test_what_does_not_fill_a_stack_exactly_stays_as_it_is(deepseek: Renamer, spoil: object) -> None:
    items = spoil(experts())  # type: ignore[operator]
    stacked = [name for item in stack_experts(deepseek, items) if isinstance(item, Stack) for name in item.outputs]
    assert "model.layers.1.mlp.experts.gate_up_proj" not in stacked
    names = [entry.name for item in stack_experts(deepseek, items) for entry, _ in item.pieces]
    assert sorted(names) == sorted(item.name for item in items)
