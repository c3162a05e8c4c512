"""Plain completions as a client sees them."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import openai
import pytest

from .fakes import NAME, PieceTokenizer, Running, ScriptedEngine

Answering = Callable[[ScriptedEngine], AbstractContextManager[Running]]
ClientOf = Callable[..., openai.OpenAI]


def engine(*scripts: list[str | bytes], **options: Any) -> ScriptedEngine:
    return ScriptedEngine(PieceTokenizer(), scripts or [["Hello", " world"]], **options)


def stream(client: openai.OpenAI, **options: Any) -> list[Any]:
    with client.completions.create(model=NAME, **options, stream=True) as chunks:
        return list(chunks)


def test_an_answer_whole_and_streamed(answering: Answering, client_of: ClientOf) -> None:
    with answering(engine()) as running:
        client = client_of(running)
        whole = client.completions.create(model=NAME, prompt="abc")
        chunks = stream(client, prompt="abc", stream_options={"include_usage": True})
    assert (whole.choices[0].text, whole.choices[0].finish_reason, whole.object) == (
        "Hello world",
        "stop",
        "text_completion",
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "Hello world"
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage)


def test_a_stop_string_over_two_tokens(answering: Answering, client_of: ClientOf) -> None:
    with answering(engine(["a", "b", "c"])) as running:
        client = client_of(running)
        chunks = stream(client, prompt="p", stop="bc")
        assert client.completions.create(model=NAME, prompt="p", stop="bc").choices[0].text == "a"
    assert "".join(chunk.choices[0].text for chunk in chunks) == "a"
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_sixteen_tokens_unless_said_otherwise(answering: Answering, client_of: ClientOf) -> None:
    with answering(engine(["x"], end=False)) as running:
        client = client_of(running)
        assert client.completions.create(model=NAME, prompt="p").choices[0].text == "x" * 16
        answer = client.completions.create(model=NAME, prompt="p" * 60, max_tokens=50)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("xxxx", "length")
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model=NAME, prompt="p" * 64, max_tokens=50)
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")


def test_several_prompts_and_samples_have_their_places(answering: Answering, client_of: ClientOf) -> None:
    with answering(engine(["one"], ["two"])) as running:
        client = client_of(running)
        whole = client.completions.create(model=NAME, prompt=["a", "bc"], n=2)
        chunks = stream(client, prompt=["a", "bc"], n=2)
        prompts = [prompt for prompt, _ in running.engine.asked[:2]]
    assert [(choice.index, choice.text) for choice in whole.choices] == [(0, "one"), (1, "two"), (2, "one"), (3, "two")]
    streamed = {
        index: "".join(chunk.choices[0].text for chunk in chunks if chunk.choices[0].index == index)
        for index in range(4)
    }
    assert streamed == {0: "one", 1: "two", 2: "one", 3: "two"}
    assert prompts == [(97,), (98, 99)]
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == 3


def test_prompts_of_tokens(answering: Answering, client_of: ClientOf) -> None:
    with answering(engine()) as running:
        client = client_of(running)
        client.completions.create(model=NAME, prompt=[5, 6, 7])
        assert running.engine.asked[-1][0] == (5, 6, 7)
        for prompt in ([5, 10**6], ""):
            with pytest.raises(openai.BadRequestError) as caught:
                client.completions.create(model=NAME, prompt=prompt)
            assert caught.value.param == "prompt"


def test_logprobs_are_numbers_with_their_places(answering: Answering, client_of: ClientOf) -> None:
    with answering(engine(["ab", "c"], logprob=float("-inf"))) as running:
        client = client_of(running)
        logprobs = client.completions.create(model=NAME, prompt="p", logprobs=1).choices[0].logprobs
        chunks = stream(client, prompt="p", logprobs=1)
        without = client.completions.create(model=NAME, prompt="p").choices[0].logprobs
        raw = running.post("/v1/completions", {"prompt": "p", "logprobs": 1, "stream": True}).text
    assert without is None
    assert logprobs is not None
    assert (logprobs.tokens, logprobs.token_logprobs, logprobs.text_offset) == (["ab", "c"], [-9999.0, -9999.0], [0, 2])
    assert logprobs.top_logprobs == [{"ab": -9999.0}, {"c": -9999.0}]
    offsets = [
        offset for chunk in chunks if chunk.choices[0].logprobs for offset in chunk.choices[0].logprobs.text_offset
    ]
    assert offsets == [0, 2]
    assert "Infinity" not in raw


def test_a_failure_in_the_stream_ends_with_the_end_mark(answering: Answering) -> None:
    with answering(engine(failure=ValueError("x"))) as running:
        answer = running.post("/v1/completions", {"prompt": "p", "stream": True})
    blocks = answer.text.strip().split("\n\n")
    assert json.loads(blocks[0].removeprefix("data: "))["error"]["code"] == "generation_failed"
    assert blocks[1:] == ["data: [DONE]"]
