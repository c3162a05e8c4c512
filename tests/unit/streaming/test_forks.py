"""A child that is forked in the middle of a load: what it gives up is its own, and no lock that a thread of the parent held stops it."""

from __future__ import annotations

import gc
import mmap
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.support.thread_ranks import ThreadGroup

import headrace
from headrace.checkpoint import Checkpoint
from headrace.errors import UsageError
from headrace.process import HomeProcess
from headrace.settings import Settings
from headrace.streaming.lockstep import Lockstep
from headrace.streaming.mapped import MappedStream
from headrace.streaming.memory import SharedMemory
from headrace.streaming.ranks import DistributedStream
from headrace.streaming.stream import TensorStream

pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")

SETTINGS = Settings(progress=False)


def in_a_child(work: Callable[[], None]) -> int:
    """Run ``work`` in a forked child; return its exit code, -SIGALRM where it did not end within ten seconds."""
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@contextmanager
def held_by_another_thread(lock: Any) -> Iterator[None]:
    """Hold ``lock`` as a reader's thread may hold it at the moment of the fork."""
    taken, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            taken.set()
            let_go.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait(10)
    try:
        yield
    finally:
        let_go.set()
        thread.join()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Iterator[Checkpoint]:
    save_file({"a": torch.arange(5), "b": torch.ones(3)}, tmp_path / "model.safetensors")
    with headrace.open(tmp_path, settings=SETTINGS) as opened:
        yield opened


def distributed(checkpoint: Checkpoint) -> DistributedStream:
    return DistributedStream(checkpoint, lockstep=Lockstep(ThreadGroup(1).links()[0], beat_s=0.02), settings=SETTINGS)


STREAMS: dict[str, tuple[Callable[[Checkpoint], Any], str]] = {
    "streamed": (lambda checkpoint: TensorStream(checkpoint, settings=SETTINGS), "_changed"),
    "mapped": (MappedStream, "_lock"),
    "on many ranks": (distributed, "_lock"),
}


@pytest.mark.parametrize("kind", STREAMS)
def test_a_child_neither_waits_for_a_lock_of_the_parent_nor_reads(checkpoint: Checkpoint, kind: str) -> None:
    make, lock = STREAMS[kind]
    streams = [make(checkpoint)]

    def work() -> None:
        with pytest.raises(UsageError, match=r"A stream was made in process \d+ and is used in its child"):
            streams[0].take("b")
        streams[0].close()
        streams.clear()  # as the collector might at any time
        gc.collect()

    with held_by_another_thread(getattr(streams[0], lock)):
        assert in_a_child(work) == 0
    assert dict(streams[0]).keys() == {"a", "b"}, "the parent goes on"


def test_shared_memory_that_a_child_drops_stays_the_parents() -> None:
    memory = SharedMemory(4 * mmap.PAGESIZE)
    kept = [memory.allocate(mmap.PAGESIZE)]
    kept[0][:] = 7

    def work() -> None:
        kept.clear()
        gc.collect()

    assert in_a_child(work) == 0
    assert int(kept[0].min()) == 7
    assert os.fstat(memory.fileno()).st_blocks * 512 == mmap.PAGESIZE


def test_home_is_where_it_was_made() -> None:
    home = HomeProcess()
    assert home.is_here
    home.check("A stream")

    def work() -> None:
        assert not home.is_here
        with pytest.raises(UsageError, match="do not survive a fork"):
            home.check("A stream")

    assert in_a_child(work) == 0
