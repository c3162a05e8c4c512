"""Blocks that all ranks see: where they lie, that each rank's writes stay its own, and when their memory goes back."""

from __future__ import annotations

import gc
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.thread_ranks import ThreadGroup, on_every_rank

from headrace.checkpoint import Entry
from headrace.errors import RankFailed
from headrace.streaming.blocks import blocks_in_file
from headrace.streaming.lockstep import Lockstep
from headrace.streaming.sharedblocks import SharedBlocks, SharedFile, share_blocks
from headrace.streaming.shares import Window, plan_windows
from headrace.units import MIB

PAGE = mmap.PAGESIZE


def windows_of(*sizes: int) -> tuple[Window, ...]:
    """Windows of at most 3 MiB for two ranks; each of ``sizes``, 1 MiB or more, is a block of its own."""
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    entries = [
        Entry(f"t{place}", "U8", (size,), "model.safetensors", start, start + size)
        for place, (size, start) in enumerate(zip(sizes, starts, strict=True))
    ]
    return plan_windows(entries, num_ranks=2, window_bytes=3 * MIB)


class Pair:
    """Two ranks' views of the same blocks."""

    def __init__(self, windows: tuple[Window, ...]) -> None:
        self.first, self.file, descriptor = SharedBlocks.create(windows, num_ranks=2)
        self.second = SharedBlocks.open(self.file, windows, rank=1, num_ranks=2)
        self.descriptor = os.dup(descriptor)
        os.close(descriptor)
        os.pwrite(
            self.descriptor, b"\0", os.fstat(self.descriptor).st_size - PAGE
        )  # the table's page is there from now on

    def kept_bytes(self) -> int:
        """What the memfd holds, without the table of who has dropped what."""
        return os.fstat(self.descriptor).st_blocks * 512 - PAGE

    def close(self) -> None:
        os.close(self.descriptor)


@pytest.fixture
def pair() -> Any:
    pair = Pair(windows_of(MIB, MIB + 5, 2 * MIB))
    yield pair
    pair.close()


