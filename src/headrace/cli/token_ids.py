"""What stands for a tokenizer where none is wanted: prompts come as token ids, and answers go as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.serving.wire import Refusal


class TokenIds:
    """A `headrace.serving.tokenizer.TextTokenizer` without a vocabulary. The text of a token is its number; numbers are separated by spaces."""

    @property
    def writes_tool_calls(self) -> bool:
        return False

    def encode(self, text: str) -> list[int]:
        """Return no token: there is nothing to make them with, and a prompt without tokens is refused."""
        return []

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> list[int]:
        raise Refusal(
            400,
            "This server was started with --skip-tokenizer-init, so it cannot chat. Use /v1/completions with a prompt of token ids.",
            code="no_tokenizer",
        )

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, tokens))

    def byte_of(self, token: int) -> int | None:
        return None
