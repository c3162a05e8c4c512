"""gpt-oss in MXFP4: all experts of a layer in one tensor of blocks, beside Transformers' own expansion of the same files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM, Mxfp4Config

import headrace
from headrace.errors import HeadraceError

HIDDEN, INNER, EXPERTS = 64, 96, 4
SECTION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def save_gpt_oss(path: Path) -> Path:
    """Write a small random model as gpt-oss is published, and return the folder."""
    torch.manual_seed(0)
    config = GptOssConfig(
        hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=EXPERTS, num_experts_per_tok=2, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=128, layer_types=["full_attention"] * 2,
    )  # fmt: skip
    GptOssForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    for layer in range(2):
        for name, rows, columns in (("gate_up_proj", 2 * INNER, HIDDEN), ("down_proj", HIDDEN, INNER)):
            experts = f"model.layers.{layer}.mlp.experts.{name}"
            del tensors[experts]
            blocks = torch.randint(0, 256, (EXPERTS, rows, columns // 32, 16), dtype=torch.uint8)
            tensors[f"{experts}_blocks"] = blocks
            tensors[f"{experts}_scales"] = torch.randint(118, 125, (EXPERTS, rows, columns // 32), dtype=torch.uint8)
            tensors[f"{experts}_bias"] = torch.randn(EXPERTS, rows).to(torch.bfloat16)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    content = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**content, "quantization_config": SECTION}))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gpt_oss(tmp_path_factory.mktemp("gpt-oss"))


IDS = torch.arange(12).reshape(1, 12)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(IDS).logits
    return result


@pytest.fixture(scope="module")
def expected(folder: Path) -> torch.Tensor:
    config = Mxfp4Config(dequantize=True, modules_to_not_convert=SECTION["modules_to_not_convert"])
    return logits(GptOssForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32))


def test_packed_experts_give_what_transformers_own_expansion_gives(folder: Path, expected: torch.Tensor) -> None:
    model = headrace.load_model(str(folder), dtype=torch.float32)
    assert dict(model.named_parameters())["model.layers.1.mlp.experts.gate_up_proj._blocks"].dtype is torch.uint8
    assert torch.allclose(logits(model), expected, atol=1e-4)


def test_expanded_experts_do_too(folder: Path, expected: torch.Tensor) -> None:
    model = headrace.load_model(str(folder), dtype=torch.float32, dequantize=True)
    assert model.model.layers[0].mlp.experts.gate_up_proj.shape == (EXPERTS, HIDDEN, 2 * INNER)
    assert torch.allclose(logits(model), expected, atol=1e-4)


def test_blocks_without_their_scales_are_named(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(HeadraceError, match=r"model\.layers\.1\.mlp\.experts\.down_proj"):
        headrace.load_model(str(tmp_path), dtype=torch.float32)
