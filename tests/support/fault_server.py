"""An HTTP/1.1 server on 127.0.0.1 that serves objects as a good store does, and misbehaves to order.

    with FaultServer() as server:
        server.put("model.safetensors", payload)
        server.script("model.safetensors", cut(after=1000), refuse(503), PLAIN)
        ...
        assert [sent.status for sent in server.log] == [206, 503, 206]

Objects have ETags; GET takes one byte range and If-Match. Each request for a key takes that key's next `Script`; when there are none left, it is answered
faithfully. Everything that was sent is in `FaultServer.log`. The server writes to raw sockets, one thread for each connection, and uses no HTTP library.
"""

from __future__ import annotations

import contextlib
import hashlib
import select
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from urllib.parse import unquote, urlsplit

_REASONS = {
    200: "OK",
    206: "Partial Content",
    302: "Found",
    403: "Forbidden",
    404: "Not Found",
    412: "Precondition Failed",
}
_LONGEST_STALL_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """How one request is answered, where that differs from what a good server does. Byte counts are of the body."""

    status: int | None = None
    """Answer with this status and ``body`` instead of the object."""
    body: bytes = b""
    headers: Mapping[str, str | None] = field(default_factory=dict)
    """Headers to add or replace; None leaves one out."""
    hang_up: bool = False
    """Close the connection without an answer."""
    cut_after: int | None = None
    """Close the connection after so many bytes."""
    with_reset: bool = False
    """Where the connection is cut, reset it instead of closing it."""
    stall_after: int | None = None
    """Send nothing more after so many bytes, and keep the connection open until the client gives up."""
    delay_s: float = 0.0
    """Wait before the answer's first byte."""
    drip: tuple[int, float] | None = None
    """Send so many bytes, wait so many seconds, and so on."""
    shift: int = 0
    """Answer with the range that starts so many bytes later."""
    most_bytes: int | None = None
    """Answer with at most the first so many bytes of the range, and say so."""
    ignores_range: bool = False
    """Answer 200 with the whole object."""
    chunk_bytes: int | None = None
    """Send the body with Transfer-Encoding chunked, in chunks of this size."""
    spoil: Callable[[bytes], bytes] | None = None
    """What is sent instead of the body's true bytes."""
    close_after: bool = False
    """Close the connection after the answer, without having said so: it goes stale in the client's hands."""
    then: Callable[[FaultServer], None] | None = None
    """Called when the request was read, before it is answered: to replace an object, say."""


PLAIN = Script()
"""A faithful answer."""


def refuse(status: int, body: bytes = b"", **headers: str) -> Script:
    """Refuse with a status; ``retry_after="1"`` gives the header Retry-After."""
    return Script(status=status, body=body, headers={name.replace("_", "-"): value for name, value in headers.items()})


def cut(after: int) -> Script:
    """Close the connection after so many bytes of the body."""
    return Script(cut_after=after)


def reset(after: int) -> Script:
    """Reset the connection after so many bytes of the body."""
    return Script(cut_after=after, with_reset=True)


def stall(after: int) -> Script:
    """Send so many bytes of the body and then nothing."""
    return Script(stall_after=after)


def redirect(location: str, status: int = 302) -> Script:
    """Redirect to another address."""
    return Script(status=status, headers={"Location": location})


@dataclass(slots=True)
class Sent:
    """One request and what was sent in answer to it. ``start`` and ``stop`` are the range that was asked for."""

    key: str
    start: int
    stop: int
    headers: dict[str, str]
    """The request's, with lower-case names."""
    connection: int
    """Number of the connection, from 1."""
    status: int = 0
    bytes_sent: int = 0


