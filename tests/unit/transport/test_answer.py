from __future__ import annotations

import pytest

from headrace.errors import HeadraceError, ObjectChanged, WrongRange
from headrace.storage import HttpRange, StoredObject
from headrace.transport.answer import end_of_answer

STORED = StoredObject("k", 1000, '"v1"')
URI = "https://host/k"


def _end(status: int = 206, start: int = 10, stop: int = 20, pinned: str | None = '"v1"', **headers: str) -> int:
    asked = HttpRange("https", "host", 443, "/k", (), start, stop, pinned)
    return end_of_answer(asked, STORED, URI, status, {name.replace("_", "-"): value for name, value in headers.items()})


@pytest.mark.parametrize(
    ("headers", "stop"),
    [
        ({"content_range": "bytes 10-19/1000"}, 20),
        ({"content_range": "bytes 10-19/*"}, 20),
        ({"content_range": " Bytes  10-19/1000 "}, 20),
        ({"content_range": "bytes 10-10/1000"}, 11),
        ({"content_range": "bytes 10-19/1000", "content_length": "10"}, 20),
        ({"content_range": "bytes 10-19/1000", "content_length": "999", "transfer_encoding": "chunked"}, 20),
        ({"content_range": "bytes 10-19/1000", "etag": '"v1"', "content_encoding": "identity"}, 20),
        ({"content_range": "bytes 10-19/1000", "content_encoding": ""}, 20),
    ],
)
def test_right_answers(headers: dict[str, str], stop: int) -> None:
    assert _end(**headers) == stop


@pytest.mark.parametrize(
    ("headers", "kind"),
    [
        ({}, WrongRange),
        ({"content_range": "bytes 9-19/1000"}, WrongRange),
        ({"content_range": "bytes 11-19/1000"}, WrongRange),
        ({"content_range": "bytes 10-20/1000"}, WrongRange),
        ({"content_range": "bytes 10-9/1000"}, WrongRange),
        ({"content_range": "bytes 10-19"}, WrongRange),
        ({"content_range": "bytes */1000"}, WrongRange),
        ({"content_range": "bytes 10-19/1000, bytes 10-19/1000"}, WrongRange),
        ({"content_range": "bytes -10-19/1000"}, WrongRange),
        ({"content_range": "bytes 10-19/1000", "content_length": "11"}, WrongRange),
        ({"content_range": "bytes 10-19/1000", "content_encoding": "gzip"}, WrongRange),
        ({"content_range": "bytes 10-19/1000", "content_encoding": "GZIP"}, WrongRange),
        ({"content_range": "bytes 10-19/1000", "transfer_encoding": "gzip, chunked"}, WrongRange),
        ({"content_range": "bytes 10-19/999"}, ObjectChanged),
        ({"content_range": "bytes 10-19/1000", "etag": '"v2"'}, ObjectChanged),
        ({"content_range": "bytes 10-19/1000", "etag": 'W/"v1"'}, ObjectChanged),
    ],
)
def test_wrong_answers(headers: dict[str, str], kind: type[HeadraceError]) -> None:
    with pytest.raises(HeadraceError) as caught:
        _end(**headers)
    assert type(caught.value) is kind
    assert URI in str(caught.value)


def test_the_etag_is_not_looked_at_where_the_store_has_another_condition() -> None:
    assert _end(pinned=None, content_range="bytes 10-19/1000", etag='"v2"') == 20


@pytest.mark.parametrize(
    ("headers", "is_right"),
    [
        ({}, True),
        ({"x-goog-generation": "7"}, True),
        ({"x-goog-generation": "8"}, False),
        ({"x-goog-generation": ""}, False),
    ],
)
def test_a_version_in_a_header_of_its_own_is_compared(headers: dict[str, str], is_right: bool) -> None:
    asked = HttpRange("https", "host", 443, "/k", (), 10, 20, version_header=("x-goog-generation", "7"))
    right = {"content-range": "bytes 10-19/1000", "etag": '"any"', **headers}
    if is_right:
        assert end_of_answer(asked, STORED, URI, 206, right) == 20
        return
    with pytest.raises(ObjectChanged, match=f"was 7 and is now {headers['x-goog-generation']}") as caught:
        end_of_answer(asked, STORED, URI, 206, right)
    assert URI in caught.value.what


def test_a_200_is_the_whole_object_or_nothing() -> None:
    assert _end(200, 0, 1000, content_length="1000") == 1000
    for start, stop, headers, kind in [
        (0, 999, {"content_length": "1000"}, WrongRange),
        (1, 1000, {"content_length": "1000"}, WrongRange),
        (0, 1000, {}, WrongRange),
        (0, 1000, {"transfer_encoding": "chunked"}, WrongRange),
        (0, 1000, {"content_length": "1001"}, ObjectChanged),
        (0, 1000, {"content_length": "1000", "etag": '"v2"'}, ObjectChanged),
    ]:
        with pytest.raises(HeadraceError) as caught:
            _end(200, start, stop, **headers)
        assert type(caught.value) is kind, (start, stop, headers)


def test_long_header_values_are_not_repeated_in_full() -> None:
    with pytest.raises(WrongRange) as caught:
        _end(content_range="x" * 5000)
    assert len(str(caught.value)) < 500
