"""What goes over the wire:

JSON, server-sent events, and the error body that clients of the OpenAI API understand. Pure.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

LEAST_LOGPROB = -9999.0
"""What stands for a probability of zero: JSON has no infinity, and a client that gets one fails on the whole answer."""

DONE = b"data: [DONE]\n\n"


class Refusal(Exception):
    """A request that is answered with an error: not a failure of the server, so not one of its errors."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """Return the body of the answer."""
        return error_body(self.status, self.message, param=self.param, code=self.code)


@dataclass(frozen=True, slots=True)
class JsonAnswer:
    """An answer that is one JSON value."""

    payload: Mapping[str, Any]
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EventAnswer:
    """An answer that is a stream of server-sent events, each already encoded."""

    events: AsyncGenerator[bytes, None]
    """To be closed by whoever sends it."""
    cancel: Callable[[], None]
    """To be called in the end, whatever happened: a generator that was never begun cannot clean up after itself."""


Answer = JsonAnswer | EventAnswer


def refuse(param: str | None, message: str, *, code: str | None = None) -> Refusal:
    """Return the refusal of a bad parameter: 400, with the parameter's name."""
    return Refusal(400, message, param=param, code=code)


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return an error as the OpenAI API writes it."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "service_unavailable"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def encode_json(value: Any) -> bytes:
    """Return ``value`` as one line of ASCII JSON. Raises `ValueError` for infinities and NaN, which are not JSON."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii")


def encode_event(value: Any, *, name: str | None = None) -> bytes:
    """Return one server-sent event. ASCII holds no line end that a client could take for the end of the event."""
    head = f"event: {name}\n".encode("ascii") if name else b""
    return head + b"data: " + encode_json(value) + b"\n\n"


def finite(logprob: float) -> float:
    """Return ``logprob`` as JSON can carry it: never below `LEAST_LOGPROB`, never NaN."""
    return LEAST_LOGPROB if math.isnan(logprob) else min(max(logprob, LEAST_LOGPROB), 0.0)


def new_id(kind: str) -> str:
    """Return a fresh identifier such as ``chatcmpl-…``. Ours, never the client's: two clients may choose the same."""
    return f"{kind}{uuid.uuid4().hex}"
