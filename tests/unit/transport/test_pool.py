from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from headrace.errors import Cancelled, ReadFailed, UsageError
from headrace.settings import TransportSettings
from headrace.storage import StoredObject
from headrace.transport import RangeRead, ReaderPool, ReadJob
from headrace.transport.pace import Pace
from headrace.transport.pool import private_scratch

from .fakes import FakeReader, content

STORED = StoredObject("k", 1 << 20, "v")
SETTINGS = TransportSettings(num_connections=4, hedge_after_s=0.05)


class Jobs:
    """Makes jobs, and remembers how each ended and in which thread."""

    def __init__(self) -> None:
        self.memory: dict[int, bytearray] = {}
        self.ended: dict[int, BaseException | None] = {}
        self.order: list[int] = []
        self.threads: dict[int, str] = {}
        self._changed = threading.Condition()

    def make(self, number: int, size: int = 100) -> ReadJob:
        start = number * 1000
        self.memory[number] = bytearray(size)

        def done(error: BaseException | None) -> None:
            with self._changed:
                assert number not in self.ended, "done is called once"
                self.ended[number] = error
                self.order.append(number)
                self.threads[number] = threading.current_thread().name
                self.memory[number].append(7)  # BufferError if the pool still refers to it.
                self._changed.notify_all()

        return ReadJob(RangeRead(STORED, start, start + size), lambda: self._pieces(number), done)

    def _pieces(self, number: int) -> list[memoryview]:
        whole = memoryview(self.memory[number])
        return [whole[:10], whole[10:10], whole[10:]]

    def wait_for(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.ended) >= count, 20), self.ended

    def is_right(self, number: int) -> bool:
        memory = self.memory[number]
        return bytes(memory[:-1]) == content(number * 1000, number * 1000 + len(memory) - 1)


@contextmanager
def _pool(
    open_reader: Callable[[], FakeReader], settings: TransportSettings = SETTINGS, **options
) -> Iterator[ReaderPool]:
    pool = ReaderPool(open_reader, settings, **options)
    try:
        yield pool
    finally:
        assert pool.close(20)
        assert [thread.name for thread in threading.enumerate() if thread.name.startswith("headrace-reader")] == []


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class Readers(list):
    """Opens fake readers that all do the same first."""

    def __init__(self, before: Callable[[FakeReader, RangeRead], None] | None = None) -> None:
        super().__init__()
        self.before = before

    def __call__(self) -> FakeReader:
        self.append(FakeReader(self.before))
        return self[-1]


def test_many_jobs_on_few_threads_each_with_one_reader() -> None:
    readers, jobs = Readers(), Jobs()
    with _pool(readers) as pool:
        for number in range(200):
            pool.submit(jobs.make(number))
        jobs.wait_for(200)
        assert all(error is None for error in jobs.ended.values())
        assert all(jobs.is_right(number) for number in range(200))
        assert 1 <= len(readers) <= 4
        counters = pool.counters
        assert (counters.num_requests, counters.bytes_received, counters.num_hedges) == (200, 20_000, 0)
        assert pool.describe_holdup() == "no read is under way, 0 wait"
    assert all(reader.is_closed for reader in readers)
    assert pool.counters == counters  # What closed readers had done is not forgotten.


def test_threads_start_as_jobs_come() -> None:
    readers, jobs = Readers(), Jobs()
    with _pool(readers) as pool:
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("headrace")]
        for number in range(20):
            pool.submit(jobs.make(number))
            jobs.wait_for(number + 1)
        assert len(readers) <= 2


