"""Consumers of every kind, each with a memory limit far below the checkpoint, against a plain read: whoever keeps a tensor has the right bytes at the end.

Freed leases are poisoned, so a tensor that was lent again too early would show.
"""

from __future__ import annotations

import gc
import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import headrace
from headrace.settings import Settings
from headrace.streaming import TensorStream

LIMIT_BYTES = 3 << 20
NUM_LAYERS = 11


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 20 MB in two files; halves of pairs lie in different files; odd sizes, empty, 0-d and one-byte dtypes among them."""
    folder = tmp_path_factory.mktemp("checkpoint")
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    first: dict[str, torch.Tensor] = {
        "a.byte": torch.tensor([7], dtype=torch.uint8),
        "a.empty": torch.empty(0, 4),
        "a.scale": torch.tensor(0.5),
    }
    second: dict[str, torch.Tensor] = {"z.empty": torch.empty(0)}
    for layer in range(NUM_LAYERS):
        first[f"layers.{layer}.q_a_proj.weight"] = random(700, 501)
        first[f"layers.{layer}.norm.weight"] = random(501)
        second[f"layers.{layer}.kv_a_proj_with_mqa.weight"] = random(301, 501)
        first[f"layers.{layer}.down.weight"] = random(900, 1000, dtype=torch.float8_e4m3fn)
        second[f"layers.{layer}.down.weight_scale"] = torch.rand(900, 1, generator=generator)
    save_file(first, folder / "model-00001-of-00002.safetensors")
    save_file(second, folder / "model-00002-of-00002.safetensors")
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, str]:
    plain = {name: tensor for path in sorted(folder.iterdir()) for name, tensor in load_file(path).items()}
    return {name: digest(tensor) for name, tensor in plain.items()}


@pytest.fixture(params=["disk", "s3"])
def uri(request: pytest.FixtureRequest, folder: Path) -> str:
    if request.param == "disk":
        return str(folder)
    bucket, client = request.getfixturevalue("bucket"), request.getfixturevalue("s3_client")
    for path in folder.iterdir():
        client.put_object(Bucket=bucket, Key=f"model/{path.name}", Body=path.read_bytes())
    return f"s3://{bucket}/model"


def digest(tensor: torch.Tensor) -> str:
    """Return a hash of a tensor's dtype, shape and bytes."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""
    return hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode() + bytes(flat)).hexdigest()


def leased(uri: str, **options: Any) -> TensorStream:
    settings = Settings.from_environment(
        progress=False, memory_limit_bytes=LIMIT_BYTES, read_bytes=256 << 10, num_connections=4, debug_poison=True
    )
    return headrace.stream(uri, ownership="leased", settings=settings, **options)


Consumer = Callable[[Iterator[tuple[str, torch.Tensor]]], dict[str, torch.Tensor]]


