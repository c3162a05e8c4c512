"""One HTTP/1.1 connection: sends a request, parses the head of the answer, and hands out its body one receive at a time. Knows no objects, no retries.

Requests are formatted and heads are parsed by ``http.client``. Bodies are not read by it: on a timeout its ``readinto`` forgets what it has received, loops
past deadlines until the buffer is full, and returns short without an error when the body is cut. Here each step is one ``recv_into`` on the caller's memory.
"""

from __future__ import annotations

import contextlib
import http.client
import math
import select
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from headrace.errors import StoreUnavailable
from headrace.settings import TransportSettings
from headrace.storage import HttpRange
from headrace.transport.patience import Patience
from headrace.transport.proxy import Proxy, absolute_target, open_tunnel, proxy_for
from headrace.transport.stopping import StopSwitch
from headrace.transport.surroundings import Surroundings
from headrace.transport.turns import Turns, make_turns
from headrace.units import KIB, MIB

BUFFER_BYTES = 64 * KIB
"""What a connection buffers. Pieces of at least half of this bypass the buffer; small ones come out of it, so that each needs no system call."""

RECORDS_BYTES = MIB
"""Over TLS so much is received before it is counted, and without giving up the turn."""
RECORD_BYTES = 16 * KIB
"""Of TLS, at most."""
WAKE_BYTES = 256 * KIB
"""Within a body, a thread is woken for so much, not for each packet. A connection of 100 MB/s brings it in 3 ms."""
RECORDS_S = 0.05
"""And what came is counted after this time at the latest: a read that trickles or stands still must be seen to."""


