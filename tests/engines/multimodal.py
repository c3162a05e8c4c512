"""Small multimodal models of real classes with random weights, saved as people save them, and one image for each."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

IMAGE_TOKEN = 300
_TEXT = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_QWEN_ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
_QWEN_IDS = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": 301,
    "vision_start_token_id": 302,
    "vision_end_token_id": 303,
}
_QWEN3_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 1],
}
_SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
_CLIP = {**_SIGLIP, "model_type": "clip_vision_model", "projection_dim": 32}
_GLM_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "image_size": 16,
    "patch_size": 4,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One kind of multimodal model, small."""

    config_class: str
    text: dict[str, Any]
    vision: dict[str, Any]
    outer: dict[str, Any] = field(default_factory=dict)
    num_image_tokens: int = 4
    """Tokens that stand for the image in a prompt."""
    pixels: tuple[int, ...] = (16, 3 * 2 * 4 * 4)
    """Shape of ``pixel_values``."""
    grid: tuple[int, ...] = (1, 4, 4)
    """``image_grid_thw``; empty where the model takes none."""
    alone: str | None = None
    """The class that its language model is built with by itself; None where it is built with its own class, without the rest."""
    others: dict[str, Any] = field(default_factory=dict)
    """What the model must be told of an image beside its pixels."""


FAMILIES: dict[str, Family] = {
    "qwen2_vl": Family(
        config_class="Qwen2VLConfig",
        text={**_TEXT, "rope_parameters": _QWEN_ROPE},
        vision={"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2},
        outer=_QWEN_IDS,
    ),
    "qwen2_5_vl": Family(
        config_class="Qwen2_5_VLConfig",
        text={**_TEXT, "rope_parameters": _QWEN_ROPE},
        vision={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 64,
            "num_heads": 2,
            "patch_size": 4,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        outer=_QWEN_IDS,
    ),
    "qwen3_vl": Family(
        config_class="Qwen3VLConfig",
        text={**_TEXT, "head_dim": 16, "rope_parameters": _QWEN_ROPE},
        vision=_QWEN3_VISION,
        outer={**_QWEN_IDS, "tie_word_embeddings": True},
    ),
    "qwen3_vl_moe": Family(
        config_class="Qwen3VLMoeConfig",
        text={**_TEXT, **_EXPERTS, "head_dim": 16, "rope_parameters": _QWEN_ROPE},
        vision=_QWEN3_VISION,
        outer=_QWEN_IDS,
    ),
    "gemma3": Family(
        config_class="Gemma3Config",
        text={
            **_TEXT,
            "head_dim": 16,
            "sliding_window": 32,
            "layer_types": ["sliding_attention", "full_attention"] * 1 + ["sliding_attention"],
        },
        vision=_SIGLIP,
        outer={
            "image_token_index": IMAGE_TOKEN,
            "mm_tokens_per_image": 4,
            "boi_token_index": 302,
            "eoi_token_index": 303,
        },
        pixels=(1, 3, 16, 16),
        grid=(),
        alone="Gemma3ForCausalLM",
    ),
    "llama4": Family(
        config_class="Llama4Config",
        text={
            **_TEXT,
            "head_dim": 16,
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
            "attention_chunk_size": 32,
        },
        vision={
            "hidden_size": 32,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 4,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
            "vision_output_dim": 32,
            "pixel_shuffle_ratio": 0.5,
        },
        outer={"image_token_index": IMAGE_TOKEN, "boi_token_index": 302, "eoi_token_index": 303},
        pixels=(1, 3, 16, 16),
        grid=(),
        alone="Llama4ForCausalLM",
    ),
    "mistral3": Family(
        config_class="Mistral3Config",
        text={**_TEXT, "model_type": "mistral", "head_dim": 16},
        vision={
            "model_type": "pixtral",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "head_dim": 16,
            "image_size": 16,
            "patch_size": 4,
        },
        outer={
            "image_token_index": IMAGE_TOKEN,
            "spatial_merge_size": 2,
            "vision_feature_layer": -1,
            "tie_word_embeddings": False,
        },
        pixels=(1, 3, 16, 16),
        grid=(),
        alone="MistralForCausalLM",
        others={"image_sizes": torch.tensor([[16, 16]])},
    ),
    "llava": Family(
        config_class="LlavaConfig",
        text={**_TEXT, "model_type": "llama"},
        vision=_CLIP,
        outer={"image_token_index": IMAGE_TOKEN, "vision_feature_layer": -1},
        num_image_tokens=16,
        pixels=(1, 3, 16, 16),
        grid=(),
        alone="LlamaForCausalLM",
    ),
    "glm4v": Family(
        config_class="Glm4vConfig",
        text={
            **_TEXT,
            "rope_parameters": {
                "rope_type": "default",
                "mrope_section": [2, 1, 1],
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        },
        vision=_GLM_VISION,
        outer={
            "image_token_id": IMAGE_TOKEN,
            "video_token_id": 301,
            "image_start_token_id": 302,
            "image_end_token_id": 303,
        },
    ),
    "glm4v_moe": Family(
        config_class="Glm4vMoeConfig",
        text={
            **_TEXT,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "default",
                "mrope_section": [2, 1, 1],
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        },
        vision=_GLM_VISION,
        outer={
            "image_token_id": IMAGE_TOKEN,
            "video_token_id": 301,
            "image_start_token_id": 302,
            "image_end_token_id": 303,
        },
    ),
}


def make_config(family: Family) -> Any:
    """Return the configuration of a small model."""
    fields = copy.deepcopy({"text_config": family.text, "vision_config": family.vision, **family.outer})
    return getattr(transformers, family.config_class)(**fields)


def save_multimodal(name: str, folder: Path, *, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Save a random model of ``FAMILIES[name]`` in two or more files, and return its folder."""
    config = make_config(FAMILIES[name])
    torch.manual_seed(0)
    model_class = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    model = model_class._from_config(config, dtype=dtype)
    with torch.no_grad():
        for value in model.state_dict().values():
            if value.is_floating_point():
                value.copy_(torch.randn(value.shape) * 0.2)
    model.save_pretrained(folder, max_shard_size="300KB")
    stored = json.loads((folder / "config.json").read_text())
    assert "text_config" in stored
    return folder


def image_inputs(family: Family) -> dict[str, Any]:
    """Return what the model's forward takes for one image in a prompt: token ids, pixels, and where they lie."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.tensor([[1, 5, 302, *[IMAGE_TOKEN] * family.num_image_tokens, 303, 9, 200]])
    inputs = {"input_ids": ids, "pixel_values": torch.randn(family.pixels, generator=generator), **family.others}
    if family.grid:
        inputs["image_grid_thw"] = torch.tensor([family.grid])
        inputs["mm_token_type_ids"] = (ids == IMAGE_TOKEN).long()
    return inputs
