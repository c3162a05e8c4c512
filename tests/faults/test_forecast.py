"""Forecasts of loads from a server: as many requests and bytes as were foretold are what the server has seen, by one process, by ranks, and for parts of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

import headrace
from headrace.checkpoint import open_checkpoint
from headrace.engines.rehearsal import rehearse_model
from headrace.settings import Settings
from headrace.streaming import DistributedStream, LoadReport, Lockstep, TensorStream
from headrace.streaming.forecast import Conditions, Forecast, forecast_load
from headrace.units import GIB
from tests.support.fault_server import FaultServer
from tests.support.kimi import NUM_LAYERS, kimi_tensors, packed_experts, save_kimi
from tests.support.stub_store import StubStore
from tests.support.thread_ranks import ThreadGroup, ThreadLink, on_every_rank


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Short reads, so that there are many; nothing is asked for twice."""
    return Settings.from_environment(
        {},
        cache_dir=tmp_path / "cache",
        progress=False,
        num_connections=4,
        read_bytes=50_000,
        gap_bytes=2_000,
        hedge_after_s=0,
        memory_limit_bytes=GIB,
    )


@pytest.fixture
def store(fault_server: FaultServer) -> StubStore:
    generator = torch.Generator().manual_seed(3)
    for file in range(2):
        tensors = {
            f"layers.{layer}.{name}": torch.randn(rows, 100, generator=generator)
            for layer in range(file * 6, file * 6 + 6)
            for name, rows in (("attention", 40), ("mlp", 150), ("norm", 1))
        }
        fault_server.put(f"model-{file + 1:05d}-of-00002.safetensors", save(tensors))
    return StubStore(fault_server)


def put_folder(server: FaultServer, folder: Path) -> StubStore:
    for path in folder.iterdir():
        server.put(path.name, path.read_bytes())
    return StubStore(server)


def seen(server: FaultServer, since: int) -> tuple[int, int]:
    """Return how many reads of weights the server has answered after the first ``since``, and with how many bytes."""
    reads = [sent for sent in server.log[since:] if sent.key.endswith(".safetensors")]
    return len(reads), sum(sent.bytes_sent for sent in reads)


def figures(found: Forecast | LoadReport) -> tuple[int, int, int, int]:
    return found.num_requests, found.bytes_read, found.bytes_wanted, found.bytes_skipped


@pytest.mark.parametrize(("wanted", "has_gaps"), [(("",), False), (("norm",), False), (("attention", "mlp"), True)])
def test_one_process(
    fault_server: FaultServer, store: StubStore, settings: Settings, wanted: tuple[str, ...], has_gaps: bool
) -> None:
    with open_checkpoint(store, settings=settings) as checkpoint:
        entries = [entry for name, entry in checkpoint.entries.items() if name.endswith(wanted)]
        about = Conditions(available_bytes=GIB)
        found = forecast_load(entries, settings, about, bytes_checkpoint=checkpoint.total_bytes)
        opened = len(fault_server.log)
        with TensorStream(checkpoint, entries, settings=settings) as stream:
            assert sum(1 for _ in stream) == len(entries)
        assert figures(found) == figures(stream.report)
    assert (found.num_requests, found.bytes_read) == seen(fault_server, opened)
    assert (found.bytes_in_gaps > 0) == has_gaps


def test_two_ranks(fault_server: FaultServer, store: StubStore, settings: Settings) -> None:
    def load(link: ThreadLink) -> Any:
        with open_checkpoint(store, settings=settings) as checkpoint:
            stream = DistributedStream(checkpoint, lockstep=Lockstep(link, beat_s=0.02), settings=settings)
            with stream:
                assert sum(1 for _ in stream) == len(checkpoint.entries)
            return stream.report, stream.bytes_read_by_rank

    outcomes = on_every_rank(ThreadGroup(2).links(), load)
    with open_checkpoint(store, settings=settings) as checkpoint:
        about = Conditions(num_ranks=2, available_bytes=GIB)
        entries = list(checkpoint.entries.values())
        found = forecast_load(entries, settings, about, bytes_checkpoint=checkpoint.total_bytes)
    for report, by_rank in outcomes:
        assert figures(found) == figures(report)
        assert tuple(rank.bytes_read for rank in found.ranks) == by_rank


@pytest.mark.parametrize(
    "part", [{}, {"language_only": True}, {"language_only": True, "layers": range(NUM_LAYERS - 1)}]
)
@pytest.mark.parametrize("is_packed", [False, True])
def test_parts_of_a_model(
    fault_server: FaultServer, settings: Settings, tmp_path: Path, part: dict[str, Any], is_packed: bool
) -> None:
    """What is told of a model, and of parts of it, is what `load_model` asks for; finding it out asks for no weight."""
    tensors = packed_experts(kimi_tensors()) if is_packed else kimi_tensors()
    store = put_folder(fault_server, save_kimi(tmp_path / "kimi", tensors, is_packed=is_packed))
    with open_checkpoint(store, settings=settings) as checkpoint:
        opened = len(fault_server.log)
        entries = rehearse_model(checkpoint, settings=settings, **part)
        assert seen(fault_server, opened) == (0, 0)
        about = Conditions(available_bytes=GIB)
        found = forecast_load(entries, settings, about, bytes_checkpoint=checkpoint.total_bytes)
        reports: list[LoadReport] = []
        model = headrace.load_model(checkpoint, settings=settings, on_report=reports.append, **part)
    assert sum(parameter.numel() for parameter in model.parameters()) > 0
    assert figures(found) == figures(reports[0])
    assert (found.num_requests, found.bytes_read) == seen(fault_server, opened)
    assert (found.bytes_skipped > 0) == bool(part)
