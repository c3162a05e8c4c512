"""Reader processes against a scripted server, over TLS: the same bytes, the same errors, and nothing left of them, whoever dies."""

from __future__ import annotations

import os
import random
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import headrace
from headrace.errors import AccessDenied, Cancelled, ObjectChanged, ReadFailed
from headrace.settings import Settings, TransportSettings
from headrace.streaming import StreamOptions, TensorStream
from headrace.streaming.memory import SharedFiles, SharedMemory
from headrace.transport import RangeRead, ReadJob, open_pool
from headrace.transport.processpool import ProcessPool
from tests.support.checkpoints import assert_equal, make_files, make_tensors
from tests.support.fault_server import FaultServer, Script, cut, refuse, stall
from tests.support.stub_store import StubStore

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="needs the openssl command to make certificates"
)

KEY = "weights"
PAYLOAD = random.Random(6).randbytes(3_000_000)
QUICK = TransportSettings(
    num_connections=6, backoff_first_s=0.002, backoff_most_s=0.01, idle_timeout_s=60, hedge_after_s=0
)
TENSORS = make_tensors()
FILES = make_files(TENSORS)


@pytest.fixture
def server(certificates: Path) -> Iterator[FaultServer]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    with FaultServer(context) as server:
        server.put(KEY, PAYLOAD)
        yield server
        assert server.wait_until_idle(), f"{server.num_open} connections were left open"
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith("headrace-reader")]
        assert left == []


class Load:
    """Reads of ``PAYLOAD`` into shared memory through a pool of reader processes, and what became of each."""

    def __init__(
        self,
        store: StubStore,
        settings: TransportSettings = QUICK,
        *,
        num_processes: int = 2,
        waits: bool = True,
        on_demand: bool = False,
    ) -> None:
        self.store = store
        self.files = SharedFiles()
        self.memory = SharedMemory(len(PAYLOAD) + 4096, self.files)
        self.array = self.memory.allocate(len(PAYLOAD))
        self.ended: dict[int, BaseException | None] = {}
        self.changed = threading.Condition()
        pool = open_pool(
            store,
            settings,
            num_processes=num_processes,
            places=self.files,
            on_demand_for_bytes=len(PAYLOAD) if on_demand else None,
        )
        assert isinstance(pool, ProcessPool)
        self.pool = pool
        self.processes = list(pool.pids)
        assert len(self.processes) == pool.num_readers == (0 if on_demand else num_processes)
        if waits and not on_demand:  # Otherwise a few reads are carried out by this process, while the others start.
            fleet = pool._fleet
            until(lambda: all(process.is_ready() for process in fleet._processes))
            fleet._num_reads_left_here = 0

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *exception: object) -> None:
        self.pool.close()
        until(lambda: not any(is_running(pid) for pid in self.processes))

    def submit(self, start: int, stop: int, *, gap: tuple[int, int] = (0, 0)) -> None:
        view = memoryview(self.array)
        pieces = [view[start : gap[0]], memoryview(bytearray(gap[1] - gap[0])), view[gap[1] : stop]]

        def done(error: BaseException | None) -> None:
            with self.changed:
                self.ended[start] = error
                self.changed.notify_all()

        read = RangeRead(self.store.stat(KEY), start, stop)
        self.pool.submit(ReadJob(read, lambda: pieces if gap[1] else [view[start:stop]], done))

    def submit_all(self, num_bytes: int = 100_000) -> None:
        for start in range(0, len(PAYLOAD), num_bytes):
            self.submit(start, start + num_bytes)

    def wait(self, number: int = 1) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.ended) >= number, 60)

    def wait_for_all(self) -> None:
        self.wait(30)
        assert set(self.ended.values()) == {None}
        assert self.array.tobytes() == PAYLOAD


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def store_of(server: FaultServer, certificates: Path, **given) -> StubStore:
    return StubStore(server, ca_file=str(certificates / "ca.pem"), **given)