class CutShort(ConnectionError):
    """The other side closed the connection before the body was complete."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a connection leads and whom it trusts: connections of one origin are interchangeable."""

    scheme: str
    host: str
    port: int
    ca_file: str | None
    verify_tls: bool

    @classmethod
    def of(cls, asked: HttpRange) -> Origin:
        return cls(asked.scheme, asked.host, asked.port, asked.ca_file, asked.verify_tls)

    @property
    def host_header(self) -> str:
        """The Host header's value (RFC 9110, 7.2): the port only where it is not the scheme's own, as signers write it too."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.scheme == "https" else 80) else f"{host}:{self.port}"


class Inbox:
    """The receiving half of a connection. It plays the file that ``http.client`` parses heads from, and it knows what lies in its buffer."""

    def __init__(self, sock: socket.socket, turns: Turns | None = None) -> None:
        self.sock = sock
        self._turns = turns or make_turns()
        self._comes_in_records = isinstance(sock, ssl.SSLSocket)
        self._failure: OSError | None = None
        self.patience: Patience | None = None
        """The limits of the attempt in progress; set before anything is received."""
        self.num_received = 0
        """Bytes received in all, heads included."""
        self._buffer = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._stop = 0
        self._timeout_s = -1.0
        self._wakes_at = 1

    @property
    def num_buffered(self) -> int:
        return self._stop - self._start

    def receive(self, room: memoryview) -> int:
        """Receive once into ``room`` and return how many bytes; 0 is the end of the connection. Raises `TooSlow` or another OSError."""
        if self._start == self._stop:
            if 2 * len(room) >= BUFFER_BYTES:
                return self._receive_from_socket(room, is_body=True)
            if not self._fill():
                return 0
        start = self._start
        num_bytes = min(self._stop - start, len(room))
        room[:num_bytes] = self._view[start : start + num_bytes]
        self._start = start + num_bytes
        return num_bytes

    def wait_at_most(self, timeout_s: float) -> None:
        """Let the next steps on the socket block for ``timeout_s`` each."""
        if timeout_s != self._timeout_s:  # A system call that is needed near a deadline only.
            self.sock.settimeout(timeout_s)
            self._timeout_s = timeout_s

    def _receive_from_socket(self, room: memoryview, *, is_body: bool = False) -> int:
        patience = self.patience
        assert patience is not None
        wait_s = patience.wait_s()
        try:
            if is_body and self._comes_in_records:
                num_bytes = self._receive_records(room, patience, wait_s)
            else:
                self._wake_at(1)
                self.wait_at_most(wait_s)
                num_bytes = self.sock.recv_into(room)
        except TimeoutError as error:
            raise patience.silence(wait_s) from error
        self.num_received += num_bytes
        return num_bytes

    def _receive_records(self, room: memoryview, patience: Patience, wait_s: float) -> int:
        """Receive TLS records of a body, which is to fill ``room``, until `RECORDS_BYTES` have come or `RECORDS_S` are over; what fails after the first is raised next.

        OpenSSL hands out one record, 16 KiB at most, a call. All that is done for each receive would be done 61,000 times for a gigabyte, by threads that wait for
        each other with every line of it. So records are received in turns, and who has one does not wait for the network.
        """
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        self.wait_at_most(0.0)
        receive, filled, most = self.sock.recv_into, 0, min(len(room), RECORDS_BYTES)
        until = patience.now() + wait_s
        while True:
            before = filled
            with self._turns:
                try:
                    while filled < most:
                        num_bytes = receive(room[filled:most])
                        if not num_bytes:  # The end; the next receive meets it again.
                            return filled
                        filled += num_bytes
                    return filled
                except ssl.SSLWantReadError:
                    event = select.POLLIN
                except ssl.SSLWantWriteError:  # It has an answer to send first, to a change of keys.
                    event = select.POLLOUT
                except OSError as failure:
                    if not filled:
                        raise
                    self._failure = failure
                    return filled
            now = patience.now()
            if filled and not before:
                until = now + RECORDS_S
            # The first bytes are waited for as they are; after them, few wakings are wanted. What is still to come is more than the room, less what OpenSSL keeps of a record.
            self._wake_at(min(most - filled - 2 * RECORD_BYTES, WAKE_BYTES) if filled else 1)
            if now >= until or not self._wait_for(event, until - now):
                if filled:
                    return filled
                raise TimeoutError

    def _wake_at(self, num_bytes: int) -> None:
        """Let the socket be ready to be received from when so many bytes are there, or its end."""
        num_bytes = max(num_bytes, 1)
        if num_bytes != self._wakes_at:
            self._wakes_at = num_bytes
            with contextlib.suppress(OSError):  # It is as good without.
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)

    def _wait_for(self, event: int, seconds: float) -> bool:
        """Wait until the socket is ready, or has failed, and say whether it is."""
        waiting = select.poll()
        waiting.register(self.sock, event)
        return bool(waiting.poll(math.ceil(seconds * 1000)))

    def _fill(self) -> int:
        self._start = self._stop = 0  # In case the next line raises.
        self._stop = self._receive_from_socket(self._view)
        return self._stop

    # -- what http.client wants of a socket and of a file

    def makefile(self, mode: str) -> Inbox:
        return self

    def readline(self, limit: int) -> bytes:
        line = b""
        while len(line) < limit and not line.endswith(b"\n"):
            if self._start == self._stop and not self._fill():
                break
            end = self._buffer.find(b"\n", self._start, self._stop) + 1 or self._stop
            end = min(end, self._start + limit - len(line))
            line += self._view[self._start : end]
            self._start = end
        return line

    def read1(self, size: int) -> bytes:
        if self._start == self._stop:
            self._fill()
        start = self._start
        self._start = min(self._stop, start + size)
        return bytes(self._view[start : self._start])

    def read(self, size: int) -> bytes:
        found = b""
        while len(found) < size and (more := self.read1(size - len(found))):
            found += more
        return found

    def flush(self) -> None:
        pass

    def close(self) -> None:
        """The end of an answer, not of the connection."""


class Answer:
    """The head of one answer, and its body a step at a time. ``headers`` has lower-case names; a repeated one is joined by commas."""

    def __init__(self, response: http.client.HTTPResponse, inbox: Inbox) -> None:
        self.status: int = response.status
        self.reason: str = response.reason
        headers: dict[str, str] = {}
        for name, value in response.headers.items():
            key = name.lower()
            headers[key] = f"{headers[key]}, {value}" if key in headers else value
        self.headers: Mapping[str, str] = headers
        self._chunked = bool(response.chunked)
        self.num_left: int | None = response.length
        """Bytes of the body still to come; None where the answer does not say."""
        self._keeps_alive = not response.will_close
        self._response = response
        self._inbox = inbox

    def receive(self, room: memoryview) -> int:
        """Receive a step of the body into ``room`` and return how many bytes; 0 at its end, which may be an early one."""
        if self._chunked:
            found = self._response.read1(len(room))
            room[: len(found)] = found
            return len(found)
        left = self.num_left
        if left is None:
            return self._inbox.receive(room)
        if left < len(room):
            room = room[:left]
        num_bytes = self._inbox.receive(room) if left else 0
        self.num_left = left - num_bytes
        return num_bytes

    def leaves_connection_usable(self) -> bool:
        """Say whether the body was taken to its very end and the next request may go over the same connection."""
        if not self._keeps_alive:
            return False
        try:
            is_over = self._response.read1(1) == b"" if self._chunked else self.num_left == 0
        except (OSError, http.client.HTTPException):
            return False
        return is_over and self._inbox.num_buffered == 0


class HttpConnection:
    """An open connection to ``origin``, used for one request after the other by one thread; `StopSwitch.throw` wakes it."""

    def __init__(
        self,
        origin: Origin,
        sock: socket.socket,
        switch: StopSwitch,
        proxy: Proxy | None = None,
        turns: Turns | None = None,
    ) -> None:
        self.origin = origin
        self._proxy = proxy if origin.scheme == "http" else None  # A tunnel is nothing that requests know of.
        self.num_answers = 0
        self._sock = sock
        self._switch = switch
        self._inbox = Inbox(sock, turns)
        self._num_before_request = 0
        self.ends = (
            f"port {_local_port(sock)} to {origin.host_header}{f' through {proxy}' if proxy is not None else ''}"
        )
        """The local port and the other side, for people."""

    @property
    def went_stale(self) -> bool:
        """Whether the request met a connection that had served before and brought not a single byte: most likely it had been closed while idle."""
        return self.num_answers > 0 and self._inbox.num_received == self._num_before_request

    def ask(self, target: str, headers: tuple[tuple[str, str], ...], patience: Patience) -> Answer:
        """Send a GET and return the head of the answer. Raises OSError and ``http.client.HTTPException``; then the connection is of no more use."""
        if self._proxy is not None:
            target = absolute_target(self.origin.host_header, target)
            if self._proxy.authorization is not None:
                headers = (*headers, ("Proxy-Authorization", self._proxy.authorization))
        request = format_request(self.origin, target, headers)
        inbox = self._inbox
        self._num_before_request = inbox.num_received
        inbox.patience = patience
        self._switch.watch(self._sock)
        wait_s = patience.wait_s()
        inbox.wait_at_most(wait_s)
        try:
            self._sock.sendall(request)
        except TimeoutError as error:
            raise patience.silence(wait_s) from error
        response = http.client.HTTPResponse(cast(Any, inbox), method="GET")
        response.begin()
        self.num_answers += 1
        return Answer(response, inbox)

    def close(self) -> None:
        """Close the socket. May be called twice."""
        self._switch.close(self._sock)


def open_connection(
    origin: Origin, settings: TransportSettings, surroundings: Surroundings, switch: StopSwitch, patience: Patience
) -> HttpConnection:
    """Connect to ``origin``, through its proxy and TLS included, within the connect timeout.

    Raises OSError, `StoreUnavailable` for a certificate that is not trusted, `InvalidSetting` for a proxy that cannot be used.
    """
    proxy = proxy_for(origin.scheme, origin.host, origin.port, settings)
    timeout_s = patience.wait_s(settings.connect_timeout_s)
    context = surroundings.tls.get(origin.ca_file, origin.verify_tls) if origin.scheme == "https" else None
    started = surroundings.clock()
    host, port = (origin.host, origin.port) if proxy is None else (proxy.host, proxy.port)
    sock = surroundings.connect(host, port, timeout_s, switch)
    try:
        switch.watch(sock)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if context is not None:
            sock.settimeout(max(0.001, timeout_s - (surroundings.clock() - started)))
            if proxy is not None:
                open_tunnel(sock, proxy, origin.host, origin.port)
            sock = _secured(sock, context, origin, switch)
        return HttpConnection(origin, sock, switch, proxy, surroundings.turns)
    except BaseException:
        switch.close(sock)
        raise


def _secured(sock: socket.socket, context: ssl.SSLContext, origin: Origin, switch: StopSwitch) -> socket.socket:
    # The new socket takes the descriptor over, so it is watched before the handshake, which waits for the other side.
    secured = context.wrap_socket(sock, server_hostname=origin.host, do_handshake_on_connect=False)
    try:
        switch.watch(secured)
        secured.do_handshake()
    except BaseException as error:
        switch.close(secured)
        if isinstance(error, ssl.SSLCertVerificationError):
            raise StoreUnavailable(
                f"The certificate of {origin.host_header} is not trusted.",
                f"{error.verify_message}.",
                "Give the CA file that signed it (for S3: AWS_CA_BUNDLE), or correct the host name.",
            ) from error
        raise
    return secured


def format_request(origin: Origin, target: str, headers: tuple[tuple[str, str], ...]) -> bytes:
    """Return a GET request, ready to be sent. Raises ValueError for what may not stand in one, without quoting it: it may be a secret."""
    writer = _Writer(origin.host, origin.port)
    try:
        writer.putrequest("GET", target, skip_host=True, skip_accept_encoding=True)
        writer.putheader("Host", origin.host_header)
        for name, value in headers:
            writer.putheader(name, value)
        writer.endheaders()
    except (ValueError, http.client.InvalidURL):
        raise ValueError(
            "the store described a request whose target or headers hold characters that HTTP forbids"
        ) from None
    return writer.formatted


class _Writer(http.client.HTTPConnection):
    """Formats and checks a request, and keeps it instead of sending it."""

    formatted: bytes = b""

    def send(self, data: Any) -> None:
        self.formatted += data


def _local_port(sock: socket.socket) -> int:
    try:
        return int(sock.getsockname()[1])
    except (OSError, IndexError, TypeError):
        return 0