class FaultServer:
    """The server; a context manager. With ``tls`` (a server-side context) it speaks HTTPS. Thread safe."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.log: list[Sent] = []
        """Requests in the order of their arrival."""
        self.num_connections = 0
        """Connections that were ever accepted."""
        self._tls = tls
        self._objects: dict[str, bytes] = {}
        self._etags: dict[str, str] = {}
        self._scripts: dict[str, deque[Script]] = {}
        self._always: dict[str, Script] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._acceptor = threading.Thread(target=self._accept, name="fault-server", daemon=True)
        self._acceptor.start()

    # -- what a test says

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    def put(self, key: str, payload: bytes) -> str:
        """Store an object, or replace it, and return its ETag."""
        etag = f'"{hashlib.sha256(payload).hexdigest()[:32]}"'
        with self._lock:
            self._objects[key], self._etags[key] = payload, etag
        return etag

    def etag(self, key: str) -> str:
        return self._etags[key]

    def objects(self) -> dict[str, bytes]:
        with self._lock:
            return dict(self._objects)

    def script(self, key: str, *scripts: Script) -> None:
        """Answer the next requests for ``key`` so, one after the other."""
        with self._lock:
            self._scripts.setdefault(key, deque()).extend(scripts)

    def always(self, key: str, script: Script) -> None:
        """Answer every request for ``key`` so, once its other scripts are used up."""
        with self._lock:
            self._always[key] = script

    def forget_scripts(self, key: str) -> None:
        """Answer faithfully from here on."""
        with self._lock:
            self._scripts.pop(key, None)
            self._always.pop(key, None)

    @property
    def num_open(self) -> int:
        """Connections that are open now."""
        with self._lock:
            return len(self._sockets)

    def wait_until_idle(self, timeout_s: float = 10.0) -> bool:
        """Wait until the clients have closed all connections; say whether they have."""
        deadline = time.monotonic() + timeout_s
        while self.num_open and time.monotonic() < deadline:
            time.sleep(0.01)
        return not self.num_open

    def drop_connections(self) -> None:
        """Close every open connection, as a server does with idle ones."""
        with self._lock:
            for sock in self._sockets:
                _shut(sock)

    def close(self) -> None:
        """Stop serving, close everything and wait for the threads."""
        self._closing.set()
        _shut(self._listener)
        self._acceptor.join(10)
        self._listener.close()
        self.drop_connections()
        for thread in self._threads:
            thread.join(10)

    def __enter__(self) -> FaultServer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- connections

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self.num_connections += 1
                self._sockets.add(sock)
                thread = threading.Thread(target=self._serve, args=(sock, self.num_connections), daemon=True)
                self._threads.append(thread)
            thread.start()

    def _serve(self, accepted: socket.socket, number: int) -> None:
        sock = accepted
        try:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                sock = self._tls.wrap_socket(accepted, server_side=True, do_handshake_on_connect=False)
                with self._lock:
                    self._sockets.discard(accepted)
                    self._sockets.add(sock)
                sock.do_handshake()
            with sock.makefile("rb") as reader:
                while not self._closing.is_set():
                    head = list(iter(lambda: reader.readline().rstrip(b"\r\n").decode("latin-1"), ""))
                    if not head or not self._answer(sock, head, number):
                        return
        except (OSError, ValueError):
            pass  # The client went away, which is its right.
        finally:
            with self._lock:
                self._sockets.discard(sock)
            sock.close()

    # -- one request

    def _answer(self, sock: socket.socket, head: list[str], number: int) -> bool:
        """Answer one request; return whether the connection stays open."""
        target = head[0].split(" ")[1]
        key = unquote(urlsplit(target).path).removeprefix("/")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        with self._lock:
            waiting = self._scripts.get(key)
            script = waiting.popleft() if waiting else self._always.get(key, PLAIN)
        if script.then is not None:
            script.then(self)
        with self._lock:
            payload, etag = self._objects.get(key), self._etags.get(key, "")
            size = len(payload) if payload is not None else 0
            start, stop = _range_of(headers.get("range"), size)
            sent = Sent(key, start, stop, headers, number)
            self.log.append(sent)
        if (script.delay_s and self._gone_within(sock, script.delay_s)) or script.hang_up:
            return False
        if script.status is not None:
            self._send(sock, sent, Script(headers=script.headers), script.status, {}, script.body)
        elif payload is None:
            self._send(sock, sent, script, 404, {}, b"no such object")
        elif "if-match" in headers and headers["if-match"] != etag:
            self._send(sock, sent, script, 412, {}, b"another version")
        elif script.ignores_range or "range" not in headers:
            self._send(sock, sent, script, 200, {"ETag": etag}, payload)
        else:
            start, stop = start + script.shift, min(stop + script.shift, size)
            if script.most_bytes is not None:
                stop = min(stop, start + script.most_bytes)
            about = {"ETag": etag, "Content-Range": f"bytes {start}-{stop - 1}/{size}"}
            self._send(sock, sent, script, 206, about, payload[start:stop])
        return not script.close_after

    def _send(
        self, sock: socket.socket, sent: Sent, script: Script, status: int, about: dict[str, str], body: bytes
    ) -> None:
        """Send head and body as the script says. Raises OSError where the connection ends there."""
        length = {"Transfer-Encoding": "chunked"} if script.chunk_bytes else {"Content-Length": str(len(body))}
        headers = {"Date": formatdate(usegmt=True), **about, **length, **script.headers}
        lines = [f"HTTP/1.1 {status} {_REASONS.get(status, 'Status')}"]
        lines += [f"{name}: {value}" for name, value in headers.items() if value is not None]
        sent.status = status
        sock.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
        if script.spoil is not None:
            body = script.spoil(body)
        for piece in _pieces(body, script):
            framed = b"%x\r\n%s\r\n" % (len(piece), piece) if script.chunk_bytes else piece
            sock.sendall(framed)
            sent.bytes_sent += len(piece)
            if script.drip is not None and self._gone_within(sock, script.drip[1]):
                raise OSError("the client went away")
        if script.stall_after is not None and script.stall_after <= len(body):
            self._gone_within(sock, _LONGEST_STALL_S)
            raise OSError("stalled for long enough")
        if script.cut_after is not None and script.cut_after <= len(body):
            if script.with_reset:  # Lingering for no time turns the close into a reset.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            raise OSError("cut")
        if script.chunk_bytes:
            sock.sendall(b"0\r\n\r\n")

    def _gone_within(self, sock: socket.socket, seconds: float) -> bool:
        """Wait so long; return True as soon as the client has closed the connection or the server is closing."""
        deadline = time.monotonic() + seconds
        while not self._closing.is_set():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            readable, _, _ = select.select([sock], [], [], min(left, 0.05))
            if readable:  # Between two answers a client has nothing to say: this is its end.
                return True
        return True


def _range_of(text: str | None, size: int) -> tuple[int, int]:
    """Return the range that a request asks for as start and stop; the whole object without one."""
    if text is None:
        return 0, size
    first, _, last = text.removeprefix("bytes=").partition("-")
    return int(first), min(int(last) + 1, size) if last else size


def _pieces(body: bytes, script: Script) -> Iterator[bytes]:
    """Yield what of the body is sent, in the pieces that the script asks for."""
    limits = [limit for limit in (script.cut_after, script.stall_after) if limit is not None]
    stop = min([len(body), *limits])
    step = script.chunk_bytes or (script.drip[0] if script.drip else 1 << 20)
    for start in range(0, stop, step):
        yield body[start : min(start + step, stop)]


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
