"""`POST /v1/responses`: the same chat in another shape.

Nothing is stored, so every request brings its whole conversation.
"""

from __future__ import annotations

from typing import Any

from headrace.serving.engine import SamplingOptions
from headrace.serving.messages import template_function_tools, template_messages, text_of
from headrace.serving.requests import Message, ResponseRequest, validate
from headrace.serving.requests import parse as parse_body
from headrace.serving.responseevents import ResponseEvents
from headrace.serving.run import Wishes
from headrace.serving.service import Service
from headrace.serving.wire import Answer, EventAnswer, JsonAnswer, new_id, refuse


class Responses:
    """The handler."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, body: bytes) -> Answer:
        request = parse_body(ResponseRequest, body)
        self._service.check_model(request.model)
        tools = template_function_tools(request.tools) if request.tool_choice != "none" else None
        messages = template_messages(input_messages(request), param="input")
        prompt = await self._service.render(messages, tools=tools, variables=request.chat_template_kwargs or {})
        make_choice = self._service.choice_maker(
            with_tools=tools is not None, parallel_calls=request.parallel_tool_calls is not False
        )
        run = self._service.start([prompt], _wishes(request), make_choice)
        events = ResponseEvents(run, self._head(request))
        if request.stream:
            return EventAnswer(events.stream(), run.cancel)
        await run.finish()
        return JsonAnswer(events.final())

    def _head(self, request: ResponseRequest) -> dict[str, Any]:
        """Return the fields of a response that do not change while it is made."""
        return {
            "id": new_id("resp_"),
            "object": "response",
            "created_at": int(self._service.now()),
            "model": self._service.model_name,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata if isinstance(request.metadata, dict) else {},
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": request.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": [tool.model_dump() for tool in request.tools or ()],
            "top_p": request.top_p,
            "truncation": "disabled",
        }


def input_messages(request: ResponseRequest) -> list[Message]:
    """Return a responses request's instructions and items as chat messages.

    Raises `Refusal` (400) for an item that refers to something stored.
    """
    messages = []
    if request.instructions:
        messages.append(Message(role="system", content=request.instructions))
    if isinstance(request.input, str):
        return [*messages, Message(role="user", content=request.input)]
    for number, item in enumerate(request.input):
        place = f"input[{number}]"
        kind = item.get("type", "message")
        if kind == "message":
            messages.append(
                validate(Message, {name: value for name, value in item.items() if name in ("role", "content")}, place)
            )
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            messages.append(validate(Message, {"role": "assistant", "tool_calls": [call]}, place))
        elif kind == "function_call_output":
            output = text_of(item.get("output"), param=f"{place}.output")
            messages.append(
                validate(Message, {"role": "tool", "content": output, "tool_call_id": item.get("call_id")}, place)
            )
        elif kind != "reasoning":  # What a model thought earlier is not shown to it again.
            raise refuse(place, f"{place} is of type {str(kind)[:60]!r}, which this server does not take.")
    if not messages:
        raise refuse("input", "input holds no message.")
    return _joined_calls(messages)


def _joined_calls(messages: list[Message]) -> list[Message]:
    """Return ``messages`` with calls that follow each other, or an assistant's text, in one message: templates know one
    turn, not its items."""
    joined: list[Message] = []
    for message in messages:
        last = joined[-1] if joined else None
        if message.tool_calls and last is not None and last.role == "assistant":
            joined[-1] = last.model_copy(update={"tool_calls": [*(last.tool_calls or ()), *message.tool_calls]})
        else:
            joined.append(message)
    return joined


def _wishes(request: ResponseRequest) -> Wishes:
    options = SamplingOptions(
        max_tokens=1,
        min_tokens=request.min_tokens or 0,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k if request.top_k is None else max(request.top_k, 0),
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        seed=request.seed,
    )
    return Wishes(
        options=options,
        most_tokens=request.max_output_tokens,
        ignore_end=bool(request.ignore_eos),
        prompt_param="input",
    )
