"""DeepSeek V3 and Kimi K2.5 at their real size, from headers alone: opened and planned, with few requests, little memory and no step whose cost grows with the square."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace.checkpoint import Checkpoint, open_checkpoint
from headrace.checkpoint.headers import GUESS_BYTES
from headrace.engines.collector import collector_paused
from headrace.engines.rehearsal import rehearse_model
from headrace.settings import Settings
from headrace.streaming.forecast import Conditions, Forecast, forecast_load
from headrace.units import GIB
from tests.support.large_checkpoints import LargeCheckpoint, SparseS3, deepseek_v3, kimi_k25, write_sparse

pytestmark = pytest.mark.slow

MOST_MEMORY_BYTES = 500_000_000
"""What opening and planning may take beyond the imports."""
_OTHER_REQUESTS = 12
"""Listings, the index and config.json."""

_MEASURE = """
import contextlib, io, re, sys
import torch, headrace.storage.s3, headrace.quantization, headrace.cli.planning
from headrace.cli.inspect import PlanOptions, inspect
from headrace.settings import Settings
def peak():  # not ru_maxrss: a child inherits that of the process that spawned it
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
before = peak()
with contextlib.redirect_stdout(io.StringIO()) as shown:
    inspect(sys.argv[1], settings=Settings.from_environment(progress=False), plan=PlanOptions(num_ranks=8))
assert "100 Gbit/s" in shown.getvalue()
print(peak() - before)
"""


@dataclass(frozen=True, slots=True)
class Served:
    """What there is, the server that it is at, and what was opened from there."""

    written: LargeCheckpoint
    server: SparseS3
    checkpoint: Checkpoint
    settings: Settings

    @property
    def most_header_bytes(self) -> int:
        """What reading every header takes at most: the first read of a file guesses how long it is."""
        return sum(max(len(header), GUESS_BYTES) for header in self.written.headers.values())


@pytest.fixture(scope="module", params=[deepseek_v3, kimi_k25], ids=["deepseek", "kimi"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One of the two, opened from a server. Nothing is asked for twice, however slow the machine is."""
    written = request.param()
    with SparseS3(written) as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment().items():
            patch.setenv(name, value)
        settings = Settings.from_environment(
            cache_dir=tmp_path_factory.mktemp("cache"), progress=False, memory_limit_bytes=8 * GIB, hedge_after_s=0
        )
        with open_checkpoint(server.uri, settings=settings) as checkpoint:
            yield Served(written, server, checkpoint, settings)


def forecast(
    checkpoint: Checkpoint, settings: Settings, num_ranks: int, is_wanted: Callable[[str], bool] = lambda name: True
) -> Forecast:
    entries = [entry for name, entry in checkpoint.entries.items() if is_wanted(name)]
    about = Conditions(num_ranks=num_ranks, available_bytes=64 * GIB)
    return forecast_load(entries, settings, about, bytes_checkpoint=checkpoint.total_bytes)


def test_sizes_are_those_of_the_repositories() -> None:
    deepseek, kimi = deepseek_v3(), kimi_k25()
    assert (deepseek.num_tensors, len(deepseek.headers)) == (91_991, 163)
    assert (kimi.num_tensors, len(kimi.headers)) == (208_550, 64)
    assert round(deepseek.tensor_bytes / 1e9, 1) == 688.6
    assert round(kimi.tensor_bytes / GIB, 1) == 554.3