def test_first_in_first_out_but_for_those_that_jump_the_queue() -> None:
    go_on = threading.Event()
    readers, jobs = Readers(lambda reader, read: reader.wait(go_on)), Jobs()
    with _pool(readers, replace(SETTINGS, num_connections=1)) as pool:
        pool.submit(jobs.make(0))
        _until(lambda: bool(readers and readers[0].reads))
        for number in (1, 2, 3):
            pool.submit(jobs.make(number))
        pool.submit(jobs.make(4), first=True)
        pool.submit(jobs.make(5), first=True)
        assert pool.describe_holdup() == "bytes 0 to 100"
        go_on.set()
        jobs.wait_for(6)
        assert jobs.order == [0, 5, 4, 1, 2, 3]
        assert set(jobs.threads.values()) == {"headrace-reader-0"}


def test_the_first_failure_stops_everything_and_is_told_to_who_comes_later() -> None:
    def before(reader: FakeReader, read: RangeRead) -> None:
        reader.wait(all_are_in if read.start == 1000 else threading.Event())
        raise failure

    failure, all_are_in = ReadFailed("It broke."), threading.Event()
    readers, jobs = Readers(before), Jobs()
    with _pool(readers, replace(SETTINGS, num_connections=2)) as pool:
        for number in range(6):
            pool.submit(jobs.make(number))
        all_are_in.set()
        jobs.wait_for(6)
        assert jobs.ended[1] is failure
        assert all(isinstance(jobs.ended[number], Cancelled) for number in (0, 2, 3, 4, 5))
        assert pool.error is failure
        pool.submit(jobs.make(6))
        assert jobs.ended[6] is failure
        assert jobs.threads[6] == "MainThread"
    assert pool.error is failure
    assert all(reader.is_closed for reader in readers)


@pytest.mark.parametrize("where", ["pieces", "done", "open_reader"])
def test_a_failure_outside_the_reader_stops_the_pool_too(where: str) -> None:
    def fail(*given: object) -> None:
        raise RuntimeError("a bug of the owner")

    readers, jobs = Readers(), Jobs()
    job = jobs.make(0)
    if where == "pieces":
        job = replace(job, pieces=fail)
    elif where == "done":
        job = replace(job, done=fail)
    with _pool(fail if where == "open_reader" else readers) as pool:  # type: ignore[arg-type]
        pool.submit(job)
        _until(lambda: pool.error is not None)
        assert isinstance(pool.error, RuntimeError)
        if where != "done":
            jobs.wait_for(1)
            assert jobs.ended[0] is pool.error
        pool.submit(jobs.make(1))
        assert jobs.ended[1] is pool.error


def test_close_cancels_what_runs_and_what_waits_and_may_be_called_again_from_anywhere() -> None:
    readers, jobs = Readers(lambda reader, read: reader.wait(threading.Event())), Jobs()
    with _pool(readers) as pool:
        for number in range(10):
            pool.submit(jobs.make(number))
        _until(lambda: sum(len(reader.reads) for reader in readers) == 4)
        closers = [threading.Thread(target=pool.close) for _ in range(3)]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join(20)
        assert all(isinstance(jobs.ended[number], Cancelled) for number in range(10))
        assert pool.error is None
        pool.submit(jobs.make(10))
        assert isinstance(jobs.ended[10], Cancelled)
    assert all(reader.is_closed for reader in readers)


def test_close_from_done_does_not_wait_for_itself() -> None:
    readers, jobs, answers = Readers(), Jobs(), []
    with _pool(readers) as pool:
        pool.submit(replace(jobs.make(0), done=lambda error: answers.append(pool.close())))
        _until(lambda: bool(answers))
    assert answers == [False]


def test_close_says_when_a_thread_does_not_end() -> None:
    go_on = threading.Event()
    readers, jobs = Readers(lambda reader, read: _until(go_on.is_set)), Jobs()
    with _pool(readers) as pool:
        pool.submit(jobs.make(0))
        _until(lambda: bool(readers and readers[0].reads))
        assert not pool.close(0.05)
        assert jobs.ended == {}  # Its memory still has a writer.
        go_on.set()
        jobs.wait_for(1)
        assert isinstance(jobs.ended[0], Cancelled)


