from __future__ import annotations

import pytest

from headrace.errors import InvalidSetting
from headrace.storage import parse_uri
from headrace.storage.revision import with_revision


@pytest.mark.parametrize(
    ("uri", "revision", "found"),
    [
        ("hf://org/name", None, "hf://org/name"),
        ("s3://bucket/key", None, "s3://bucket/key"),
        ("hf://org/name", "v1.0", "hf://org/name@v1.0"),
        ("hf://org/name/sub", "refs/pr/4", "hf://org/name@refs%2Fpr%2F4/sub"),
        ("hf://org/name@v1", "v1", "hf://org/name@v1"),
        ("org/name", "main", "hf://org/name@main"),
    ],
)
def test_a_revision_becomes_a_part_of_the_uri(uri: str, revision: str | None, found: str) -> None:
    pinned = with_revision(parse_uri(uri), revision)
    assert str(pinned) == found
    assert pinned == parse_uri(found)
    assert parse_uri(pinned.text) == pinned, "who opens what was typed gets the revision too"


@pytest.mark.parametrize(
    ("uri", "revision", "says"),
    [
        ("s3://bucket/key", "main", "Only hub repositories"),
        ("/folder", "main", "Only hub repositories"),
        ("hf://org/name@v1", "v2", "given twice"),
        ("hf://org/name", "", "empty"),
    ],
)
def test_a_revision_that_cannot_be_meant_is_refused(uri: str, revision: str, says: str) -> None:
    with pytest.raises(InvalidSetting, match=says):
        with_revision(parse_uri(uri), revision)
