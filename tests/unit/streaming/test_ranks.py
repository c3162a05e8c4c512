"""Ranks that load together, as threads over files of this machine: the same tensors everywhere, every byte read once, one error for all."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.support.thread_ranks import ThreadGroup, ThreadLink, on_every_rank

import headrace
from headrace.checkpoint import Checkpoint, Entry
from headrace.errors import InvalidSetting, RankFailed, ReadFailed, StreamClosed, StreamError
from headrace.progress import LoadProgress
from headrace.settings import Settings
from headrace.streaming.lockstep import Lockstep
from headrace.streaming.memory import Bytes, PrivateMemory
from headrace.streaming.ranks import DistributedStream
from headrace.streaming.stream import StreamOptions
from headrace.transport import ReaderPool, open_pool
from headrace.units import MIB

TENSORS = {
    "fp8": torch.arange(0, 240, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(16, 15),
    "embed": (torch.arange(3 * MIB // 2) % 32749).to(torch.int16).view(1024, -1),
    "norm": torch.linspace(-1, 1, 33, dtype=torch.bfloat16),
    "empty": torch.empty(0, 7),
    "scale": torch.tensor(0.25),
    "mask": torch.tensor([True, False, True]),
    "head": torch.arange(700_000, dtype=torch.int32).view(700, 1000),
}
"""3 MiB, 2.8 MB and small ones, FP8 and an empty one among them."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    save_file(TENSORS, place / "model.safetensors")
    return place


def settings_of(**more: Any) -> Settings:
    return Settings.from_environment({}, progress=False, **{"num_connections": 2, "read_bytes": 256 << 10, **more})


def on_ranks(
    folder: Path,
    num_ranks: int,
    work: Callable[[DistributedStream], Any],
    *,
    choose: Callable[[int, Checkpoint], Sequence[Entry] | None] = lambda rank, checkpoint: None,
    group: ThreadGroup | None = None,
    settings: Settings | None = None,
    **more: Any,
) -> list[Any]:
    """Run ``work`` with a stream on every rank; no thread of a reader or an exchange is left."""

    def run(link: ThreadLink) -> Any:
        with headrace.open(folder, settings=settings or settings_of()) as checkpoint:
            lockstep = Lockstep(link, beat_s=0.02)
            own = {name: value(link.rank) if callable(value) else value for name, value in more.items()}
            stream = DistributedStream(
                checkpoint,
                choose(link.rank, checkpoint),
                lockstep=lockstep,
                settings=settings or settings_of(),
                **own,
            )
            return work(stream)

    outcomes = on_every_rank((group or ThreadGroup(num_ranks)).links(), run)
    assert [one.name for one in threading.enumerate() if one.name.startswith("headrace")] == []
    return outcomes


def load_all(stream: DistributedStream) -> dict[str, torch.Tensor]:
    with stream:
        return dict(stream)


def assert_same(loaded: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor] = TENSORS) -> None:
    assert set(loaded) == set(wanted)
    for name, tensor in loaded.items():
        assert tensor.dtype == wanted[name].dtype
        assert tensor.shape == wanted[name].shape
        assert torch.equal(
            tensor.view(torch.uint8) if tensor.numel() and tensor.dim() else tensor,
            (wanted[name].view(torch.uint8) if tensor.numel() and tensor.dim() else wanted[name]),
        )


@pytest.mark.parametrize("exchange", ["shared", "broadcast"])
@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_every_rank_gets_every_tensor_and_reads_its_share(folder: Path, num_ranks: int, exchange: str) -> None:
    def work(stream: DistributedStream) -> Any:
        assert stream.exchange == exchange
        loaded = load_all(stream)
        return loaded, list(loaded), stream.bytes_read_by_rank, stream.report

    outcomes = on_ranks(folder, num_ranks, work, exchange=exchange)
    with headrace.open(folder, settings=settings_of()) as checkpoint:
        order, total = list(checkpoint.entries), checkpoint.total_bytes
    for loaded, names, by_rank, report in outcomes:
        assert_same(loaded)
        assert names == order
        assert by_rank == outcomes[0][2]
        assert sum(by_rank) == total == report.bytes_read == report.bytes_wanted
        assert max(by_rank) <= total / num_ranks + MIB
        assert min(by_rank) > 0
        assert report.num_tensors == len(TENSORS)
        assert report.ownership == "owned"