def test_a_forked_child_may_close_but_not_submit() -> None:
    jobs = Jobs()
    with _pool(Readers()) as pool:
        pool._home._pid += 1  # As it looks in a child; to fork a process with threads is what this guards against.
        with pytest.raises(UsageError, match="do not survive a fork"):
            pool.submit(jobs.make(0))
        assert pool.close()
        pool._home._pid -= 1
    assert jobs.ended == {}


def test_a_store_that_throttles_is_given_fewer_reads_at_once() -> None:
    active, most = [0], [0]
    lock, steps = threading.Lock(), threading.Semaphore(0)

    def before(reader: FakeReader, read: RangeRead) -> None:
        with lock:
            active[0] += 1
            most[0] = max(most[0], active[0])
        assert steps.acquire(timeout=20)
        with lock:
            active[0] -= 1

    pace = Pace(4, lambda: 0.0)
    pace.refused()
    jobs = Jobs()
    with _pool(Readers(before), pace=pace) as pool:
        for number in range(30):
            pool.submit(jobs.make(number))
        _until(lambda: active[0] == 2)
        time.sleep(0.05)
        assert most[0] == 2
        steps.release(3)
        _until(lambda: active[0] == 3)  # About as many successes as reads are under way raise it by one.
        time.sleep(0.05)
        assert most[0] == 3
        steps.release(100)
        jobs.wait_for(30)
        assert pace.num_allowed == 4


def test_a_store_that_throttles_is_not_asked_twice() -> None:
    slow = threading.Event()
    pace = Pace(4, lambda: 0.0)
    pace.refused()
    jobs = Jobs()
    with _pool(Readers(lambda reader, read: reader.wait(slow)), pace=pace, is_hedged=True) as pool:
        pool.submit(jobs.make(0))
        time.sleep(0.2)
        assert pool.counters.num_hedges == 0
        slow.set()
        jobs.wait_for(1)


def test_a_store_that_has_throttled_is_asked_twice_again_when_it_has_had_its_quiet() -> None:
    """Not only when all its pace is back, which takes more successes than a load may have left."""
    now, silent = [0.0], threading.Event()
    pace = Pace(4, lambda: now[0])
    pace.refused()
    pace.refused()
    readers, came = _late_first(silent)
    jobs = Jobs()
    with _pool(readers, pace=pace, is_hedged=True) as pool:
        pool.submit(jobs.make(0))
        _until(lambda: len(came) == 1)
        time.sleep(0.1)
        assert pool.counters.num_hedges == 0
        now[0] = 1.0
        jobs.wait_for(1)
        assert pool.counters.num_hedges == 1
        assert pace.num_allowed < 4
        assert jobs.is_right(0)


def test_a_store_that_is_spared_gets_no_more_second_reads_than_its_pace_allows() -> None:
    now, silent = [0.0], threading.Event()
    pace = Pace(6, lambda: now[0])
    pace.refused()  # Three are allowed, two of which are under way.
    now[0] = 1.0
    jobs = Jobs()
    settings = replace(SETTINGS, num_connections=6)
    with _pool(Readers(lambda reader, read: reader.wait(silent)), settings, pace=pace, is_hedged=True) as pool:
        pool.submit(jobs.make(0))
        pool.submit(jobs.make(1))
        _until(lambda: pool.counters.num_hedges == 1)
        time.sleep(0.1)
        assert pool.counters.num_hedges == 1
        silent.set()
        jobs.wait_for(2)


# -- second reads


def test_scratch_memory_goes_back_to_the_system_when_it_is_dropped() -> None:
    """Once a large block was freed, malloc takes the next from its arenas, and what a thread frees there stays with the process."""
    page, size = os.sysconf("SC_PAGE_SIZE"), 24 << 20

    def resident_bytes() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * page

    def use() -> None:
        for _ in range(3):
            scratch = private_scratch(size)
            scratch[::page] = bytes(len(scratch[::page]))
            assert resident_bytes() > before + size // 2, "it was touched"
            del scratch
        after.append(resident_bytes())

    before, after = resident_bytes(), list[int]()
    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert after[0] < before + size // 2


