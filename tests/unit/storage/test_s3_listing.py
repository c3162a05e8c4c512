"""Servers that know only the older listing, and what is read off a listing of versions."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import quote

import pytest

from headrace.errors import AccessDenied, StorageError
from headrace.storage.s3 import S3Store

from .s3_stub import Answer, Asked, S3Stub, error, listing

OpenS3 = Callable[..., S3Store]
KEYS = [f"m/{number:02}" for number in range(7)] + ["m/z x"]


def old_page(asked: Asked, *, names_next: bool = True, page_keys: int = 3) -> Answer:
    """A page of ListObjects, which knows ``marker`` and nothing of tokens."""
    marker = asked.query.get("marker", "")
    rest = [key for key in KEYS if key > marker]
    keys, more = rest[:page_keys], len(rest) > page_keys
    contents = "".join(
        f"<Contents><Key>{quote(key)}</Key><ETag>&quot;e&quot;</ETag><Size>1</Size></Contents>" for key in keys
    )
    after = f"<NextMarker>{quote(keys[-1])}</NextMarker>" if more and names_next else ""
    text = (
        f"<ListBucketResult><EncodingType>url</EncodingType><IsTruncated>{'true' if more else 'false'}</IsTruncated>"
        f"<Marker>{quote(marker)}</Marker>{after}{contents}</ListBucketResult>"
    )
    return Answer(200, text.encode())


def names_of(store: S3Store) -> list[str]:
    return [f"m/{item.key}" for item in store.list_level().objects]


@pytest.mark.parametrize(
    "refusal",
    [
        error(501, "NotImplemented", "A header you provided implies functionality that is not implemented."),
        error(400, "InvalidArgument", "list-type is unknown"),
        error(405, "MethodNotAllowed"),
        Answer(501),
        Answer(400),
    ],
)
def test_a_server_that_refuses_the_newer_listing_is_asked_by_the_older(open_s3: OpenS3, refusal: Answer) -> None:
    with S3Stub(lambda asked: refusal if "list-type" in asked.query else old_page(asked)) as stub:
        store = open_s3(endpoint=stub.endpoint)
        assert names_of(store) == KEYS
        store.list_level("sub")
        assert ["list-type" in asked.query for asked in stub.asked] == [True, False, False, False, False, False, False]


@pytest.mark.parametrize("names_next", [True, False])
def test_a_server_that_takes_the_newer_listing_for_the_older_is_listed_to_its_end(
    open_s3: OpenS3, names_next: bool
) -> None:
    """Its first page is cut and names no token: taken for the end, files would be missing."""
    with S3Stub(lambda asked: old_page(asked, names_next=names_next)) as stub:
        assert names_of(open_s3(endpoint=stub.endpoint)) == KEYS
        assert [asked.query.get("marker") for asked in stub.asked] == [None, None, "m/02", "m/05"]


def test_a_short_answer_without_a_count_is_complete(open_s3: OpenS3) -> None:
    with S3Stub(lambda asked: old_page(asked, page_keys=100)) as stub:
        assert names_of(open_s3(endpoint=stub.endpoint)) == KEYS
        assert len(stub.asked) == 1


def test_a_server_that_ignores_the_token_is_asked_by_the_older(open_s3: OpenS3) -> None:
    def answer(asked: Asked) -> Answer:
        return listing({"m/00": 1, "m/01": 1}, token="same") if "list-type" in asked.query else old_page(asked)

    with S3Stub(answer) as stub:
        assert names_of(open_s3(endpoint=stub.endpoint)) == KEYS


def test_a_server_that_repeats_itself_by_both_is_given_up(open_s3: OpenS3) -> None:
    with S3Stub(lambda _: listing({"m/a": 1}, token="same")) as stub:
        with pytest.raises(StorageError, match="same page"):
            open_s3(endpoint=stub.endpoint).list_level()
        assert len(stub.asked) == 4


@pytest.mark.parametrize(
    "refusal", [error(400, "InvalidBucketName", "No such name."), error(501, "NotImplemented", "Not at all.")]
)
def test_where_both_are_refused_the_first_refusal_is_told(open_s3: OpenS3, refusal: Answer) -> None:
    with S3Stub(lambda asked: refusal if "list-type" in asked.query else error(400, "Second")) as stub:
        with pytest.raises(StorageError) as caught:
            open_s3(endpoint=stub.endpoint).list_level()
        assert "Second" not in str(caught.value)
        assert len(stub.asked) == 2


@pytest.mark.parametrize(
    "refusal", [error(403, "AccessDenied"), error(404, "NoSuchBucket"), error(400, "ExpiredToken")]
)
def test_other_refusals_ask_nothing_else(open_s3: OpenS3, refusal: Answer) -> None:
    with S3Stub(lambda _: refusal) as stub:
        with pytest.raises(StorageError):
            open_s3(endpoint=stub.endpoint).list_level()
        assert all("list-type" in asked.query for asked in stub.asked)


# Versions


def version(key: str, number: int, when: str, *, latest: bool = False, version_id: str = "", size: int = 5) -> str:
    return (
        f"<Version><Key>{quote(key)}</Key><VersionId>{version_id or f'v{number}'}</VersionId>"
        f"<IsLatest>{str(latest).lower()}</IsLatest><LastModified>2026-01-01T{when}.000Z</LastModified>"
        f"<ETag>&quot;e{number}&quot;</ETag><Size>{size}</Size></Version>"
    )


def marker(key: str, when: str, *, latest: bool = False) -> str:
    return (
        f"<DeleteMarker><Key>{quote(key)}</Key><VersionId>d</VersionId><IsLatest>{str(latest).lower()}</IsLatest>"
        f"<LastModified>2026-01-01T{when}.000Z</LastModified></DeleteMarker>"
    )


def versions_page(*items: str, key_marker: str = "", version_marker: str = "") -> Answer:
    after = (
        f"<NextKeyMarker>{quote(key_marker)}</NextKeyMarker><NextVersionIdMarker>{version_marker}</NextVersionIdMarker>"
        if key_marker
        else ""
    )
    truncated = "true" if key_marker else "false"
    head = f"<EncodingType>url</EncodingType><IsTruncated>{truncated}</IsTruncated>{after}"
    return Answer(200, f"<ListVersionsResult>{head}{''.join(items)}</ListVersionsResult>".encode())


def states_of(store: S3Store) -> list[dict[str, str]]:
    """Key to version id, or to ETag where none is needed, for every state."""
    found = []
    for past in store.open_past():
        objects = past.list_level().objects
        found.append({stored.key: stored.version_id or stored.version for stored in objects})
    return found


def test_states_follow_from_versions_and_removals_over_pages(open_s3: OpenS3) -> None:
    pages = {
        "": versions_page(
            version("m/a b", 2, "10:00:02", latest=True),
            version("m/a b", 1, "10:00:00"),
            key_marker="m/a b",
            version_marker="v1",
        ),
        "m/a b": versions_page(
            marker("m/c", "10:00:03", latest=True),
            version("m/c", 3, "10:00:01"),
            version("m/sub/x", 4, "10:00:00", latest=True),
        ),
    }
    with S3Stub(lambda asked: pages[asked.query.get("key-marker", "")]) as stub:
        store = open_s3(endpoint=stub.endpoint)
        assert states_of(store) == [
            {"a b": "v2"},
            {"a b": "v2", "c": "v3"},
            {"a b": "v1", "c": "v3"},
            {"a b": "v1"},
            {"a b": "v1"},
        ]
        assert "versions" in stub.asked[0].query and stub.asked[0].query["prefix"] == "m/"
        assert stub.asked[1].query["version-id-marker"] == "v1"


def test_what_no_version_was_given_to_is_asked_for_without_one_while_it_is_the_latest(open_s3: OpenS3) -> None:
    page = versions_page(
        version("m/a", 1, "10:00:00", latest=True, version_id="null"),
        version("m/b", 3, "10:00:02", latest=True),
        version("m/b", 2, "10:00:01", version_id="null"),
    )
    with S3Stub(lambda _: page) as stub:
        assert states_of(open_s3(endpoint=stub.endpoint)) == [
            {"a": '"e1"', "b": "v3"},
            {"a": '"e1"', "b": "null"},
            {"a": '"e1"'},
        ]


def test_an_old_version_is_read_as_such(open_s3: OpenS3) -> None:
    page = versions_page(version("m/a", 2, "10:00:02", latest=True), version("m/a", 1, "10:00:00", version_id="v/1+"))

    def answer(asked: Asked) -> Answer:
        if "versions" in asked.query:
            return page
        assert asked.query["versionId"] == "v/1+"
        return Answer(200, b"12345", {"ETag": '"e1"', "x-amz-version-id": "v/1+"})

    with S3Stub(answer) as stub:
        *_, past = open_s3(endpoint=stub.endpoint).open_past()
        stored = past.stat("a")
        assert past.read_object(stored) == b"12345"
        described = past.describe_range(stored, 1, 3)
        assert described.target == "/bucket/m/a?versionId=v%2F1%2B"  # type: ignore[union-attr]
        assert described.version_header == ("x-amz-version-id", "v/1+")  # type: ignore[union-attr]
        assert dict(described.headers)["If-Match"] == '"e1"'  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "answer",
    [
        error(501, "NotImplemented"),
        error(405, "MethodNotAllowed"),
        error(400, "InvalidArgument"),
        listing({"m/a": 1}),
        listing({"m/a": 1}, token="more"),
    ],
)
def test_a_server_without_versions_has_no_past(open_s3: OpenS3, answer: Answer) -> None:
    with S3Stub(lambda _: answer) as stub:
        assert list(open_s3(endpoint=stub.endpoint).open_past()) == []


def test_without_the_right_to_versions_there_is_an_error(open_s3: OpenS3) -> None:
    with S3Stub(lambda _: error(403, "AccessDenied")) as stub, pytest.raises(AccessDenied, match="GetObjectVersion"):
        list(open_s3(endpoint=stub.endpoint).open_past())


def test_the_same_page_of_versions_again_and_again_ends(open_s3: OpenS3) -> None:
    page = versions_page(version("m/a", 1, "10:00:00", latest=True), key_marker="m/a", version_marker="v1")
    with S3Stub(lambda _: page) as stub, pytest.raises(StorageError, match="same page of versions"):
        list(open_s3(endpoint=stub.endpoint).open_past())
    assert len(stub.asked) == 2
