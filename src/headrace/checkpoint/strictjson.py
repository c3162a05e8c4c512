"""JSON as strictly as two readers must agree on it. Pure; knows nothing of tensors.

Python's own reader keeps the last of two equal keys, takes ``NaN``, half surrogate pairs and numbers of any size, and gives up on deep nesting with a
`RecursionError`. Two programs that differ in such things read different weights from the same bytes, so all of it is refused here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any, NoReturn

from headrace.checkpoint.wording import quoted

_DEEPEST = 64
"""Lists and objects within each other. The format needs three; the reference reader stops at 128."""


def parse_strictly(text: bytes) -> Any:
    """Return the value that ``text`` (UTF-8) holds. Whole numbers are unbounded ints, except that ``-0`` is the float it denotes.

    Raises `ValueError` with a sentence for people: not UTF-8, a byte order mark, not JSON, a duplicate key, NaN or infinity, a number too large to be
    one, half a surrogate pair, nesting deeper than 64.
    """
    if text.startswith(b"\xef\xbb\xbf"):
        raise ValueError("It begins with a byte order mark.")
    try:
        decoded = text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"It is not UTF-8: byte {error.start:,} of it is 0x{text[error.start]:02x}.") from error
    try:
        value = _DECODER.decode(decoded)
    except RecursionError:
        raise ValueError("It is nested too deeply.") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"It is not valid JSON: {error.msg} at character {error.pos:,}.") from error
    _check_depth(value)
    if "\\u" in decoded:  # the only way in for half a pair: UTF-8 has none
        _check_texts(value)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"It has a duplicate key: {quoted(key)} is there twice.")
            seen.add(key)
    return found


def _whole_number(text: str) -> int | float:
    if text == "-0":
        return -0.0
    if len(text) > 1000:  # Python refuses from 4,300 digits on, with words about its own settings.
        raise ValueError(f"It holds a number of {len(text):,} digits.")
    return int(text)


def _fraction(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("It holds a number that is too large.")
    return value


def _constant(text: str) -> NoReturn:
    raise ValueError(f"It holds {text}, which is not JSON.")


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(_DEEPEST + 1):
        level = [item for outer in level for item in _contents(outer) if isinstance(item, (dict, list))]
        if not level:
            return
    raise ValueError("It is nested too deeply.")


def _check_texts(value: Any) -> None:
    level = [value]
    while level:
        for item in level:
            if isinstance(item, str):
                _check_text(item)
            elif isinstance(item, dict):
                for key in item:
                    _check_text(key)
        level = [item for outer in level for item in _contents(outer)]


def _contents(item: Any) -> Iterable[Any]:
    if isinstance(item, dict):
        return item.values()
    return item if isinstance(item, list) else ()


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"It holds half a surrogate pair in the text {quoted(text)}.") from error


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_int=_whole_number, parse_float=_fraction, parse_constant=_constant
)