def _late_first(slow: threading.Event) -> tuple[Readers, list[FakeReader]]:
    """Return readers the first of which is stuck at the read of byte 0 until ``slow`` or its cancellation, and the list of those that came there."""
    came: list[FakeReader] = []

    def before(reader: FakeReader, read: RangeRead) -> None:
        if read.start == 0:
            came.append(reader)
            if len(came) == 1:
                reader.wait(slow)

    return Readers(before), came


def test_a_late_read_is_overtaken_and_its_thread_goes_on_with_another_reader() -> None:
    readers, came = _late_first(threading.Event())
    jobs = Jobs()
    # Enough patience for a busy machine: a second reader that is late to begin would have a successor.
    with _pool(readers, replace(SETTINGS, hedge_after_s=3.0), is_hedged=True) as pool:
        for number in range(3):
            pool.submit(jobs.make(number))
        jobs.wait_for(3)
        assert all(error is None for error in jobs.ended.values())
        assert all(jobs.is_right(number) for number in range(3))
        assert len(came) == 2
        assert came[0].cancelled.is_set()
        assert not came[1].cancelled.is_set()
        assert pool.counters.num_hedges == 1
        for number in range(3, 40):
            pool.submit(jobs.make(number))
        jobs.wait_for(40)
        assert all(jobs.is_right(number) for number in range(40))
        _until(lambda: came[0].is_closed)
    assert pool.error is None


def test_a_lone_read_is_hedged_as_well() -> None:
    readers, came = _late_first(threading.Event())
    jobs = Jobs()
    with _pool(readers, is_hedged=True) as pool:
        pool.submit(jobs.make(0))
        jobs.wait_for(1)
        assert jobs.ended == {0: None}
        assert jobs.is_right(0)
        assert len(came) == 2


def test_pieces_are_written_only_after_the_first_reader_has_stopped() -> None:
    let_go = threading.Event()
    events: list[str] = []

    def before(reader: FakeReader, read: RangeRead) -> None:
        if len(readers) == 1 or reader is readers[0]:
            reader.cancelled.wait(20)
            events.append("first reader was asked to stop")
            assert let_go.wait(20)
            jobs.memory[0][:10] = b"\xee" * 10  # Its last write.
            events.append("first reader stopped")

    readers, jobs = Readers(before), Jobs()
    with _pool(readers, is_hedged=True) as pool:
        pool.submit(jobs.make(0))
        _until(lambda: len(events) == 1)
        time.sleep(0.1)
        assert jobs.ended == {}
        assert jobs.memory[0] == bytes(100)  # Not yet: the first may still write.
        let_go.set()
        jobs.wait_for(1)
        events.append("done")
        assert jobs.is_right(0)
    assert events == ["first reader was asked to stop", "first reader stopped", "done"]


def test_a_first_reader_that_wins_stops_the_second_one() -> None:
    slow, second_started = threading.Event(), threading.Event()

    def before(reader: FakeReader, read: RangeRead) -> None:
        if reader is readers[0]:
            reader.wait(slow)
        elif read.start == 0:
            second_started.set()
            reader.wait(threading.Event())

    readers, jobs = Readers(before), Jobs()
    with _pool(readers, is_hedged=True) as pool:
        pool.submit(jobs.make(0))
        assert second_started.wait(20)
        assert pool.describe_holdup() == "bytes 0 to 100 (asked for a second time)"
        slow.set()
        jobs.wait_for(1)
        assert jobs.ended == {0: None}
        assert jobs.is_right(0)
        _until(lambda: readers[1].is_closed)
        assert readers[1].cancelled.is_set()
        assert not readers[0].cancelled.is_set()
        for number in range(1, 10):
            pool.submit(jobs.make(number))
        jobs.wait_for(10)
        assert all(jobs.is_right(number) for number in range(10))


