"""Over TLS a body is received many records at a time: what has come is counted soon, and kept whatever ends the rest."""

from __future__ import annotations

import random
import shutil
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.errors import Cancelled
from headrace.settings import TransportSettings
from headrace.transport import HttpReader, RangeRead
from headrace.transport.connection import RECORDS_BYTES
from headrace.transport.surroundings import Surroundings
from headrace.transport.turns import Turns
from tests.support.fault_server import FaultServer, Script, cut, reset, stall
from tests.support.stub_store import StubStore

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="needs the openssl command to make certificates"
)

KEY = "weights"
PAYLOAD = random.Random(8).randbytes(1_500_000)
QUICK = TransportSettings(backoff_first_s=0.002, backoff_most_s=0.01, idle_timeout_s=60)


@pytest.fixture
def store(certificates: Path) -> Iterator[StubStore]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    with FaultServer(context) as server:
        server.put(KEY, PAYLOAD)
        yield StubStore(server, ca_file=str(certificates / "ca.pem"))
        assert server.wait_until_idle()


def read(reader: HttpReader, store: StubStore) -> bytes:
    memory = bytearray(len(PAYLOAD))
    reader.read(RangeRead(store.stat(KEY), 0, len(PAYLOAD)), [memoryview(memory)])
    return bytes(memory)


def test_many_records_are_counted_at_once(store: StubStore) -> None:
    steps: list[int] = []
    reader = HttpReader(store, QUICK, on_bytes=steps.append)
    assert read(reader, store) == PAYLOAD
    reader.close()
    assert sum(steps) == len(PAYLOAD)
    assert max(steps) <= RECORDS_BYTES
    assert max(steps) > 16 << 10


@pytest.mark.parametrize("fault", [cut, reset])
def test_what_came_before_a_body_was_cut_is_kept(store: StubStore, fault) -> None:
    store.server.script(KEY, fault(200_000))
    reader = HttpReader(store, QUICK)
    assert read(reader, store) == PAYLOAD
    reader.close()
    first, second = store.server.log
    assert first.start == 0
    # A reset drops what lies in the socket; a clean end drops nothing.
    assert second.start == 200_000 if fault is cut else 0 <= second.start <= 200_000


@contextmanager
def read_that_stalls(reader: HttpReader, store: StubStore) -> Iterator[None]:
    """Read in another thread until the store stalls, and let the read stand there for as long as the context lasts; it can be stopped then."""
    store.server.script(KEY, stall(200_000))
    errors: list[BaseException] = []

    def run() -> None:
        try:
            read(reader, store)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    deadline = time.monotonic() + 30
    while reader.counters.bytes_received < 200_000:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    yield
    reader.cancel()
    thread.join(30)
    assert [type(error) for error in errors] == [Cancelled]
    reader.close()


def test_what_came_before_a_stall_is_counted_while_it_lasts_and_the_read_can_be_stopped(store: StubStore) -> None:
    with read_that_stalls(HttpReader(store, QUICK), store):
        pass


def test_a_body_that_drips_arrives_and_one_that_stalls_is_asked_for_again(store: StubStore) -> None:
    store.server.script(KEY, Script(drip=(100_000, 0.07)))
    reader = HttpReader(store, QUICK)
    assert read(reader, store) == PAYLOAD
    reader.close()
    store.server.script(KEY, stall(100_000))
    reader = HttpReader(store, replace(QUICK, idle_timeout_s=0.3))
    assert read(reader, store) == PAYLOAD
    reader.close()
    assert store.server.log[-1].start == 100_000


class _CountingTurns(Turns):
    """Turns that note how many were taken at a time."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self._counting = threading.Lock()
        self.num_taken = self.most_taken = self.num_ever = 0

    def __enter__(self) -> None:
        super().__enter__()
        with self._counting:
            self.num_taken += 1
            self.num_ever += 1
            self.most_taken = max(self.most_taken, self.num_taken)

    def __exit__(self, *_: object) -> None:
        with self._counting:
            self.num_taken -= 1
        super().__exit__(*_)


def test_no_more_threads_decrypt_at_a_time_than_there_are_turns(store: StubStore) -> None:
    turns = _CountingTurns(2)
    world = Surroundings(turns=turns)
    readers = [HttpReader(store, QUICK, world) for _ in range(8)]
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda reader=reader: found.append(read(reader, store))) for reader in readers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for reader in readers:
        reader.close()
    assert found == [PAYLOAD] * 8
    assert 1 <= turns.most_taken <= 2
    assert turns.num_taken == 0
    # Each turn takes many records: 16 KiB a turn would be 90 for each reader.
    assert turns.num_ever < 8 * 90


def test_who_waits_for_the_network_holds_no_turn(store: StubStore) -> None:
    world = Surroundings(turns=Turns(1))
    other = HttpReader(store, QUICK, world)
    with read_that_stalls(HttpReader(store, QUICK, world), store):
        assert read(other, store) == PAYLOAD
    other.close()