def test_opening_and_planning_ask_for_headers_alone(served: Served) -> None:
    written, server = served.written, served.server
    assert len(served.checkpoint.entries) == written.num_tensors
    assert served.checkpoint.total_bytes == written.tensor_bytes
    alone, shared = (forecast(served.checkpoint, served.settings, num_ranks) for num_ranks in (1, 8))
    for found in (alone, shared):
        assert found.bytes_read == found.bytes_wanted == written.tensor_bytes
        assert written.tensor_bytes / found.read_bytes <= found.num_requests <= 100_000
    for rank in shared.ranks:
        assert rank.bytes_read == pytest.approx(written.tensor_bytes / 8, rel=0.01)
        assert rank.bytes_received == pytest.approx(written.tensor_bytes * 7 / 8, rel=0.01)
        assert rank.num_requests == pytest.approx(shared.num_requests / 8, rel=0.1)
    assert alone.least_seconds(1e11) == pytest.approx(written.tensor_bytes * 8e-11)
    assert alone.seconds(1e11) > alone.least_seconds(1e11)
    assert server.bytes_asked <= served.most_header_bytes
    assert len(server.reads) <= 2 * len(written.headers)
    assert len(server.asked) - len(server.reads) <= _OTHER_REQUESTS


def test_what_is_left_out_costs_nothing(served: Served) -> None:
    """One layer of 61: its share of the bytes, and about as large a share of the requests."""
    every = forecast(served.checkpoint, served.settings, 1)
    layer = forecast(served.checkpoint, served.settings, 1, lambda name: ".layers.30." in name)
    assert 0.01 < layer.bytes_wanted / every.bytes_wanted < 0.02
    assert layer.bytes_skipped == every.bytes_wanted - layer.bytes_wanted
    assert layer.num_requests < every.num_requests * 0.025
    assert layer.bytes_read < layer.bytes_wanted * 1.001


def test_models_are_placed(served: Served) -> None:
    """What Transformers takes: all but the layer for multi-token prediction of the one, all but encoder and projector of the other's language model."""
    checkpoint, is_kimi = served.checkpoint, served.written.num_tensors > 200_000
    order = rehearse_model(checkpoint, settings=served.settings, language_only=is_kimi)
    outside = ("mm_projector.", "vision_tower.") if is_kimi else ("model.layers.61.",)
    left_out = {name for name in checkpoint.entries if name.startswith(outside)}
    assert len(left_out) == (335 if is_kimi else 1564)
    assert {entry.name for entry in order} == set(checkpoint.entries) - left_out
    assert len(order) == len(checkpoint.entries) - len(left_out)
    assert served.server.bytes_asked <= served.most_header_bytes


def test_memory_stays_small(served: Served, tmp_path: Path) -> None:
    """`headrace inspect --plan --ranks 8` in a process of its own: headers, index, quantization and plan, beyond the imports."""
    environment = {**os.environ, **served.server.environment(), "HEADRACE_CACHE_DIR": str(tmp_path)}
    before = len(served.server.asked)
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, served.server.uri],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    del served.server.asked[before:]  # the other tests count what they asked for themselves
    assert done.returncode == 0, done.stderr[-2000:]
    assert 0 < int(done.stdout) < MOST_MEMORY_BYTES


@pytest.mark.parametrize("make", [deepseek_v3, kimi_k25])
def test_no_step_grows_with_the_square(make: Callable[..., LargeCheckpoint], tmp_path: Path) -> None:
    """The whole against about an eighth of it, in CPU time for each tensor: a step that grows with the square would take eight times as much.

    Python's cyclic garbage collector is paused, as `headrace inspect` and `load_model` do: it runs when it will, and would take half of the time.
    """
    settings = Settings(cache_dir=tmp_path / "cache", memory_limit_bytes=8 * GIB)
    steps: dict[str, list[float]] = {}
    with collector_paused(), ExitStack() as opened:
        for num_layers in (8, 61):
            written = make(num_layers)
            folder = tmp_path / str(num_layers)
            write_sparse(written, folder)
            started = [time.process_time()]
            checkpoint = opened.enter_context(open_checkpoint(folder, settings=settings))
            started.append(time.process_time())
            for num_ranks in (1, 8):
                assert forecast(checkpoint, settings, num_ranks).bytes_wanted == written.tensor_bytes
                started.append(time.process_time())
            for name, start, stop in zip(("opening", "one", "ranks"), started, started[1:], strict=False):
                steps.setdefault(name, []).append((stop - start) / written.num_tensors)
    assert {name: whole / part for name, (part, whole) in steps.items() if whole > 3 * part} == {}
