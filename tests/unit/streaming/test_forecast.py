"""A forecast is what the load's report says afterwards: from a disk, by one process and by ranks that share; and its times follow from its figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.support.thread_ranks import ThreadGroup, ThreadLink, on_every_rank

import headrace
from headrace.checkpoint import Entry
from headrace.errors import InvalidSetting
from headrace.settings import Settings, TransportSettings
from headrace.streaming.forecast import Conditions, Forecast, RankForecast, forecast_load
from headrace.streaming.lockstep import Lockstep
from headrace.streaming.memory import available_memory_bytes
from headrace.streaming.ranks import DistributedStream
from headrace.units import GIB, KIB, MIB

NUM_SMALL = 3000
"""More than one system call fills: each takes 1,024 pieces of memory."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files: 3,000 tensors of 8 bytes beside large ones, of 9 MB, 4.2 MB and 400 kB; and an empty one."""
    place = tmp_path_factory.mktemp("model")
    small = {f"layers.{number}.shape": torch.full((2,), number, dtype=torch.int32) for number in range(NUM_SMALL)}
    save_file({**small, "embed": torch.ones(1500, 1500)}, place / "model-00001-of-00002.safetensors")
    large = {f"layers.{number}.weight": torch.ones(100, 1000) for number in range(30)}
    others = {"head": torch.ones(1050, 1000), "empty": torch.empty(0, 3)}
    save_file({**large, **others}, place / "model-00002-of-00002.safetensors")
    return place


def settings_of(**more: Any) -> Settings:
    return Settings.from_environment({}, **{"progress": False, "num_connections": 3, "memory_limit_bytes": GIB, **more})


def forecast_of(
    folder: Path, settings: Settings, *, include: Any = None, available_bytes: int = GIB, **conditions: Any
) -> Forecast:
    with headrace.open(folder, settings=settings) as checkpoint:
        entries = list(checkpoint.entries.values())
        if include is not None:
            entries = [entry for entry in entries if include(entry.name)]
        about = Conditions(is_local=True, available_bytes=available_bytes, **conditions)
        return forecast_load(entries, settings, about, bytes_checkpoint=checkpoint.total_bytes)


SETTINGS = [
    {},
    {"read_bytes": MIB},
    {"read_bytes": 5 * MIB, "gap_bytes": 0},
    {"memory_limit_bytes": 0},
    {"memory_limit_bytes": MIB},
    {"memory_limit_bytes": -1, "local_ranks": 2},
    {"memory_limit_bytes": 4 * MIB, "local_ranks": 2},
]


@pytest.mark.parametrize(
    ("ownership", "more"),
    [*(("owned", more) for more in SETTINGS), ("leased", {}), ("leased", {"memory_limit_bytes": 0})],
    ids=str,
)
def test_one_process_does_what_was_forecast(folder: Path, ownership: Any, more: dict[str, Any]) -> None:
    settings = settings_of(**more)
    found = forecast_of(folder, settings, ownership=ownership)
    with headrace.stream(folder, ownership=ownership, settings=settings) as stream:
        num_tensors = sum(1 for _ in stream)
    report = stream.report
    assert num_tensors == found.num_tensors == NUM_SMALL + 33
    assert (found.bytes_read, found.num_requests) == (report.bytes_read, report.num_requests)
    assert (found.bytes_wanted, found.bytes_checkpoint) == (report.bytes_wanted, report.bytes_checkpoint)
    assert found.ranks[0].num_connections == report.num_connections
    assert found.bytes_received == 0


def test_what_is_left_out_is_counted_and_so_are_gaps(folder: Path) -> None:
    settings = settings_of()

    def is_wanted(name: str) -> bool:
        return name.endswith("shape") and int(name.split(".")[1]) % 2 == 0

    found = forecast_of(folder, settings, include=is_wanted)
    with headrace.stream(folder, include=is_wanted, settings=settings) as stream:
        assert sum(1 for _ in stream) == NUM_SMALL // 2
    report = stream.report
    assert (found.bytes_read, found.num_requests) == (report.bytes_read, report.num_requests)
    assert found.bytes_skipped == report.bytes_skipped == report.bytes_checkpoint - 8 * NUM_SMALL // 2
    assert found.bytes_in_gaps == report.bytes_read - report.bytes_wanted > 0


def test_the_default_limit_follows_the_memory_that_is_there(folder: Path) -> None:
    """An eighth of what is available, so the reads are as long as a load's only where the same was available."""
    settings = settings_of(memory_limit_bytes=None)
    found = forecast_of(folder, settings, available_bytes=available_memory_bytes())
    with headrace.stream(folder, settings=settings) as stream:
        assert sum(1 for _ in stream)
    assert found.num_requests == stream.report.num_requests
    assert forecast_of(folder, settings, available_bytes=0).num_requests >= found.num_requests