def test_all_bytes_arrive_in_the_memory_of_the_load_and_are_counted(server: FaultServer, certificates: Path) -> None:
    server.script(KEY, cut(40_000), refuse(503), Script())
    with Load(store_of(server, certificates)) as load:
        load.submit_all()
        load.wait_for_all()
        counters = load.pool.counters
    assert counters.bytes_received == len(PAYLOAD)
    assert counters.num_requests == len(server.log)
    assert counters.num_retries == 2
    assert load.pool.num_lost == 0


def test_a_gap_goes_to_the_memory_that_was_given_for_it(server: FaultServer, certificates: Path) -> None:
    with Load(store_of(server, certificates)) as load:
        load.array[:] = 0
        load.submit(1000, 90_000, gap=(5000, 9000))
        load.wait()
    assert load.ended == {1000: None}
    expected = np.zeros(len(PAYLOAD), dtype=np.uint8)
    source = np.frombuffer(PAYLOAD, dtype=np.uint8)
    expected[1000:5000], expected[9000:90_000] = source[1000:5000], source[9000:90_000]
    assert np.array_equal(load.array, expected)


def test_reads_are_carried_out_here_while_the_processes_start(server: FaultServer, certificates: Path) -> None:
    with Load(store_of(server, certificates), waits=False) as load:
        load.submit_all()
        load.wait_for_all()
        assert load.pool.counters.bytes_received == len(PAYLOAD)


def test_processes_on_demand_are_not_started_for_threads_that_are_not_busy(
    server: FaultServer, certificates: Path
) -> None:
    with Load(store_of(server, certificates), on_demand=True) as load:
        load.submit_all()
        load.wait_for_all()
        assert (load.pool.pids, load.pool.num_readers, load.pool.why_started) == ([], 0, "")


def test_processes_on_demand_take_over_from_threads_that_are_busy(
    server: FaultServer, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("BUSY_PROCESSORS", 0.0), ("LEAST_LEFT_BYTES", 0), ("LOOK_EVERY_S", 1e-9)):
        monkeypatch.setattr(f"headrace.transport.busyness.{name}", value)
    with Load(store_of(server, certificates), on_demand=True) as load:
        for start in range(0, 1_000_000, 100_000):
            load.submit(start, start + 100_000)
        load.wait(10)
        load.processes = list(load.pool.pids)
        assert len(load.processes) == load.pool.num_readers == 2
        assert load.pool.why_started.startswith("auto: TLS, and threads filled ")
        fleet = load.pool._fleet
        until(lambda: all(process.is_ready() for process in fleet._processes))
        for start in range(1_000_000, len(PAYLOAD), 100_000):
            load.submit(start, start + 100_000)
        load.wait_for_all()
        received = [process.status.read(slot).bytes_received for process in fleet._processes for slot in range(8)]
        assert sum(received) == len(PAYLOAD) - 1_000_000
        assert load.pool.counters.bytes_received == len(PAYLOAD)


def test_the_load_renews_credentials_for_its_readers(server: FaultServer, certificates: Path) -> None:
    store = store_of(server, certificates, tokens=["old", "new"])
    server.script(KEY, refuse(403, b"ExpiredToken"))
    with Load(store, replace(QUICK, num_connections=1), num_processes=1) as load:
        load.submit(0, 1000)
        load.wait()
    assert load.ended == {0: None}
    assert store.num_refreshes == 1
    assert [sent.headers["authorization"] for sent in server.log] == ["Bearer old", "Bearer new"]


def test_the_error_of_a_read_is_the_one_that_the_store_made_and_ends_the_processes(
    server: FaultServer, certificates: Path
) -> None:
    server.always(KEY, refuse(403))
    store = store_of(server, certificates)
    with Load(store) as load:
        load.submit(0, 1000)
        load.wait()
        error = load.ended[0]
        assert type(error) is AccessDenied
        assert error.mend == "Look at the server."
        assert load.pool.error is error
        until(lambda: not any(is_running(pid) for pid in load.processes))  # Before the pool is closed.
        assert load.pool.pids == []
    assert [refusal.status for refusal in store.refusals] == [403]


