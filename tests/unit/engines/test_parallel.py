"""What can be divided among ranks, by what Transformers' plans and configurations say, before anything is read."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from transformers.distributed import DistributedConfig

from headrace.engines.parallel import check_kinds, check_parallel, num_tensor_ranks
from headrace.errors import InvalidSetting, ModelError

LLAMA = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 320}


def check(class_name: str, config: Any, num_ranks: int) -> None:
    check_parallel(getattr(transformers, class_name), config, num_ranks, source="s3://bucket/model")


@pytest.mark.parametrize(
    ("sizes", "is_refused"), [({"tp_size": 2, "pp_size": 2}, True), ({"tp_size": 2}, False), ({"pp_size": 2}, False)]
)
@pytest.mark.parametrize("kind", [dict, DistributedConfig])
def test_stages_are_not_divided_within_their_layers(kind: Any, sizes: dict[str, int], is_refused: bool) -> None:
    said = ""
    try:
        check_kinds({"distributed_config": kind(**sizes)}, source="s3://bucket/model")
    except InvalidSetting as error:
        said = str(error)
    assert ("layers of all stages on each of them" in said) == is_refused


@pytest.mark.parametrize(
    ("heads", "key_value_heads", "num_ranks", "words"),
    [
        (4, 2, 4, r"key-value heads, 2, is no multiple of 4.*Possible for this model: 1, 2\."),
        (4, 4, 3, r"attention heads, 4, is no multiple of 3.*Possible for this model: 1, 2, 4\."),
        (4, 1, 2, r"key-value heads, 1, .*Possible for this model: 1\."),
    ],
)
def test_heads_that_ranks_cannot_share_equally(heads: int, key_value_heads: int, num_ranks: int, words: str) -> None:
    config = transformers.LlamaConfig(**LLAMA, num_attention_heads=heads, num_key_value_heads=key_value_heads)
    with pytest.raises(InvalidSetting, match=words):
        check("LlamaForCausalLM", config, num_ranks)


def test_heads_that_they_can() -> None:
    config = transformers.LlamaConfig(**LLAMA, num_attention_heads=4, num_key_value_heads=2)
    check("LlamaForCausalLM", config, 2)
    # Whatever is no head may be cut anywhere.
    config = transformers.LlamaConfig(**{**LLAMA, "vocab_size": 321, "intermediate_size": 97}, num_attention_heads=4)
    check("LlamaForCausalLM", config, 4)


def test_attention_whose_projections_are_gathered_again_is_not_bound_to_heads() -> None:
    config = transformers.Phi3Config(**LLAMA, num_attention_heads=4, num_key_value_heads=1, pad_token_id=0)
    assert config.base_model_tp_plan["layers.*.self_attn.qkv_proj"] == "colwise_gather_output"
    check("Phi3ForCausalLM", config, 2)


def test_a_multimodal_model_is_judged_by_its_language_model() -> None:
    config = transformers.Gemma3Config(
        text_config=dict(LLAMA, num_attention_heads=4, num_key_value_heads=1, head_dim=16)
    )
    with pytest.raises(InvalidSetting, match="key-value heads, 1"):
        check("Gemma3ForConditionalGeneration", config, 2)


def test_a_model_without_a_plan() -> None:
    with pytest.raises(ModelError, match="GPT2LMHeadModel has no tensor-parallel plan"):
        check("GPT2LMHeadModel", transformers.GPT2Config(n_embd=64, n_layer=1, n_head=4), 2)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 1),
        ({"distributed_config": DistributedConfig(tp_size=4)}, 4),
        ({"distributed_config": {"tp_size": 4}}, 4),
        ({"distributed_config": DistributedConfig(fsdp_size=2)}, 1),
        ({"distributed_config": DistributedConfig(tp_size=2, tp_plan={"lm_head": "colwise_gather_output"})}, 1),
        ({"tp_plan": "auto", "tp_size": 2}, 2),
    ],
)
def test_how_many_ranks_follow_transformers_own_plan(options: dict[str, Any], expected: int) -> None:
    assert num_tensor_ranks(options) == expected
