"""Without a tokenizer, tokens are their numbers: whole, and piece by piece as they come."""

from __future__ import annotations

import pytest

from headrace.cli.token_ids import TokenIds
from headrace.serving.text import Detokenizer
from headrace.serving.wire import Refusal


@pytest.mark.parametrize("tokens", [[], [0], [12, 45, 7], list(range(40)), [1, 11, 111, 1]])
def test_pieces_join_to_the_numbers(tokens: list[int]) -> None:
    detokenizer = Detokenizer(TokenIds())
    text = "".join(detokenizer.push(token) for token in tokens) + detokenizer.finish()
    assert text == TokenIds().decode(tokens)
    assert [int(number) for number in text.split()] == tokens


def test_a_chat_is_refused_by_name() -> None:
    with pytest.raises(Refusal, match="--skip-tokenizer-init") as caught:
        TokenIds().render([{"role": "user", "content": "hi"}], tools=None, variables={})
    assert caught.value.status == 400


def test_text_is_no_prompt() -> None:
    assert TokenIds().encode("hello") == []
    assert TokenIds().writes_tool_calls is False
