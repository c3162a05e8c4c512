"""The routes of the API and the ASGI application behind the gate.

It is reached only when the model is ready, with the key, and with the whole body.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any
from urllib.parse import unquote

from headrace.serving.asgi import Receive, Scope, Send, read_body, send_json
from headrace.serving.chat import ChatCompletions
from headrace.serving.completions import Completions
from headrace.serving.responses import Responses
from headrace.serving.run import describe_failure
from headrace.serving.service import Service
from headrace.serving.wire import Answer, EventAnswer, JsonAnswer, Refusal

Handler = Callable[[bytes], Awaitable[Answer]]

_MODEL_PREFIX = "/v1/models/"
_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would gather the stream before it passes it on.
]


class Application:
    """Answers the routes of the OpenAI API that a text model can."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.routes: dict[str, dict[str, Handler]] = {
            "/v1/chat/completions": {"POST": ChatCompletions(service)},
            "/v1/completions": {"POST": Completions(service)},
            "/v1/responses": {"POST": Responses(service)},
            "/v1/models": {"GET": self._list_models},
        }
        """Path, then method, then handler. ``/v1/models/{name}`` is the one path with a part that varies."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            handler = self._find(scope)
            if scope["method"] == "POST":
                _check_content_type(scope)
            answer = await handler(await read_body(receive))
        except Exception as error:  # noqa: BLE001  The last place that can make an answer of it.
            refusal = describe_failure(error)
            answer = JsonAnswer(refusal.body(), refusal.status, refusal.headers)
        if isinstance(answer, JsonAnswer):
            await send_json(send, answer.status, answer.payload, headers=answer.headers)
        else:
            await _send_events(send, answer)

    def _find(self, scope: Scope) -> Handler:
        """Return the handler. Raises `Refusal`: 404 for a path, 405 for a method that is not there."""
        path, method = scope["path"], scope["method"]
        methods = self.routes.get(path)
        if methods is None and path.startswith(_MODEL_PREFIX):
            methods = {"GET": self._show_model(path.removeprefix(_MODEL_PREFIX))}
        if methods is None:
            raise Refusal(
                404, f"There is no {path[:200]} here. There are {', '.join(self.routes)}.", code="unknown_url"
            )
        if method not in methods:
            allowed = ", ".join(methods)
            raise Refusal(
                405,
                f"{path} takes {allowed}, not {method[:20]}.",
                code="method_not_allowed",
                headers={"allow": allowed},
            )
        return methods[method]

    async def _list_models(self, body: bytes) -> Answer:
        return JsonAnswer({"object": "list", "data": [self._card()]})

    def _show_model(self, name: str) -> Handler:
        async def show(body: bytes) -> Answer:
            # A client quotes the slashes of a name, or does not; a server before us may have undone it.
            self._service.check_model(self._service.model_name if unquote(name) == self._service.model_name else name)
            return JsonAnswer(self._card())

        return show

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._service.model_name,
            "object": "model",
            "created": self._service.created,
            "owned_by": "headrace",
            "max_model_len": self._service.engine.context_tokens,
            "snapshot": self._service.snapshot,
        }


def _check_content_type(scope: Scope) -> None:
    """Raise `Refusal` for a body that does not say it is JSON: a web page may send any other kind to a server on the reader's own machine without being asked."""
    given = next((value for name, value in scope["headers"] if name == b"content-type"), b"").decode("latin-1")
    if given.partition(";")[0].strip().lower() != "application/json":
        raise Refusal(415, "The header Content-Type must be application/json.", code="unsupported_media_type")


async def _send_events(send: Send, answer: EventAnswer) -> None:
    try:
        await send({"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS})
        async with aclosing(answer.events) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
    finally:
        answer.cancel()
