"""One reader against a server that misbehaves: the bytes or the error, and what is left of it afterwards."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.errors import (
    AccessDenied,
    Cancelled,
    HeadraceError,
    ObjectChanged,
    ObjectNotFound,
    ReadFailed,
    ReadStalled,
    StoreUnavailable,
    WrongRange,
)
from headrace.settings import TransportSettings
from headrace.storage import StoredObject, Verdict
from headrace.transport import HttpReader, RangeRead, Surroundings, fetch
from tests.support.fault_server import FaultServer, Script, cut, redirect, refuse, reset, stall
from tests.support.stub_store import StubStore

KEY = "model-00001.safetensors"
PAYLOAD = random.Random(7).randbytes(300_000)
QUICK = TransportSettings(backoff_first_s=0.002, backoff_most_s=0.01, idle_timeout_s=5, connect_timeout_s=5)


class Bench:
    """A reader over a server that holds one object, and the memory that it reads into."""

    def __init__(
        self, server: FaultServer, settings: TransportSettings = QUICK, store: StubStore | None = None
    ) -> None:
        self.server = server
        self.waits: list[float] = []
        server.put(KEY, PAYLOAD)
        self.store = store or StubStore(server)
        self.stored = self.store.stat(KEY)
        self.reader = HttpReader(self.store, settings, Surroundings(wait=self._wait))
        self.memory = bytearray()

    def _wait(self, event: threading.Event, seconds: float) -> bool:
        self.waits.append(seconds)
        return event.wait(seconds)

    def read(self, start: int = 0, stop: int = len(PAYLOAD), sizes: tuple[int, ...] = ()) -> bytes:
        """Read into pieces of ``sizes`` bytes and one of what is left, and return the memory."""
        self.memory = bytearray(stop - start)
        pieces, place = [], 0
        for size in (*sizes, stop - start - sum(sizes)):
            pieces.append(memoryview(self.memory)[place : place + size])
            place += size
        self.reader.read(RangeRead(self.stored, start, stop), pieces)
        return bytes(self.memory)

    def fails(self, kind: type[HeadraceError], start: int = 0, stop: int = len(PAYLOAD)) -> str:
        """Read, expect an error of exactly ``kind``, and check that the reader let go of the memory; return the message."""
        with pytest.raises(HeadraceError) as caught:
            self.read(start, stop)
        assert type(caught.value) is kind, repr(caught.value)
        message = str(caught.value)
        caught.value.__traceback__ = None
        del caught
        self.memory.append(0)  # BufferError if anything still referred to it.
        assert self.reader.doing == "no read"
        return message


@pytest.fixture
def bench(fault_server: FaultServer):
    made: list[Bench] = []

    def make(settings: TransportSettings = QUICK, store: StubStore | None = None) -> Bench:
        made.append(Bench(fault_server, settings, store))
        return made[-1]

    yield make
    for one in made:
        one.reader.close()


Make = Callable[..., Bench]


# -- what goes well


def test_reads_ranges_into_pieces_over_one_connection(bench: Make, fault_server: FaultServer) -> None:
    b = bench()
    assert b.read(0, 1) == PAYLOAD[:1]
    assert b.read(5, 200_000, sizes=(1, 0, 3, 64, 100_000, 7)) == PAYLOAD[5:200_000]
    assert b.read(299_999, 300_000) == PAYLOAD[-1:]
    assert b.read() == PAYLOAD
    assert fault_server.num_connections == 1
    assert [(sent.start, sent.stop) for sent in fault_server.log] == [
        (0, 1),
        (5, 200_000),
        (299_999, 300_000),
        (0, 300_000),
    ]
    assert b.reader.counters.num_requests == 4
    assert b.reader.counters.num_retries == 0
    assert b.reader.counters.bytes_received == 1 + 199_995 + 1 + 300_000


def test_scatters_over_very_many_small_pieces(bench: Make) -> None:
    b = bench()
    assert b.read(1, 300_000, sizes=(13,) * 20_000) == PAYLOAD[1:]


def test_chunked_bodies_are_counted_and_the_connection_is_kept(bench: Make, fault_server: FaultServer) -> None:
    b = bench()
    fault_server.always(KEY, Script(chunk_bytes=7001))
    assert b.read(10, 250_000, sizes=(5, 100_000)) == PAYLOAD[10:250_000]
    assert b.read() == PAYLOAD
    assert fault_server.num_connections == 1


def test_a_whole_object_in_answer_to_a_range_is_taken_when_the_whole_was_asked_for(
    bench: Make, fault_server: FaultServer
) -> None:
    b = bench()
    fault_server.script(KEY, Script(ignores_range=True))
    assert b.read() == PAYLOAD
    assert fault_server.log[0].status == 200


def test_a_shorter_range_is_taken_and_continued_at_once(bench: Make, fault_server: FaultServer) -> None:
    b = bench()
    fault_server.script(KEY, Script(most_bytes=150_000), Script(most_bytes=100_000))
    assert b.read() == PAYLOAD
    assert [sent.start for sent in fault_server.log] == [0, 150_000, 250_000]
    assert b.waits == []
    assert fault_server.num_connections == 1


def test_an_idle_connection_that_the_server_closed_costs_one_more_request_and_no_wait(
    bench: Make, fault_server: FaultServer
) -> None:
    b = bench()
    fault_server.script(KEY, Script(close_after=True))
    assert b.read(0, 10) == PAYLOAD[:10]
    assert fault_server.wait_until_idle()
    assert b.read(10, 20) == PAYLOAD[10:20]
    assert b.waits == []
    assert b.reader.counters.num_retries == 0
    assert fault_server.num_connections == 2


def test_fetch_returns_bytes_and_leaves_nothing_open(fault_server: FaultServer) -> None:
    fault_server.put(KEY, PAYLOAD)
    fault_server.script(KEY, cut(100))
    store = StubStore(fault_server)
    assert fetch(store, store.stat(KEY), 8, 1000, QUICK) == PAYLOAD[8:1000]
    assert fetch(store, store.stat(KEY), 8, 8, QUICK) == b""
    assert [sent.start for sent in fault_server.log] == [8, 108]


# -- cuts, resets, stalls


@pytest.mark.parametrize("script", [cut(70_000), reset(70_000)], ids=["closed", "reset"])
def test_a_body_cut_twice_continues_from_the_last_byte(bench: Make, fault_server: FaultServer, script: Script) -> None:
    b = bench()
    fault_server.script(KEY, script, script)
    assert b.read() == PAYLOAD
    starts = [sent.start for sent in fault_server.log]
    assert len(starts) == 3
    assert starts == sorted(starts)
    # A reset may take bytes away that were on their way; a close may not.
    assert starts[2] <= 140_000
    if not script.with_reset:
        assert starts == [0, 70_000, 140_000]
    assert fault_server.num_connections == 3  # One with a partial body is not used again.
    assert b.reader.counters.num_retries == 2
    assert b.reader.counters.bytes_received == 300_000


def test_a_cut_chunked_body_continues_too(bench: Make, fault_server: FaultServer) -> None:
    b = bench()
    fault_server.script(KEY, Script(chunk_bytes=1000, cut_after=50_500))
    assert b.read() == PAYLOAD
    assert len(fault_server.log) == 2
    assert 0 < fault_server.log[1].start <= 50_500


def test_a_body_that_never_comes_is_given_up_after_the_last_attempt(bench: Make, fault_server: FaultServer) -> None:
    b = bench(replace(QUICK, max_attempts=3))
    fault_server.always(KEY, Script(hang_up=True))
    message = b.fails(ReadFailed, 100, 200)
    assert len(fault_server.log) == 3
    assert len(b.waits) == 2
    assert message == (
        f"Cannot read bytes 100 to 200 of {b.store.uri_of(KEY)} from {fault_server.url}: 0 of 100 bytes came in 3 attempts. "
        "The last one failed: RemoteDisconnected, Remote end closed connection without response. "
        "Check that the store can be reached from this machine, or raise max_attempts."
    )
    assert fault_server.wait_until_idle()


def test_attempts_that_bring_bytes_are_bounded_as_well(bench: Make, fault_server: FaultServer) -> None:
    b = bench(replace(QUICK, max_attempts=2))
    fault_server.always(KEY, cut(10))
    message = b.fails(ReadFailed, 0, 1000)
    assert len(fault_server.log) == 20
    assert "200 of 1000 bytes came in 20 attempts" in message
    fault_server.always(KEY, Script(most_bytes=10))
    assert "200 of 1000 bytes came in 20 attempts" in b.fails(ReadFailed, 0, 1000)


def test_progress_starts_the_count_of_attempts_anew(bench: Make, fault_server: FaultServer) -> None:
    b = bench(replace(QUICK, max_attempts=2))
    fault_server.script(KEY, *[refuse(503), cut(1000)] * 6)
    assert b.read(0, 10_000) == PAYLOAD[:10_000]
    assert len(fault_server.log) == 13


def test_a_stalled_body_is_continued_on_another_connection(bench: Make, fault_server: FaultServer) -> None:
    b = bench(replace(QUICK, idle_timeout_s=0.2))
    fault_server.script(KEY, stall(100_000))
    assert b.read() == PAYLOAD
    assert [sent.start for sent in fault_server.log] == [0, 100_000]
    deadline = time.monotonic() + 10
    while fault_server.num_open > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert fault_server.num_open == 1  # The stalled connection was closed, not left behind.


def test_a_server_that_only_stalls_is_given_up_with_the_cause(bench: Make, fault_server: FaultServer) -> None:
    b = bench(replace(QUICK, idle_timeout_s=0.1, max_attempts=2))
    fault_server.always(KEY, stall(0))
    message = b.fails(ReadStalled, 0, 10)
    assert "nothing came for 0.10 s" in message
    assert "idle_timeout_s" in message
    assert fault_server.wait_until_idle()


def test_a_head_that_never_comes_is_a_stall(bench: Make, fault_server: FaultServer) -> None:
    b = bench(replace(QUICK, idle_timeout_s=0.1, max_attempts=2))
    fault_server.always(KEY, Script(delay_s=20))
    assert "nothing came for 0.10 s" in b.fails(ReadStalled, 0, 10)
    assert len(fault_server.log) == 2


def test_a_trickle_is_given_up_by_the_least_rate_though_bytes_keep_coming(
    bench: Make, fault_server: FaultServer
) -> None:
    b = bench(replace(QUICK, least_rate_window_s=0.4, least_rate_bytes_per_s=1000))
    fault_server.script(KEY, Script(drip=(1, 0.15)))
    assert b.read(0, 50_000) == PAYLOAD[:50_000]
    first, second = fault_server.log
    assert 0 < first.bytes_sent < 100
    assert 0 < second.start <= first.bytes_sent
    assert b.reader.counters.bytes_received == 50_000


def test_a_trickle_is_given_up_by_the_total_timeout(bench: Make, fault_server: FaultServer) -> None:
    b = bench(replace(QUICK, total_timeout_s=0.3, max_attempts=2))
    fault_server.always(KEY, Script(drip=(1, 0.05)))
    message = b.fails(ReadStalled, 0, 10_000)
    assert "the attempt took longer than 0.30 s" in message
    # A few bytes of a trickle are no progress: otherwise it would be asked for twenty times.
    assert len(fault_server.log) == 2
    assert b.reader.counters.bytes_received > 0


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cuts=st.lists(
        st.tuples(st.sampled_from(["cut", "reset", "short", "refuse", "hang up", "chunked"]), st.integers(0, 30_000)),
        max_size=12,
    ),
    sizes=st.lists(st.integers(0, 4000), max_size=12),
    start=st.integers(0, 1000),
)
def test_any_sequence_of_faults_gives_the_bytes_of_the_object(
    fault_server: FaultServer, cuts: list[tuple[str, int]], sizes: list[int], start: int
) -> None:
    makers: dict[str, Callable[[int], Script]] = {
        "cut": cut,
        "reset": reset,
        "short": lambda after: Script(most_bytes=after + 1),
        "refuse": lambda after: refuse(503),
        "hang up": lambda after: Script(hang_up=True),
        "chunked": lambda after: Script(chunk_bytes=997, cut_after=after),
    }
    b = Bench(fault_server, replace(QUICK, max_attempts=14))
    fault_server.forget_scripts(KEY)
    fault_server.script(KEY, *[makers[kind](after) for kind, after in cuts])
    try:
        assert b.read(start, 60_000, sizes=tuple(sizes)) == PAYLOAD[start:60_000]
        assert b.reader.counters.bytes_received == 60_000 - start  # Each byte exactly once.
    finally:
        b.reader.close()


# -- refusals


def test_a_busy_store_is_asked_again_after_the_backoff(bench: Make, fault_server: FaultServer) -> None:
    b = bench()
    fault_server.script(KEY, refuse(503), refuse(429, b"slow down"))
    assert b.read() == PAYLOAD
    assert [sent.status for sent in fault_server.log] == [503, 429, 206]
    assert len(b.waits) == 2
    assert fault_server.num_connections == 1  # A refusal that was read to its end leaves the connection usable.


def test_retry_after_is_honoured(bench: Make, fault_server: FaultServer) -> None:
    b = bench()
    fault_server.script(KEY, refuse(503, retry_after="0.25"))
    assert b.read(0, 5) == PAYLOAD[:5]
    assert len(b.waits) == 1
    assert 0.25 <= b.waits[0] <= 0.26


def test_a_store_that_stays_busy_is_the_stores_own_error_with_the_account_of_the_read(
    bench: Make, fault_server: FaultServer
) -> None:
    b = bench(replace(QUICK, max_attempts=4))
    fault_server.always(KEY, refuse(503))
    message = b.fails(StoreUnavailable, 0, 10)
    uri = b.store.uri_of(KEY)
    assert message == (
        f"{uri} cannot be read. The server answered 503. The read of bytes 0 to 10 of {uri} from {fault_server.url}: "
        "0 of 10 bytes came in 4 attempts, the last answer was HTTP 503 Status. Look at the server."
    )
    assert len(fault_server.log) == 4


@pytest.mark.parametrize(
    ("status", "kind"), [(403, AccessDenied), (404, ObjectNotFound), (412, ObjectChanged), (416, ObjectChanged)]
)
def test_a_refusal_that_waiting_does_not_mend_is_raised_at_once(
    bench: Make, fault_server: FaultServer, status: int, kind: type[HeadraceError]
) -> None:
    b = bench()
    fault_server.always(KEY, refuse(status, b"x" * 100_000))
    b.fails(kind)
    assert len(fault_server.log) == 1
    assert b.waits == []
    assert len(b.store.refusals[0].body) == 8192
    assert b.store.refusals[0].headers["content-length"] == "100000"
    assert fault_server.wait_until_idle()  # The rest of the body was not taken, so the connection is gone.


def test_a_reader_says_since_when_nothing_came_but_for_its_own_waits(fault_server: FaultServer) -> None:
    fault_server.put(KEY, PAYLOAD)
    fault_server.script(KEY, refuse(503, retry_after="0.25"), Script(delay_s=0.2))
    silent_from: list[float] = []

    def wait(event: threading.Event, seconds: float) -> bool:
        silent_from.append(reader.counters.heard_at - time.monotonic())
        return event.wait(seconds)

    store = StubStore(fault_server)
    reader = HttpReader(store, QUICK, Surroundings(wait=wait))
    began = time.monotonic()
    reader.read(RangeRead(store.stat(KEY), 0, 1000), [memoryview(bytearray(1000))])
    assert 0.2 < silent_from[0] < 0.26, "it will have been silent from the end of the wait on"
    assert 0.2 <= reader.counters.longest_silence_s < time.monotonic() - began - 0.2
    assert began < reader.counters.heard_at <= time.monotonic()
    reader.close()


def test_fetch_asks_a_second_time_where_the_first_answer_stands_still(fault_server: FaultServer) -> None:
    fault_server.put(KEY, PAYLOAD)
    fault_server.script(KEY, stall(100))
    store, patient = StubStore(fault_server), replace(QUICK, hedge_after_s=0.6, idle_timeout_s=20)
    assert fetch(store, store.stat(KEY), 8, 1000, patient) == PAYLOAD[8:1000]
    assert [sent.start for sent in fault_server.log] == [8, 8], "the second one begins anew: the first may still go on"
    assert fault_server.wait_until_idle()


def test_fetch_raises_the_error_of_the_read_itself(fault_server: FaultServer) -> None:
    fault_server.put(KEY, PAYLOAD)
    store = StubStore(fault_server)
    stored = store.stat(KEY)
    fault_server.put(KEY, PAYLOAD[::-1])
    with pytest.raises(ObjectChanged):
        fetch(store, stored, 8, 1000, QUICK)


def test_expired_credentials_are_fetched_anew_in_the_middle_of_an_object(
    bench: Make, fault_server: FaultServer
) -> None:
    b = bench(store=StubStore(fault_server, tokens=("old", "new")))
    fault_server.script(KEY, cut(1000), refuse(403, b"<Code>ExpiredToken</Code>"))
    assert b.read() == PAYLOAD
    assert [(sent.start, sent.headers["authorization"]) for sent in fault_server.log] == [
        (0, "Bearer old"),
        (1000, "Bearer old"),
        (1000, "Bearer new"),
    ]


# -- answers that are not what was asked for


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (Script(shift=1), "the store answered with bytes 101 to 201"),
        (Script(shift=-1), "the store answered with bytes 99 to 199"),
        (Script(headers={"Content-Range": None}), "a 206 without Content-Range"),
        (Script(headers={"Content-Range": "bytes 100-250/300000"}), "bytes 100 to 251"),
        (Script(headers={"Content-Range": "octets x"}), "a 206 whose Content-Range is 'octets x'"),
        (Script(headers={"Content-Length": "99"}), "bytes 100 to 200, and says that they are 99"),
        (Script(ignores_range=True), "the whole object"),
        (Script(headers={"Content-Encoding": "gzip"}), "uncompressed"),
        (Script(headers={"Transfer-Encoding": "gzip"}), "Only chunked is known here."),
    ],
)
def test_a_wrong_answer_is_asked_for_once_more_and_then_refused(
    bench: Make, fault_server: FaultServer, script: Script, says: str
) -> None:
    b = bench()
    fault_server.script(KEY, script)
    assert b.read(100, 200) == PAYLOAD[100:200]
    assert fault_server.num_connections == 2  # The wrong body was not taken, so its connection is not used again.
    fault_server.always(KEY, script)
    assert says in b.fails(WrongRange, 100, 200)
    assert len(fault_server.log) == 4
    assert b.reader.counters.bytes_received == 100  # Not one wrong byte was received.


def test_a_whole_object_is_no_answer_to_the_rest_of_one(bench: Make, fault_server: FaultServer) -> None:
    b = bench()
    fault_server.script(KEY, cut(1000), Script(ignores_range=True), Script(ignores_range=True))
    assert "the whole object" in b.fails(WrongRange)
    assert bytes(b.memory[:1000]) == PAYLOAD[:1000]


@pytest.mark.parametrize(
    "script",
    [
        Script(headers={"Content-Range": f"bytes 0-299999/{len(PAYLOAD) + 1}"}),
        Script(headers={"ETag": '"another"'}),
        Script(ignores_range=True, headers={"Content-Length": "300001"}),
    ],
    ids=["total", "etag", "length of the whole"],
)
def test_another_version_is_an_error_at_once(bench: Make, fault_server: FaultServer, script: Script) -> None:
    b = bench()
    fault_server.always(KEY, script)
    message = b.fails(ObjectChanged)
    assert b.store.uri_of(KEY) in message
    assert len(fault_server.log) == 1
    assert b.reader.counters.bytes_received == 0


def test_an_object_replaced_in_the_middle_of_a_read_is_an_error_and_never_a_mix(
    bench: Make, fault_server: FaultServer
) -> None:
    b = bench()
    other = bytes(len(PAYLOAD))
    fault_server.script(KEY, cut(1000), Script(then=lambda server: server.put(KEY, other)))
    b.fails(ObjectChanged)
    assert [sent.status for sent in fault_server.log] == [206, 412]
    assert bytes(b.memory[:1000]) == PAYLOAD[:1000]


def test_an_object_replaced_behind_a_server_that_ignores_conditions_is_told_by_its_etag(
    bench: Make, fault_server: FaultServer
) -> None:
    b = bench()
    b.store.sends_condition = False
    fault_server.script(KEY, cut(1000), Script(then=lambda server: server.put(KEY, bytes(len(PAYLOAD)))))
    assert "ETag" in b.fails(ObjectChanged)
    assert [sent.status for sent in fault_server.log] == [206, 206]


def test_what_is_not_http_is_retried_and_not_quoted(bench: Make, fault_server: FaultServer) -> None:
    b = bench(replace(QUICK, max_attempts=2))
    fault_server.always(KEY, Script(headers={"Content-Range": "x\r\n" + "A: b\r\n" * 200}))
    message = b.fails(ReadFailed, 0, 10)
    assert "the answer is not HTTP" in message


# -- redirects


def test_redirects_are_followed_and_credentials_stay_at_home(bench: Make, fault_server: FaultServer) -> None:
    with FaultServer() as elsewhere:
        elsewhere.put("blob", PAYLOAD)
        b = bench(store=StubStore(fault_server, tokens=("secret",)))
        fault_server.always(KEY, redirect("/moved"))
        fault_server.always("moved", redirect(f"{elsewhere.url}/blob?signature=hush", 307))
        assert b.read(7, 100_000) == PAYLOAD[7:100_000]
        assert b.read(0, 7) == PAYLOAD[:7]
        assert [sent.key for sent in fault_server.log] == [KEY, "moved", KEY, "moved"]
        assert all(sent.headers["authorization"] == "Bearer secret" for sent in fault_server.log)  # The same host.
        assert [(sent.start, sent.stop) for sent in elsewhere.log] == [(7, 100_000), (0, 7)]
        assert all("authorization" not in sent.headers for sent in elsewhere.log)
        assert all(sent.headers["if-match"] == b.stored.version for sent in elsewhere.log)
        assert fault_server.num_connections == elsewhere.num_connections == 1
        b.reader.close()
        assert elsewhere.wait_until_idle()


def test_a_circle_of_redirects_ends(bench: Make, fault_server: FaultServer) -> None:
    b = bench()
    fault_server.always(KEY, redirect(f"/{KEY}?again=hush", 301))
    message = b.fails(StoreUnavailable)
    assert len(fault_server.log) == 6
    assert "hush" not in message


def test_the_store_is_asked_about_a_redirect_before_it_is_followed(bench: Make, fault_server: FaultServer) -> None:
    class Regional(StubStore):
        def judge(self, stored: StoredObject, refusal) -> Verdict:
            verdict = super().judge(stored, refusal)
            return replace(verdict, retry=True) if refusal.status == 301 else verdict

    b = bench(store=Regional(fault_server))
    fault_server.script(KEY, redirect("http://127.0.0.1:1/nowhere", 301))
    assert b.read() == PAYLOAD
    assert [sent.status for sent in fault_server.log] == [301, 206]


def test_a_redirect_without_location_is_a_refusal(bench: Make, fault_server: FaultServer) -> None:
    b = bench()
    fault_server.always(KEY, refuse(301))
    b.fails(StoreUnavailable)
    assert len(fault_server.log) == 1


# -- stopping


@pytest.mark.parametrize("script", [stall(1000), stall(0), Script(delay_s=30)], ids=["body", "first byte", "head"])
def test_cancel_wakes_a_blocked_read(bench: Make, fault_server: FaultServer, script: Script) -> None:
    b = bench(replace(QUICK, idle_timeout_s=60))
    fault_server.script(KEY, script)
    outcome = _read_and_cancel(b, until=lambda: len(fault_server.log) == 1)
    assert isinstance(outcome, Cancelled)
    with pytest.raises(Cancelled):
        b.read(0, 1)  # For good.
    b.reader.close()
    assert fault_server.wait_until_idle()
    assert len(fault_server.log) == 1  # No further attempt was made.


def test_cancel_wakes_a_read_that_waits_for_its_next_attempt(bench: Make, fault_server: FaultServer) -> None:
    b = bench(replace(QUICK, backoff_first_s=60, backoff_most_s=60))
    fault_server.always(KEY, refuse(503, retry_after="50"))
    outcome = _read_and_cancel(b, until=lambda: len(b.waits) == 1 and "waits for" in b.reader.doing)
    assert isinstance(outcome, Cancelled)
    assert len(fault_server.log) == 1


def test_nothing_is_written_after_a_cancelled_read_has_returned(bench: Make, fault_server: FaultServer) -> None:
    b = bench()
    fault_server.script(KEY, Script(drip=(1000, 0.01)))
    outcome = _read_and_cancel(b, until=lambda: b.reader.counters.bytes_received > 3000)
    assert isinstance(outcome, Cancelled)
    b.memory[:] = b"\xee" * len(b.memory)
    time.sleep(0.2)  # The server would have sent twenty pieces more.
    assert b.memory == b"\xee" * len(b.memory)


def _read_and_cancel(b: Bench, until: Callable[[], bool]) -> BaseException | None:
    outcome: list[BaseException | None] = []

    def read() -> None:
        try:
            b.read()
            outcome.append(None)
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    deadline = time.monotonic() + 10
    while not until() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert KEY in b.reader.doing
    b.reader.cancel()
    thread.join(10)
    assert not thread.is_alive()
    return outcome[0]


# -- the connection itself


def test_a_port_where_nobody_listens_is_named_with_the_attempts(bench: Make, fault_server: FaultServer) -> None:
    with FaultServer() as gone:
        gone.put(KEY, PAYLOAD)
        store = StubStore(gone)
        port = gone.port
        b = bench(replace(QUICK, max_attempts=3), store)
    store.server = type("Gone", (), {"url": f"http://127.0.0.1:{port}", "port": port})()  # type: ignore[assignment]
    message = b.fails(ReadFailed, 0, 10)
    assert f"http://127.0.0.1:{port}" in message
    assert "3 attempts" in message
    assert "ConnectionRefusedError, Connection refused" in message


def test_a_slow_connection_is_given_up_in_the_connect_timeout(bench: Make, fault_server: FaultServer) -> None:
    b = bench()

    def never(host: str, port: int, timeout_s: float, switch: object) -> None:
        timeouts.append(timeout_s)
        raise TimeoutError("timed out")

    timeouts: list[float] = []
    b.reader = HttpReader(b.store, replace(QUICK, max_attempts=2), Surroundings(connect=never))  # type: ignore[arg-type]
    assert "the connection could not be made in time" in b.fails(ReadStalled, 0, 10)
    assert timeouts == [5, 5]


def test_characters_that_http_forbids_are_refused_without_quoting_them(bench: Make, fault_server: FaultServer) -> None:
    b = bench(store=StubStore(fault_server, tokens=("hush\r\nX: y",)))
    with pytest.raises(ValueError, match="characters that HTTP forbids") as caught:
        b.read(0, 10)
    assert "hush" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert fault_server.log == []
