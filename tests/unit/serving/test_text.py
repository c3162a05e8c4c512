"""Whole characters and stop strings, whatever the pieces."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.serving.text import Detokenizer, StopScanner, longest_prefix_at_end

from .fakes import PieceTokenizer


class CountingTokenizer(PieceTokenizer):
    """Counts the tokens that it decodes."""

    num_decoded = 0

    def decode(self, tokens: Sequence[int]) -> str:
        self.num_decoded += len(tokens)
        return super().decode(tokens)


def pieces_of(tokenizer: PieceTokenizer, tokens: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.finish()]


@pytest.mark.parametrize("text", ["😀", "ď", "👩‍👩‍👧‍👦", "日本語", "plain"])
def test_characters_come_whole(text: str) -> None:
    pieces = pieces_of(PieceTokenizer(), list(text.encode()))
    assert "".join(pieces) == text
    assert all("�" not in piece for piece in pieces)
    assert pieces[-1] == ""  # nothing was left to the end


def test_an_unfinished_character_comes_at_the_end_and_once() -> None:
    assert pieces_of(PieceTokenizer(), list(b"a\xf0\x9f\x98")) == ["a", "", "", "", "�"]


def test_the_stream_goes_on_after_a_real_replacement_character() -> None:
    # The byte 0xFF is no UTF-8: its U+FFFD is sent, and what follows must come, too.
    pieces = pieces_of(PieceTokenizer(), list(b"\xffab"))
    assert pieces == ["", "�a", "b", ""]


def test_a_token_that_ends_one_character_and_begins_the_next() -> None:
    tokenizer = PieceTokenizer()
    data = "日本".encode()
    tokens = [tokenizer.token(part) for part in (data[:2], data[2:4], data[4:])]
    assert pieces_of(tokenizer, tokens) == ["", "日", "本", ""]


def test_special_tokens_have_no_text_and_break_nothing() -> None:
    assert "".join(pieces_of(PieceTokenizer(), [*b"a", 256, 256, *"ď".encode()[:1], 256, *"ď".encode()[1:]])) == "aď"


def test_broken_bytes_without_end_are_decoded_in_linear_time() -> None:
    tokenizer = CountingTokenizer()
    pieces = pieces_of(tokenizer, [0x80] * 2000)
    assert "".join(pieces) == "�" * 2000
    assert tokenizer.num_decoded < 2000 * 40


@given(st.lists(st.binary(min_size=0, max_size=5), max_size=60))
def test_pieces_join_to_the_whole_decode(parts: list[bytes]) -> None:
    tokenizer = PieceTokenizer()
    tokens = [tokenizer.token(part) for part in parts]
    assert "".join(pieces_of(tokenizer, tokens)) == tokenizer.decode(tokens)


@given(st.text(max_size=40), st.data())
def test_text_cut_anywhere_never_shows_a_broken_character(text: str, data: st.DataObject) -> None:
    raw, tokenizer, tokens = text.replace("�", "").encode(), PieceTokenizer(), []
    while raw:
        size = data.draw(st.integers(1, 4))
        tokens.append(tokenizer.token(raw[:size]))
        raw = raw[size:]
    assert all("�" not in piece for piece in pieces_of(tokenizer, tokens))


class Prefixed(PieceTokenizer):
    """Drops the space of the first token that it is given, as sentencepiece does; token 65 is also the byte 65 of a
    fallback."""

    def decode(self, tokens: Sequence[int]) -> str:
        return super().decode(tokens).removeprefix(" ")


def test_the_first_tokens_space_is_dropped_and_no_others() -> None:
    tokenizer = Prefixed()
    tokens = [tokenizer.token(piece) for piece in (" the", " sea", b"", " is", " ", " deep")]
    assert "".join(pieces_of(tokenizer, tokens)) == tokenizer.decode(tokens) == "the sea is  deep"


# Stop strings


def scan(stops: Sequence[str], pieces: Sequence[str]) -> tuple[list[str], bool]:
    scanner = StopScanner(stops)
    out = [scanner.feed(piece) for piece in pieces]
    return [*out, scanner.flush()], scanner.stopped


def test_a_stop_string_over_two_pieces_is_found_and_not_sent() -> None:
    assert scan(["bc"], ["a", "b", "c", "d"]) == (["a", "", "", "", ""], True)


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    assert scan(["bc"], ["ab", "d"]) == (["a", "bd", ""], False)
    assert scan(["aab"], ["aa", "a", "b"]) == (["", "a", "", ""], True)
    assert scan(["xyz"], ["abxy"]) == (["ab", "xy"], False)


def test_the_stop_string_that_is_complete_first_wins() -> None:
    assert scan(["abc", "b"], ["abc"]) == scan(["b", "abc"], ["abc"]) == (["a", ""], True)
    assert scan(["abc", "b"], ["a", "b", "c"]) == (["", "a", "", ""], True)
    assert scan(["bc", "abc"], ["xabc"]) == (["x", ""], True)  # both end there: the longer one


def test_without_stop_strings_everything_passes() -> None:
    assert scan([], ["a", "b"]) == (["a", "b", ""], False)


def reference(stops: Sequence[str], text: str) -> tuple[str, bool]:
    """Look at every beginning of the text, the plain way."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


@given(st.lists(st.text("ab", min_size=1, max_size=4), max_size=4), st.lists(st.text("abc", max_size=4), max_size=12))
def test_stopping_does_not_depend_on_how_the_text_is_cut(stops: list[str], pieces: list[str]) -> None:
    out, stopped = scan(stops, pieces)
    assert ("".join(out), stopped) == reference(stops, "".join(pieces))


@given(st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4), st.text("abc", max_size=12))
def test_the_longest_proper_prefix_is_held(stops: list[str], text: str) -> None:
    size = longest_prefix_at_end(text, stops)
    fitting = [
        n
        for n in range(len(text) + 1)
        if any(len(stop) > n and stop.startswith(text[len(text) - n :]) for stop in stops)
    ]
    assert size == max(fitting)
