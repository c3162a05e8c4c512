"""What may be asked, and what is said to who asks for something else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.serving.requests import ChatRequest, CompletionRequest, ResponseRequest, parse
from headrace.serving.wire import Refusal

MESSAGES = [{"role": "user", "content": "hi"}]


def refusal(kind: Any, body: bytes | dict[str, Any]) -> Refusal:
    with pytest.raises(Refusal) as caught:
        parse(kind, body if isinstance(body, bytes) else json.dumps(body).encode())
    assert caught.value.status == 400
    return caught.value


def test_what_clients_send_is_taken() -> None:
    body = {
        "model": "m",
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "be brief"}]},
            {"role": "assistant", "content": None, "refusal": None, "annotations": [], "tool_calls": None},
        ],
        "temperature": 1,
        "stop": "x",
        "user": "u",
        "seed": 4,
        "n": 2,
        "max_tokens": None,
        "store": False,
        "metadata": {"a": "b"},
        "modalities": ["text"],
        "response_format": {"type": "text"},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}],
        "tool_choice": "auto",
        "logit_bias": {"5": -100},
        "top_k": -1,
        "stream_options": None,
    }
    request = parse(ChatRequest, json.dumps(body).encode())
    assert (request.temperature, request.stop, request.n, request.logit_bias) == (1.0, ["x"], 2, {5: -100.0})
    assert request.max_tokens is None


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("temperature", 2.5, "temperature"),
        ("temperature", "1", "temperature"),
        ("temperature", True, "temperature"),
        ("top_p", 0, "top_p"),
        ("n", 0, "n"),
        ("n", 1000, "n"),
        ("max_tokens", 0, "max_tokens"),
        ("max_tokens", 1.5, "max_tokens"),
        ("max_completion_tokens", -1, "max_completion_tokens"),
        ("stop", [""], "stop"),
        ("stop", ["x"] * 17, "stop"),
        ("stop", ["x" * 2000], "stop"),
        ("stop", 4, "stop"),
        ("seed", 2**70, "seed"),
        ("presence_penalty", 3, "presence_penalty"),
        ("logit_bias", {"x": 1}, "logit_bias"),
        ("logit_bias", {"1": 101}, "logit_bias"),
        ("top_logprobs", 2, "top_logprobs"),
        ("stream_options", {"include_usage": True}, "stream_options"),
        ("response_format", {"type": "json_object"}, "response_format"),
        ("tool_choice", "required", "tool_choice"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}, "tool_choice"),
        ("tools", [{"type": "web_search"}], "tools[0].type"),
        ("audio", {"voice": "x"}, "audio"),
        ("functions", [{"name": "f"}], "functions"),
        ("modalities", ["text", "audio"], "modalities"),
        ("messages", [], "messages"),
        ("messages", [{"role": "robot", "content": "x"}], "messages[0].role"),
        ("messages", [*MESSAGES, {"role": "user", "content": 4}], "messages[1].content"),
        ("messages", [{"role": "user", "content": ["x"]}], "messages[0].content"),
        ("chat_template", "{{ x }}", "chat_template"),
        ("max_token", 5, "max_token"),
    ],
)
def test_a_bad_value_is_named(field: str, value: Any, param: str) -> None:
    refused = refusal(ChatRequest, {"messages": MESSAGES, field: value})
    assert refused.param == param
    assert param in refused.message
    assert refused.body()["error"]["type"] == "invalid_request_error"


def test_what_is_missing_is_named() -> None:
    refused = refusal(ChatRequest, {"model": "m"})
    assert (refused.param, refused.code) == ("messages", "missing_required_parameter")


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"x"', b"\xff{}", b'{"messages": ' + b"[" * 100_000, b'{"messages": [1e999999]}'],
)
def test_what_is_no_request_is_refused(body: bytes) -> None:
    refusal(ChatRequest, body)


@pytest.mark.parametrize("value", [b"NaN", b"Infinity", b"-Infinity"])
def test_numbers_that_are_none_are_refused(value: bytes) -> None:
    assert (
        refusal(ChatRequest, b'{"messages": [{"role": "user", "content": "x"}], "temperature": ' + value + b"}").param
        == "temperature"
    )


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [1]], ["a", [1]]),
    ],
)
def test_prompts_are_lists(prompt: Any, expected: Any) -> None:
    assert parse(CompletionRequest, json.dumps({"prompt": prompt}).encode()).prompt == expected


@pytest.mark.parametrize("prompt", [None, [], [[]], 4, [1, "a"], [-1], [True], ["a"] * 65, {"a": 1}])
def test_other_prompts_are_refused(prompt: Any) -> None:
    assert refusal(CompletionRequest, {"prompt": prompt}).param == "prompt"


@pytest.mark.parametrize(("field", "value"), [("best_of", 2), ("echo", True), ("suffix", "x"), ("logprobs", 21)])
def test_what_a_completion_cannot_do(field: str, value: Any) -> None:
    assert refusal(CompletionRequest, {"prompt": "x", field: value}).param == field


def test_what_asks_for_nothing_is_taken() -> None:
    body = {"prompt": "x", "n": 2, "best_of": 2, "echo": False, "suffix": "", "logprobs": None}
    assert parse(CompletionRequest, json.dumps(body).encode()).n == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("previous_response_id", "resp_1"),
        ("conversation", "conv_1"),
        ("background", True),
        ("include", ["reasoning.encrypted_content"]),
        ("truncation", "auto"),
        ("text", {"format": {"type": "json_schema"}}),
        ("text", {"style": 1}),
        ("input", 4),
        ("input", []),
        ("input", ["x"]),
    ],
)
def test_what_a_response_cannot_do(field: str, value: Any) -> None:
    assert refusal(ResponseRequest, {"input": "hi", field: value}).param == field


def test_a_response_takes_its_neutral_values() -> None:
    body = {
        "input": [{"role": "user", "content": "x"}],
        "store": True,
        "background": False,
        "include": [],
        "truncation": "disabled",
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "top_logprobs": 0,
        "reasoning": {"effort": "low"},
    }
    assert parse(ResponseRequest, json.dumps(body).encode()).input == body["input"]
