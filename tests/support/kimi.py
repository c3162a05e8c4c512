"""A tiny Kimi K2.5 checkpoint with random weights, under the names, in the nesting and in the order of files of moonshotai/Kimi-K2.5: in bfloat16, or its experts in INT4.

Names, shapes and configuration follow the public repository (config.json and the list of its 208,550 tensors). INT4 is compressed-tensors' ``pack-quantized`` with groups of 32;
its section is in ``text_config`` alone, and its ignore list does not name the vision tower, which is plain all the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from headrace.quantization import Role
from headrace.quantization.int4 import PackedInt
from tests.support.weight_files import StoredTensor, WeightFile

VISION = ("vision_tower.", "mm_projector.")
IMAGE_TOKEN = 305
GROUP_SIZE = 32
NUM_LAYERS, NUM_EXPERTS = 3, 4
_HIDDEN, _VOCAB, _EXPERT, _VISION = 64, 320, 32, 32
_RANK, _HEADS, _NOPE, _ROPE, _VALUE = 32, 2, 16, 8, 16

TEXT_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 1,
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": _HIDDEN,
    "intermediate_size": 96,
    "kv_lora_rank": _RANK,
    "max_position_embeddings": 1024,
    "model_type": "kimi_k2",
    "moe_intermediate_size": _EXPERT,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": NUM_EXPERTS,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": _HEADS,
    "num_experts_per_tok": 2,
    "num_hidden_layers": NUM_LAYERS,
    "num_key_value_heads": _HEADS,
    "num_nextn_predict_layers": 0,
    "pad_token_id": 0,
    "q_lora_rank": _RANK,
    "qk_nope_head_dim": _NOPE,
    "qk_rope_head_dim": _ROPE,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 8.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 128,
        "type": "yarn",
    },
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "use_cache": True,
    "v_head_dim": _VALUE,
    "vocab_size": _VOCAB,
}
SECTION: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "dynamic": False,
                "group_size": GROUP_SIZE,
                "num_bits": 4,
                "observer": "minmax",
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "format": "pack-quantized",
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
CONFIG: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "bos_token_id": 1,
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "ignore_index": -100,
    "image_token_id": IMAGE_TOKEN,
    "media_placeholder_token_id": IMAGE_TOKEN,
    "model_type": "kimi_k25",
    "pad_token_id": 0,
    "projection_hidden_size": _VISION,
    "text_config": TEXT_CONFIG,
    "tie_word_embeddings": False,
    "vision_config": {
        "hidden_size": _VISION,
        "intermediate_size": 48,
        "merge_kernel_size": [2, 2],
        "merge_type": "sd2_tpool",
        "mm_projector_type": "patchmerger",
        "model_type": "",
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "patch_size": 4,
        "pos_emb_height": 4,
        "pos_emb_time": 4,
        "pos_emb_width": 4,
        "vt_hidden_size": _VISION,
    },
}


def kimi_tensors() -> dict[str, torch.Tensor]:
    """Return all tensors in the repository's order: decoder layers, head and embeddings, projector, vision tower. Always the same; all bfloat16 but the router's float32 bias."""
    generator = torch.Generator().manual_seed(25)
    return {name: (torch.randn(shape, generator=generator) * 0.3).to(_dtype(name)) for name, shape in _shapes().items()}


def _dtype(name: str) -> torch.dtype:
    return torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16


def _shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(NUM_LAYERS):
        prefix = f"language_model.model.layers.{layer}."
        shapes |= {f"{prefix}{name}": shape for name, shape in _layer(is_dense=layer == 0).items()}
    shapes |= {
        "language_model.lm_head.weight": (_VOCAB, _HIDDEN),
        "language_model.model.embed_tokens.weight": (_VOCAB, _HIDDEN),
        "language_model.model.norm.weight": (_HIDDEN,),
    }
    merged = 4 * _VISION
    shapes |= _biased("mm_projector.pre_norm", _VISION)
    shapes |= _biased("mm_projector.proj.0", merged, merged)
    shapes |= _biased("mm_projector.proj.2", _HIDDEN, merged)
    shapes |= _biased("vision_tower.patch_embed.proj", _VISION, 3, 4, 4)
    shapes |= {"vision_tower.patch_embed.pos_emb.weight": (4, 4, _VISION)}
    for block in range(2):
        prefix = f"vision_tower.encoder.blocks.{block}."
        for name, *shape in (
            ("norm0", _VISION),
            ("norm1", _VISION),
            ("wqkv", 3 * _VISION, _VISION),
            ("wo", _VISION, _VISION),
            ("mlp.fc0", 48, _VISION),
            ("mlp.fc1", _VISION, 48),
        ):
            shapes |= _biased(f"{prefix}{name}", *shape)
    return shapes | _biased("vision_tower.encoder.final_layernorm", _VISION)


def _layer(*, is_dense: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (_HIDDEN,),
        "post_attention_layernorm.weight": (_HIDDEN,),
        "self_attn.q_a_proj.weight": (_RANK, _HIDDEN),
        "self_attn.q_a_layernorm.weight": (_RANK,),
        "self_attn.q_b_proj.weight": (_HEADS * (_NOPE + _ROPE), _RANK),
        "self_attn.kv_a_proj_with_mqa.weight": (_RANK + _ROPE, _HIDDEN),
        "self_attn.kv_a_layernorm.weight": (_RANK,),
        "self_attn.kv_b_proj.weight": (_HEADS * (_NOPE + _VALUE), _RANK),
        "self_attn.o_proj.weight": (_HIDDEN, _HEADS * _VALUE),
    }
    if is_dense:
        return shapes | _mlp("mlp", 96)
    shapes |= {"mlp.gate.weight": (NUM_EXPERTS, _HIDDEN), "mlp.gate.e_score_correction_bias": (NUM_EXPERTS,)}
    shapes |= _mlp("mlp.shared_experts", _EXPERT)
    for expert in range(NUM_EXPERTS):
        shapes |= _mlp(f"mlp.experts.{expert}", _EXPERT)
    return shapes


def _mlp(path: str, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{path}.gate_proj.weight": (inner, _HIDDEN),
        f"{path}.up_proj.weight": (inner, _HIDDEN),
        f"{path}.down_proj.weight": (_HIDDEN, inner),
    }


def _biased(path: str, *shape: int) -> dict[str, tuple[int, ...]]:
    return {f"{path}.weight": shape, f"{path}.bias": shape[:1]}


def is_expert(name: str) -> bool:
    return re.search(r"\.mlp\.experts\.\d+\.", name) is not None


def packed_experts(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return ``tensors`` with every expert's weight in INT4: ``weight_packed`` int32, ``weight_scale`` bfloat16, ``weight_shape`` int32."""
    scheme = PackedInt(bits=4, group_size=GROUP_SIZE)
    packed: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if not is_expert(name):
            packed[name] = tensor
            continue
        rows, columns = tensor.shape
        values = tensor.float()
        scale = (values.reshape(rows, columns // GROUP_SIZE, GROUP_SIZE).abs().amax(-1) / 7).to(torch.bfloat16)
        packed[f"{name}_packed"] = scheme.pack(values, {Role.SCALE: scale})
        packed[f"{name}_scale"] = scale
        packed[f"{name}_shape"] = torch.tensor([rows, columns], dtype=torch.int32)
    return packed


def expanded_experts(packed: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what `packed_experts` stands for, in float32, by the format's description: eight biased values in each word, low bits first, times the group's scale."""
    expanded: dict[str, torch.Tensor] = {}
    for name, tensor in packed.items():
        if name.endswith("_packed"):
            base = name.removesuffix("_packed")
            rows, columns = packed[f"{base}_shape"].tolist()
            words = tensor.long() & 0xFFFFFFFF
            codes = torch.stack([(words >> (4 * place)) & 15 for place in range(8)], dim=-1).reshape(rows, -1)
            scale = packed[f"{base}_scale"].float().repeat_interleave(GROUP_SIZE, dim=1)
            expanded[base] = (codes[:, :columns] - 8).float() * scale
        elif not name.endswith(("_scale", "_shape")):
            expanded[name] = tensor
    return expanded


def save_kimi(folder: Path, tensors: Mapping[str, torch.Tensor], *, is_packed: bool = False) -> Path:
    """Write ``tensors`` as the repository lays them out: a file for each layer, one for head and embeddings, one for the projector, one for the tower; and config.json."""
    folder.mkdir(parents=True)
    files: dict[int, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        files.setdefault(_file_of(name), {})[name] = StoredTensor.of(tensor)
    count = max(files)
    weight_map = {}
    for number, inside in sorted(files.items()):
        file = f"model-{number:05d}-of-{count:06d}.safetensors"
        (folder / file).write_bytes(WeightFile(inside).encode())
        weight_map |= dict.fromkeys(inside, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    text_config = {**TEXT_CONFIG, "quantization_config": SECTION} if is_packed else TEXT_CONFIG
    (folder / "config.json").write_text(json.dumps({**CONFIG, "text_config": text_config}))
    return folder


def _file_of(name: str) -> int:
    if name.startswith("language_model.model.layers."):
        return min(int(name.split(".")[3]), NUM_LAYERS - 1) + 1
    return NUM_LAYERS + (1 if name.startswith("language_model.") else 2 if name.startswith("mm_projector.") else 3)


def image_inputs() -> dict[str, torch.Tensor]:
    """Return a prompt with one image of 4 × 4 patches, which 4 tokens stand for: ``input_ids`` int64 [1, 9], ``pixel_values`` float32 [16, 3, 4, 4], ``image_grid_thw`` [1, 3]."""
    generator = torch.Generator().manual_seed(7)
    return {
        "input_ids": torch.tensor([[1, 5, *[IMAGE_TOKEN] * 4, 9, 200, 7]]),
        "pixel_values": torch.randn(16, 3, 4, 4, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }
