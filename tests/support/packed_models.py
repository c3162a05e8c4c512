"""Small checkpoints whose linear layers are packed as tools pack them, of any model and sizes: for shapes that no real checkpoint has."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

E4M3 = torch.float8_e4m3fn
_KEPT = ("embed", "norm", "gate.weight", "router")
"""Parts of the names of what tools leave as it is."""
_HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class Packing:
    """One way to pack: the section of config.json, and a weight's tensors by what is put after the module's name."""

    section: dict[str, Any]
    pack: Callable[[torch.Tensor], dict[str, torch.Tensor]]


def _channels(limit: float, dtype: torch.dtype) -> Callable[[torch.Tensor], dict[str, torch.Tensor]]:
    def pack(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        scale = weight.abs().amax(dim=1, keepdim=True) / limit
        codes = weight / scale
        return {"weight": (codes if dtype.is_floating_point else codes.round()).to(dtype), "weight_scale": scale}

    return pack


def _blocks(size: int) -> Callable[[torch.Tensor], dict[str, torch.Tensor]]:
    def pack(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        rows, columns = (-(-length // size) for length in weight.shape)
        padded = weight.new_zeros(rows * size, columns * size)
        padded[: weight.shape[0], : weight.shape[1]] = weight
        scale = padded.view(rows, size, columns, size).abs().amax(dim=(1, 3)) / 448
        codes = weight / scale.repeat_interleave(size, 0).repeat_interleave(size, 1)[: len(weight), : weight.shape[1]]
        return {"weight": codes.to(E4M3), "weight_scale_inv": scale}

    return pack


def _compressed(format: str, kind: str, **inputs: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": kind, "strategy": "channel", "symmetric": True, "dynamic": False}
    activations = {"num_bits": 8, "type": kind, "strategy": "token", "symmetric": True, "dynamic": True, **inputs}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "format": format}
    return {
        "quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"],
    }  # fmt: skip


PACKINGS = {
    "FP8, inputs per token": Packing(_compressed("float-quantized", "float"), _channels(448, E4M3)),
    "INT8, inputs per token": Packing(_compressed("int-quantized", "int", symmetric=False), _channels(127, torch.int8)),
    "FP8 blocks": Packing(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}, _blocks(16)
    ),
}


def save_packed(config: Any, packing: str, folder: Path, *, packs_head: bool = False) -> Path:
    """Write the checkpoint of a random model of ``config``, packed by one of `PACKINGS`, and return the folder. The head is left plain, as tools leave it, unless ``packs_head``."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    model.save_pretrained(folder)
    return pack(folder, packing, packs_head=packs_head)


def pack(folder: Path, packing: str, *, packs_head: bool = False) -> Path:
    """Pack the linear layers of the plain checkpoint in ``folder`` by one of `PACKINGS`, and return the folder."""
    chosen, kept = PACKINGS[packing], _KEPT if packs_head else (*_KEPT, _HEAD)
    packed: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith(".weight") and tensor.dim() == 2 and not any(part in name for part in kept):
            module = name.removesuffix("weight")
            packed |= {f"{module}{suffix}": part.contiguous() for suffix, part in chosen.pack(tensor).items()}
        else:
            packed[name] = tensor
    save_file(packed, folder / "model.safetensors", metadata={"format": "pt"})
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "quantization_config": chosen.section}))
    return folder
