from __future__ import annotations

import contextlib
import random
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import Cancelled
from headrace.settings import TransportSettings
from headrace.transport.connection import BUFFER_BYTES, WAKE_BYTES, HttpConnection, Inbox, Origin, format_request
from headrace.transport.patience import Patience, TooSlow
from headrace.transport.stopping import StopSwitch
from headrace.transport.surroundings import WINDOW_BYTES, dial
from headrace.units import KIB

SETTINGS = TransportSettings(idle_timeout_s=20)
ORIGIN = Origin("http", "host.example", 80, None, True)


@contextlib.contextmanager
def _inbox(sent: bytes, settings: TransportSettings = SETTINGS) -> Iterator[Inbox]:
    """Return an inbox whose other side sends ``sent`` and closes."""
    ours, theirs = socket.socketpair()

    def send() -> None:
        with theirs, contextlib.suppress(OSError):
            theirs.sendall(sent)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        inbox = Inbox(ours)
        inbox.patience = Patience(settings, time.monotonic)
        yield inbox
    finally:
        ours.close()
        thread.join(10)


@settings(max_examples=30, deadline=None)
@given(
    steps=st.lists(st.one_of(st.integers(1, 300), st.integers(BUFFER_BYTES // 2 - 2, BUFFER_BYTES + 2)), max_size=12),
    seed=st.integers(0, 99),
)
def test_small_and_large_steps_mixed_give_all_bytes_in_order(steps: list[int], seed: int) -> None:
    payload = random.Random(seed).randbytes(3 * BUFFER_BYTES)
    with _inbox(payload) as inbox:
        found = b""
        for step in steps:
            room = bytearray(step)
            num_bytes = inbox.receive(memoryview(room))
            assert 0 <= num_bytes <= step
            found += room[:num_bytes]
        while num_bytes := inbox.receive(memoryview(room := bytearray(1000))):
            found += room[:num_bytes]
        assert found == payload
        assert inbox.num_received == len(payload)
        assert inbox.num_buffered == 0


def test_lines_of_any_length_and_what_follows_them() -> None:
    long = b"x" * (BUFFER_BYTES + 100) + b"\r\n"
    with _inbox(b"one\r\n" + long + b"\n" + b"body") as inbox:
        assert inbox.readline(65537) == b"one\r\n"
        assert inbox.readline(65537) == long[:65537]
        assert inbox.readline(65537) == long[65537:]
        assert inbox.readline(65537) == b"\n"
        assert inbox.read(2) == b"bo"
        assert inbox.read1(100) == b"dy"
        assert inbox.readline(10) == b""
        assert inbox.read(10) == b""


def test_silence_is_too_slow_and_the_deadline_holds_for_trickles_too() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        inbox = Inbox(ours)
        inbox.patience = Patience(TransportSettings(idle_timeout_s=0.05), time.monotonic)
        with pytest.raises(TooSlow, match=r"nothing came for 0\.05 s"):
            inbox.receive(memoryview(bytearray(10)))
        now = [0.0]
        inbox.patience = Patience(TransportSettings(total_timeout_s=5), lambda: now[0])
        theirs.sendall(b"x")
        now[0] = 5.0
        with pytest.raises(TooSlow, match="the attempt took longer than"):
            inbox.receive(memoryview(bytearray(10)))


class _Records(socket.socket):
    """Plays a TLS connection over a plain socket: what stands in ``raised`` is raised by the receives that come first."""

    raised: list[OSError]

    def recv_into(self, *args: Any) -> int:
        if self.raised:
            raise self.raised.pop(0)
        try:
            return super().recv_into(*args)
        except BlockingIOError:
            raise ssl.SSLWantReadError from None


@contextlib.contextmanager
def _records_inbox(raised: list[OSError], patience: Patience) -> Iterator[tuple[Inbox, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    with theirs, _Records(fileno=ours.detach()) as sock:
        sock.raised = raised
        inbox = Inbox(sock)
        inbox._comes_in_records = True
        inbox.patience = patience
        yield inbox, theirs


def test_a_tls_connection_that_has_to_send_first_is_waited_for() -> None:
    with _records_inbox([ssl.SSLWantWriteError()], Patience(SETTINGS, time.monotonic)) as (inbox, theirs):
        theirs.sendall(b"x" * BUFFER_BYTES)
        room = memoryview(bytearray(BUFFER_BYTES))
        assert inbox.receive(room) == BUFFER_BYTES
        assert bytes(room) == b"x" * BUFFER_BYTES


def test_a_tls_connection_in_which_nothing_comes_is_too_slow() -> None:
    patience = Patience(TransportSettings(idle_timeout_s=0.05), time.monotonic)
    with (
        _records_inbox([ssl.SSLWantReadError()], patience) as (inbox, _),
        pytest.raises(TooSlow, match=r"nothing came for 0\.05 s"),
    ):
        inbox.receive(memoryview(bytearray(BUFFER_BYTES)))


def test_a_body_that_comes_in_parts_and_a_short_head_after_it_are_both_waited_for() -> None:
    body, head = random.Random(1).randbytes(900 * KIB), b"HTTP/1.1 206 Partial Content\r\n"
    with _records_inbox([], Patience(SETTINGS, time.monotonic)) as (inbox, theirs):

        def send() -> None:
            for part in (body[:1000], body[1000 : 300 * KIB], body[300 * KIB :], head):
                theirs.sendall(part)
                time.sleep(0.1)

        thread = threading.Thread(target=send)
        thread.start()
        room = memoryview(bytearray(len(body)))
        filled = num_receives = 0
        while filled < len(body):
            filled += inbox.receive(room[filled:])
            num_receives += 1
        inbox._wake_at(WAKE_BYTES)  # As the last wait within a body may leave it.
        assert inbox.readline(1000) == head
        thread.join()
    assert bytes(room) == body
    assert 3 <= num_receives <= 7  # What came is counted soon, though more is on its way.


def test_a_request_as_it_is_sent() -> None:
    headers = (("Range", "bytes=0-9"), ("If-Match", '"v"'))
    assert format_request(ORIGIN, "/a%20b?x=1", headers) == (
        b'GET /a%20b?x=1 HTTP/1.1\r\nHost: host.example\r\nRange: bytes=0-9\r\nIf-Match: "v"\r\n\r\n'
    )
    assert format_request(ORIGIN, "//double", ()).startswith(b"GET //double HTTP/1.1\r\n")


@pytest.mark.parametrize(
    ("target", "header"),
    [
        ("/hush\r\nX: y", ("A", "b")),
        ("/hush x", ("A", "b")),
        ("/ü-hush", ("A", "b")),
        ("/", ("A", "hush\r\nX: y")),
        ("/", ("A b\n", "hush")),
        ("/", ("A", "hush重")),
    ],
)
def test_what_may_not_stand_in_a_request_is_refused_without_quoting_it(target: str, header: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="characters that HTTP forbids") as caught:
        format_request(ORIGIN, target, (header,))
    assert "hush" not in str(caught.value)
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    ("scheme", "host", "port", "header"),
    [
        ("http", "h", 80, "h"),
        ("http", "h", 443, "h:443"),
        ("https", "h", 443, "h"),
        ("https", "h", 80, "h:80"),
        ("https", "::1", 443, "[::1]"),
        ("http", "::1", 8080, "[::1]:8080"),
    ],
)
def test_the_host_header_has_the_port_where_it_is_not_the_schemes_own(
    scheme: str, host: str, port: int, header: str
) -> None:
    assert Origin(scheme, host, port, None, True).host_header == header


def _asked(answer: bytes, num_requests: int = 1) -> tuple[bytes, list[bool]]:
    """Ask over one connection whose other side sends ``answer`` each time; return the last body and whether the connection was usable after each."""
    ours, theirs = socket.socketpair()
    usable = []
    body = b""
    with theirs:
        connection = HttpConnection(ORIGIN, ours, StopSwitch())
        for _ in range(num_requests):
            theirs.sendall(answer)
            got = connection.ask("/", (), Patience(SETTINGS, time.monotonic))
            body, room = b"", bytearray(1000)
            while got.num_left != 0 and (num_bytes := got.receive(memoryview(room))):
                body += room[:num_bytes]
            usable.append(got.leaves_connection_usable())
        connection.close()
        connection.close()
    return body, usable


def test_a_connection_is_usable_after_a_body_that_ended_where_it_should() -> None:
    assert _asked(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nbody", 3) == (b"body", [True] * 3)
    assert _asked(b"HTTP/1.1 204 None\r\n\r\n", 2) == (b"", [True] * 2)
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nbo\r\n2;x=y\r\ndy\r\n0\r\nTrailer: x\r\n\r\n"
    assert _asked(chunked, 3) == (b"body", [True] * 3)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nConnection: close\r\n\r\nbody",
        b"HTTP/1.0 200 OK\r\nContent-Length: 4\r\n\r\nbody",
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nbody and more than was said",
    ],
    ids=["close", "1.0", "more"],
)
def test_a_connection_is_not_usable_after(answer: bytes) -> None:
    assert _asked(answer) == (b"body", [False])


def test_an_interim_answer_is_passed_over_and_repeated_headers_are_joined() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        connection = HttpConnection(ORIGIN, ours, StopSwitch())
        theirs.sendall(
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 206 Part\r\nContent-Length: 0\r\nX-A: 1\r\nx-a: 2\r\n\r\n"
        )
        answer = connection.ask("/", (), Patience(SETTINGS, time.monotonic))
        assert (answer.status, answer.reason) == (206, "Part")
        assert answer.headers == {"content-length": "0", "x-a": "1, 2"}
        connection.close()


def test_a_switch_wakes_whoever_waits_and_stops_whoever_comes_later() -> None:
    switch = StopSwitch()
    ours, theirs = socket.socketpair()
    with theirs:
        switch.watch(ours)
        thread = threading.Timer(0.05, switch.throw)
        thread.start()
        assert ours.recv(1) == b""  # Woken: nothing was ever sent.
        thread.join(10)
        for stopped in (switch.check, lambda: switch.watch(ours)):
            with pytest.raises(Cancelled):
                stopped()
        switch.close(ours)
        switch.throw()  # The socket is closed, and its number may belong to another one: nothing to do.
        assert ours.fileno() == -1


class NotedSwitch(StopSwitch):
    """A switch that remembers what it watched."""

    def __init__(self) -> None:
        super().__init__()
        self.watched: list[socket.socket] = []

    def watch(self, sock: socket.socket) -> None:
        self.watched.append(sock)
        super().watch(sock)


def test_dial_goes_on_to_the_next_address(monkeypatch: pytest.MonkeyPatch) -> None:
    switch = NotedSwitch()
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.1", 0)) as closed:
        port, dead_port = listener.getsockname()[1], closed.getsockname()[1]
        closed.close()
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", number)) for number in (dead_port, port)]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **more: found)
        with dial("host", 1, 5, switch) as sock:
            assert sock.getpeername() == ("127.0.0.1", port)
        assert len(switch.watched) == 2
        del found[1]
        with pytest.raises(ConnectionRefusedError):
            dial("host", 1, 5, switch)
    assert [one.fileno() for one in switch.watched] == [-1, -1, -1]


def test_dial_is_stopped_by_its_switch() -> None:
    switch = NotedSwitch()
    switch.throw()
    with pytest.raises(Cancelled):
        dial("127.0.0.1", 9, 5, switch)
    assert [one.fileno() for one in switch.watched] == [-1]


def test_a_connection_has_a_wide_window_from_the_start_and_waits_for_no_more_than_a_byte() -> None:
    most_bytes = int(Path("/proc/sys/net/ipv4/tcp_rmem").read_text().split()[2])
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as usual, dial("127.0.0.1", port, 5, StopSwitch()) as ours:
            before, after = (one.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) for one in (usual, ours))
            assert after >= min(WINDOW_BYTES, most_bytes // 2)
            assert after > before
            assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1
