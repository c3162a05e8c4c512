"""A TCP proxy on 127.0.0.1 that counts what comes back from the server behind it. Knows nothing of HTTP."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit


class CountingProxy:
    """Passes every connection on to ``endpoint`` (``http://host:port``). A context manager; one thread serves all connections."""

    def __init__(self, endpoint: str) -> None:
        parts = urlsplit(endpoint)
        self._behind = (parts.hostname or "", parts.port or 80)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._selector = selectors.DefaultSelector()
        self._peers: dict[socket.socket, socket.socket] = {}
        self._clients: set[socket.socket] = set()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="proxy", daemon=True)
        self.bytes_returned = 0
        """Bytes that the server sent, headers included."""

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()
        for one in [self._listener, *self._peers]:
            one.close()
        self._selector.close()

    def _serve(self) -> None:
        while not self._is_over.is_set():
            for key, _ in self._selector.select(0.1):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj in self._peers:
                    assert isinstance(key.fileobj, socket.socket)
                    self._pass_on(key.fileobj)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        server = socket.create_connection(self._behind)
        self._clients.add(client)
        for one, other in ((client, server), (server, client)):
            self._peers[one] = other
            self._selector.register(one, selectors.EVENT_READ)

    def _pass_on(self, source: socket.socket) -> None:
        target = self._peers[source]
        try:
            piece = source.recv(1 << 18)
            if piece:
                target.sendall(piece)
        except OSError:
            piece = b""
        if not piece:
            self._drop(source, target)
        elif source not in self._clients:
            self.bytes_returned += len(piece)

    def _drop(self, *pair: socket.socket) -> None:
        for one in pair:
            self._peers.pop(one, None)
            self._clients.discard(one)
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(one)
            one.close()
