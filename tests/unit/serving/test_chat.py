"""Chat completions as a client sees them: OpenAI's own, against a server on the loopback interface."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from .fakes import NAME, PieceTokenizer, Running, ScriptedEngine, serving

ASK: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "hi"}]}
Answering = Callable[[ScriptedEngine], AbstractContextManager[Running]]
ClientOf = Callable[..., openai.OpenAI]


def engine(*scripts: list[str | bytes], **options: Any) -> ScriptedEngine:
    return ScriptedEngine(PieceTokenizer(), scripts or [["Hello", " world"]], **options)


def stream(client: openai.OpenAI, **options: Any) -> list[ChatCompletionChunk]:
    with client.chat.completions.create(**{**ASK, **options}, stream=True) as chunks:
        return list(chunks)


def text_of(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


def events_of(running: Running, **options: Any) -> list[Any]:
    """Return what stands in the events, the last of which is the end mark."""
    answer = running.post("/v1/chat/completions", {**ASK, "stream": True, **options})
    assert answer.headers["content-type"].startswith("text/event-stream")
    blocks = answer.text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") for block in blocks)
    assert blocks.pop() == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def test_an_answer(answering: Answering, client_of: ClientOf) -> None:
    with answering(engine()) as running:
        answer = client_of(running).chat.completions.create(**ASK)
    ChatCompletion.model_validate(answer.model_dump(), strict=True)
    assert answer.choices[0].message.content == "Hello world"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == NAME
    assert answer.usage is not None
    # The prompt "<user>hi" is 8 tokens; the end token is counted and not shown.
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (8, 3, 11)


def test_a_streamed_answer(answering: Answering, client_of: ClientOf) -> None:
    with answering(engine()) as running:
        chunks = stream(client_of(running))
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].delta.content for chunk in chunks] == ["", "Hello", " world", None]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, "stop"]
    assert {(chunk.id, chunk.model) for chunk in chunks} == {(chunks[0].id, NAME)}


@pytest.mark.parametrize("end", [True, False], ids=["ends", "goes-on"])
def test_a_stop_string_over_two_tokens(answering: Answering, client_of: ClientOf, end: bool) -> None:
    with answering(engine(["a", "b", "c", "d"], end=end)) as running:
        client = client_of(running)
        chunks = stream(client, stop="bc")
        whole = client.chat.completions.create(**ASK, stop=["zz", "bc"])
    assert text_of(chunks) == whole.choices[0].message.content == "a"
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 3  # a, b and the c that completed it


def test_the_beginning_of_a_stop_string_at_the_end_is_sent(answering: Answering, client_of: ClientOf) -> None:
    with answering(engine(["a", "b"])) as running:
        client = client_of(running)
        assert text_of(stream(client, stop="bc")) == "ab"
        assert client.chat.completions.create(**ASK, stop="bc").choices[0].message.content == "ab"


def test_what_was_held_back_goes_through_the_tool_parser_too(answering: Answering, client_of: ClientOf) -> None:
    # "}</tool_call>" waits as the beginning of a stop string when the special token at the end comes.
    call = ['<tool_call>{"name": "f", "arguments": {"x": 1}', "}</tool_call>"]
    with answering(engine(call)) as running:
        client = client_of(running)
        answer = client.chat.completions.create(**ASK, stop="}</tool_call>!", tools=TOOLS)
        chunks = stream(client, stop="}</tool_call>!", tools=TOOLS)
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    assert calls[0].type == "function"
    assert (calls[0].function.name, calls[0].function.arguments) == ("f", '{"x": 1}')
    assert answer.choices[0].message.content is None
    assert chunks[-1].choices[0].finish_reason == answer.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("text", ["😀", "ď", "👩‍👩‍👧‍👦"])
def test_characters_over_several_tokens(answering: Answering, client_of: ClientOf, text: str) -> None:
    with answering(engine([bytes((byte,)) for byte in text.encode()])) as running:
        client = client_of(running)
        chunks = stream(client)
        assert text_of(chunks) == client.chat.completions.create(**ASK).choices[0].message.content == text
    assert all("�" not in (chunk.choices[0].delta.content or "") for chunk in chunks)


def test_a_cut_character_is_flushed(answering: Answering, client_of: ClientOf) -> None:
    with answering(engine([b"a", b"\xf0", b"\x9f"])) as running:
        assert text_of(stream(client_of(running))) == "a�"


def test_usage_comes_only_when_asked_for(answering: Answering) -> None:
    with answering(engine()) as running:
        without = events_of(running)
        asked = events_of(running, stream_options={"include_usage": True})
    assert all("usage" not in event and event["choices"] for event in without)
    assert [event["usage"] for event in asked[:-1]] == [None] * (len(asked) - 1)
    assert asked[-1]["choices"] == []
    assert asked[-1]["usage"] == {"prompt_tokens": 8, "completion_tokens": 3, "total_tokens": 11}


def test_each_choice_has_its_index_and_its_end(answering: Answering, client_of: ClientOf) -> None:
    scripts = (["one"], ["two", " and", " more"])
    with answering(engine(*scripts)) as running:
        client = client_of(running)
        chunks = stream(client, n=2, max_tokens=3)
        whole = client.chat.completions.create(**ASK, n=2, max_tokens=3)
    assert [text_of(chunks, index) for index in (0, 1)] == ["one", "two and more"]
    finishes = [
        (choice.index, choice.finish_reason) for chunk in chunks for choice in chunk.choices if choice.finish_reason
    ]
    assert sorted(finishes) == [(0, "stop"), (1, "length")]
    assert [(choice.index, choice.message.content, choice.finish_reason) for choice in whole.choices] == [
        (0, "one", "stop"),
        (1, "two and more", "length"),
    ]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_more_tokens_than_there_is_room_for_are_cut_to_the_room(
    answering: Answering, client_of: ClientOf, name: str
) -> None:
    # A context of 16; the prompt "<user>abcd" has 10 tokens.
    with answering(engine(["x"], end=False, context_tokens=16)) as running:
        answer = client_of(running).chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": "abcd"}], **{name: 100}
        )
    assert answer.choices[0].message.content == "x" * 6
    assert answer.choices[0].finish_reason == "length"


def test_one_token_is_still_generated_where_one_fits(answering: Answering, client_of: ClientOf) -> None:
    with answering(engine(["x"], end=False, context_tokens=16)) as running:
        client = client_of(running)
        answer = client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "a" * 9}])
        assert answer.choices[0].message.content == "x"
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "a" * 10}], max_tokens=1)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    assert "16" in caught.value.message


TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = ["<tool", '_call>{"name": "weather",', ' "arguments": {"city"', ': "Brno"}', "}</tool_call>"]


def test_a_streamed_tool_call_in_five_pieces(answering: Answering, client_of: ClientOf) -> None:
    with answering(engine(CALL)) as running:
        chunks = stream(client_of(running), tools=TOOLS)
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert [delta.id is not None for delta in deltas] == [True] + [False] * (len(deltas) - 1)
    functions = [delta.function for delta in deltas]
    assert [function.name for function in functions if function is not None] == ["weather"] + [None] * (len(deltas) - 1)
    assert json.loads("".join(function.arguments or "" for function in functions if function is not None)) == {
        "city": "Brno"
    }
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert text_of(chunks) == ""


def test_a_call_that_is_cut_off_is_text(answering: Answering, client_of: ClientOf) -> None:
    with answering(engine(["<tool_call>{", '"name"', ": "], end=False)) as running:
        client = client_of(running)
        whole = client.chat.completions.create(**ASK, tools=TOOLS, max_tokens=3).choices[0]
        chunks = stream(client, tools=TOOLS, max_tokens=3)
    assert whole.message.content == text_of(chunks) == '<tool_call>{"name": '
    assert whole.finish_reason == chunks[-1].choices[0].finish_reason == "length"


def test_without_tools_such_text_is_text(answering: Answering, client_of: ClientOf) -> None:
    with answering(engine(CALL)) as running:
        client = client_of(running)
        for options in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            answer = client.chat.completions.create(**ASK, **options)
            assert answer.choices[0].message.content == "".join(CALL)
            assert answer.choices[0].finish_reason == "stop"
        assert running.engine.tokenizer.rendered[-1]["tools"] is None


def test_a_conversation_with_tools_reaches_the_template(answering: Answering) -> None:
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Brno"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "wet"},
    ]
    with answering(engine()) as running:
        body = {
            "messages": messages,
            "tools": TOOLS,
            "chat_template_kwargs": {"enable_thinking": False},
            "max_tokens": 1,
        }
        assert running.post("/v1/chat/completions", body).status_code == 200
        rendered = running.engine.tokenizer.rendered[-1]
        bad = {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]}
        refused = running.post("/v1/chat/completions", bad)
    assert rendered["messages"] == [
        {"role": "system", "content": "be\nbrief"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Brno"}}}
            ],
        },
        {"role": "tool", "content": "wet", "tool_call_id": "c1"},
    ]
    assert rendered["tools"] == TOOLS
    assert rendered["variables"] == {"enable_thinking": False}
    assert refused.status_code == 400
    assert "arguments" in refused.json()["error"]["message"]


@pytest.mark.parametrize("logprob", [float("-inf"), float("nan"), -1e30])
def test_an_impossible_tokens_logprob_is_a_number(answering: Answering, client_of: ClientOf, logprob: float) -> None:
    with answering(engine(["x", "y"], logprob=logprob)) as running:
        answer = client_of(running).chat.completions.create(**ASK, logprobs=True, top_logprobs=1)
        chunks = stream(client_of(running), logprobs=True, top_logprobs=1)
        raw = running.post("/v1/chat/completions", {**ASK, "stream": True, "logprobs": True}).text
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert [(token.token, token.logprob, token.bytes) for token in content] == [
        ("x", -9999.0, [120]),
        ("y", -9999.0, [121]),
    ]
    assert content[0].top_logprobs[0].logprob == -9999.0
    streamed = [
        token for chunk in chunks if chunk.choices[0].logprobs for token in chunk.choices[0].logprobs.content or []
    ]
    assert [(token.token, token.logprob) for token in streamed] == [("x", -9999.0), ("y", -9999.0)]
    assert not any(word in raw for word in ("NaN", "Infinity"))


def test_a_template_that_refuses_is_a_400(answering: Answering, client_of: ClientOf) -> None:
    with answering(engine()) as running, pytest.raises(openai.BadRequestError) as caught:
        client_of(running).chat.completions.create(model=NAME, messages=[{"role": "user", "content": "<fail>"}])
    assert caught.value.code == "chat_template_error"


@pytest.mark.parametrize(
    ("part", "code"),
    [
        ({"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}}, "media_not_fetched"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "media_not_fetched"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "media_not_supported"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, "media_not_supported"),
        ({"type": "video_url", "video_url": {"url": "http://169.254.169.254/"}}, "media_not_fetched"),
        ({"type": "text"}, None),
        ({}, "media_not_supported"),
    ],
)
def test_media_are_refused_by_a_text_model(answering: Answering, part: dict[str, Any], code: str | None) -> None:
    with answering(engine()) as running:
        answer = running.post(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "see"}, part]}]}
        )
        assert running.engine.asked == []
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == code
    assert answer.json()["error"]["param"] == "messages[0].content[1]"


def test_another_models_name_is_a_404(answering: Answering, client_of: ClientOf) -> None:
    with answering(engine()) as running:
        client = client_of(running)
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(**{**ASK, "model": "gpt-4o"})
        assert [model.id for model in client.models.list()] == [NAME]
        assert client.models.retrieve(NAME).id == NAME
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("gpt-4o")
    assert caught.value.code == "model_not_found"


def test_parameters_reach_the_engine(answering: Answering) -> None:
    body = {
        **ASK,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.25,
        "presence_penalty": -0.5,
        "logit_bias": {"5": 3},
        "seed": 9,
        "n": 2,
        "max_tokens": 7,
        "min_tokens": 2,
        "logprobs": True,
        "top_logprobs": 3,
    }
    with answering(engine(logprob=-1.0)) as running:
        assert running.post("/v1/chat/completions", body).status_code == 200
        options = running.engine.asked[-1][1]
        assert running.post("/v1/chat/completions", {**ASK, "max_tokens": 3, "ignore_eos": True}).status_code == 200
        endless = running.engine.asked[-1][1]
        bad = running.post("/v1/chat/completions", {**ASK, "logit_bias": {"99999": 3}})
    assert (options.temperature, options.top_p, options.top_k, options.min_p) == (0.5, 0.9, 0, 0.1)
    assert (options.repetition_penalty, options.frequency_penalty, options.presence_penalty) == (1.1, 0.25, -0.5)
    assert (options.logit_bias, options.seed, options.num_samples) == (((5, 3.0),), 9, 2)
    assert (options.max_tokens, options.min_tokens, options.num_logprobs) == (7, 2, 3)
    assert (endless.max_tokens, endless.min_tokens, endless.temperature) == (3, 3, None)
    assert bad.status_code == 400


def test_a_failure_before_the_stream_and_in_it(
    answering: Answering, client_of: ClientOf, caplog: pytest.LogCaptureFixture
) -> None:
    with answering(engine(failure=RuntimeError("secret detail"))) as running:
        whole = running.post("/v1/chat/completions", ASK)
        (role, failed) = events_of(running)
        with pytest.raises(openai.APIError, match="RuntimeError"):
            stream(client_of(running))
        assert running.engine.num_running == 0
    assert whole.status_code == 500
    assert role["choices"][0]["delta"]["role"] == "assistant"
    assert failed["error"]["type"] == whole.json()["error"]["type"] == "server_error"
    assert "secret detail" not in whole.text
    assert "secret detail" in caplog.text


def test_a_full_queue_refuses(client_of: ClientOf) -> None:
    with serving(engine(), max_waiting=3) as running:
        running.engine.full = 3
        with pytest.raises(openai.RateLimitError) as caught:
            client_of(running).chat.completions.create(**ASK)
        assert len(running.engine.asked) == 1
    assert caught.value.response.headers["retry-after"] == "1"


def test_the_clients_request_id_stays_the_clients(answering: Answering) -> None:
    with answering(engine()) as running:
        ids = [running.post("/v1/chat/completions", ASK, **{"x-request-id": "mine"}).json()["id"] for _ in range(2)]
    assert ids[0] != ids[1]
    assert all(each.startswith("chatcmpl-") and "mine" not in each for each in ids)
