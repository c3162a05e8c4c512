"""The stream over a pool that a test steps by hand: budget, order, jumps, errors, closing. No thread of the pool's own runs here."""

from __future__ import annotations

import gc
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.checkpoint.entry import Entry
from headrace.errors import (
    BudgetExceeded,
    Cancelled,
    InvalidSetting,
    ReadFailed,
    StreamClosed,
    StreamError,
    UnsupportedDtype,
)
from headrace.settings import Settings
from headrace.storage import StoredObject
from headrace.streaming import readahead
from headrace.streaming.memory import SharedMemory
from headrace.streaming.room import OwnedRoom
from headrace.streaming.stream import StreamOptions, TensorStream

FILE = "model.safetensors"


def content(start: int, stop: int) -> bytes:
    return bytes((at * 7 + at // 256) % 251 for at in range(start, stop))


class SteppedPool:
    """Takes jobs and carries one out when a test says so: `step`. Waiting consumers are served by `serve` from another thread."""

    def __init__(self) -> None:
        self.jobs: deque[Any] = deque()
        self.error: BaseException | None = None
        self.closed = False
        self.started: list[tuple[int, int]] = []
        self.counters = SimpleNamespace(bytes_received=0, num_requests=0, num_retries=0, num_hedges=0)
        self.arrival = threading.Semaphore(0)

    def submit(self, job: Any, *, first: bool = False) -> None:
        if self.error is not None:
            job.done(self.error)
            return
        (self.jobs.appendleft if first else self.jobs.append)(job)
        self.arrival.release()

    def step(self, error: BaseException | None = None) -> None:
        job = self.jobs.popleft()
        self.started.append((job.read.start, job.read.stop))
        if error is not None:
            self.error = error
            job.done(error)
            while self.jobs:
                self.jobs.popleft().done(Cancelled("stopped"))
            return
        at = job.read.start
        for piece in job.pieces():
            piece[:] = content(at, at + len(piece))
            at += len(piece)
        assert at == job.read.stop
        self.counters.bytes_received += job.read.size_bytes
        self.counters.num_requests += 1
        job.done(None)

    def close(self) -> None:
        self.closed = True
        while self.jobs:
            self.jobs.popleft().done(Cancelled("closed"))

    def describe_holdup(self) -> str:
        return "a test"


def entries_of(sizes: list[int]) -> list[Entry]:
    found, at = [], 4096
    for place, size in enumerate(sizes):
        found.append(Entry(name=f"t{place}", dtype="U8", shape=(size,), file=FILE, start=at, stop=at + size))
        at += size
    return found


@dataclass
class FakeSnapshot:
    id: str = "abc"


@dataclass
class FakeCheckpoint:
    entries: dict[str, Entry]
    uri: str = "test://checkpoint"
    files: tuple[str, ...] = (FILE,)
    snapshot: FakeSnapshot = field(default_factory=FakeSnapshot)
    closed: bool = False
    store: Any = None

    @property
    def total_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.entries.values())

    def stored(self, file: str) -> StoredObject:
        return StoredObject(file, 1 << 30, "v1")

    def close(self) -> None:
        self.closed = True


def make(
    sizes: list[int] | list[Entry],
    *,
    limit: int = 1 << 30,
    read_bytes: int = 4096,
    connections: int = 8,
    options: StreamOptions | None = None,
    **more: Any,
) -> tuple[TensorStream, SteppedPool]:
    entries = [item if isinstance(item, Entry) else None for item in sizes]
    listed: list[Entry] = entries_of(sizes) if entries and entries[0] is None else sizes  # type: ignore[assignment,arg-type]
    pool = SteppedPool()
    known = Settings.from_environment(
        {}, memory_limit_bytes=limit, read_bytes=read_bytes, gap_bytes=0, num_connections=connections
    )
    checkpoint: Any = FakeCheckpoint({entry.name: entry for entry in listed})
    stream = TensorStream(checkpoint, listed, options=options, settings=known, pool=lambda *_, **__: pool, **more)
    return stream, pool


def serve(pool: SteppedPool, *, error: BaseException | None = None) -> threading.Thread:
    """Carry out jobs in a thread of its own as they come, until the pool closes; with ``error``, fail the first."""

    def run() -> None:
        while pool.arrival.acquire(timeout=10) and not pool.closed:
            if pool.jobs:
                pool.step(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def finish(stream: TensorStream, pool: SteppedPool, thread: threading.Thread) -> None:
    stream.close()
    pool.arrival.release()
    thread.join(10)
    assert not thread.is_alive()


def assert_right(entry: Entry, tensor: torch.Tensor) -> None:
    assert bytes(tensor.view(-1).view(torch.uint8).numpy()) == content(entry.start, entry.stop)


@given(
    st.lists(st.sampled_from([0, 1, 10, 4096, 9000, 20000]), min_size=1, max_size=10),
    st.integers(1, 3),
    st.sampled_from([0, 5000, 1 << 20]),
    st.randoms(),
)
@settings(max_examples=60, deadline=None)
def test_any_order_of_taking_within_any_budget_gives_every_tensor_whole(
    sizes: list[int], connections: int, limit: int, random: Any
) -> None:
    stream, pool = make(sizes, limit=limit, connections=connections)
    thread = serve(pool)
    names = [entry.name for entry in stream.plan.entries]
    random.shuffle(names)
    by_name = {entry.name: entry for entry in stream.plan.entries}
    try:
        tensors = {name: stream.take(name) for name in names}
    finally:
        finish(stream, pool, thread)
    for name, tensor in tensors.items():
        assert_right(by_name[name], tensor)
    assert pool.counters.bytes_received == sum(sizes), "every byte is read once, whatever the order"


def test_reading_ahead_stays_within_the_budget() -> None:
    stream, pool = make([4096] * 20, limit=3 * 4096)
    thread = serve(pool)
    held = 0
    for _ in stream:
        held = max(held, stream.report.peak_staging_bytes)
    finish(stream, pool, thread)
    assert held == 3 * 4096


def test_a_tensor_larger_than_the_budget_still_loads() -> None:
    stream, pool = make([50000, 10, 60000], limit=4096)
    thread = serve(pool)
    loaded = dict(stream)
    finish(stream, pool, thread)
    assert [tensor.numel() for tensor in loaded.values()] == [50000, 10, 60000]
    assert stream.report.peak_staging_bytes <= 60000 + 10


def test_nothing_is_read_before_the_first_tensor_is_asked_for() -> None:
    stream, pool = make([4096] * 4)
    assert not pool.jobs
    stream.close()
    assert pool.closed


def test_the_queue_is_short_so_that_a_jump_is_quick() -> None:
    stream, pool = make([4096] * 50, connections=2)
    with stream._changed:
        stream._start()
    assert len(pool.jobs) == 6
    stream.close()


def test_a_waited_for_tensor_jumps_the_queue_and_the_budget() -> None:
    stream, pool = make([4096] * 10, limit=2 * 4096)
    taken: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: taken.append(stream.take("t9")))
    thread.start()
    for _ in range(2):
        assert pool.arrival.acquire(timeout=10)
    assert pool.arrival.acquire(timeout=10)
    pool.step()
    thread.join(10)
    assert pool.started == [(10 * 4096, 11 * 4096)]
    assert_right(stream.plan.entries[9], taken[0])
    stream.close()


def test_the_first_error_is_raised_and_stays() -> None:
    stream, pool = make([4096] * 4)
    thread = serve(pool, error=ReadFailed("model.safetensors could not be read."))
    with pytest.raises(ReadFailed, match="could not be read"):
        next(iter(stream))
    with pytest.raises(ReadFailed):
        stream.take("t3")
    finish(stream, pool, thread)
    assert not stream._destinations


def test_closing_wakes_a_waiting_consumer() -> None:
    stream, pool = make([4096])
    raised: list[BaseException] = []

    def consume() -> None:
        try:
            stream.take("t0")
        except StreamClosed as error:
            raised.append(error)

    thread = threading.Thread(target=consume)
    thread.start()
    assert pool.arrival.acquire(timeout=10)
    stream.close()
    thread.join(10)
    assert len(raised) == 1 and not stream._destinations


def test_each_tensor_is_handed_out_once_and_only_what_was_planned() -> None:
    stream, pool = make([10, 20])
    thread = serve(pool)
    stream.take("t0")
    with pytest.raises(StreamError, match="handed out already"):
        stream.take("t0")
    with pytest.raises(StreamError, match="not part of this stream"):
        stream.take("other")
    assert stream.names_left == ["t1"]
    assert [name for name, _ in stream] == ["t1"]
    finish(stream, pool, thread)


def test_the_stream_keeps_no_reference_to_what_it_handed_out() -> None:
    stream, pool = make([1 << 21, 10], read_bytes=1 << 21)
    thread = serve(pool)
    tensor = stream.take("t0")
    freed = threading.Event()
    weakref.finalize(tensor.untyped_storage(), freed.set)
    alive = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert alive() is None
    finish(stream, pool, thread)
    assert freed.is_set()


def test_an_early_close_frees_what_was_read_ahead_and_a_checkpoint_that_is_owned() -> None:
    stream, pool = make([4096] * 6, owns_checkpoint=True)
    thread = serve(pool)
    for _ in stream:
        break
    finish(stream, pool, thread)
    assert pool.closed and not stream._destinations and stream.checkpoint.closed  # type: ignore[attr-defined]
    stream.close()


def test_a_forgotten_stream_closes_its_pool() -> None:
    stream, pool = make([4096])
    del stream
    gc.collect()
    assert pool.closed


def stored(dtype: str, shape: tuple[int, ...], size: int) -> Entry:
    return Entry(name="x", dtype=dtype, shape=shape, file=FILE, start=101, stop=101 + size)


def one(entry: Entry, **options: Any) -> torch.Tensor:
    stream, pool = make([entry], **options)
    thread = serve(pool)
    try:
        return stream.take("x")
    finally:
        finish(stream, pool, thread)


@pytest.mark.parametrize(
    ("dtype", "shape", "size", "expected"),
    [
        ("F32", (), 4, (torch.float32, ())),
        ("F32", (3,), 12, (torch.float32, (3,))),
        ("BF16", (2, 3), 12, (torch.bfloat16, (2, 3))),
        ("F8_E4M3", (5,), 5, (torch.float8_e4m3fn, (5,))),
        ("F8_E8M0", (1, 1), 1, (torch.float8_e8m0fnu, (1, 1))),
        ("F4", (2, 8), 8, (torch.float4_e2m1fn_x2, (2, 4))),
        ("BF16", (0, 4), 0, (torch.bfloat16, (0, 4))),
        ("F4", (0, 8), 0, (torch.float4_e2m1fn_x2, (0, 4))),
        ("U64", (1,), 8, (torch.uint64, (1,))),
    ],
)
def test_tensors_have_the_stored_dtype_and_shape_whatever_their_offset(
    dtype: str, shape: tuple[int, ...], size: int, expected: Any
) -> None:
    entry = stored(dtype, shape, size)
    tensor = one(entry)
    assert (tensor.dtype, tuple(tensor.shape)) == expected
    assert tensor.data_ptr() % 64 == 0
    assert bytes(tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b"") == content(101, 101 + size)


def test_a_dtype_without_a_torch_type_is_refused_before_any_read_and_raw_bytes_are_given_on_request() -> None:
    entry = stored("F6_E2M3", (4,), 3)
    with pytest.raises(UnsupportedDtype, match=r"F6_E2M3[\s\S]*raw=True"):
        make([entry])
    tensor = one(entry, options=StreamOptions(raw=True))
    assert tensor.dtype == torch.uint8 and tensor.tolist() == list(content(101, 104))


def test_progress_and_report_add_up() -> None:
    clock: Callable[[], float] = iter(range(1000)).__next__
    stream, pool = make([4096, 0, 5000], clock=clock)
    thread = serve(pool)
    list(stream)
    finish(stream, pool, thread)
    assert (stream.progress.bytes_done, stream.progress.bytes_wanted) == (9096, 9096)
    report = stream.report
    assert (report.num_tensors, report.bytes_wanted, report.bytes_read, report.bytes_checkpoint) == (
        3,
        9096,
        9096,
        9096,
    )
    assert report.seconds > 0 and report.seconds == stream.report.seconds, "the clock stops with the last tensor"
    assert report.bytes_skipped == 0 and report.to_dict()["num_requests"] == pool.counters.num_requests


LEASED = StreamOptions(ownership="leased")


@given(
    st.lists(st.sampled_from([0, 1, 10, 4096, 9000, 20000]), min_size=1, max_size=10),
    st.integers(1, 3),
    st.sampled_from([0, 5000, 30000, 1 << 20]),
    st.sampled_from(["all", "none", "every second"]),
)
@settings(max_examples=60, deadline=None)
def test_leased_tensors_are_right_whatever_the_consumer_keeps(
    sizes: list[int], connections: int, limit: int, keep: str
) -> None:
    stream, pool = make(sizes, limit=limit, connections=connections, options=LEASED)
    by_name = {entry.name: entry for entry in stream.plan.entries}
    thread = serve(pool)
    kept: dict[str, torch.Tensor] = {}
    try:
        for place, (name, tensor) in enumerate(stream):
            assert_right(by_name[name], tensor)
            if keep == "all" or (keep == "every second" and place % 2):
                kept[name] = tensor
            del tensor
    finally:
        finish(stream, pool, thread)
    for name, tensor in kept.items():
        assert_right(by_name[name], tensor)


def test_a_consumer_that_copies_stays_within_the_limit() -> None:
    stream, pool = make([4096] * 40, limit=6 * 4096, options=LEASED)
    thread = serve(pool)
    copies = {name: tensor.clone() for name, tensor in stream}
    finish(stream, pool, thread)
    report = stream.report
    assert len(copies) == 40 and report.num_promotions == 0
    assert report.peak_staging_bytes <= 6 * 4096 and report.ownership == "leased"


def wait_until_idle(pool: SteppedPool) -> None:
    """Wait until nothing is left to do for a pool that is served: what is carried out last may bring more."""
    deadline = time.monotonic() + 10
    while pool.jobs or pool.arrival._value:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    time.sleep(0.05)


@pytest.mark.parametrize("options", [LEASED, StreamOptions()])
def test_reads_do_not_run_on_before_a_slow_consumer_whose_memory_is_used_again(
    options: StreamOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readahead, "FIRST_BYTES", 8 * 4096)
    stream, pool = make([4096] * 60, connections=1, options=options)
    thread = serve(pool)
    first = stream.take("t0").clone()
    wait_until_idle(pool)
    num_ahead = len(pool.started) - 1
    # Those that had been queued when the last was held back still come.
    assert num_ahead == 59 if options.ownership == "owned" else 8 <= num_ahead <= 8 + 3
    rest = {name: tensor.clone() for name, tensor in stream}
    finish(stream, pool, thread)
    for entry, tensor in zip(stream.plan.entries, [first, *rest.values()], strict=True):
        assert_right(entry, tensor)


def test_a_consumer_that_comes_in_bursts_has_more_read_ahead_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readahead, "FIRST_BYTES", 8 * 4096)
    stream, pool = make([4096] * 200, connections=1, options=LEASED)
    thread = serve(pool)
    ahead = []
    for place in range(100):
        assert_right(stream.plan.entries[place], stream.take(f"t{place}"))
        if place % 20 == 0:  # A pause of the consumer's, in which reads are held back.
            wait_until_idle(pool)
            ahead.append(len(pool.started) - place - 1)
    finish(stream, pool, thread)
    assert ahead[-1] > ahead[0]
    assert ahead[-1] <= 64 + 3


