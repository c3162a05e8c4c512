"""A pool of HTTP readers against a server that misbehaves: hedges, throttling, failures, close; and what is left afterwards."""

from __future__ import annotations

import gc
import os
import random
import select
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace

from headrace.errors import Cancelled, ObjectChanged, StoreUnavailable
from headrace.settings import TransportSettings
from headrace.transport import PoolCounters, RangeRead, ReaderPool, ReadJob, open_pool
from tests.support.fault_server import PLAIN, FaultServer, Script, cut, refuse, reset, stall
from tests.support.stub_store import StubStore

KEY = "model.safetensors"
PAYLOAD = random.Random(3).randbytes(400_000)
READ_BYTES = 40_000
NUM_READS = 10
QUICK = TransportSettings(
    num_connections=4, backoff_first_s=0.002, backoff_most_s=0.01, idle_timeout_s=20, hedge_after_s=0
)


class Load:
    """Loads one object in ten reads into one memory, and remembers how each read ended."""

    def __init__(self, server: FaultServer, settings: TransportSettings = QUICK) -> None:
        server.put(KEY, PAYLOAD)
        self.store = StubStore(server)
        self.stored = self.store.stat(KEY)
        self.memory = bytearray(len(PAYLOAD))
        self.ended: dict[int, BaseException | None] = {}
        self.bytes_told = 0
        self._changed = threading.Condition()
        self.pool: ReaderPool = open_pool(self.store, settings, on_bytes=self._told)

    def _told(self, num_bytes: int) -> None:
        with self._changed:
            self.bytes_told += num_bytes

    def submit(self, *numbers: int) -> None:
        for number in numbers or range(NUM_READS):
            start = number * READ_BYTES
            job = ReadJob(
                RangeRead(self.stored, start, start + READ_BYTES),
                lambda start=start: [
                    memoryview(self.memory)[start : start + 7],
                    memoryview(self.memory)[start + 7 : start + READ_BYTES],
                ],
                lambda error, number=number: self._done(number, error),
            )
            self.pool.submit(job)

    def _done(self, number: int, error: BaseException | None) -> None:
        with self._changed:
            assert number not in self.ended, "done is called once"
            self.ended[number] = error
            self._changed.notify_all()

    def wait_for(self, count: int = NUM_READS) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.ended) >= count, 30), self.pool.describe_holdup()

    def close(self) -> PoolCounters:
        assert self.pool.close()
        self.memory.append(0)  # BufferError if anything still referred to it.
        del self.memory[-1]
        return self.pool.counters


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_load_over_few_connections(fault_server: FaultServer) -> None:
    load = Load(fault_server)
    load.submit()
    load.wait_for()
    counters = load.close()
    assert load.memory == PAYLOAD
    assert set(load.ended.values()) == {None}
    assert counters == PoolCounters(num_requests=10, num_retries=0, num_hedges=0, bytes_received=400_000)
    assert load.bytes_told == 400_000
    assert 1 <= fault_server.num_connections <= 4


def test_cuts_resets_and_refusals_all_over_the_place(fault_server: FaultServer) -> None:
    load = Load(fault_server)
    fault_server.script(
        KEY, *[cut(1000), reset(20_000), refuse(503), Script(hang_up=True), Script(chunk_bytes=999, cut_after=5000)] * 3
    )
    load.submit()
    load.wait_for()
    counters = load.close()
    assert load.memory == PAYLOAD
    assert set(load.ended.values()) == {None}
    assert counters.bytes_received == 400_000
    assert counters.num_retries > 0


def test_a_stalled_read_at_the_end_is_hedged_and_its_late_bytes_go_nowhere(fault_server: FaultServer) -> None:
    load = Load(fault_server, replace(QUICK, hedge_after_s=3))
    fault_server.script(KEY, stall(10_000))
    load.submit()
    load.wait_for()
    assert load.memory == PAYLOAD
    load.memory[:] = bytes(len(PAYLOAD))
    counters = load.close()
    assert load.memory == bytes(len(PAYLOAD))
    assert set(load.ended.values()) == {None}
    assert counters.num_hedges == 1
    assert counters.bytes_received == 400_000 + 10_000
    assert fault_server.wait_until_idle()


