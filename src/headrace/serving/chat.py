"""`POST /v1/chat/completions`: a chat in, one or more answers out, whole or streamed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from headrace.serving.messages import template_messages, template_tools
from headrace.serving.output import Choice, Delta, TokenLogprob
from headrace.serving.requests import ChatRequest, parse
from headrace.serving.run import Run, Wishes, completing_wishes, describe_failure
from headrace.serving.service import Service
from headrace.serving.toolcalls import ToolCall
from headrace.serving.wire import DONE, Answer, EventAnswer, JsonAnswer, encode_event, new_id


class ChatCompletions:
    """The handler."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, body: bytes) -> Answer:
        request = parse(ChatRequest, body)
        self._service.check_model(request.model)
        tools = template_tools(request.tools) if request.tool_choice != "none" else None
        variables = dict(request.chat_template_kwargs or {})
        if request.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", request.reasoning_effort)
        prompt = await self._service.render(template_messages(request.messages), tools=tools, variables=variables)
        make_choice = self._service.choice_maker(
            stops=request.stop or (),
            with_tools=tools is not None,
            parallel_calls=request.parallel_tool_calls is not False,
        )
        run = self._service.start([prompt], _wishes(request), make_choice)
        head = {"id": new_id("chatcmpl-"), "created": int(self._service.now()), "model": self._service.model_name}
        if request.stream:
            return EventAnswer(_events(run, head, include_usage=request.include_usage), run.cancel)
        await run.finish()
        choices = [
            _choice(index, choice, with_logprobs=bool(request.logprobs)) for index, choice in enumerate(run.choices)
        ]
        return JsonAnswer({**head, "object": "chat.completion", "choices": choices, "usage": run.usage()})


def _wishes(request: ChatRequest) -> Wishes:
    most = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    num_logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return completing_wishes(request, most_tokens=most, num_logprobs=num_logprobs, prompt_param="messages")


def _choice(index: int, choice: Choice, *, with_logprobs: bool) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.calls:
        message["content"] = choice.text or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in choice.calls
        ]
    logprobs = _logprobs(choice.logprobs) if with_logprobs else None
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish}


def _logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    def entry(token: TokenLogprob) -> dict[str, Any]:
        return {"token": token.text, "logprob": token.logprob, "bytes": token.utf8}

    return {
        "content": [{**entry(token), "top_logprobs": [entry(other) for other in token.top]} for token in tokens],
        "refusal": None,
    }


async def _events(run: Run, head: dict[str, Any], *, include_usage: bool) -> AsyncGenerator[bytes, None]:
    """Yield the answer as events: a role for each choice, its pieces, its finish; the usage if it was asked for; the
    end mark."""
    head = {**head, "object": "chat.completion.chunk"}
    # Asked for, usage is null on all chunks but the last; not asked for, there is no such field.
    tail = {"usage": None} if include_usage else {}

    def chunk(
        index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finish: str | None = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return encode_event({**head, "choices": [choice], **tail})

    try:
        for index in range(len(run.choices)):
            yield chunk(index, {"role": "assistant", "content": ""})
        async with aclosing(run.deltas()) as deltas:
            async for index, delta in deltas:
                for body, logprobs in _delta_bodies(delta):
                    yield chunk(index, body, logprobs)
                if delta.finish:
                    yield chunk(index, {}, finish=delta.finish)
        if include_usage:
            yield encode_event({**head, "choices": [], "usage": run.usage()})
    except Exception as error:  # noqa: BLE001  The status is sent; all that is left is to say it in the stream.
        yield encode_event(describe_failure(error).body())
    yield DONE


def _delta_bodies(delta: Delta) -> list[tuple[dict[str, Any], dict[str, Any] | None]]:
    """Return the deltas of one step. Log probabilities go with its text, which may be empty while some is held back."""
    bodies: list[tuple[dict[str, Any], dict[str, Any] | None]] = []
    if delta.text or delta.logprobs:
        bodies.append(({"content": delta.text}, _logprobs(delta.logprobs) if delta.logprobs else None))
    bodies.extend((piece, None) for call in delta.calls for piece in _call_pieces(call))
    return bodies


def _call_pieces(call: ToolCall) -> list[dict[str, Any]]:
    """Return a call as deltas: id and name on the first only, so that clients that concatenate do not repeat them."""
    first = {"index": call.index, "id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""}}
    return [{"tool_calls": [first]}, {"tool_calls": [{"index": call.index, "function": {"arguments": call.arguments}}]}]
