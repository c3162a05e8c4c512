"""Ranks of one machine, each with reader processes of its own: the same tensors, whoever dies, and nothing left."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import headrace
from headrace.settings import Settings
from headrace.streaming import DistributedStream, Lockstep
from headrace.streaming.processgroup import GroupLink
from headrace.streaming.ranks import Exchange
from headrace.transport import ProcessPool, processes
from tests.support.checkpoints import make_files, make_tensors
from tests.support.fault_server import FaultServer, refuse, stall
from tests.support.rank_processes import RankProcesses

TENSORS = make_tensors()
FILES = make_files(TENSORS)
WEIGHTS = [f"m/{name}" for name in FILES if name.endswith(".safetensors")]
NUM_RANKS, NUM_READERS = 2, 2


@dataclass(frozen=True, slots=True)
class Found:
    """What one rank came to."""

    digests: dict[str, str]
    pids: tuple[int, ...]
    """Every reader process that it had."""
    num_lost: int
    num_bytes_by_readers: int
    row: str
    exchange: str


@pytest.fixture
def server(fault_server: FaultServer) -> FaultServer:
    for name, content in FILES.items():
        fault_server.put(f"m/{name}", content)
    return fault_server


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[RankProcesses]:
    with RankProcesses(NUM_RANKS, tmp_path) as ranks:
        yield ranks


OPENED: list[tuple[headrace.Checkpoint, Settings]] = []


def open_on_rank(rank: int, url: str, cache_dir: Path) -> None:
    """Open the checkpoint and keep it, so that a script for its files can be set before the load and not meet their headers."""
    quick = {"backoff_first_s": 0.005, "backoff_most_s": 0.02, "hedge_after_s": 0}
    settings = Settings.from_environment(
        {},
        cache_dir=cache_dir,
        progress=False,
        read_bytes=100_000,
        num_connections=4 * NUM_RANKS,
        readers=NUM_READERS,
        **quick,
    )
    OPENED[:] = [(headrace.open(f"{url}/m", settings=settings), settings)]


def load_on_rank(rank: int, exchange: Exchange, kills: bool) -> Found:
    """Load everything by reader processes alone; with ``kills`` all of them are killed once each connection is at a read."""
    processes._READS_BEFORE_START = 0
    checkpoint, settings = OPENED.pop()
    with ExitStack() as stack:
        stack.callback(checkpoint.close)
        lockstep = Lockstep(GroupLink())
        stream = DistributedStream(checkpoint, lockstep=lockstep, settings=settings, exchange=exchange)
        stack.enter_context(stream)
        stream._own = own = stream._open_own()
        pool = own._pool
        assert isinstance(pool, ProcessPool)
        first, seen = pool.pids, [*pool._fleet._processes]
        killer = threading.Thread(target=kill_when_reading, args=(pool,))
        if kills:
            killer.start()
        digests = {name: digest_of(tensor) for name, tensor in stream}
        if kills:
            killer.join()
        report = stream.report
    by_readers = sum(one.status.read(slot).bytes_received for one in seen for slot in range(16))
    row = dict(report.rows())["readers"]
    return Found(digests, tuple(first), pool.num_lost, by_readers, row, stream.exchange)


def kill_when_reading(pool: ProcessPool) -> None:
    while not pool.counters.bytes_received:
        time.sleep(0.01)
    time.sleep(0.3)
    for pid in pool.pids:
        os.kill(pid, signal.SIGKILL)


def digest_of(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(tensor.numpy().tobytes()).hexdigest()}"


def assert_gone(pids: tuple[int, ...]) -> None:
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("exchange", ["shared", "broadcast"])
def test_two_ranks_by_two_reader_processes_each_load_the_same_and_leave_none(
    server: FaultServer, ranks: RankProcesses, tmp_path: Path, exchange: Exchange
) -> None:
    assert [outcome.error for outcome in ranks.run(open_on_rank, server.url, tmp_path)] == [None] * NUM_RANKS
    outcomes = ranks.run(load_on_rank, exchange, False)
    assert [outcome.error for outcome in outcomes] == [None] * NUM_RANKS
    found: list[Found] = [outcome.value for outcome in outcomes]
    for one in found:
        assert one.digests == {name: digest_of(tensor) for name, tensor in TENSORS.items()}
        assert (len(one.pids), one.num_lost, one.exchange) == (NUM_READERS, 0, exchange)
        assert one.row == "2 processes (as set, this rank)"
        assert_gone(one.pids)
    # Each byte was read once, by a reader process.
    num_bytes = sum(tensor.nbytes for tensor in TENSORS.values())
    assert sum(one.num_bytes_by_readers for one in found) == num_bytes
    assert all(not [name for name in outcome.threads if name.startswith("headrace")] for outcome in outcomes)


def test_reader_processes_that_are_killed_cost_the_ranks_nothing_but_time(
    server: FaultServer, ranks: RankProcesses, tmp_path: Path
) -> None:
    ranks.run(open_on_rank, server.url, tmp_path)
    for key in WEIGHTS:
        server.script(key, stall(20_000), stall(20_000))
    outcomes = ranks.run(load_on_rank, "shared", True)
    assert [outcome.error for outcome in outcomes] == [None] * NUM_RANKS
    found: list[Found] = [outcome.value for outcome in outcomes]
    for one in found:
        assert one.digests == {name: digest_of(tensor) for name, tensor in TENSORS.items()}
        assert_gone(one.pids)
    assert sum(one.num_lost for one in found) >= 1


def test_what_a_reader_process_of_one_rank_fails_with_is_raised_by_all(
    server: FaultServer, ranks: RankProcesses, tmp_path: Path
) -> None:
    ranks.run(open_on_rank, server.url, tmp_path)
    server.always(WEIGHTS[1], refuse(403))
    outcomes = ranks.run(load_on_rank, "shared", False)
    kinds = {type(outcome.error).__name__ for outcome in outcomes}
    assert "AccessDenied" in kinds
    assert kinds <= {"AccessDenied", "RankFailed"}
    paths = [path for one in ranks._processes for path in Path(f"/proc/{one.pid}/task").glob("*/children")]
    assert paths
    assert_gone(tuple(int(pid) for path in paths for pid in path.read_text().split()))
