"""Small models of real classes with random weights, saved as people save them. Made here, so that nothing has to be fetched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

_COMMON = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 12,  # two digits, so that natural and lexicographic order differ
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**_COMMON, "tie_word_embeddings": False}),
    "llama-tied": ("LlamaConfig", {**_COMMON, "tie_word_embeddings": True}),
    "gemma3": ("Gemma3TextConfig", {**_COMMON, "head_dim": 16, "sliding_window": 32}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            **_COMMON,
            "num_hidden_layers": 2,
            "head_dim": 16,
            "num_experts": 12,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "decoder_sparse_step": 1,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **_COMMON,
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 24,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
        },
    ),
}


def save_model(name: str, folder: Path, *, dtype: torch.dtype = torch.bfloat16, max_shard_size: str = "200KB") -> Path:
    """Save a random model of ``CONFIGS[name]`` in several safetensors files, and return its folder."""
    class_name, fields = CONFIGS[name]
    config = getattr(transformers, class_name)(**fields)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for value in model.state_dict().values():
            if value.is_floating_point():
                value.copy_(torch.randn(value.shape) * 0.05)
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def rewrite(folder: Path, change: Any) -> None:
    """Apply ``change(tensors)`` to all tensors of a saved model and write them back as one file without an index."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
        path.unlink()
    for path in folder.glob("*.index.json"):
        path.unlink()
    change(tensors)
    save_file(
        {key: value.contiguous() for key, value in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def edit_config(folder: Path, **fields: Any) -> None:
    """Change fields of a saved config.json; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key, value in fields.items():
        config.pop(key, None)
        if value is not None:
            config[key] = value
    path.write_text(json.dumps(config))
