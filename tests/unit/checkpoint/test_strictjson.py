from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.checkpoint.strictjson import parse_strictly


def test_values() -> None:
    assert parse_strictly(b' {"a": [1, -2, 1.5, true, null, "x", {}], "b": 18446744073709551616} ') == {
        "a": [1, -2, 1.5, True, None, "x", {}],
        "b": 1 << 64,
    }


def test_minus_zero_is_no_whole_number() -> None:
    value = parse_strictly(b"-0")
    assert type(value) is float
    assert math.copysign(1, value) == -1


def test_whole_pairs_are_text() -> None:
    assert parse_strictly(rb'"\ud83d\ude00"') == "😀"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (rb'"\ud83d"', "half a surrogate pair"),
        (rb'{"a": [{"\ude00": 1}]}', "half a surrogate pair"),
        (b'{"a": {"b": 1, "c": 2, "b": 1}}', "duplicate key: 'b'"),
        (rb'{"a": 1, "\u0061": 1}', "duplicate key: 'a'"),
        (b"[Infinity]", "Infinity, which is not JSON"),
        (b"[-Infinity]", "-Infinity"),
        (b"1e400", "too large"),
        (b"9" * 1001, "1,001 digits"),
        (b"[" * 66 + b"]" * 66, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
        (b"\xed\xa0\x80", "not UTF-8: byte 0"),
        (b"{}{}", "Extra data at character 2"),
        (b"", "not valid JSON"),
        (b'"a\nb"', "Invalid control character"),
        (b"{'a': 1}", "not valid JSON"),
        (b"[1,]", "not valid JSON"),
        (b"01", "Extra data"),
    ],
)
def test_refused(text: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=r"^It ") as caught:
        parse_strictly(text)
    assert words in str(caught.value)


def test_nesting_up_to_the_limit() -> None:
    assert parse_strictly(b"[" * 65 + b"]" * 65) != []


@settings(deadline=None)
@given(st.binary(max_size=40) | st.text('[]{}",:0-eE.\\u', max_size=30).map(str.encode))
def test_nothing_but_value_errors(text: bytes) -> None:
    try:
        parse_strictly(text)
    except ValueError as error:
        assert str(error).startswith("It ")
