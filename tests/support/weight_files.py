"""Safetensors files taken apart to their bytes and put together again, wrong ones too: for tests that need a file that no writer would write."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

INDEX = "model.safetensors.index.json"
DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as it lies in a file."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes

    @classmethod
    def of(cls, tensor: torch.Tensor) -> StoredTensor:
        """Return ``tensor`` as it would be stored."""
        content = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return cls(DTYPES[tensor.dtype], tuple(tensor.shape), content)

    def tensor(self) -> torch.Tensor:
        """Return it as a tensor that owns its memory."""
        dtype = next(dtype for dtype, name in DTYPES.items() if name == self.dtype)
        if not self.content:
            return torch.empty(self.shape, dtype=dtype)
        return torch.frombuffer(bytearray(self.content), dtype=dtype).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A whole safetensors file: its metadata, and its tensors in the order of the header."""

    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str] | None = None

    @classmethod
    def parse(cls, content: bytes) -> WeightFile:
        """Return what ``content`` holds. It must be a sound file: nothing is checked."""
        body = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:body])
        metadata = header.pop("__metadata__", None)
        tensors = {}
        for name, entry in header.items():
            start, stop = entry["data_offsets"]
            tensors[name] = StoredTensor(entry["dtype"], tuple(entry["shape"]), content[body + start : body + stop])
        return cls(tensors, metadata)

    def encode(self) -> bytes:
        """Return the file's bytes, the tensors one after the other in the order of the header."""
        header: dict[str, Any] = {} if self.metadata is None else {"__metadata__": dict(self.metadata)}
        start = 0
        for name, tensor in self.tensors.items():
            stop = start + len(tensor.content)
            header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, stop]}
            start = stop
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return b"".join([len(text).to_bytes(8, "little"), text, *(tensor.content for tensor in self.tensors.values())])


def read_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return all tensors of the weight files in ``folder``, file after file."""
    tensors: dict[str, StoredTensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= WeightFile.parse(path.read_bytes()).tensors
    return tensors


def remove_tensor(folder: Path, name: str) -> None:
    """Rewrite the file of ``folder`` that holds ``name`` without it, and its line in the index, where there is one."""
    path, file = _find(folder, name)
    rest = {other: tensor for other, tensor in file.tensors.items() if other != name}
    path.write_bytes(replace(file, tensors=rest).encode())
    _edit_index(folder, lambda weight_map: weight_map.pop(name))


def change_tensor(folder: Path, name: str, change: Callable[[StoredTensor], StoredTensor | torch.Tensor]) -> None:
    """Rewrite the file of ``folder`` that holds ``name`` with what ``change`` makes of it, in its place."""
    path, file = _find(folder, name)
    path.write_bytes(replace(file, tensors={**file.tensors, name: _stored(change(file.tensors[name]))}).encode())


def add_tensor(folder: Path, name: str, tensor: StoredTensor | torch.Tensor) -> None:
    """Rewrite the last weight file of ``folder`` with one more tensor at its end, and add it to the index, where there is one."""
    path = sorted(folder.glob("*.safetensors"))[-1]
    file = WeightFile.parse(path.read_bytes())
    assert name not in file.tensors
    path.write_bytes(replace(file, tensors={**file.tensors, name: _stored(tensor)}).encode())
    _edit_index(folder, lambda weight_map: weight_map.update({name: path.name}))


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Apply ``change`` to the object in a JSON file."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def _find(folder: Path, name: str) -> tuple[Path, WeightFile]:
    for path in sorted(folder.glob("*.safetensors")):
        file = WeightFile.parse(path.read_bytes())
        if name in file.tensors:
            return path, file
    raise KeyError(f"no file of {folder} holds {name}")


def _stored(tensor: StoredTensor | torch.Tensor) -> StoredTensor:
    return tensor if isinstance(tensor, StoredTensor) else StoredTensor.of(tensor)


def _edit_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    if (folder / INDEX).exists():
        edit_json(folder / INDEX, lambda content: change(content["weight_map"]))