def test_a_consumer_that_keeps_everything_is_promoted_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    stream, pool = make([4096] * 40, limit=6 * 4096, options=LEASED)
    thread = serve(pool)
    kept = list(stream)
    finish(stream, pool, thread)
    assert stream.report.num_promotions >= 5 and len(kept) == 40
    assert caplog.text.count("keeps tensors") == 1
    for entry, (_, tensor) in zip(stream.plan.entries, kept, strict=True):
        assert_right(entry, tensor)


def test_a_consumer_that_keeps_is_an_error_on_request_and_what_it_has_stays_valid() -> None:
    stream, pool = make([4096] * 40, limit=6 * 4096, options=StreamOptions(ownership="leased", on_budget="error"))
    thread = serve(pool)
    kept: list[torch.Tensor] = []
    with pytest.raises(BudgetExceeded, match=r"still holds .* tensors of .*\(t0, t1, t2, \.\.\.\)"):
        for _, tensor in stream:
            kept.append(tensor)
    finish(stream, pool, thread)
    for entry, tensor in zip(stream.plan.entries, kept, strict=False):
        assert_right(entry, tensor)


def test_a_limit_that_cannot_hold_a_tensor_is_refused_before_any_read_when_it_must_hold() -> None:
    strict = StreamOptions(ownership="leased", on_budget="error")
    with pytest.raises(BudgetExceeded, match=r"too small to lend t1 .*Set memory_limit to at least 100 kB"):
        make([10, 50000], limit=60000, options=strict)
    stream, pool = make([10, 50000], limit=0, options=strict)
    thread = serve(pool)
    assert [tensor.numel() for _, tensor in stream] == [10, 50000]
    finish(stream, pool, thread)