def test_errors_that_a_reader_makes_arrive_with_their_kind_and_words(server: FaultServer, certificates: Path) -> None:
    server.always(KEY, cut(0))
    with Load(store_of(server, certificates), replace(QUICK, max_attempts=2)) as load:
        load.submit(0, 1000)
        load.wait()
    error = load.ended[0]
    assert type(error) is ReadFailed
    assert "2 attempts" in str(error)
    assert "weights" in str(error)
    assert "CutShort" in str(error.__cause__)


def test_an_object_that_was_replaced_is_told_from_a_bad_network(server: FaultServer, certificates: Path) -> None:
    store = store_of(server, certificates)
    with Load(store) as load:
        load.submit(0, 1000)
        load.wait()
        stored = store.stat(KEY)
        server.put(KEY, PAYLOAD[::-1])
        ended: list[BaseException | None] = []
        view = memoryview(load.array)[:10]
        load.pool.submit(ReadJob(RangeRead(stored, 0, 10), lambda: [view], ended.append))
        until(lambda: bool(ended))
        assert type(ended[0]) is ObjectChanged
        view.release()


def test_what_describing_a_request_raises_is_raised_for_the_read(server: FaultServer, certificates: Path) -> None:
    class Locked(StubStore):
        num_described = 0

        def describe_range(self, stored, start: int, stop: int):
            self.num_described += 1
            if self.num_described == 2:
                raise AccessDenied("The credentials have ended.")
            return super().describe_range(stored, start, stop)

    server.script(KEY, cut(500))
    store = Locked(server, ca_file=str(certificates / "ca.pem"))
    with Load(store) as load:
        load.submit(0, 1000)
        load.wait()
    assert type(load.ended[0]) is AccessDenied
    assert load.ended[0].what == "The credentials have ended."


def test_a_request_that_cannot_be_described_for_a_moment_is_tried_again(
    server: FaultServer, certificates: Path
) -> None:
    class Busy(StubStore):
        num_failed = 0

        def describe_range(self, stored, start: int, stop: int):
            if self.num_failed < 3:
                self.num_failed += 1
                raise ConnectionRefusedError(111, "The token server is away")
            return super().describe_range(stored, start, stop)

    with Load(Busy(server, ca_file=str(certificates / "ca.pem")), replace(QUICK, num_connections=1)) as load:
        load.submit(0, 1000)
        load.wait()
        assert load.ended == {0: None}
        assert (
            load.pool.counters.num_retries == 2
        )  # The first of the three was the load's own attempt to spare a message.


def test_a_read_that_is_given_up_is_acknowledged_before_its_memory_is_free(
    server: FaultServer, certificates: Path
) -> None:
    server.always(KEY, stall(20_000))
    with Load(store_of(server, certificates)) as load:
        for start in range(0, 600_000, 100_000):
            load.submit(start, start + 100_000)
        until(lambda: load.pool.counters.bytes_received >= 6 * 20_000)
        assert "by reader process" in load.pool.describe_holdup()
        assert load.pool.close()
        assert {type(error) for error in load.ended.values()} == {Cancelled}
        assert len(load.ended) == 6
        load.array[:] = 7
    assert server.wait_until_idle()
    assert int(load.array.min()) == int(load.array.max()) == 7


def test_a_process_that_is_killed_in_mid_load_costs_nothing_but_time(server: FaultServer, certificates: Path) -> None:
    server.script(KEY, *[stall(30_000)] * 6)
    with Load(store_of(server, certificates)) as load:
        load.submit_all()
        until(lambda: load.pool.counters.bytes_received >= 6 * 30_000)
        for pid in load.processes:
            os.kill(pid, signal.SIGKILL)
        load.wait_for_all()
        assert load.pool.num_lost == 2
        replaced = load.pool.pids
        assert len(replaced) == 2
        assert not set(replaced) & set(load.processes)
        load.processes += replaced


