"""E16: rows of packed integers whose last word is padded; only ``weight_shape`` says how many columns there are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import headrace

COLUMNS, WORDS = 44, 6
SECTION = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*(gate|up)_proj"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel", "group_size": None},
        }
    },
}


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Return codes from -8 to 7, eight to a word, the last word of each row filled up with zeros: ``[N, 6]`` int32 of ``[N, 44]``."""
    padded = torch.nn.functional.pad(codes + 8, (0, 8 * WORDS - COLUMNS)).reshape(len(codes), WORDS, 8).to(torch.int64)
    words = (padded << (4 * torch.arange(8))).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


@pytest.fixture
def folder(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=COLUMNS, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=64, dtype="bfloat16",
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    tensors, values = load_file(tmp_path / "model.safetensors"), {}
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.down_proj"
        codes, scale = torch.randint(-8, 8, (32, COLUMNS)), (torch.rand(32, 1) * 0.01 + 0.01).to(torch.bfloat16)
        del tensors[f"{name}.weight"]
        tensors[f"{name}.weight_packed"], tensors[f"{name}.weight_scale"] = pack(codes), scale
        tensors[f"{name}.weight_shape"] = torch.tensor([32, COLUMNS])
        values[f"{name}.weight"] = codes.float() * scale.float()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**content, "quantization_config": SECTION}))
    return tmp_path, values


@pytest.mark.parametrize("dequantize", [False, True])
def test_padding_is_not_taken_for_columns(folder: tuple[Path, dict[str, torch.Tensor]], dequantize: bool) -> None:
    path, values = folder
    model = headrace.load_model(str(path), dtype=torch.float32, dequantize=dequantize)
    for name, expected in values.items():
        layer = model.get_submodule(name.removesuffix(".weight"))
        found = layer.weight if dequantize else layer.dequantized(torch.float32)
        assert torch.equal(found, expected)
    with torch.no_grad():
        assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()


def test_packed_parameters_are_not_trainable(folder: tuple[Path, dict[str, torch.Tensor]]) -> None:
    model = headrace.load_model(str(folder[0]), dtype=torch.float32)
    layer = model.model.layers[0].mlp.down_proj
    assert [name for name, value in layer.named_parameters() if value.requires_grad] == []
    assert model.model.layers[0].mlp.up_proj.weight.requires_grad
