"""The gate in front of the application: who may pass, when, and with how much. Answers for the process while the model
loads.

Pure ASGI over the standard library: it is up before torch is imported. Every route but the two probes needs the key,
known or not, so that a route that is added later is closed until somebody opens it. It knows nothing of models.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from headrace.errors import InvalidSetting
from headrace.serving.asgi import (
    App,
    BodyTooLarge,
    ClientLeft,
    Message,
    Receive,
    Scope,
    Send,
    header,
    read_body,
    send_bytes,
    send_json,
)
from headrace.serving.metrics import Metrics
from headrace.serving.wire import error_body

logger = logging.getLogger("headrace.serving")

PROBES = ("/health", "/ready")
"""The only routes without a key. They take no input and name nothing but the state and its progress."""

METRICS = "/metrics"


class State(Protocol):
    """What the gate asks of the life of the server."""

    @property
    def is_alive(self) -> bool:
        """Whether the process is worth keeping."""
        ...

    @property
    def app(self) -> App | None:
        """The application, while it takes requests."""
        ...

    def describe(self, *, in_full: bool) -> dict[str, Any]:
        """Return the state and how far it is, JSON-ready, without secrets; ``in_full`` with what was loaded."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSettings:
    """What passes."""

    api_key: str | None = field(default=None, repr=False)
    most_body_bytes: int = 32 << 20
    """Largest body of a request, in bytes."""

    def __post_init__(self) -> None:
        if self.api_key is not None and (
            not self.api_key or not self.api_key.isascii() or not self.api_key.isprintable() or " " in self.api_key
        ):
            raise InvalidSetting(
                "The API key cannot be used.",
                "It is empty, or holds spaces or signs that no header can carry.",
                "Set another, or none.",
            )


class Gate:
    """The ASGI application that the HTTP server runs."""

    def __init__(self, state: State, metrics: Metrics, settings: GateSettings) -> None:
        self._state = state
        self._metrics = metrics
        self._settings = settings
        self._key = None if settings.api_key is None else settings.api_key.encode("utf-8")
        self.num_inside = 0
        """Requests that the application works on."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # No websockets, and nothing to do at start-up.
        watched = _WatchedSend(send)
        started = self._metrics.clock()
        try:
            await self._answer(scope, receive, watched)
        except ClientLeft:
            self._metrics.count_disconnect()
        except Exception:
            logger.exception("A request could not be answered.")
            if watched.status is None:
                await send_json(watched, 500, error_body(500, "The server failed on this request. Its log says more."))
        finally:
            if watched.status is not None:
                self._metrics.count_request(self._route(scope), watched.status, self._metrics.clock() - started)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        if path in PROBES and method in ("GET", "HEAD"):
            await self._probe(path, send)
        elif not self._has_key(scope):
            message = "This server needs its API key: Authorization: Bearer <key>."
            await send_json(
                send, 401, error_body(401, message, code="invalid_api_key"), headers={"www-authenticate": "Bearer"}
            )
        elif path == METRICS and method == "GET":
            await send_bytes(send, 200, self._metrics.text(), content_type=self._metrics.content_type)
        else:
            await self._admit(scope, receive, send)

    async def _probe(self, path: str, send: Send) -> None:
        good = self._state.is_alive if path == "/health" else self._state.app is not None
        # Who has set a key does not want strangers to read what is served from where.
        state = self._state.describe(in_full=self._key is None)
        await send_json(send, 200 if good else 503, state, headers={"cache-control": "no-store"})

    def _has_key(self, scope: Scope) -> bool:
        if self._key is None:
            return True
        scheme, _, given = header(scope, b"authorization").partition(b" ")
        # Compared in full even when the scheme is wrong: the time must not tell how much of it was right.
        same = hmac.compare_digest(given.strip(), self._key)
        return same and scheme.lower() == b"bearer"

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._state.app
        if app is None:
            state = self._state.describe(in_full=False)
            refused = error_body(503, f"The server is {state['status']}.", code="not_ready")
            await send_json(send, 503, {**refused, **state}, headers={"retry-after": "5"})
            return
        body = await self._read(scope, receive, send)
        if body is not None:
            self.num_inside += 1
            try:
                await _call(app, scope, body, receive, send)
            finally:
                self.num_inside -= 1

    async def _read(self, scope: Scope, receive: Receive, send: Send) -> bytes | None:
        """Return the body, or None after having refused it."""
        most = self._settings.most_body_bytes
        with suppress(BodyTooLarge):
            length = header(scope, b"content-length")
            # Python converts no number of more than 4300 digits, and none of more than 18 is a size.
            if not length.isdigit() or (len(length) <= 18 and int(length) <= most):
                return await read_body(receive, most_bytes=most)
        message = f"The body has more than {most} bytes."
        await send_json(send, 413, error_body(413, message, code="body_too_large"), headers={"connection": "close"})
        return None

    def _route(self, scope: Scope) -> str:
        """Return the route for a label: one of ours, or ``other``, since what clients make up would grow the counters
        without end."""
        path = scope["path"]
        if path in (*PROBES, METRICS):
            return str(path)
        known = getattr(self._state.app, "routes", {})
        return str(path) if path in known else "other"


async def _call(app: App, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
    """Run ``app`` with a body that was read already, and cancel it as soon as the client leaves, streamed or not.

    Raises `ClientLeft` then.
    """
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else {"type": "http.disconnect"}

    async def until_client_leaves() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    answering = asyncio.ensure_future(app(scope, replay, send))
    leaving = asyncio.ensure_future(until_client_leaves())
    try:
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise ClientLeft
        answering.result()
    finally:
        for task in (answering, leaving):
            task.cancel()
        await asyncio.gather(answering, leaving, return_exceptions=True)


class _WatchedSend:
    """Passes an answer on and remembers its status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status: int | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)
