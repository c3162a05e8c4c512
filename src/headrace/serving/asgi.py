"""The few lines of ASGI that are needed to read a body and to send an answer.

Standard library only: the gate needs it before anything heavy is imported.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from headrace.serving.wire import encode_json

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class ClientLeft(Exception):
    """The client closed the connection before its request was complete."""


class BodyTooLarge(Exception):
    """The body has more bytes than are taken."""


async def read_body(receive: Receive, *, most_bytes: int | None = None) -> bytes:
    """Return the whole body. Raises `ClientLeft`, and `BodyTooLarge` as soon as more than ``most_bytes`` have come."""
    pieces = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        pieces += message.get("body", b"")
        if most_bytes is not None and len(pieces) > most_bytes:
            raise BodyTooLarge
        if not message.get("more_body", False):
            return bytes(pieces)


async def send_json(
    send: Send, status: int, value: Mapping[str, Any], *, headers: Mapping[str, str] | None = None
) -> None:
    """Send a whole answer in JSON."""
    await send_bytes(send, status, encode_json(value), content_type="application/json", headers=headers)


async def send_bytes(
    send: Send, status: int, body: bytes, *, content_type: str, headers: Mapping[str, str] | None = None
) -> None:
    """Send a whole answer."""
    fields = {"content-type": content_type, "content-length": str(len(body)), **(headers or {})}
    encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})


def header(scope: Scope, name: bytes) -> bytes:
    """Return the first header called ``name`` (lower case); empty where there is none."""
    return next((value for key, value in scope["headers"] if key == name), b"")
