"""Texts for a calibration: where they are from, and what becomes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.engines.calibration import MOST_TOKENS, CalibrationTexts, read_texts, to_sequences
from headrace.errors import InvalidSetting


def tokenizer(text: str) -> dict[str, Any]:
    """One token a word, the number in it, between a 1 and a 2; of a text without numbers none at all."""
    words = [int(word) for word in text.split() if word.isdigit()]
    return {"input_ids": [1, *words, 2] if words else []}


def texts(*given: str) -> CalibrationTexts:
    return CalibrationTexts(texts=given, origin="tests")


def test_our_own_are_many_and_of_many_kinds() -> None:
    own = read_texts(None)
    assert own.is_own and own.origin == "Headrace's own texts"
    assert len(own.texts) == len(set(own.texts)) >= 30
    together = " ".join(own.texts)
    assert len(together.split()) > 1000
    assert all(sample in together for sample in ("def mean", "SELECT", "25 = 5²", "Bibliothek", "图书馆"))


def test_a_file_has_one_text_in_each_line(tmp_path: Path) -> None:
    file = tmp_path / "texts.txt"
    file.write_bytes("one two\r\n\n   \n  drei – vier \npage\x0cbreak\u2028here".encode())
    found = read_texts(file)
    assert found.texts == ("one two", "drei – vier", "page\x0cbreak\u2028here")
    assert found.origin == str(file) and not found.is_own
    assert read_texts(str(file)) == found


def test_texts_that_are_given_stay_as_they_are() -> None:
    found = read_texts(["two\nlines", " ", "x"])
    assert found.texts == ("two\nlines", "x")
    assert found.origin == "the texts that were given" and not found.is_own


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file or directory"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b" \n\n", "has no text"),
    ],
)
def test_files_that_cannot_be_used(content: bytes | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "texts.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InvalidSetting, match=message) as caught:
        read_texts(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"), [([], "has no text"), (["", " "], "has no text"), (["x", 3], "type int")]
)
def test_lists_that_cannot_be_used(given: Any, message: str) -> None:
    with pytest.raises(InvalidSetting, match=message):
        read_texts(given)


def test_each_text_is_a_sequence_and_long_ones_are_cut() -> None:
    long = " ".join(str(number) for number in range(10, 20))
    assert to_sequences(texts("5 6", long), tokenizer, longest=5) == (
        (1, 5, 6, 2),
        (1, 10, 11, 12, 13),
        (14, 15, 16, 17, 18),
        (19, 2),
    )


@pytest.mark.parametrize("longest", [None, 1 << 20])
def test_a_sequence_is_never_longer_than_the_limit(longest: int | None) -> None:
    found = to_sequences(texts("7 " * 1000), tokenizer, longest=longest)
    assert [len(sequence) for sequence in found] == [MOST_TOKENS, 1002 - MOST_TOKENS]


def test_texts_without_a_token_are_refused() -> None:
    assert to_sequences(texts("no number", "5"), tokenizer) == ((1, 5, 2),)
    with pytest.raises(InvalidSetting, match="makes no token"):
        to_sequences(texts("no number"), tokenizer)