def test_a_load_whose_processes_all_die_again_and_again_is_finished_by_its_own_threads(
    server: FaultServer, certificates: Path
) -> None:
    server.script(KEY, stall(30_000), stall(30_000))
    with Load(store_of(server, certificates), replace(QUICK, num_connections=1), num_processes=1) as load:
        load.submit_all()
        for number in (1, 2):  # The process, and the one that takes its place.
            until(lambda: len(server.log) == number)  # noqa: B023
            for pid in load.pool.pids:
                os.kill(pid, signal.SIGKILL)
        load.wait_for_all()
        assert load.pool.pids == []
        assert load.pool.num_lost == 2


def test_a_process_that_stands_still_is_ended_when_its_reads_are_given_up(
    server: FaultServer, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.transport.remote._ACKNOWLEDGED_WITHIN_S", 0.5)
    server.always(KEY, stall(20_000))
    with Load(store_of(server, certificates), replace(QUICK, num_connections=1), num_processes=1) as load:
        load.submit(0, 100_000)
        until(lambda: load.pool.counters.bytes_received >= 20_000)
        os.kill(load.processes[0], signal.SIGSTOP)
        assert load.pool.close()
        assert type(load.ended[0]) is Cancelled
        assert not is_running(load.processes[0])


def test_a_late_read_of_a_process_that_stands_still_is_carried_out_here(
    server: FaultServer, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.transport.remote._ACKNOWLEDGED_WITHIN_S", 0.5)
    server.script(KEY, stall(20_000))
    settings = replace(QUICK, num_connections=2, hedge_after_s=0.3)
    with Load(store_of(server, certificates), settings, num_processes=1) as load:
        load.submit(0, 100_000)
        until(lambda: load.pool.counters.bytes_received >= 20_000)
        os.kill(load.processes[0], signal.SIGSTOP)
        load.wait()
        assert load.ended == {0: None}
        assert load.array[:100_000].tobytes() == PAYLOAD[:100_000]
        assert load.pool.counters.num_hedges >= 1


def test_processes_read_over_the_interface_and_on_the_node_that_are_named(
    server: FaultServer, certificates: Path
) -> None:
    place = "lo@0" if Path("/sys/devices/system/node/node0").is_dir() else "lo"
    with Load(store_of(server, certificates), replace(QUICK, reader_places=f"{place},")) as load:
        load.submit_all()
        load.wait_for_all()
        assert load.pool.num_lost == 0


def test_two_hundred_connections_over_four_processes(server: FaultServer, certificates: Path) -> None:
    server.always(KEY, Script(delay_s=0.3))
    with Load(store_of(server, certificates), replace(QUICK, num_connections=200), num_processes=4) as load:
        for start in range(0, len(PAYLOAD), 10_000):
            load.submit(start, start + 10_000)
        load.wait(300)
        assert set(load.ended.values()) == {None}
        assert load.array.tobytes() == PAYLOAD
    assert server.num_connections >= 200


PARENT = """
import os, sys, time
from headrace.settings import TransportSettings
from headrace.transport.processes import Fleet
fleet = Fleet(TransportSettings(), 2)
while not all(process.is_ready() for process in fleet._processes):
    time.sleep(0.01)
if sys.argv[1] == "forked" and not os.fork():
    time.sleep(60)
    os._exit(0)
print(*fleet.pids, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("how", ["alone", "forked"])
def test_processes_end_with_their_parent_though_a_fork_of_it_has_their_channels_open(how: str) -> None:
    source = str(Path(headrace.__file__).parents[1])
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, how],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": source},
        start_new_session=True,
    )
    assert parent.stdout is not None
    pids = [int(text) for text in parent.stdout.readline().split()]
    assert len(pids) == 2
    assert all(is_running(pid) for pid in pids)
    parent.kill()
    parent.wait()
    until(lambda: not any(is_running(pid) for pid in pids))
    parent.stdout.close()
    if how == "forked":
        os.killpg(parent.pid, signal.SIGKILL)


# -- whole streams


def _settings(certificates: Path, folder: Path, **given) -> Settings:
    quick = {"backoff_first_s": 0.005, "backoff_most_s": 0.02, "hedge_after_s": 0}
    return Settings.from_environment(
        {},
        cache_dir=folder,
        ca_file=str(certificates / "ca.pem"),
        progress=False,
        read_bytes=100_000,
        num_connections=4,
        **quick,
        **given,
    )


def _open(server: FaultServer, settings: Settings) -> headrace.Checkpoint:
    for name, content in FILES.items():
        server.put(f"m/{name}", content)
    return headrace.open(f"{server.url}/m", settings=settings)


@pytest.mark.parametrize("ownership", ["owned", "leased"])
def test_tensors_are_the_same_and_stay_when_the_processes_are_gone(
    server: FaultServer, certificates: Path, tmp_path: Path, ownership: str
) -> None:
    settings = _settings(certificates, tmp_path, readers=2)
    options = StreamOptions(ownership=ownership)  # type: ignore[arg-type]
    with (
        _open(server, settings) as checkpoint,
        TensorStream(checkpoint, options=options, settings=settings) as stream,
    ):
        pool = stream._pool
        assert isinstance(pool, ProcessPool)
        found = dict(stream)
        assert pool.pids == []
        report = stream.report
    assert_equal(found, TENSORS)
    assert report.num_readers == 2
    assert report.bytes_read >= report.bytes_wanted
    assert ("readers", "2 processes (as set)") in report.rows()


def test_leased_memory_is_used_again_within_its_limit(server: FaultServer, certificates: Path, tmp_path: Path) -> None:
    settings = _settings(certificates, tmp_path, readers=2, memory_limit_bytes=0, debug_poison=True)
    with _open(server, settings) as checkpoint:
        options = StreamOptions(ownership="leased", on_budget="error")
        with TensorStream(checkpoint, options=options, settings=settings) as stream:
            copied = {}
            for name, tensor in stream:
                copied[name] = tensor.clone()
                del tensor
    assert_equal(copied, TENSORS)


def test_by_itself_a_load_has_no_processes(server: FaultServer, certificates: Path, tmp_path: Path) -> None:
    settings = _settings(certificates, tmp_path)
    with _open(server, settings) as checkpoint, TensorStream(checkpoint, settings=settings) as stream:
        assert not isinstance(stream._pool, ProcessPool)
        assert_equal(dict(stream), TENSORS)
        assert stream.report.num_readers == 0
        who = dict(stream.report.rows())["readers"]
        assert who.startswith("threads (auto: TLS, ")


@pytest.mark.parametrize("is_busy", [True, False])
def test_by_itself_a_large_load_on_a_large_machine_has_processes_once_its_threads_are_busy(
    server: FaultServer, certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_busy: bool
) -> None:
    monkeypatch.setattr(sys.modules[TensorStream.__module__], "usable_processors", lambda: 32)
    monkeypatch.setattr("headrace.transport.choice.LEAST_BYTES", 1_000_000)
    if is_busy:
        for name, value in (("BUSY_PROCESSORS", 0.0), ("LEAST_LEFT_BYTES", 0), ("LOOK_EVERY_S", 1e-9)):
            monkeypatch.setattr(f"headrace.transport.busyness.{name}", value)
    settings = _settings(certificates, tmp_path)
    with _open(server, settings) as checkpoint, TensorStream(checkpoint, settings=settings) as stream:
        pool = stream._pool
        assert isinstance(pool, ProcessPool)
        assert pool.pids == []
        assert_equal(dict(stream), TENSORS)
        assert pool.pids == []
        who = dict(stream.report.rows())["readers"]
        if is_busy:
            assert stream.report.num_readers == 2
            assert who.startswith("2 processes (auto: TLS, and threads filled ")
        else:
            assert stream.report.num_readers == 0
            assert who == "threads (auto: TLS, 32 processors; 2 processes once reading fills two)"
