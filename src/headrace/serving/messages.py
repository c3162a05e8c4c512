"""From the messages of a request to what a chat template takes: roles that templates know, content as text, arguments
as objects. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.serving.requests import FunctionTool, Message, Tool
from headrace.serving.wire import Refusal, refuse

_TEXT_PARTS = ("text", "input_text", "output_text")
_ROLES = {"developer": "system", "function": "tool"}
"""Newer and older names for roles, which templates do not know."""


def template_messages(messages: Sequence[Message], *, param: str = "messages") -> list[dict[str, Any]]:
    """Return ``messages`` for the template.

    Raises `Refusal` (400) for media and for arguments that are no JSON object.
    """
    result = []
    for number, message in enumerate(messages):
        place = f"{param}[{number}]"
        entry: dict[str, Any] = {
            "role": _ROLES.get(message.role, message.role),
            "content": text_of(message.content, param=f"{place}.content"),
        }
        for name in ("name", "tool_call_id", "reasoning_content"):
            if getattr(message, name) is not None:
                entry[name] = getattr(message, name)
        if message.tool_calls:
            entry["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": _arguments(call.function.arguments, f"{place}.tool_calls"),
                    },
                }
                for call in message.tool_calls
            ]
        result.append(entry)
    return result


def template_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    """Return the tools of a chat request for the template; None for none."""
    return [tool.model_dump(exclude_none=True) for tool in tools] if tools else None


def template_function_tools(tools: Sequence[FunctionTool] | None) -> list[dict[str, Any]] | None:
    """Return the tools of a responses request for the template, which expects them nested."""
    if not tools:
        return None
    return [
        {"type": "function", "function": tool.model_dump(exclude_none=True, exclude={"type", "strict"})}
        for tool in tools
    ]


def text_of(content: Any, *, param: str) -> str:
    """Return the text of a message's content; several parts stand on lines of their own.

    Raises `Refusal` (400) for a part that is not text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type")
        if kind in _TEXT_PARTS and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind == "refusal" and isinstance(part.get("refusal"), str):
            texts.append(part["refusal"])
        else:
            raise _refuse_part(part, f"{param}[{number}]")
    return "\n".join(texts)


def _refuse_part(part: Mapping[str, Any], param: str) -> Refusal:
    kind = part.get("type")
    if kind in _TEXT_PARTS:
        return refuse(param, f"{param} has no text.")
    if any(not url.lower().startswith("data:") for url in _urls(part)):
        # Fetching what a client names would let it reach whatever this machine reaches.
        return refuse(
            param,
            f"{param} names a place: media are taken as data: URLs only, this server fetches nothing.",
            code="media_not_fetched",
        )
    return refuse(
        param, f"{param} is of type {str(kind)[:60]!r}, and this model takes text only.", code="media_not_supported"
    )


def _urls(part: Mapping[str, Any]) -> list[str]:
    found = []
    for name, value in part.items():
        if name.endswith("url"):
            found.append(value.get("url") if isinstance(value, Mapping) else value)
    return [url for url in found if isinstance(url, str)]


def _arguments(text: str, param: str) -> dict[str, Any]:
    """Return a call's arguments as an object: templates walk through them, and a string would be walked letter by
    letter."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise refuse(param, f"{param}: arguments must be the JSON text of an object.")
    return value
