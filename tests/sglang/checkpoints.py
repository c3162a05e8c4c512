"""Small models with random weights for SGLang's own classes, in the names and files that people get, each in several files with an index."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.kimi import kimi_tensors, save_kimi
from tests.vllm.models import edit_config, save_llama

_SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def save_deepseek(folder: Path) -> Path:
    _save("DeepseekV3", folder, **_EXPERTS, **_DEEPSEEK, rope_parameters=_YARN)
    # In every published one, and dropped by Transformers.
    return edit_config(folder, moe_layer_freq=1, scoring_func="sigmoid", topk_method="noaux_tc")


def save_kimi_k25(folder: Path) -> Path:
    """Save a Kimi K2.5 with vision tower. SGLang's configuration has other names than the repository's for some shapes, with the big model's as defaults."""
    save_kimi(folder, kimi_tensors())
    vision = json.loads((folder / "config.json").read_text())["vision_config"]
    own = {
        "text_hidden_size": 64,
        "mm_hidden_size": 32,
        "init_pos_emb_height": 4,
        "init_pos_emb_width": 4,
        "init_pos_emb_time": 4,
    }
    return edit_config(folder, vision_config={**vision, **own})


def save_qwen2(folder: Path) -> Path:
    return _save("Qwen2", folder, num_key_value_heads=2)


def save_qwen3(folder: Path) -> Path:
    return _save("Qwen3", folder, num_key_value_heads=2, head_dim=32)


def save_qwen3_moe(folder: Path) -> Path:
    return _save("Qwen3Moe", folder, num_key_value_heads=2, head_dim=32, num_experts=4, **_EXPERTS)


MAKERS: dict[str, Callable[[Path], Path]] = {
    "LlamaForCausalLM": save_llama,
    "Qwen2ForCausalLM": save_qwen2,
    "Qwen3ForCausalLM": save_qwen3,
    "Qwen3MoeForCausalLM": save_qwen3_moe,
    "DeepseekV3ForCausalLM": save_deepseek,
    "KimiK25ForConditionalGeneration": save_kimi_k25,
}
"""SGLang's class to what makes a checkpoint for it."""


def _save(name: str, folder: Path, **fields: Any) -> Path:
    import torch
    import transformers

    torch.manual_seed(7)
    config = getattr(transformers, f"{name}Config")(**_SHAPE, **fields)
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(torch.bfloat16)
    with torch.no_grad():
        for value in model.state_dict().values():
            value.copy_(torch.randn(value.shape) * 0.05)
    model.save_pretrained(folder, max_shard_size="100KB")
    return folder
