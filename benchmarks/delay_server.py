"""Answers every request with 204 after a delay, over a Unix socket: what nginx asks before it lets a request pass, so that each first byte is late. For benchmarks only."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import TracebackType
from typing import cast

_ANSWER = b"HTTP/1.1 204 No Content\r\n\r\n"


class DelayServer:
    """Serves at ``path`` while the context lasts, in a thread of this process; waiting costs nothing, an answer some ten microseconds."""

    def __init__(self, path: Path, delay_s: float) -> None:
        self._path, self._delay_s = path, delay_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="delay-server", daemon=True)

    def __enter__(self) -> DelayServer:
        self._server = self._loop.run_until_complete(
            self._loop.create_unix_server(lambda: _Delaying(self._loop, self._delay_s), str(self._path))
        )
        self._path.chmod(0o777)  # nginx's workers may be another user.
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._server.close()
        self._loop.close()


class _Delaying(asyncio.Protocol):
    """One connection, one request after the other, none with a body."""

    def __init__(self, loop: asyncio.AbstractEventLoop, delay_s: float) -> None:
        self._loop, self._delay_s = loop, delay_s
        self._head = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._head += data
        if self._head.endswith(b"\r\n\r\n"):
            self._head = b""
            self._loop.call_later(self._delay_s, self._transport.write, _ANSWER)