def test_a_stalled_read_is_hedged_although_the_store_had_throttled(fault_server: FaultServer) -> None:
    load = Load(fault_server, replace(QUICK, hedge_after_s=1, idle_timeout_s=10))
    fault_server.script(KEY, refuse(503), stall(10_000))
    load.submit(0, 1)  # Too few for the pace to come back.
    load.wait_for(2)
    assert load.memory[: 2 * READ_BYTES] == PAYLOAD[: 2 * READ_BYTES]
    counters = load.close()
    assert set(load.ended.values()) == {None}
    assert counters.num_hedges >= 1
    assert fault_server.wait_until_idle()


def test_a_second_read_that_stalls_as_well_is_replaced(fault_server: FaultServer) -> None:
    load = Load(fault_server, replace(QUICK, hedge_after_s=1.8, idle_timeout_s=10))
    fault_server.script(KEY, stall(10_000), PLAIN, PLAIN, PLAIN, stall(7), stall(0))
    load.submit(0, 1, 2, 3)
    load.wait_for(4)
    assert load.memory[: 4 * READ_BYTES] == PAYLOAD[: 4 * READ_BYTES]
    counters = load.close()
    assert set(load.ended.values()) == {None}
    assert counters.num_hedges + counters.num_retries >= 3  # a slow machine may give one up before it is late
    assert fault_server.wait_until_idle()


def test_a_late_loser_that_sends_other_bytes_cannot_reach_the_tensor(fault_server: FaultServer) -> None:
    load = Load(fault_server, replace(QUICK, hedge_after_s=2))
    # It sends a right beginning slowly, and then what it should not, for as long as somebody listens.
    other = Script(drip=(500, 0.1), spoil=lambda body: body[:5000] + b"\xee" * (len(body) - 5000))
    fault_server.script(KEY, other)
    load.submit()
    load.wait_for()
    assert load.memory == PAYLOAD
    time.sleep(0.3)
    assert load.memory == PAYLOAD
    load.close()
    assert load.memory == PAYLOAD
    late = fault_server.log[0]
    assert late.bytes_sent < READ_BYTES  # It was stopped in the middle of its answer.


def test_a_first_read_that_wins_after_all_stops_the_hedge(fault_server: FaultServer) -> None:
    load = Load(fault_server, replace(QUICK, hedge_after_s=0.2))
    fault_server.script(KEY, Script(delay_s=0.6), Script(delay_s=20))
    load.submit(0)
    load.wait_for(1)
    assert load.memory[:READ_BYTES] == PAYLOAD[:READ_BYTES]
    load.submit(1, 2, 3)
    load.wait_for(4)
    counters = load.close()
    assert load.memory[: 4 * READ_BYTES] == PAYLOAD[: 4 * READ_BYTES]
    assert counters.num_hedges == 1
    assert set(load.ended.values()) == {None}


def test_an_object_replaced_in_mid_load_fails_the_load_and_stops_the_others(fault_server: FaultServer) -> None:
    load = Load(fault_server)
    fault_server.script(KEY, stall(10), stall(10), Script(then=lambda server: server.put(KEY, bytes(400_000))))
    load.submit()
    load.wait_for()
    errors = list(load.ended.values())
    assert isinstance(load.pool.error, ObjectChanged)
    assert load.pool.error in errors
    assert (
        sum(isinstance(error, Cancelled) for error in errors) >= 2
    )  # Those that were stalled did not wait for their timeout.
    assert all(isinstance(error, ObjectChanged | Cancelled | None) for error in errors)
    for number, error in load.ended.items():
        if error is None:
            assert (
                load.memory[number * READ_BYTES : (number + 1) * READ_BYTES]
                == PAYLOAD[number * READ_BYTES : (number + 1) * READ_BYTES]
            )
    load.close()
    assert fault_server.wait_until_idle()