def test_a_consumer_in_other_threads_gives_room_back() -> None:
    stream, pool = make([4096] * 60, limit=8 * 4096, options=StreamOptions(ownership="leased", on_budget="error"))
    thread = serve(pool)
    work: queue.Queue[Any] = queue.Queue()
    found: dict[str, bytes] = {}

    def consume() -> None:
        while (item := work.get()) is not None:
            name, tensor = item
            del item
            found[name] = bytes(tensor.numpy())
            del tensor

    consumers = [threading.Thread(target=consume) for _ in range(3)]
    for one_of_them in consumers:
        one_of_them.start()
    try:
        for item in stream:
            work.put(item)
            del item
    finally:
        for _ in consumers:
            work.put(None)
        for one_of_them in consumers:
            one_of_them.join(10)
        finish(stream, pool, thread)
    assert found == {entry.name: content(entry.start, entry.stop) for entry in stream.plan.entries}


def test_streamed_tensors_are_marked_and_so_is_their_storage() -> None:
    """origin B6: a view loses a tensor's attributes, but its storage has them."""
    tensor = one(stored("F32", (3,), 12))
    assert tensor._headrace_streamed is True  # type: ignore[attr-defined]
    assert tensor[1:].untyped_storage()._headrace_streamed is True  # type: ignore[attr-defined]
    assert not hasattr(torch.empty(3).untyped_storage(), "_headrace_streamed")


