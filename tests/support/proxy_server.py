"""A forward proxy on 127.0.0.1: tunnels for CONNECT, and plain HTTP by absolute request targets. Notes what was asked of it."""

from __future__ import annotations

import contextlib
import socket
import threading
from urllib.parse import urlsplit


class ProxyServer:
    """A context manager. ``authorization`` is the Proxy-Authorization that it demands, if any; ``trailing`` is sent right behind a tunnel's answer."""

    def __init__(self, *, authorization: str | None = None, refuse_with: int | None = None) -> None:
        self.asked: list[str] = []
        """First lines of the requests that it got."""
        self.headers: list[dict[str, str]] = []
        self._authorization = authorization
        self._refuse_with = refuse_with
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []
        self._closing = False

    def __enter__(self) -> ProxyServer:
        self._run(self._accept)
        return self

    def __exit__(self, *exception: object) -> None:
        self._closing = True
        for sock in [self._listener, *self._sockets]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for sock in [self._listener, *self._sockets]:
            sock.close()

    def _run(self, work: object, *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closing:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._sockets.append(client)
            self._run(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            head = b""
            while b"\r\n\r\n" not in head:
                more = client.recv(4096)
                if not more:
                    return
                head += more
            lines = head.split(b"\r\n\r\n", 1)[0].decode("latin-1").split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
            self.asked.append(lines[0])
            self.headers.append(headers)
            if self._refuse_with is not None or (
                self._authorization and headers.get("proxy-authorization") != self._authorization
            ):
                client.sendall(f"HTTP/1.1 {self._refuse_with or 407} Refused\r\nContent-Length: 0\r\n\r\n".encode())
                return
            method, target, version = lines[0].split(" ")
            if method == "CONNECT":
                host, _, port = target.rpartition(":")
                server = self._connect(host, int(port))
                client.sendall(b"HTTP/1.1 200 Connection established\r\nVia: test\r\n\r\n")
            else:
                parts = urlsplit(target)
                server = self._connect(parts.hostname or "", parts.port or 80)
                path = parts.path + (f"?{parts.query}" if parts.query else "")
                server.sendall(head.replace(lines[0].encode(), f"{method} {path} {version}".encode(), 1))
            self._run(self._copy, server, client)
            self._copy(client, server)

    def _connect(self, host: str, port: int) -> socket.socket:
        server = socket.create_connection((host, port), timeout=10)
        server.settimeout(None)
        self._sockets.append(server)
        return server

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
