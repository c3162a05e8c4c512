"""The responses API as a client sees it, streamed event by event."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from .fakes import NAME, PieceTokenizer, Running, ScriptedEngine

Answering = Callable[[ScriptedEngine], AbstractContextManager[Running]]
ClientOf = Callable[..., openai.OpenAI]
CALL = 'Well. <tool_call>{"name": "weather", "arguments": {"city": "Brno"}}</tool_call>'
TOOLS: Any = [{"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True}]


def engine(*scripts: list[str | bytes], **options: Any) -> ScriptedEngine:
    return ScriptedEngine(PieceTokenizer(), scripts or [["Hello", " world"]], **options)


def stream(client: openai.OpenAI, **options: Any) -> list[Any]:
    with client.responses.create(model=NAME, **options, stream=True) as events:
        return list(events)


def test_an_answer(answering: Answering, client_of: ClientOf) -> None:
    with answering(engine()) as running:
        answer = client_of(running).responses.create(model=NAME, input="hi", instructions="be brief")
        rendered = running.engine.tokenizer.rendered[-1]["messages"]
    Response.model_validate(answer.model_dump(), strict=True)
    assert answer.output_text == "Hello world"
    assert (answer.status, answer.model, answer.incomplete_details) == ("completed", NAME, None)
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.input_tokens + 3
    assert rendered == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]


def test_a_stream_builds_the_same_answer(answering: Answering, client_of: ClientOf) -> None:
    with answering(engine()) as running:
        events = stream(client_of(running), input="hi")
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(10))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Hello world"
    assert events[6].text == events[-1].response.output_text == "Hello world"
    assert {event.item_id for event in events[3:8]} == {events[2].item.id} == {events[-1].response.output[0].id}
    assert all(type(event).model_validate(event.model_dump(), strict=True) for event in events)


def test_an_answer_that_was_cut_is_incomplete(answering: Answering, client_of: ClientOf) -> None:
    with answering(engine(["x"], end=False)) as running:
        client = client_of(running)
        answer = client.responses.create(model=NAME, input="hi", max_output_tokens=5)
        events = stream(client, input="hi", max_output_tokens=100_000)
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model=NAME, input="a" * 100)
    assert (answer.status, answer.output_text) == ("incomplete", "xxxxx")
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == "x" * (64 - len("<user>hi"))
    assert caught.value.code == "context_length_exceeded"


def test_an_empty_answer_is_a_message_without_text(answering: Answering, client_of: ClientOf) -> None:
    with answering(engine([])) as running:
        client = client_of(running)
        whole = client.responses.create(model=NAME, input="hi")
        events = stream(client, input="hi")
    assert [item.type for item in whole.output] == [item.type for item in events[-1].response.output] == ["message"]
    assert whole.output_text == events[-1].response.output_text == ""


def test_a_tool_call_is_an_item_of_its_own(answering: Answering, client_of: ClientOf) -> None:
    with answering(engine([CALL[:30], CALL[30:]])) as running:
        client = client_of(running)
        whole = client.responses.create(model=NAME, input="hi", tools=TOOLS)
        events = stream(client, input="hi", tools=TOOLS)
        rendered = running.engine.tokenizer.rendered[-1]["tools"]
    assert rendered == [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    for response in (whole, events[-1].response):
        assert [item.type for item in response.output] == ["message", "function_call"]
        call = response.output[1]
        assert (call.name, json.loads(call.arguments), call.status) == ("weather", {"city": "Brno"}, "completed")
    added = [event for event in events if event.type == "response.output_item.added"]
    assert [(event.output_index, event.item.type) for event in added] == [(0, "message"), (1, "function_call")]
    arguments = [event for event in events if event.type.startswith("response.function_call_arguments")]
    assert {event.item_id for event in arguments} == {added[1].item.id}


def test_earlier_turns_come_as_items(answering: Answering) -> None:
    items: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "input_text", "text": "and"}, {"type": "input_text", "text": "now?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Wait."}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call", "id": "fc_2", "call_id": "c2", "name": "time", "arguments": '{"z": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "wet"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "late"}]},
    ]
    with answering(engine()) as running:
        assert running.post("/v1/responses", {"input": items}).status_code == 200
        rendered = running.engine.tokenizer.rendered[-1]["messages"]

    def call(number: str, name: str, arguments: dict[str, int]) -> dict[str, Any]:
        return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}

    assert rendered == [
        {"role": "user", "content": "and\nnow?"},
        {
            "role": "assistant",
            "content": "Wait.",
            "tool_calls": [call("c1", "weather", {}), call("c2", "time", {"z": 1})],
        },
        {"role": "tool", "content": "wet", "tool_call_id": "c1"},
        {"role": "tool", "content": "late", "tool_call_id": "c2"},
    ]


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "item_reference", "id": "msg_1"}, "input[0]"),
        ({"type": "function_call", "call_id": "c"}, "input[0].tool_calls[0].function.name"),
        ({"role": "robot", "content": "x"}, "input[0].role"),
        (
            {"role": "user", "content": [{"type": "input_image", "image_url": "https://example.com/x.png"}]},
            "input[0].content[0]",
        ),
        ({"type": "reasoning"}, "input"),
    ],
)
def test_other_items_are_refused(answering: Answering, item: dict[str, Any], param: str) -> None:
    with answering(engine()) as running:
        answer = running.post("/v1/responses", {"input": [item]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_a_failure_is_told_in_the_stream(answering: Answering, client_of: ClientOf) -> None:
    with answering(engine(failure=RuntimeError("x"))) as running:
        events = stream(client_of(running), input="hi")
        whole = running.post("/v1/responses", {"input": "hi"})
    assert [event.type for event in events][-2:] == ["error", "response.failed"]
    assert events[-1].response.status == "failed"
    assert events[-1].response.error.code == "server_error"
    assert whole.status_code == 500