@pytest.mark.parametrize("limit", [0, 5 * MIB, -1])
def test_any_memory_limit_works(folder: Path, limit: int) -> None:
    outcomes = on_ranks(
        folder, 2, lambda stream: (load_all(stream), stream.report), settings=settings_of(memory_limit_bytes=limit)
    )
    for loaded, report in outcomes:
        assert_same(loaded)
        # A window, which no limit makes smaller than the largest tensor, and what was read ahead.
        assert report.peak_staging_bytes <= max(2 * 3 * MIB, limit) or limit == -1
    assert len({report.bytes_read for _, report in outcomes}) == 1


def test_ranks_with_different_free_memory_plan_alike(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter([10 << 30, 600 << 20])
    monkeypatch.setattr("headrace.streaming.agreement.available_memory_bytes", lambda: next(free))
    outcomes = on_ranks(folder, 2, lambda stream: (stream.windows, load_all(stream)))
    assert outcomes[0][0] == outcomes[1][0]
    assert_same(outcomes[0][1])


def test_all_ranks_call_the_same_collectives(folder: Path) -> None:
    group = ThreadGroup(3)
    on_ranks(folder, 3, load_all, group=group, settings=settings_of(memory_limit_bytes=0), exchange="broadcast")
    assert group.calls[0] == group.calls[1] == group.calls[2]
    senders = [call.rpartition(" ")[2] for call in group.calls[0] if call.startswith("broadcast")]
    assert set(senders) == {"0", "1", "2"}


def test_tensors_own_their_memory_and_it_goes_with_them(folder: Path) -> None:
    counted: list[list[weakref.ref[Any]]] = [[], []]

    class Counting(PrivateMemory):
        def __init__(self, rank: int) -> None:
            super().__init__()
            self.rank = rank

        def allocate(self, num_bytes: int) -> Bytes:
            array = super().allocate(num_bytes)
            counted[self.rank].append(weakref.ref(array))
            return array

    def work(stream: DistributedStream) -> Any:
        with stream:
            kept = {name: tensor for name, tensor in stream if name == "head"}
        return kept["head"]

    def memory(rank: int) -> PrivateMemory:
        return Counting(rank)

    group = ThreadGroup(2)

    def run(link: ThreadLink) -> Any:
        with headrace.open(folder, settings=settings_of()) as checkpoint:
            lockstep = Lockstep(link, beat_s=0.02)
            return work(
                DistributedStream(checkpoint, lockstep=lockstep, settings=settings_of(), memory=memory(link.rank))
            )

    heads = on_every_rank(group.links(), run)
    gc.collect()
    for rank, head in enumerate(heads):
        assert torch.equal(head, TENSORS["head"])
        assert head._headrace_streamed
        alive = [one() for one in counted[rank] if one() is not None]
        assert [len(array) for array in alive] == [head.numel() * 4]


def test_raw_bytes_are_exchanged_as_they_are(folder: Path) -> None:
    outcomes = on_ranks(folder, 2, load_all, options=StreamOptions(raw=True))
    for loaded in outcomes:
        assert loaded["fp8"].dtype == torch.uint8
        assert torch.equal(loaded["fp8"], TENSORS["fp8"].view(torch.uint8).flatten())


def test_tensors_may_be_taken_out_of_order_and_differently_on_each_rank(folder: Path) -> None:
    orders = itertools.cycle([list(TENSORS), list(reversed(TENSORS))])

    def work(stream: DistributedStream) -> dict[str, torch.Tensor]:
        with stream:
            return {name: stream.take(name) for name in next(orders)}

    for loaded in on_ranks(folder, 2, work, settings=settings_of(memory_limit_bytes=0)):
        assert_same(loaded)


def test_a_part_of_the_entries_in_an_order_of_ones_own(folder: Path) -> None:
    chosen = ["head", "norm", "fp8"]

    def work(stream: DistributedStream) -> Any:
        loaded = load_all(stream)
        return list(loaded), loaded, stream.report

    for names, loaded, report in on_ranks(
        folder, 2, work, choose=lambda rank, checkpoint: [checkpoint.entries[name] for name in chosen]
    ):
        assert names == chosen
        assert_same(loaded, {name: TENSORS[name] for name in chosen})
        assert report.bytes_read == report.bytes_wanted  # what lies between is not read


def test_wrong_names_are_errors_of_this_rank_alone(folder: Path) -> None:
    def work(stream: DistributedStream) -> list[str]:
        with stream:
            with pytest.raises(StreamError, match="not part of this stream"):
                stream.take("nobody")
            dict(stream)
            with pytest.raises(StreamError, match="handed out already"):
                stream.take("norm")
            return stream.names_left

    assert on_ranks(folder, 2, work) == [[], []]


def test_ranks_that_want_different_tensors_fail_on_both(folder: Path) -> None:
    outcomes = on_ranks(
        folder, 2, load_all, choose=lambda rank, checkpoint: list(checkpoint.entries.values())[: 3 + rank]
    )
    for error in outcomes:
        assert type(error) is StreamError
        assert "Rank 1 asked for other tensors" in error.what


def test_ranks_that_opened_different_snapshots_fail_on_both(folder: Path, tmp_path: Path) -> None:
    save_file({**TENSORS, "norm": TENSORS["norm"] + 1}, tmp_path / "model.safetensors")
    group = ThreadGroup(2)

    def run(link: ThreadLink) -> Any:
        with headrace.open([folder, tmp_path][link.rank], settings=settings_of()) as checkpoint:
            return DistributedStream(checkpoint, lockstep=Lockstep(link, beat_s=0.02), settings=settings_of())

    for error in on_every_rank(group.links(), run):
        assert type(error) is StreamError
        assert "Rank 1 opened snapshot" in error.what
    assert group.calls[0] == group.calls[1] == ["gather"]


def test_a_read_that_fails_on_one_rank_fails_on_all(folder: Path) -> None:
    def refuse() -> Any:
        raise ReadFailed("model.safetensors cannot be read.", "It was cut.")

    def pool(rank: int) -> Any:
        if rank == 1:
            return lambda store, settings, *, on_bytes: ReaderPool(refuse, settings)
        return open_pool

    def work(stream: DistributedStream) -> Any:
        with stream:
            try:
                stream.take("fp8")
            finally:
                assert len(stream.names_left) == len(TENSORS)

    first, second, third = on_ranks(folder, 3, work, pool=pool)
    assert type(second) is ReadFailed
    for error in (first, third):
        assert (type(error), error.rank) == (RankFailed, 1)
        assert "It was cut." in error.why


def test_memory_that_one_rank_cannot_have_fails_on_both(folder: Path) -> None:
    class Poor(PrivateMemory):
        def allocate(self, num_bytes: int) -> Bytes:
            if num_bytes > MIB and threading.current_thread().name == "rank-0":
                raise MemoryError
            return super().allocate(num_bytes)

    first, second = on_ranks(folder, 2, load_all, memory=Poor())
    assert type(first) is MemoryError
    assert (type(second), second.rank, second.why) == (RankFailed, 0, "MemoryError")


def test_a_consumers_error_on_one_rank_is_raised_on_the_others(folder: Path) -> None:
    def work(stream: DistributedStream) -> None:
        with stream:
            for _ in stream:
                if threading.current_thread().name == "rank-1":
                    raise ValueError("the consumer's own")

    first, second = on_ranks(folder, 2, work, settings=settings_of(memory_limit_bytes=0))
    assert type(second) is ValueError
    assert (type(first), first.rank, first.why) == (RankFailed, 1, "ValueError: the consumer's own")


def test_a_rank_that_stops_early_is_an_error_on_the_others(folder: Path) -> None:
    def work(stream: DistributedStream) -> list[str]:
        with stream:
            for _ in stream:
                if threading.current_thread().name == "rank-0":
                    break
        return stream.names_left

    first, second = on_ranks(folder, 2, work, settings=settings_of(memory_limit_bytes=0))
    assert len(first) == len(TENSORS) - 1
    assert (type(second), second.rank) == (RankFailed, 0)


def test_ranks_that_stop_at_the_same_tensor_stop_in_peace(folder: Path) -> None:
    def work(stream: DistributedStream) -> Any:
        with stream:
            stream.take("norm")
        left = stream.names_left
        with pytest.raises(StreamClosed):
            stream.take(left[-1])
        stream.close()
        return len(left)

    assert on_ranks(folder, 3, work, settings=settings_of(memory_limit_bytes=0)) == [len(TENSORS) - 1] * 3


def test_closing_from_another_thread_ends_a_rank_that_waits(folder: Path) -> None:
    def work(stream: DistributedStream) -> None:
        with stream:
            if threading.current_thread().name == "rank-0":
                closer = threading.Timer(0.3, stream.close)
                closer.start()
                try:
                    dict(stream)
                finally:
                    closer.join()
            else:
                time.sleep(1.0)  # its consumer is busy
                dict(stream)

    first, second = on_ranks(folder, 2, work, settings=settings_of(memory_limit_bytes=0))
    assert type(first) is StreamClosed
    assert (type(second), second.rank) == (RankFailed, 0)


def test_after_a_failure_every_take_raises_it(folder: Path) -> None:
    def work(stream: DistributedStream) -> None:
        if threading.current_thread().name == "rank-1":
            stream.close()
            return
        with stream:
            for _ in range(2):
                with pytest.raises(RankFailed):
                    stream.take("norm")

    assert on_ranks(folder, 2, work) == [None, None]


def test_a_budget_that_raises_is_refused_on_every_rank(folder: Path) -> None:
    options = [StreamOptions(ownership="leased", on_budget="error"), StreamOptions(ownership="leased")]
    first, second = on_ranks(folder, 2, load_all, options=lambda rank: options[rank])
    assert type(first) is InvalidSetting
    assert (type(second), second.rank) == (RankFailed, 0)
    assert "on_budget" in second.why


def test_nothing_but_empty_tensors_needs_no_exchange(folder: Path) -> None:
    group = ThreadGroup(2)
    outcomes = on_ranks(folder, 2, load_all, group=group, choose=lambda rank, checkpoint: [checkpoint.entries["empty"]])
    assert [loaded["empty"].shape for loaded in outcomes] == [(0, 7)] * 2
    assert group.calls[0] == ["gather"]  # the planning's


def test_progress_counts_what_all_ranks_read(folder: Path) -> None:
    shown = [LoadProgress(), LoadProgress()]
    on_ranks(folder, 2, load_all, progress=lambda rank: shown[rank])
    for progress in shown:
        assert (
            progress.bytes_done
            == progress.bytes_wanted
            == sum(tensor.numel() * tensor.element_size() for tensor in TENSORS.values())
        )


def test_a_forgotten_stream_stops_its_readers(folder: Path) -> None:
    def work(stream: DistributedStream) -> None:
        stream.take("fp8")
        del stream

    # No rank says goodbye, and none waits for another: all forgot it at the same place.
    assert on_ranks(folder, 2, work) == [None, None]
    gc.collect()
    assert [one.name for one in threading.enumerate() if one.name.startswith("headrace")] == []
