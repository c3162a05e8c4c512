"""Who passes the gate, when, and with how much; and that nothing goes on for a client that has left."""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import openai
import pytest

from headrace.errors import InvalidSetting
from headrace.serving.asgi import App, Message, Scope
from headrace.serving.gate import Gate, GateSettings
from headrace.serving.metrics import Metrics

from .fakes import NAME, PieceTokenizer, Running, ScriptedEngine, serving

Answering = Callable[[ScriptedEngine], AbstractContextManager[Running]]
KEY = "sk-test-0123456789"
CHAT = {"model": NAME, "messages": [{"role": "user", "content": "hi"}]}


class State:
    """A life that a test sets."""

    def __init__(self, app: App | None = None, *, is_alive: bool = True) -> None:
        self.app = app
        self.is_alive = is_alive

    def describe(self, *, in_full: bool) -> dict[str, Any]:
        return {"status": "ready" if self.app else "loading", **({"report": "s3://bucket/model"} if in_full else {})}


async def echo(scope: Scope, receive: Any, send: Any) -> None:
    body = (await receive())["body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


def call(
    gate: Gate,
    path: str,
    *,
    method: str = "POST",
    headers: dict[str, str] | None = None,
    body: list[bytes] | None = None,
) -> tuple[int, bytes, dict[str, str]]:
    """Send one request through ``gate`` in this process; its client stays."""
    messages: list[Message] = [{"type": "http.request", "body": piece, "more_body": True} for piece in body or []]
    messages.append({"type": "http.request", "body": b"", "more_body": False})
    sent: list[Message] = []

    async def receive() -> Message:
        if messages:
            return messages.pop(0)
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    encoded = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    scope: Scope = {"type": "http", "method": method, "path": path, "headers": encoded}
    asyncio.run(gate(scope, receive, send))
    answered = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:]), answered


def make_gate(app: App | None = echo, *, is_alive: bool = True, **settings: Any) -> Gate:
    return Gate(State(app, is_alive=is_alive), Metrics(), GateSettings(**settings))


def test_before_it_is_ready_only_the_probes_answer() -> None:
    gate = make_gate(None)
    assert call(gate, "/health", method="GET")[0] == 200
    status, body, _ = call(gate, "/ready", method="GET")
    assert (status, json.loads(body)["status"]) == (503, "loading")
    status, body, headers = call(gate, "/v1/chat/completions")
    assert (status, json.loads(body)["error"]["code"], headers["retry-after"]) == (503, "not_ready", "5")
    assert call(gate, "/v1/models", method="GET")[0] == 503
    assert gate.num_inside == 0


def test_a_dead_server_is_not_alive() -> None:
    assert call(make_gate(None, is_alive=False), "/health", method="GET")[0] == 503


def test_what_is_served_is_shown_to_strangers_only_without_a_key() -> None:
    assert "report" in json.loads(call(make_gate(), "/ready", method="GET")[1])
    assert "report" not in json.loads(call(make_gate(api_key=KEY), "/ready", method="GET")[1])


@pytest.mark.parametrize(
    ("given", "status"),
    [
        (None, 401),
        ("", 401),
        ("Bearer", 401),
        ("Bearer ", 401),
        (f"Bearer {KEY}x", 401),
        (f"Bearer {KEY[:-1]}", 401),
        (f"Basic {KEY}", 401),
        (KEY, 401),
        ("Bearer schlüssel", 401),
        (f"Bearer {KEY}", 200),
        (f"bearer {KEY}", 200),
    ],
)
def test_the_key(given: str | None, status: int) -> None:
    answered, body, headers = call(
        make_gate(api_key=KEY), "/v1/completions", headers={} if given is None else {"authorization": given}
    )
    assert answered == status
    assert KEY.encode() not in body
    assert ("www-authenticate" in headers) is (status == 401)


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or a == b)
    call(make_gate(api_key=KEY), "/v1/models", headers={"authorization": "Bearer wrong"})
    call(make_gate(api_key=KEY), "/v1/models", headers={"authorization": "Basic " + KEY})
    assert compared == [(b"wrong", KEY.encode()), (KEY.encode(), KEY.encode())]


@pytest.mark.parametrize("key", ["", " ", "a b", "schlüssel", "line\nend"])
def test_a_key_that_no_header_can_carry_is_refused(key: str) -> None:
    with pytest.raises(InvalidSetting):
        GateSettings(api_key=key)


def test_the_key_is_not_in_a_repr() -> None:
    assert KEY not in repr(GateSettings(api_key=KEY))