@pytest.mark.parametrize("fault", ["scratch", "read"])
def test_a_second_read_that_fails_harms_nobody_and_is_not_tried_again(fault: str) -> None:
    slow = threading.Event()
    scratches: list[int] = []

    def before(reader: FakeReader, read: RangeRead) -> None:
        if reader is readers[0]:
            reader.wait(slow)
        elif read.start == 0:
            raise ReadFailed("The second one broke.")

    def scratch(size: int) -> memoryview:
        scratches.append(size)
        if fault == "scratch":
            raise MemoryError
        return memoryview(bytearray(size))

    readers, jobs = Readers(before), Jobs()
    with _pool(readers, is_hedged=True, scratch=scratch) as pool:
        pool.submit(jobs.make(0))
        _until(lambda: pool.counters.num_hedges == 1)
        time.sleep(0.2)
        slow.set()
        jobs.wait_for(1)
        assert jobs.ended == {0: None}
        assert jobs.is_right(0)
        assert scratches == [100]
        assert pool.error is None


def test_a_first_reader_that_fails_while_the_second_reads_is_a_failure() -> None:
    slow, second_started = threading.Event(), threading.Event()
    failure = ReadFailed("It broke.")

    def before(reader: FakeReader, read: RangeRead) -> None:
        if reader is readers[0]:
            reader.wait(slow)
            raise failure
        second_started.set()
        reader.wait(threading.Event())

    readers, jobs = Readers(before), Jobs()
    with _pool(readers, is_hedged=True) as pool:
        pool.submit(jobs.make(0))
        assert second_started.wait(20)
        slow.set()
        jobs.wait_for(1)
        assert jobs.ended == {0: failure}
    assert readers[1].cancelled.is_set()
    assert readers[1].is_closed


def test_close_during_a_second_read_ends_both() -> None:
    readers, jobs = Readers(lambda reader, read: reader.wait(threading.Event())), Jobs()
    with _pool(readers, is_hedged=True) as pool:
        pool.submit(jobs.make(0))
        _until(lambda: len(readers) == 2 and bool(readers[1].reads))
    assert isinstance(jobs.ended[0], Cancelled)
    assert all(reader.cancelled.is_set() and reader.is_closed for reader in readers)


def test_nothing_is_hedged_while_jobs_wait_or_where_it_is_off() -> None:
    slow = threading.Event()
    jobs = Jobs()
    with _pool(Readers(lambda reader, read: reader.wait(slow)), is_hedged=False) as pool:
        pool.submit(jobs.make(0))
        time.sleep(0.2)
        assert pool.counters.num_hedges == 0
        slow.set()
        jobs.wait_for(1)
    settings = replace(SETTINGS, hedge_after_s=0)
    slow.clear()
    with _pool(Readers(lambda reader, read: reader.wait(slow)), settings, is_hedged=True) as pool:
        pool.submit(jobs.make(1))
        time.sleep(0.2)
        assert pool.counters.num_hedges == 0
        slow.set()
        jobs.wait_for(2)


def test_races_of_hedges_with_their_first_readers_end_each_job_once_and_right() -> None:
    def before(reader: FakeReader, read: RangeRead) -> None:
        time.sleep((hash((read.start, len(reader.reads))) % 5) * 0.001)

    jobs = Jobs()
    settings = replace(SETTINGS, hedge_after_s=0.001, num_connections=6)
    with _pool(Readers(before), settings, is_hedged=True) as pool:
        pool._lateness.finished = lambda *_: None  # type: ignore[method-assign]  # The median of peers would end the race.
        for number in range(300):
            pool.submit(jobs.make(number))
            if number % 3 == 2:
                jobs.wait_for(number)
        jobs.wait_for(300)
        assert all(error is None for error in jobs.ended.values())
        assert all(jobs.is_right(number) for number in range(300))
        assert pool.counters.num_hedges > 0
