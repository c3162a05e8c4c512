"""What a loader of another engine hands out, beside what the files hold."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


def loaded(loader: Any, source: Any) -> dict[str, torch.Tensor]:
    """Return copies of all that ``loader`` yields of ``source``."""
    return {name: tensor.clone() for name, tensor in loader._get_weights_iterator(source)}


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of all safetensors files in ``folder``."""
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Assert that both have the same tensors, by name and value."""
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def assert_closing_ends_the_reading(loader: Any, source: Any) -> None:
    """Assert that threads of ours read until the iterator is closed, and none afterwards."""
    weights = loader._get_weights_iterator(source)
    next(weights)
    assert _reading()
    weights.close()
    assert not _reading()


def _reading() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("headrace")]
