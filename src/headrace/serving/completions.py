"""`POST /v1/completions`: plain prompts in, continuations out, whole or streamed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from headrace.serving.output import TokenLogprob
from headrace.serving.requests import CompletionRequest, parse
from headrace.serving.run import Run, Wishes, completing_wishes, describe_failure
from headrace.serving.service import Service
from headrace.serving.wire import DONE, Answer, EventAnswer, JsonAnswer, encode_event, new_id

DEFAULT_TOKENS = 16
"""What the OpenAI API generates here when ``max_tokens`` is not given."""


class Completions:
    """The handler. With several prompts, or ``n``, choice ``i * n + j`` is sample ``j`` of prompt ``i``."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, body: bytes) -> Answer:
        request = parse(CompletionRequest, body)
        self._service.check_model(request.model)
        prompts = [await self._service.encode(prompt) for prompt in request.prompt]
        run = self._service.start(prompts, _wishes(request), self._service.choice_maker(stops=request.stop or ()))
        head = {
            "id": new_id("cmpl-"),
            "object": "text_completion",
            "created": int(self._service.now()),
            "model": self._service.model_name,
        }
        with_logprobs = request.logprobs is not None
        if request.stream:
            return EventAnswer(_events(run, head, include_usage=request.include_usage), run.cancel)
        await run.finish()
        choices = [
            _choice(index, choice.text, _logprobs(choice.logprobs, 0) if with_logprobs else None, choice.finish)
            for index, choice in enumerate(run.choices)
        ]
        return JsonAnswer({**head, "choices": choices, "usage": run.usage()})


def _wishes(request: CompletionRequest) -> Wishes:
    most = DEFAULT_TOKENS if request.max_tokens is None else request.max_tokens
    return completing_wishes(request, most_tokens=most, num_logprobs=request.logprobs, prompt_param="prompt")


def _choice(index: int, text: str, logprobs: dict[str, Any] | None, finish: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}


def _logprobs(tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    """Return parallel lists; ``offset`` is where the first token's text begins, in characters of the choice."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [{other.text: other.logprob for other in token.top} for token in tokens],
        "text_offset": offsets,
    }


async def _events(run: Run, head: dict[str, Any], *, include_usage: bool) -> AsyncGenerator[bytes, None]:
    """Yield the answer as events: pieces and finish of each choice; the usage if it was asked for; the end mark."""
    tail = {"usage": None} if include_usage else {}
    offsets = [0] * len(run.choices)
    try:
        async with aclosing(run.deltas()) as deltas:
            async for index, delta in deltas:
                if not delta:
                    continue
                logprobs = _logprobs(delta.logprobs, offsets[index]) if delta.logprobs else None
                offsets[index] += sum(len(token.text) for token in delta.logprobs)
                yield encode_event({**head, "choices": [_choice(index, delta.text, logprobs, delta.finish)], **tail})
        if include_usage:
            yield encode_event({**head, "choices": [], "usage": run.usage()})
    except Exception as error:  # noqa: BLE001  The status is sent; all that is left is to say it in the stream.
        yield encode_event(describe_failure(error).body())
    yield DONE
