"""Loads one checkpoint over and over, and after each load looks whether the tensors are right and anything was left: threads, descriptors, sockets, files."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import random
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

import headrace
from headrace.errors import HeadraceError
from headrace.settings import Settings
from headrace.streaming import LoadReport
from tests.support.faulty_s3 import FaultyS3

_LONGEST_LEAVE_S = 5.0
"""How long the system may take to show that a socket was closed."""


def write_checkpoint(folder: Path, num_bytes: int, *, num_files: int = 1, seed: int = 1) -> dict[str, str]:
    """Write a bf16 checkpoint of about ``num_bytes`` random bytes with a config, and an index if there are several files; return each tensor's SHA-256.

    The shapes are those of a small decoder: one table of an eighth of it all, layers of larger and smaller matrices, norms. Written without Headrace or
    safetensors: header length, header, data (safetensors' README, "Format").
    """
    dice = random.Random(seed)
    wanted = _shapes(num_bytes)
    names = list(wanted)
    weight_map: dict[str, str] = {}
    truth: dict[str, str] = {}
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(num_files):
        file = f"model-{number + 1:05d}-of-{num_files:05d}.safetensors" if num_files > 1 else "model.safetensors"
        mine = names[number * len(names) // num_files : (number + 1) * len(names) // num_files]
        header, stop = {}, 0
        for name in mine:
            start, stop = stop, stop + 2 * wanted[name][0] * wanted[name][1]
            header[name] = {"dtype": "BF16", "shape": wanted[name], "data_offsets": [start, stop]}
        raw = json.dumps(header).encode()
        with (folder / file).open("wb") as out:
            out.write(struct.pack("<Q", len(raw)) + raw)
            for name in mine:
                payload = dice.randbytes(2 * wanted[name][0] * wanted[name][1])
                truth[name] = hashlib.sha256(payload).hexdigest()
                out.write(payload)
        weight_map |= dict.fromkeys(mine, file)
    if num_files > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return truth


def _shapes(num_bytes: int) -> dict[str, tuple[int, int]]:
    hidden = 64 * max(1, int((num_bytes / 2) ** 0.5 / 640))
    table = max(1, num_bytes // 16 // hidden)
    found = {"model.embed_tokens.weight": (table, hidden)}
    left, layer = num_bytes - 2 * table * hidden, 0
    while left > 0:
        prefix = f"model.layers.{layer}"
        found[f"{prefix}.input_layernorm.weight"] = (1, hidden)
        found[f"{prefix}.self_attn.q_proj.weight"] = (hidden, hidden)
        found[f"{prefix}.self_attn.k_proj.weight"] = (hidden // 4, hidden)
        found[f"{prefix}.mlp.up_proj.weight"] = (3 * hidden + 1, hidden)
        left -= 2 * hidden * (1 + hidden + hidden // 4 + 3 * hidden + 1)
        layer += 1
    return found


def hash_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the SHA-256 of each tensor's bytes."""
    return {
        name: hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()
        for name, tensor in tensors.items()
    }


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What a process holds: compared before and after a load."""

    threads: tuple[str, ...]
    descriptors: int
    sockets: int
    files: tuple[str, ...]
    """Below the folders that are watched."""

    @classmethod
    def now(cls, folders: Sequence[Path] = ()) -> Leftovers:
        descriptors = _descriptors()
        return cls(
            tuple(sorted(thread.name for thread in threading.enumerate())),
            len(descriptors),
            sum(target.startswith("socket:") for target in descriptors),
            tuple(sorted(str(path) for folder in folders for path in folder.rglob("*"))),
        )


def _descriptors() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:  # The one by which the folder itself was read.
            continue
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How one load went."""

    seconds: float
    """From the call to the return, opening included."""
    num_bytes: int
    is_right: bool
    error: str
    """What was raised; empty for a load that came to its end."""
    left: str
    """What was left of it; empty for nothing."""
    rss_bytes: int
    report: LoadReport | None

    @property
    def is_clean(self) -> bool:
        return self.is_right and not self.error and not self.left


class Soak:
    """Loads ``uri`` in this process, and remembers what it held before."""

    def __init__(
        self,
        uri: str,
        truth: Mapping[str, str],
        settings: Settings,
        *,
        watched: Sequence[Path] = (),
        leased: bool = False,
    ) -> None:
        """``watched`` are folders that loads must leave as they were; ``leased`` streams into memory that is used again instead of `headrace.load_state_dict`."""
        self._uri = uri
        self._truth = truth
        self._settings = settings
        self._watched = watched
        self._leased = leased
        self._before: Leftovers | None = None
        self._process = psutil.Process()

    def load(self) -> Load:
        """Load once. The first load's leftovers (modules, the SDK's own) are what later ones are compared with; call it once without faults."""
        reports: list[LoadReport] = []
        found: dict[str, str] = {}
        num_bytes, error = 0, ""
        started = time.perf_counter()
        try:
            if self._leased:
                found, num_bytes = self._stream(reports.append)
                seconds = time.perf_counter() - started
            else:
                tensors = headrace.load_state_dict(self._uri, settings=self._settings, on_report=reports.append)
                seconds = time.perf_counter() - started
                found, num_bytes = hash_tensors(tensors), sum(tensor.nbytes for tensor in tensors.values())
                del tensors
        except HeadraceError as failure:
            seconds = time.perf_counter() - started
            error = f"{type(failure).__name__}: {failure}"
        left = self._left()
        return Load(
            seconds=seconds,
            num_bytes=num_bytes,
            is_right=found == self._truth,
            error=error,
            left=left,
            rss_bytes=self._process.memory_info().rss,
            report=reports[0] if reports else None,
        )

    def _stream(self, note: Callable[[LoadReport], None]) -> tuple[dict[str, str], int]:
        found: dict[str, str] = {}
        num_bytes = 0
        with headrace.stream(self._uri, ownership="leased", settings=self._settings) as stream:
            for name, tensor in stream:
                found |= hash_tensors({name: tensor})
                num_bytes += tensor.nbytes
                del tensor
        note(stream.report)
        return found, num_bytes

    def _left(self) -> str:
        gc.collect()
        deadline = time.monotonic() + _LONGEST_LEAVE_S
        while True:
            now = Leftovers.now(self._watched)
            if self._before is None:
                self._before = now
            if now == self._before:
                return ""
            if time.monotonic() > deadline:
                return f"{now}, where before was {self._before}"
            time.sleep(0.01)


def alternate(
    server: FaultyS3, soak: Soak, *, num_faulty: int, is_over: Callable[[int], bool]
) -> Iterator[tuple[bool, Load]]:
    """Yield loads and whether the server misbehaved: one without faults, then ``num_faulty`` with them, and so on.

    ``is_over`` is asked after each round how many loads with faults there were. The first of all, without faults, warms up and is not yielded.
    """
    server.misbehave(False)
    first = soak.load()
    assert first.is_clean, first
    num_done = 0
    while not is_over(num_done):
        for number in range(1 + num_faulty):
            server.misbehave(number > 0)
            yield number > 0, soak.load()
        num_done += num_faulty
    server.misbehave(False)