@pytest.mark.parametrize(("name", "value"), [("ownership", "rented"), ("on_budget", "ignore")])
def test_options_are_checked(name: str, value: str) -> None:
    with pytest.raises(InvalidSetting, match=f"{name} is '{value}'"):
        StreamOptions(**{name: value})  # type: ignore[arg-type]


def test_local_ranks_share_memory_and_connections() -> None:
    entries = entries_of([4096] * 40)
    checkpoint: Any = FakeCheckpoint({entry.name: entry for entry in entries})
    pool = SteppedPool()
    seen: list[int] = []

    def open_pool(store: Any, transport: Any, *, on_bytes: Any) -> Any:
        seen.append(transport.num_connections)
        return pool

    known = Settings.from_environment(
        {"LOCAL_WORLD_SIZE": "4"}, memory_limit_bytes=40 * 4096, num_connections=8, read_bytes=4096
    )
    stream = TensorStream(checkpoint, entries, settings=known, pool=open_pool)
    thread = serve(pool)
    list(stream)
    finish(stream, pool, thread)
    assert seen == [2] and stream.report.peak_staging_bytes == 10 * 4096


def test_tensors_can_lie_in_memory_that_other_processes_see() -> None:
    memory = SharedMemory(1 << 20)
    stream, pool = make([10, 9000, 0, 4096], room=OwnedRoom(memory, limit_bytes=1 << 30))
    thread = serve(pool)
    tensors = dict(stream)
    finish(stream, pool, thread)
    for entry in stream.plan.entries:
        assert_right(entry, tensors[entry.name])
        if entry.size_bytes:
            seen = os.pread(memory.fileno(), entry.size_bytes, memory.offset_of(tensors[entry.name].numpy()))
            assert seen == content(entry.start, entry.stop)


