"""Tool calls in text, in pieces of any size; what is no call stays text."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.serving.toolcalls import ToolCallParser

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Brno", "note": "a </tool_call> inside"}}\n</tool_call>'
SECOND = '<tool_call>{"name": "time", "arguments": "{\\"zone\\": 1}"}</tool_call>'


def parse(pieces: Sequence[str], *, most_calls: int | None = None) -> tuple[str, list[tuple[int, str, object]]]:
    parser = ToolCallParser(most_calls=most_calls)
    parsed = [*(parser.feed(piece) for piece in pieces), parser.flush()]
    calls = [call for each in parsed for call in each.calls]
    assert len({call.id for call in calls}) == len(calls) == parser.num_calls
    return "".join(each.text for each in parsed), [
        (call.index, call.name, json.loads(call.arguments)) for call in calls
    ]


WEATHER = (0, "weather", {"city": "Brno", "note": "a </tool_call> inside"})


def test_a_call_and_text_before_it() -> None:
    assert parse(["Let me look.\n" + CALL]) == ("Let me look.", [WEATHER])


def test_two_calls_and_the_line_ends_around_them() -> None:
    assert parse([f"\n{CALL}\n{SECOND}\n"]) == ("", [WEATHER, (1, "time", {"zone": 1})])


def test_only_as_many_calls_as_are_wanted() -> None:
    assert parse([CALL + SECOND], most_calls=1) == ("", [WEATHER])


@pytest.mark.parametrize(
    "text",
    [
        "a < b and <tool",
        "<tool_call>",
        "<tool_call>{not json}</tool_call> more",
        '<tool_call>{"name": 4, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "x", "arguments": [1]}</tool_call>',
        '<tool_call>["name"]</tool_call>',
        "  spaces at both ends  ",
        '<tool_call>{"name": "x", "argu',
    ],
)
def test_what_is_no_call_is_text(text: str) -> None:
    assert parse([text]) == (text, [])
    assert parse(list(text)) == (text, [])


@given(st.data())
def test_the_result_does_not_depend_on_how_the_text_is_cut(data: st.DataObject) -> None:
    text = f"So.\n{CALL}\n{SECOND}"
    cuts = sorted(data.draw(st.sets(st.integers(1, len(text) - 1), max_size=8)))
    pieces = [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(pieces) == ("So.", [WEATHER, (1, "time", {"zone": 1})])
