"""Small checkpoints of random tensors, as files of a folder."""

from __future__ import annotations

import json

import torch
from safetensors.torch import save


def make_tensors(num_tensors: int = 8, rows: int = 300) -> dict[str, torch.Tensor]:
    """Return float32 tensors ``w0``, ``w1``, … of shape [rows, 1000], always the same."""
    generator = torch.Generator().manual_seed(7)
    return {f"w{number}": torch.randn(rows, 1000, generator=generator) for number in range(num_tensors)}


def make_files(tensors: dict[str, torch.Tensor], *, folder: str = "") -> dict[str, bytes]:
    """Return a checkpoint of two weight files with their index, and side files; the second weight file may lie in a sub-folder."""
    names = list(tensors)
    halves = {
        "model-00001-of-00002.safetensors": names[: len(names) // 2],
        f"{folder}model-00002-of-00002.safetensors": names[len(names) // 2 :],
    }
    weight_map = {name: file for file, inside in halves.items() for name in inside}
    return {
        **{file: save({name: tensors[name] for name in inside}) for file, inside in halves.items()},
        "model.safetensors.index.json": json.dumps({"weight_map": weight_map}).encode(),
        "config.json": b'{"model_type": "llama"}',
        "tokenizer.json": b'{"version": "1.0"}',
        "chat_template.jinja": b"{{ messages }}",
    }


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Assert that both have the same names, and bit for bit the same values."""
    assert set(found) == set(expected)
    assert all(
        torch.equal(found[name].view(torch.int32), tensor.view(torch.int32)) for name, tensor in expected.items()
    )
