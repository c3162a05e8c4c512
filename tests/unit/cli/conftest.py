"""A checkpoint of three tensors in two files, written byte by byte, for the commands to look at."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import pytest


def write_safetensors(path: Path, tensors: Mapping[str, tuple[str, list[int], bytes]]) -> None:
    """Write a safetensors file: name to stored type, shape and bytes."""
    header: dict[str, object] = {}
    position = 0
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + len(raw)]}
        position += len(raw)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(raw for _, _, raw in tensors.values()))


@pytest.fixture
def checkpoint_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    write_safetensors(
        folder / first,
        {"embed.weight": ("BF16", [4, 8], bytes(range(64))), "packed.weight": ("F4", [2, 16], bytes(range(16)))},
    )
    write_safetensors(folder / second, {"norm.weight": ("F32", [8], bytes(range(32)))})
    weight_map = {"embed.weight": first, "packed.weight": first, "norm.weight": second}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 32,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
