"""How a response of the responses API is told: its items, and the numbered events that build them up one by one."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from headrace.serving.run import Run, describe_failure
from headrace.serving.toolcalls import ToolCall
from headrace.serving.wire import encode_event, new_id


class ResponseEvents:
    """One response: streamed by `stream`, or whole by `final` once its run has finished."""

    def __init__(self, run: Run, head: dict[str, Any]) -> None:
        self._run = run
        self._head = head
        self._message_id = new_id("msg_")
        self._number = 0
        self._items: list[dict[str, Any]] = []  # complete items, in order
        self._text: str | None = None  # the text of the message that is open

    def final(self) -> dict[str, Any]:
        """Return the complete response of a run that was not streamed."""
        choice = self._run.choices[0]
        items = [self._message(choice.text, self._ending())] if choice.text or not choice.calls else []
        return self._response(self._ending(), [*items, *map(_call_item, choice.calls)])

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield every event, ending with ``response.completed``, ``response.incomplete`` or ``response.failed``."""
        try:
            yield self._event("response.created", response=self._response("in_progress", []))
            yield self._event("response.in_progress", response=self._response("in_progress", []))
            async with aclosing(self._run.deltas()) as deltas:
                async for _, delta in deltas:
                    if delta.text:
                        for event in self._add_text(delta.text):
                            yield event
                    for call in delta.calls:
                        for event in self._add_call(call):
                            yield event
            if not self._items and self._text is None:
                for event in self._open_message():  # An empty answer is a message without text, not nothing.
                    yield event
            ending = self._ending()
            for event in self._close_message(ending):
                yield event
            yield self._event(f"response.{ending}", response=self._response(ending, self._items))
        except Exception as error:  # noqa: BLE001  The status is sent; all that is left is to say it in the stream.
            refusal = describe_failure(error)
            yield self._event("error", message=refusal.message, code=refusal.code, param=refusal.param)
            failure = {"code": "server_error", "message": refusal.message}
            yield self._event("response.failed", response={**self._response("failed", self._items), "error": failure})

    def _add_text(self, text: str) -> list[bytes]:
        events = self._open_message() if self._text is None else []
        assert self._text is not None
        self._text += text
        place = self._place()
        return [*events, self._event("response.output_text.delta", **place, delta=text, logprobs=[])]

    def _add_call(self, call: ToolCall) -> list[bytes]:
        events = self._close_message("completed")
        item, index = _call_item(call), len(self._items)
        opened = {**item, "arguments": "", "status": "in_progress"}
        events += [
            self._event("response.output_item.added", output_index=index, item=opened),
            self._event(
                "response.function_call_arguments.delta", item_id=item["id"], output_index=index, delta=call.arguments
            ),
            self._event(
                "response.function_call_arguments.done",
                item_id=item["id"],
                output_index=index,
                name=call.name,
                arguments=call.arguments,
            ),
            self._event("response.output_item.done", output_index=index, item=item),
        ]
        self._items.append(item)
        return events

    def _open_message(self) -> list[bytes]:
        if self._items:
            self._message_id = new_id("msg_")
        self._text = ""
        opened = {**self._message("", "in_progress"), "content": []}
        return [
            self._event("response.output_item.added", output_index=len(self._items), item=opened),
            self._event("response.content_part.added", **self._place(), part=_text_part("")),
        ]

    def _close_message(self, status: str) -> list[bytes]:
        if self._text is None:
            return []
        text, place, index = self._text, self._place(), len(self._items)
        item = self._message(text, status)
        self._items.append(item)
        self._text = None
        return [
            self._event("response.output_text.done", **place, text=text, logprobs=[]),
            self._event("response.content_part.done", **place, part=_text_part(text)),
            self._event("response.output_item.done", output_index=index, item=item),
        ]

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._message_id, "output_index": len(self._items), "content_index": 0}

    def _message(self, text: str, status: str) -> dict[str, Any]:
        return {
            "id": self._message_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [_text_part(text)],
        }

    def _ending(self) -> str:
        return "incomplete" if self._run.choices[0].finish == "length" else "completed"

    def _response(self, status: str, items: list[dict[str, Any]]) -> dict[str, Any]:
        ended = status in ("completed", "incomplete")
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": reason,
            "output": list(items),
            "usage": self._usage() if ended else None,
        }

    def _usage(self) -> dict[str, Any]:
        prompt, output = self._run.num_prompt_tokens, self._run.num_output_tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + output,
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = encode_event({"type": kind, "sequence_number": self._number, **fields}, name=kind)
        self._number += 1
        return event


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call_item(call: ToolCall) -> dict[str, Any]:
    item_id = "fc_" + call.id.removeprefix("call_")
    return {
        "id": item_id,
        "type": "function_call",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "status": "completed",
    }
