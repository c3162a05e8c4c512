"""Real quantized checkpoints for tests: those stored in tests/data/quantized, or every one of a folder that is named by HEADRACE_QUANTIZED_CHECKPOINTS.

Beside each folder ``NAME`` lie ``NAME.weights.json`` (what each packed weight dequantizes to) and ``NAME.ref.safetensors`` (logits). tests/data/quantized/README.md says more.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.file_pool import FilePool
from tests.support.weight_files import WeightFile

VARIABLE = "HEADRACE_QUANTIZED_CHECKPOINTS"
STORED = Path(__file__).parents[1] / "data" / "quantized"

# Read where the module is imported: before a test begins, the variables of the machine are taken away.
FOLDER = os.environ.get(VARIABLE)
"""None: the stored checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFacts:
    """What one packed weight is, by its maker's own formula."""

    shape: tuple[int, int]
    sha256: str
    """Of the float32 values, little-endian, row after row."""
    first: tuple[float, ...]
    """The first four values: what a failure shows."""

    def check(self, found: torch.Tensor, *, name: str) -> None:
        """Assert that ``found`` (float32) is this weight, bit for bit."""
        assert found.dtype is torch.float32, name
        assert tuple(found.shape) == self.shape, name
        same = sha256_of(found) == self.sha256
        assert same, f"{name} begins with {found.flatten()[:4].tolist()} and must begin with {list(self.first)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class References:
    """Logits of a checkpoint's model in float32."""

    input_ids: torch.Tensor
    """[2, 48], int64."""
    plain: torch.Tensor
    """Of the last positions, at least one, [2, num_positions, vocab]: weights dequantized, nothing else rounded."""
    rounded: torch.Tensor | None
    """Of the last eight positions: inputs, keys and values rounded as well, as the checkpoint says. None where it says nothing of them."""


@dataclass(frozen=True, slots=True)
class QuantizedCheckpoint:
    """One checkpoint on disk. Its files are shared by all tests: `copied` before changing them."""

    name: str
    root: Path

    @property
    def folder(self) -> Path:
        """The folder as people get it from a hub."""
        return self.root / self.name

    def copied(self, target: Path) -> Path:
        """Return a copy of the folder under ``target`` that may be changed."""
        copy = target / self.name
        shutil.copytree(self.folder, copy, copy_function=shutil.copyfile)
        copy.chmod(0o755)
        return copy

    def config(self) -> dict[str, Any]:
        """Return config.json."""
        return dict(json.loads((self.folder / "config.json").read_text()))

    def weights(self) -> dict[str, WeightFacts]:
        """Return the packed weights by their name in the files, ``….weight``."""
        content = json.loads((self.root / f"{self.name}.weights.json").read_text())
        return {
            name: WeightFacts(shape=tuple(entry["shape"]), sha256=entry["sha256_fp32"], first=tuple(entry["first"]))
            for name, entry in content.items()
        }

    def references(self) -> References:
        """Return the logits that were computed when the checkpoint was made."""
        file = WeightFile.parse((self.root / f"{self.name}.ref.safetensors").read_bytes())
        plain, rounded = file.tensors["logits_wonly_fp32"], file.tensors.get("logits_exact_fp32", None)
        return References(
            input_ids=file.tensors["input_ids"].tensor(),
            plain=plain.tensor(),
            rounded=None if rounded is None or rounded == plain else rounded.tensor().float(),
        )


class QuantizedCheckpoints:
    """All checkpoints in ``folder``, or else in the pool: those are put together when they are first asked for, into ``root``."""

    def __init__(self, root: Path, *, folder: str | None = FOLDER) -> None:
        self._root = Path(folder) if folder else root
        self._pool = None if folder else FilePool(STORED)
        self._made: dict[str, QuantizedCheckpoint] = {}

    def __getitem__(self, name: str) -> QuantizedCheckpoint:
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def _make(self, name: str) -> QuantizedCheckpoint:
        if self._pool is not None:
            for path in self._pool.names():
                if path.startswith(f"{name}/") or path in files_beside(name):
                    self._pool.extract(path, self._root)
        return QuantizedCheckpoint(name, self._root)


def checkpoint_names() -> list[str]:
    """Return the names of all checkpoints of this run, in order."""
    if FOLDER:
        return names_in(Path(FOLDER))
    return sorted({path.partition("/")[0] for path in FilePool(STORED).names() if "/" in path})


def readable_names() -> list[str]:
    """Return the names of those that are read: all but SVDQuant, whose low-rank branch is refused. None of the stored ones is."""
    names = checkpoint_names()
    if not FOLDER:
        return names
    configs = {name: json.loads((Path(FOLDER) / name / "config.json").read_text()) for name in names}
    return [name for name in names if "SVD" not in str(configs[name].get("quantization_config", {}).get("quant_algo"))]


def names_in(folder: Path) -> list[str]:
    """Return the names of the checkpoints in a folder that holds ``NAME/``, ``NAME.weights.json`` and ``NAME.ref.safetensors``."""
    names = sorted(path.parent.name for path in folder.glob("*/config.json"))
    return [name for name in names if all((folder / beside).exists() for beside in files_beside(name))]


def files_beside(name: str) -> tuple[str, str]:
    """Return the names of the files that lie beside the folder of a checkpoint."""
    return f"{name}.weights.json", f"{name}.ref.safetensors"


def sha256_of(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes."""
    return hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).hexdigest()


@pytest.fixture(scope="session")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> QuantizedCheckpoints:
    """The quantized checkpoints of this run by name, each put together once; copy one before changing it."""
    return QuantizedCheckpoints(tmp_path_factory.mktemp("quantized"))