def copying(stream: Iterator[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.empty_like(tensor).copy_(tensor) for name, tensor in stream}


def listing(stream: Iterator[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return dict(list(stream))


def keeping_every_second(stream: Iterator[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: tensor if place % 2 else tensor.clone() for place, (name, tensor) in enumerate(stream)}


def keeping_small_ones(stream: Iterator[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: tensor if tensor.nbytes < 4096 else tensor.clone() for name, tensor in stream}


def keeping_views(stream: Iterator[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    kept: dict[str, Any] = {}
    for place, (name, tensor) in enumerate(stream):
        shape, dtype = tensor.shape, tensor.dtype
        if not tensor.numel():
            kept[name] = tensor
            continue
        flat = tensor.reshape(-1).view(torch.uint8)
        kinds = [
            lambda t: t.detach(),
            lambda t: t[:],
            lambda t: t.view(-1),
            lambda t: torch.from_numpy(t.numpy()),
            lambda t: t.narrow(0, 0, t.shape[0]),
        ]
        view = kinds[place % len(kinds)](flat)
        del tensor, flat
        kept[name] = (view, dtype, shape)
    return {
        name: item if isinstance(item, torch.Tensor) else item[0].reshape(-1).view(item[1]).view(item[2])
        for name, item in kept.items()
    }


def holding_pairs(stream: Iterator[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Fuse two halves as an engine does: the first is held, as it came, until the second comes from another file."""
    found: dict[str, torch.Tensor] = {}
    waiting: dict[str, torch.Tensor] = {}
    partners = {".q_a_proj.weight": ".kv_a_proj_with_mqa.weight", ".down.weight": ".down.weight_scale"}
    for name, tensor in stream:
        for first, second in partners.items():
            if name.endswith(first):
                waiting[name.removesuffix(first) + second] = tensor
            elif name.endswith(second) and name in waiting:
                found[name.removesuffix(second) + first] = waiting.pop(name).clone()
        if name not in waiting.values() and not any(name.endswith(first) for first in partners):
            found[name] = tensor.clone()
    assert not waiting
    return found


def in_a_thread_pool(stream: Iterator[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    def slowly(item: tuple[str, torch.Tensor]) -> tuple[str, torch.Tensor]:
        time.sleep(0.001)
        return item[0], item[1].clone()

    with ThreadPoolExecutor(4) as executor:
        return dict(executor.map(slowly, stream))


@pytest.mark.parametrize(
    "consumer",
    [copying, listing, dict, keeping_every_second, keeping_small_ones, keeping_views, in_a_thread_pool],
    ids=lambda consumer: consumer.__name__,
)
def test_every_consumer_has_the_right_bytes_at_the_end(consumer: Consumer, uri: str, expected: dict[str, str]) -> None:
    """origin B7: nothing has to be collected, and who does collect has right values."""
    with leased(uri) as stream:
        kept = consumer(iter(stream))
    gc.collect()
    assert {name: digest(tensor) for name, tensor in kept.items()} == expected


def test_a_half_that_is_held_survives_until_the_other_comes(uri: str, expected: dict[str, str]) -> None:
    """origin B5."""
    with leased(uri) as stream:
        found = holding_pairs(iter(stream))
    assert {name: digest(tensor) for name, tensor in found.items()} == expected


def test_a_consumer_that_copies_never_needs_more_than_the_limit(uri: str) -> None:
    with leased(uri, on_budget="error") as stream:
        assert len(copying(iter(stream))) == len(stream.plan.entries)
    report = stream.report
    assert report.num_promotions == 0 and report.peak_staging_bytes <= LIMIT_BYTES < report.bytes_wanted / 4


def test_two_streams_at_once_do_not_touch_each_other(uri: str, expected: dict[str, str]) -> None:
    with leased(uri) as one, leased(uri) as other:
        pairs = list(zip(one, other, strict=True))
    assert {name: digest(tensor) for (name, tensor), _ in pairs} == expected
    assert {name: digest(tensor) for _, (name, tensor) in pairs} == expected


def test_tensors_outlive_a_stream_that_is_closed_early(uri: str, expected: dict[str, str]) -> None:
    with leased(uri) as stream:
        kept = [next(iter(stream)) for _ in range(5)]
    del stream
    gc.collect()
    assert len(kept) == 5 and all(digest(tensor) == expected[name] for name, tensor in kept)


def reader_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("headrace")]


def test_an_exception_in_the_consumer_ends_the_readers(uri: str) -> None:
    class Broken(Exception):
        pass

    with pytest.raises(Broken), leased(uri) as stream:
        for _ in stream:
            raise Broken
    assert reader_threads() == []


def test_a_generator_that_is_never_finished_ends_with_its_last_reference(uri: str) -> None:
    iterator = iter(leased(uri))
    next(iterator)
    deadline = time.monotonic() + 10
    del iterator
    while reader_threads() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.05)
    assert reader_threads() == []


_PROGRAM = """
import os, sys, threading
import headrace
from headrace.settings import Settings
settings = Settings.from_environment(progress=False, memory_limit_bytes=3 << 20, num_connections=4, read_bytes=256 << 10)
stream = headrace.stream(sys.argv[1], ownership="leased", settings=settings)
iterator = iter(stream)
kept = [next(iterator) for _ in range(3)]
"""
_ENDINGS = {
    "the interpreter exits in mid-stream": "",
    "it exits with tensors in a thread": "threading.Thread(target=lambda: [__import__('time').sleep(0.2), kept.clear()]).start()",
    "a child is forked and both go on": """
before = [bytes(t.reshape(-1).view(__import__('torch').uint8).numpy()) if t.numel() else b'' for _, t in kept]
pid = os.fork()
if pid == 0:
    same = [bytes(t.reshape(-1).view(__import__('torch').uint8).numpy()) if t.numel() else b'' for _, t in kept] == before
    for _, t in kept:
        if t.numel(): t.reshape(-1).view(__import__('torch').uint8)[:] = 0  # the child's own copy
    stream.close()
    os._exit(0 if same else 3)
assert os.waitpid(pid, 0)[1] == 0
assert [bytes(t.reshape(-1).view(__import__('torch').uint8).numpy()) if t.numel() else b'' for _, t in kept] == before
assert sum(1 for _ in iterator) == len(stream.plan.entries) - 3
""",
}


@pytest.mark.parametrize("ending", list(_ENDINGS), ids=list(_ENDINGS))
def test_a_process_ends_cleanly_when(ending: str, uri: str) -> None:
    command = [sys.executable, "-W", "error", "-c", _PROGRAM + _ENDINGS[ending], uri]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