@pytest.mark.parametrize("ownership", ["owned", "leased"])
def test_a_limit_below_the_longest_read_shortens_the_reads(ownership: Any, caplog: pytest.LogCaptureFixture) -> None:
    limit = 256 << 10
    stream, pool = make([4096] * 400, limit=limit, read_bytes=8 << 20, options=StreamOptions(ownership=ownership))
    thread = serve(pool)
    copies = [tensor.clone() for _, tensor in stream]
    finish(stream, pool, thread)
    assert max(read.size_bytes for read in stream.plan.reads) <= limit // 4
    report = stream.report
    assert report.peak_staging_bytes <= limit and report.num_promotions == 0 and len(copies) == 400
    assert caplog.text == ""


@given(
    st.lists(st.integers(1, 12).map(lambda number: number * 60_000), min_size=1, max_size=12), st.sampled_from([0, 3])
)
@example([432_000, 720_000, 720_000], 0)
@settings(max_examples=25, deadline=None)
def test_a_consumer_that_holds_one_tensor_always_gets_the_next_within_the_smallest_limit(
    sizes: list[int], times: int
) -> None:
    """The one that is held may lie in the middle of the memory, with less than half of it free on either side."""
    options = StreamOptions(ownership="leased", on_budget="error")
    stream, pool = make(sizes, limit=times * max(sizes), read_bytes=1 << 20, options=options)
    thread = serve(pool)
    names = [name for name, _ in stream]  # The loop's variable holds each tensor until the next one has come.
    finish(stream, pool, thread)
    assert len(names) == len(sizes) and stream.report.num_promotions == 0