def test_a_failed_pool_keeps_no_memory_of_its_reads(fault_server: FaultServer) -> None:
    gc.disable()
    try:
        load = Load(fault_server, replace(QUICK, max_attempts=2))
        fault_server.always(KEY, Script(cut_after=0))
        load.submit()
        load.wait_for()
        assert load.pool.error is not None
        assert load.pool.error.__traceback__ is not None
        load.close()  # It checks that nothing refers to the memory; the error is still held.
    finally:
        gc.enable()


def test_reads_that_failed_once_and_then_succeeded_keep_no_memory_either(fault_server: FaultServer) -> None:
    gc.disable()
    try:
        load = Load(fault_server, replace(QUICK, idle_timeout_s=0.2))
        fault_server.script(KEY, cut(100), stall(200), refuse(503), reset(50))
        load.submit()
        load.wait_for()
        assert load.memory == PAYLOAD
        load.close()
    finally:
        gc.enable()


def test_a_busy_store_gets_fewer_requests_at_once_and_the_load_ends_well(fault_server: FaultServer) -> None:
    load = Load(fault_server)
    fault_server.script(KEY, *[refuse(503, retry_after="0.01")] * 4)
    load.submit()
    load.wait_for()
    counters = load.close()
    assert load.memory == PAYLOAD
    assert counters.num_retries == 4
    assert [sent.status for sent in fault_server.log].count(503) == 4


def test_a_store_that_stays_down_is_one_error_for_all(fault_server: FaultServer) -> None:
    load = Load(fault_server, replace(QUICK, max_attempts=3))
    fault_server.always(KEY, refuse(503))
    load.submit()
    load.wait_for()
    assert isinstance(load.pool.error, StoreUnavailable)
    assert all(error is not None for error in load.ended.values())
    load.close()
    assert load.memory == bytes(len(PAYLOAD))


def test_close_in_the_middle_of_stalled_reads_is_quick(fault_server: FaultServer) -> None:
    load = Load(fault_server, replace(QUICK, idle_timeout_s=60))
    fault_server.always(KEY, stall(100))
    load.submit()
    _until(lambda: len(fault_server.log) == 4 and all(sent.bytes_sent == 100 for sent in fault_server.log))
    holdup = load.pool.describe_holdup()
    assert load.store.uri_of(KEY) in holdup
    assert f"to 127.0.0.1:{fault_server.port}, attempt 1" in holdup
    started = time.monotonic()
    load.close()
    assert time.monotonic() - started < 10
    assert len(load.ended) == NUM_READS
    assert all(isinstance(error, Cancelled) for error in load.ended.values())
    assert fault_server.wait_until_idle()


def test_a_forked_child_cannot_use_the_pool_and_does_not_hang(fault_server: FaultServer) -> None:
    load = Load(fault_server)
    load.submit(0)
    load.wait_for(1)
    reading, writing = os.pipe()
    child = _fork()
    if child == 0:
        try:
            load.submit(1)
        except BaseException as error:
            os.write(writing, type(error).__name__.encode())
        os.write(writing, b" closed" if load.pool.close() else b" not closed")
        os._exit(0)
    os.close(writing)
    said = b""
    while select.select([reading], [], [], 20)[0] and (more := os.read(reading, 100)):
        said += more
    os.close(reading)
    os.waitpid(child, 0)
    assert said == b"UsageError closed"
    load.submit(2)  # The parent's own goes on.
    load.wait_for(2)
    assert load.memory[2 * READ_BYTES : 3 * READ_BYTES] == PAYLOAD[2 * READ_BYTES : 3 * READ_BYTES]
    load.close()


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of just what this is about.
        return os.fork()
