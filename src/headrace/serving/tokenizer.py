"""Text to tokens and back: the protocol that the handlers use, and a Transformers tokenizer behind it.

It renders chats with the checkpoint's own template, and lets no request bring another.
"""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from headrace.serving.text import Decoder
from headrace.serving.toolcalls import OPEN
from headrace.serving.wire import Refusal, refuse

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TextTokenizer(Decoder, Protocol):
    """What the handlers need of a tokenizer. Thread-safe."""

    @property
    def writes_tool_calls(self) -> bool:
        """Whether the model was taught to write tool calls in the notation that is parsed here."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a plain prompt, with what the tokenizer puts before one."""
        ...

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> list[int]:
        """Return the tokens of a chat, up to where the answer begins.

        Raises `Refusal` (400) where the template does not take it, or is absent.
        """
        ...


class HubTokenizer:
    """A tokenizer of Transformers.

    One lock: the Rust tokenizers refuse to be used and reconfigured at the same time ("Already borrowed").
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._bytes = _byte_tokens(tokenizer)
        self._templates = " ".join(_templates(tokenizer))
        # A request's variables may not stand where our own arguments do: what is rendered, tokenised and returned is
        # not theirs to say.
        self._reserved = set(inspect.signature(tokenizer.apply_chat_template).parameters) - {"kwargs"} | {
            "messages",
            "add_special_tokens",
        }

    @property
    def writes_tool_calls(self) -> bool:
        return OPEN in self._templates

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    def decode(self, tokens: Sequence[int]) -> str:
        with self._lock:
            # Cleaning up takes spaces away that an earlier piece may already have brought.
            return str(
                self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
            )

    def byte_of(self, token: int) -> int | None:
        return self._bytes.get(token)

    def encode(self, text: str) -> list[int]:
        with self._lock:
            return list(self._tokenizer(text, verbose=False)["input_ids"])

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> list[int]:
        if not self.has_chat_template:
            raise Refusal(
                400,
                "This model has no chat template, so it cannot chat. Use /v1/completions with a plain prompt.",
                code="no_chat_template",
            )
        taken = sorted(self._reserved & set(variables))
        if taken:
            raise refuse("chat_template_kwargs", f"chat_template_kwargs must not set {', '.join(taken)}.")
        try:
            with self._lock:
                tokens = self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tools=[dict(tool) for tool in tools] if tools else None,
                    add_generation_prompt=True,
                    tokenize=True,
                    return_dict=False,
                    **variables,
                )
        except ImportError:
            raise  # jinja2 is missing: the server's fault, not the request's.
        except (
            Exception
        ) as error:  # A template is a program: it raises what it likes on messages that it was not written for.
            first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise refuse(
                "messages",
                f"The model's chat template does not take these messages: {first_line[:500]}",
                code="chat_template_error",
            ) from error
        return list(tokens)


def _templates(tokenizer: Any) -> list[str]:
    """Return the tokenizer's chat templates: none, one, or several by name."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, Mapping):
        return [str(value) for value in template.values()]
    return [template] if template else []


def _byte_tokens(tokenizer: Any) -> dict[int, int]:
    """Return token → byte for the 256 byte-fallback tokens, which are told from text that looks like them by how they
    decode."""
    found = {}
    for text, token in tokenizer.get_vocab().items():
        match = _BYTE_TOKEN.fullmatch(text)
        if match and tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False) != text:
            found[token] = int(match[1], 16)
    return found