def test_every_route_needs_the_key() -> None:
    with serving(gate=GateSettings(api_key=KEY), wait=True) as running:
        app: Any = running.server._lifecycle.app
        paths = [
            *app.routes,
            f"/v1/models/{NAME}",
            "/metrics",
            "/",
            "/docs",
            "/openapi.json",
            "/v1",
            "//health",
            "/health/",
            "/health/../v1/models",
        ]
        assert len(app.routes) == 4
        for path in paths:
            for answer in (
                running.get(path),
                running.post(path, CHAT),
                running.get(path, authorization="Bearer wrong"),
            ):
                assert answer.status_code == 401, path
                assert answer.json()["error"]["type"] == "authentication_error"
        assert running.post("/health", {}).status_code == 401
        assert len(running.engine.asked) == 1
        assert running.get("/health").status_code == running.get("/ready").status_code == 200
        assert running.get("/v1/models", authorization=f"Bearer {KEY}").status_code == 200
        assert running.post("/v1/chat/completions", CHAT, authorization=f"Bearer {KEY}").status_code == 200
        assert b"headrace_ready 1.0" in running.get("/metrics", authorization=f"Bearer {KEY}").content


def test_what_is_not_there_is_a_404_and_a_405() -> None:
    with serving() as running:
        missing, wrong = running.post("/v1/embeddings", {}), running.get("/v1/chat/completions")
        unknown = [running.post(path, {}).status_code for path in ("/load_model", "/reset", "/v1/audio/transcriptions")]
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "unknown_url")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert unknown == [404, 404, 404]


def test_a_body_that_is_too_large_is_refused_before_it_is_read() -> None:
    gate = make_gate(most_body_bytes=10)
    assert call(gate, "/x", headers={"content-length": "11"})[0] == 413
    assert call(gate, "/x", headers={"content-length": "9" * 5000})[0] == 413
    assert call(gate, "/x", body=[b"12345", b"678901"])[0] == 413
    assert call(gate, "/x", headers={"content-length": "1"}, body=[b"12345678901"])[0] == 413  # and whatever it claims
    assert call(gate, "/x", body=[b"12345", b"67890"])[:2] == (200, b"1234567890")
    assert gate.num_inside == 0


def test_an_error_in_the_application_is_an_answer_and_a_log(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(scope: Scope, receive: Any, send: Any) -> None:
        raise RuntimeError("inner detail")

    gate = make_gate(broken)
    status, body, _ = call(gate, "/v1/completions")
    assert (status, json.loads(body)["error"]["type"]) == (500, "server_error")
    assert b"inner detail" not in body
    assert "inner detail" in caplog.text
    assert gate.num_inside == 0


def test_nothing_but_http_is_answered() -> None:
    async def never(*_: Any) -> Any:
        raise AssertionError

    asyncio.run(make_gate()({"type": "websocket", "path": "/v1/realtime"}, never, never))


# Clients that leave


def endless(**options: Any) -> ScriptedEngine:
    return ScriptedEngine(PieceTokenizer(), [["x"]], end=False, pause_s=0.01, context_tokens=100_000, **options)


def send_raw(running: Running, path: str, body: dict[str, Any]) -> socket.socket:
    """Send a request over a socket of our own, and return it."""
    host, port = running.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    connection = socket.create_connection((host, int(port)))
    connection.sendall(
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode()
        + data
    )
    return connection


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": "x", "max_tokens": 90_000}),
        ("/v1/responses", {"input": "x"}),
    ],
)
def test_a_client_that_leaves_ends_its_generation(
    answering: Answering, path: str, body: dict[str, Any], stream: bool
) -> None:
    with answering(endless()) as running:
        gate, before = running.server._gate, disconnects(running)
        with send_raw(running, path, {**body, "stream": stream}):
            running.wait_for(lambda: running.engine.num_running == 1)
            assert gate.num_inside == 1
        running.wait_for(lambda: running.engine.num_running == 0 and gate.num_inside == 0, timeout_s=1.0)
        assert running.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200
        assert disconnects(running) == before + 1


def test_a_client_that_leaves_in_the_middle_of_its_body_is_forgotten(answering: Answering) -> None:
    with answering(endless()) as running:
        before = disconnects(running)
        host, port = running.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        running.wait_for(lambda: disconnects(running) == before + 1)
        assert running.engine.asked == []


def test_finished_requests_leave_nothing_behind(answering: Answering, client_of: Callable[..., openai.OpenAI]) -> None:
    with answering(ScriptedEngine(PieceTokenizer())) as running:
        client = client_of(running)
        for _ in range(5):
            client.chat.completions.create(**CHAT)  # type: ignore[call-overload]
            with client.chat.completions.create(**CHAT, stream=True) as stream:  # type: ignore[call-overload]
                next(iter(stream))  # and leaves
        gate = running.server._gate
        running.wait_for(lambda: running.engine.num_running == 0 and gate.num_inside == 0, timeout_s=1.0)


def disconnects(running: Running) -> float:
    found = re.search(r"(?m)^headrace_disconnects_total (\S+)", running.get("/metrics").text)
    assert found is not None
    return float(found[1])


def test_labels_of_counters_cannot_be_made_up_by_clients() -> None:
    with serving() as running:
        for number in range(3):
            running.get(f"/made/up/{number}")
        text = running.get("/metrics").text
    assert 'headrace_requests_total{route="other",status="404"} 3.0' in text
    assert "/made/up" not in text
