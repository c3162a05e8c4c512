"""Tool calls in a model's text, as Hermes, Qwen and their descendants write them.

    <tool_call>{"name": …, "arguments": {…}}</tool_call>

Pure: text in, text and calls out. Other models' notations are not known here; their calls stay text. So does a call
that is not well formed: nothing that the model wrote is lost.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from headrace.serving.text import longest_prefix_at_end
from headrace.serving.wire import new_id

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One complete call."""

    index: int
    id: str
    name: str
    arguments: str
    """JSON text of an object."""


@dataclass(slots=True)
class Parsed:
    """What a piece of text turned out to be."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()


class ToolCallParser:
    """Splits a text that comes in pieces into what is said and what is called. White space around calls is dropped."""

    def __init__(self, *, most_calls: int | None = None) -> None:
        self._most_calls = most_calls
        self._outside = ""  # text that may be the beginning of an opening tag, or white space before one
        self._inside: str | None = None  # text after an opening tag
        self._said = False
        self.num_calls = 0

    def feed(self, text: str) -> Parsed:
        """Take the next piece; return what is certain."""
        parsed = Parsed()
        while text or self._inside is not None:
            if self._inside is None:
                text = self._read_outside(text, parsed)
                if self._inside is None:
                    break
            else:
                self._inside, text = self._inside + text, ""
                rest = self._read_inside(parsed)
                if rest is None:
                    break
                text = rest
        return parsed

    def flush(self) -> Parsed:
        """Return what was held back when the text ended; a call that was never closed is text."""
        held = self._outside if self._inside is None else self._outside + OPEN + self._inside
        self._outside, self._inside = "", None
        return Parsed(self._kept(held))

    def _read_outside(self, text: str, parsed: Parsed) -> str:
        text, self._outside = self._outside + text, ""
        before, tag, after = text.partition(OPEN)
        if tag:
            # The white space waits until the call turns out to be one.
            said = before.rstrip()
            self._outside = before[len(said) :]
            parsed.text += self._kept(said)
            self._inside = ""
            return after
        size = longest_prefix_at_end(text, (OPEN,))
        certain = text[: len(text) - size].rstrip()
        self._outside = text[len(certain) :]
        parsed.text += self._kept(certain)
        return ""

    def _read_inside(self, parsed: Parsed) -> str | None:
        """Return what follows a call that is complete; None while it is not."""
        assert self._inside is not None
        end = self._inside.find(CLOSE)
        while end >= 0:
            call = self._read_call(self._inside[:end])
            if call is not None:
                rest = self._inside[end + len(CLOSE) :]
                if self._most_calls is None or self.num_calls < self._most_calls:
                    parsed.calls = (*parsed.calls, call)
                    self.num_calls += 1
                self._outside, self._inside = "", None
                return rest
            end = self._inside.find(CLOSE, end + 1)  # It may stand within a string of the arguments.
        return None

    def _read_call(self, text: str) -> ToolCall | None:
        try:
            value = json.loads(text)
            arguments = value.get("arguments", value.get("parameters", {}))
            if isinstance(arguments, str):
                arguments = json.loads(arguments)
            name = value["name"]
        except (ValueError, KeyError, AttributeError, RecursionError):
            return None
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        return ToolCall(self.num_calls, new_id("call_"), name, json.dumps(arguments, ensure_ascii=False))

    def _kept(self, text: str) -> str:
        if self.num_calls and not text.strip():
            return ""  # Line ends between and after calls are no content.
        return text