def test_what_one_rank_reads_the_other_has(pair: Pair) -> None:
    for block, value in ((0, 7), (1, 9)):
        pair.first.allocate(0, block)[: MIB // 2] = value
        pair.second.allocate(0, block)[MIB // 2 :] = value + 1
    for blocks in (pair.first, pair.second):
        for block, size, value in ((0, MIB, 7), (1, MIB + 5, 9)):
            array = blocks.hand_out(0, block)
            assert len(array) == size and array.ctypes.data % PAGE == 0
            assert set(array[: MIB // 2].tolist()) == {value} and set(array[MIB // 2 :].tolist()) == {value + 1}


def test_a_piece_of_a_block_is_found_where_another_process_can_fill_it(pair: Pair) -> None:
    piece = memoryview(pair.first.allocate(0, 1))[100:200]
    place = pair.first.find(piece)
    assert place is not None
    with mmap.mmap(place.descriptor, place.size_bytes, flags=mmap.MAP_SHARED) as mapped:
        mapped[place.offset : place.offset + 100] = b"x" * 100
    assert bytes(piece) == b"x" * 100
    assert pair.second.hand_out(0, 1)[99:201].tolist() == [0, *b"x" * 100, 0]


def test_no_other_memory_is_found_in_the_file_of_blocks(pair: Pair) -> None:
    assert pair.first.find(memoryview(bytearray(100))) is None
    assert pair.first.find(memoryview(pair.first.allocate(0, 0))[:0]) is None
    assert pair.first.find(memoryview(pair.first.allocate(0, 1)).toreadonly()) is None
    assert pair.first.find(memoryview(pair.first.hand_out(0, 0))) is None  # The private mapping.


def test_the_descriptor_goes_with_the_blocks() -> None:
    blocks, _, descriptor = SharedBlocks.create(windows_of(MIB), num_ranks=1)
    os.close(descriptor)
    place = blocks.find(memoryview(blocks.allocate(0, 0)))
    assert place is not None
    inode = os.fstat(place.descriptor).st_ino
    del blocks
    gc.collect()
    left = [path for path in Path("/proc/self/fd").iterdir() if path.exists() and path.stat().st_ino == inode]
    assert str(place.descriptor) not in {path.name for path in left}


def test_blocks_of_one_rank_in_a_file_are_found_there_and_go_when_dropped() -> None:
    blocks, files = blocks_in_file(windows_of(MIB, MIB + 5))
    array = blocks.allocate(0, 1)
    place = files.find(memoryview(array)[7:])
    assert place is not None
    with mmap.mmap(place.descriptor, place.size_bytes, flags=mmap.MAP_SHARED) as mapped:
        mapped[place.offset] = 9
        assert (array[7], len(array)) == (9, MIB + 5)
        array = blocks.hand_out(0, 1)
        assert os.fstat(place.descriptor).st_blocks > 0
        del array
        gc.collect()
        assert os.fstat(place.descriptor).st_blocks == 0


def test_what_a_consumer_writes_is_its_own(pair: Pair) -> None:
    pair.first.allocate(0, 0)[:] = 1
    ours, theirs = torch.from_numpy(pair.first.hand_out(0, 0)), torch.from_numpy(pair.second.hand_out(0, 0))
    ours[:PAGE].fill_(2)
    theirs[5] = 3
    assert ours[:PAGE].unique().tolist() == [2] and ours[PAGE:].unique().tolist() == [1]
    assert theirs[5] == 3 and theirs[:5].unique().tolist() == [1] == theirs[6:].unique().tolist()


def test_memory_goes_back_when_the_last_rank_has_dropped_a_block(pair: Pair) -> None:
    for block in (0, 1):
        pair.first.allocate(0, block)[:] = 1
    kept = [pair.first.hand_out(0, 0), pair.first.hand_out(0, 1)]
    view = torch.from_numpy(pair.second.hand_out(0, 0))[7:9]
    other = pair.second.hand_out(0, 1)
    both = pair.kept_bytes()
    assert both == 2 * MIB + PAGE
    kept.pop(0)
    gc.collect()
    assert pair.kept_bytes() == both, "the other rank keeps a view of it"
    assert view.tolist() == [1, 1]
    del view
    gc.collect()
    assert pair.kept_bytes() == MIB + PAGE
    assert set(other.tolist()) == set(kept[0].tolist()) == {1}, "the neighbour is untouched"
    del other
    kept.clear()
    gc.collect()
    assert pair.kept_bytes() == 0


def test_a_rank_that_is_not_there_yet_keeps_a_block(pair: Pair) -> None:
    pair.first.allocate(0, 0)[:] = 1
    pair.first.hand_out(0, 0)
    gc.collect()
    assert set(pair.second.hand_out(0, 0).tolist()) == {1}


def test_a_forked_child_gives_nothing_back(pair: Pair) -> None:
    pair.first.allocate(0, 0)[:] = 1
    kept = [pair.first.hand_out(0, 0), pair.second.hand_out(0, 0)]
    child = os.fork()
    if child == 0:
        kept.clear()
        gc.collect()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert set(kept[0].tolist()) == set(kept[1].tolist()) == {1}


def test_another_file_is_not_taken_for_it(pair: Pair) -> None:
    windows = windows_of(MIB)
    wrong = SharedFile(pair.file.pid, pair.descriptor, pair.file.inode)
    with pytest.raises(ValueError, match="another process"):  # its size
        SharedBlocks.open(wrong, windows, rank=1, num_ranks=2)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with pytest.raises(OSError):
        SharedBlocks.open(SharedFile(ended.pid, 3, 1), windows, rank=1, num_ranks=2)


def test_ranks_share_or_none_does(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = windows_of(MIB, MIB)
    descriptors = len(os.listdir("/proc/self/fd"))

    def run(link: Any) -> Any:
        return share_blocks(windows, Lockstep(link, beat_s=0.02), range(3))

    found = on_every_rank(ThreadGroup(3).links(), run)
    assert all(isinstance(one, SharedBlocks) for one in found)
    original = SharedBlocks.open.__func__  # type: ignore[attr-defined]

    def blind(cls: Any, file: Any, windows: Any, *, rank: int, num_ranks: int) -> Any:
        if rank == 2:
            raise PermissionError("in another container")
        return original(cls, file, windows, rank=rank, num_ranks=num_ranks)

    monkeypatch.setattr(SharedBlocks, "open", classmethod(blind))
    assert on_every_rank(ThreadGroup(3).links(), run) == [None] * 3

    def refused(cls: Any, windows: Any, *, num_ranks: int) -> Any:
        raise OSError("no such memory")

    monkeypatch.setattr(SharedBlocks, "create", classmethod(refused))
    assert on_every_rank(ThreadGroup(3).links(), run) == [None] * 3
    found.clear()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_rank_that_vanishes_ends_the_others(tmp_path: Path) -> None:
    group = ThreadGroup(2, timeout_s=10)

    def run(link: Any) -> Any:
        if link.rank == 1:
            group.vanish()
            return None
        return share_blocks(windows_of(MIB), Lockstep(link, beat_s=0.02), range(2))

    first, _ = on_every_rank(group.links(), run)
    assert isinstance(first, RankFailed)