@pytest.mark.parametrize(
    ("num_ranks", "step", "more"),
    [*((2, 1, more) for more in SETTINGS), (2, 2, {}), (3, 1, {}), (3, 2, {"memory_limit_bytes": 0})],
    ids=str,
)
def test_ranks_do_what_was_forecast(folder: Path, num_ranks: int, step: int, more: dict[str, Any]) -> None:
    """With every tensor, and with every second one: what lies between two wanted ones is never read by ranks."""
    settings = settings_of(**more)
    with headrace.open(folder, settings=settings) as checkpoint:
        wanted = set(list(checkpoint.entries)[::step])

    def load(link: ThreadLink) -> Any:
        with headrace.open(folder, settings=settings) as checkpoint:
            entries = [entry for name, entry in checkpoint.entries.items() if name in wanted]
            stream = DistributedStream(checkpoint, entries, lockstep=Lockstep(link, beat_s=0.02), settings=settings)
            with stream:
                assert sum(1 for _ in stream) == len(wanted)
            return stream.report, stream.bytes_read_by_rank

    outcomes = on_every_rank(ThreadGroup(num_ranks).links(), load)
    found = forecast_of(folder, settings, include=wanted.__contains__, num_ranks=num_ranks)
    for report, by_rank in outcomes:
        assert tuple(rank.bytes_read for rank in found.ranks) == by_rank
        assert [rank.bytes_received for rank in found.ranks] == [report.bytes_wanted - own for own in by_rank]
        assert (found.bytes_read, found.num_requests) == (report.bytes_read, report.num_requests)
        assert found.bytes_read == found.bytes_wanted
        assert sum(rank.num_connections for rank in found.ranks) == report.num_connections


def test_times_follow_from_the_figures() -> None:
    ranks = (
        RankForecast(bytes_read=10**9, bytes_received=0, num_requests=100, num_connections=4),
        RankForecast(bytes_read=10**9, bytes_received=0, num_requests=400, num_connections=4),
    )
    found = Forecast(
        num_tensors=2,
        bytes_checkpoint=3 * 10**9,
        bytes_wanted=2 * 10**9,
        read_bytes=16 * MIB,
        ranks=ranks,
        is_local=False,
        request_latency_s=0.1,
    )
    assert found.least_seconds(1e9) == pytest.approx(16.0)
    assert found.seconds(1e9) == pytest.approx(
        16.0
    )  # 12 s of 48 s / 4 that a rank's requests take hide behind the link
    assert found.seconds(1e11) == pytest.approx((400 * 0.1 + 0.08) / 4)
    told = found.to_dict()
    assert json.loads(json.dumps(told)) == json.loads(json.dumps(told))
    assert (told["bytes_skipped"], told["num_requests"]) == (10**9, 500)


def test_a_limit_on_the_bandwidth_is_waited_for() -> None:
    entries = [Entry(f"w{number}", "U8", (MIB,), "f", number * MIB, (number + 1) * MIB) for number in range(64)]
    transport = TransportSettings(bandwidth_bytes_per_s=MIB)
    settings = Settings(memory_limit_bytes=GIB, transport=transport)
    remote, local = (
        forecast_load(entries, settings, Conditions(is_local=is_local, available_bytes=GIB), bytes_checkpoint=64 * MIB)
        for is_local in (False, True)
    )
    assert remote.seconds(1e11) == pytest.approx(64.0)
    assert local.seconds(1e11) == local.least_seconds(1e11) < 1
    assert (remote.num_requests, local.num_requests) == (4, 16)


def test_short_reads_of_a_small_memory_cost_requests() -> None:
    entries = [Entry("w", "U8", (64 * MIB,), "f", 0, 64 * MIB)]
    about = Conditions(available_bytes=GIB)
    roomy, tight = (
        forecast_load(entries, Settings(memory_limit_bytes=limit), about, bytes_checkpoint=64 * MIB)
        for limit in (GIB, MIB)
    )
    assert (roomy.read_bytes, roomy.num_requests) == (16 * MIB, 4)
    assert (tight.read_bytes, tight.num_requests) == (256 * KIB, 256)
    assert tight.seconds(1e11) > roomy.seconds(1e11)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_nothing_wanted_takes_nothing(num_ranks: int) -> None:
    about = Conditions(num_ranks=num_ranks, available_bytes=GIB)
    found = forecast_load([], Settings(), about, bytes_checkpoint=10)
    assert (found.bytes_read, found.num_requests, found.bytes_skipped) == (0, 0, 10)
    assert found.seconds(1e9) == 0.0


def test_no_rank_is_no_load() -> None:
    with pytest.raises(InvalidSetting, match="num_ranks is 0"):
        Conditions(num_ranks=0, available_bytes=GIB)
