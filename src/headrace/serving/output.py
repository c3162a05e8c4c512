"""One choice of an answer: tokens in, pieces of text, tool calls and log probabilities out.

Pure; the same path for streamed and whole answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from headrace.serving.engine import Step
from headrace.serving.text import Decoder, Detokenizer, StopScanner
from headrace.serving.toolcalls import Parsed, ToolCall, ToolCallParser
from headrace.serving.wire import finite

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's text and log probability, which is finite."""

    text: str
    logprob: float
    top: tuple[TokenLogprob, ...] = ()

    @property
    def utf8(self) -> list[int] | None:
        """The token's bytes; None for a piece of a character, whose bytes the text does not tell."""
        return None if "�" in self.text else list(self.text.encode("utf-8"))


@dataclass(slots=True)
class Delta:
    """What one step added to a choice."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason | None = None

    def __bool__(self) -> bool:
        return bool(self.text or self.calls or self.logprobs or self.finish)


class Choice:
    """Gathers one sample. Text that may yet become part of a character, of a stop string or of a tool call is held
    back, and nothing else."""

    def __init__(
        self, decoder: Decoder, *, stops: Sequence[str] = (), tool_calls: ToolCallParser | None = None
    ) -> None:
        self._decoder = decoder
        self._detokenizer = Detokenizer(decoder)
        self._scanner = StopScanner(stops)
        self._tool_calls = tool_calls
        self.num_tokens = 0
        self.finish: FinishReason | None = None
        self.text = ""
        self.calls: list[ToolCall] = []
        self.logprobs: list[TokenLogprob] = []

    def push(self, step: Step) -> Delta:
        """Take the next token and return what can be sent. Not to be called once `finish` is set."""
        self.num_tokens += 1
        delta = Delta()
        raw = ""
        if not step.hidden:
            raw = self._detokenizer.push(step.token)
            if step.logprob is not None:
                delta.logprobs.append(self._describe(step))
        if step.finish:
            raw += self._detokenizer.finish()
        text = self._scanner.feed(raw)
        ended = self._scanner.stopped or step.finish is not None
        if ended:
            text += self._scanner.flush()
        self._split(text, delta, ended=ended)
        if ended:
            self.finish = delta.finish = self._reason(step)
        self._keep(delta)
        return delta

    def _split(self, text: str, delta: Delta, *, ended: bool) -> None:
        """Fill in ``delta``'s text and calls.

        What was held back until the end goes through the parser like all else.
        """
        if self._tool_calls is None:
            delta.text = text
            return
        parsed = self._tool_calls.feed(text)
        tail = self._tool_calls.flush() if ended else Parsed()
        delta.text = parsed.text + tail.text
        delta.calls = parsed.calls

    def _reason(self, step: Step) -> FinishReason:
        if step.finish == "length" and not self._scanner.stopped:
            return "length"
        return "tool_calls" if self._tool_calls is not None and self._tool_calls.num_calls else "stop"

    def _keep(self, delta: Delta) -> None:
        self.text += delta.text
        self.calls.extend(delta.calls)
        self.logprobs.extend(delta.logprobs)

    def _describe(self, step: Step) -> TokenLogprob:
        assert step.logprob is not None
        top = tuple(TokenLogprob(self._decoder.decode((token,)), finite(logprob)) for token, logprob in step.top)
        return TokenLogprob(self._decoder.decode((step.token,)), finite(step.logprob), top)
