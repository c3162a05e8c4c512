from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import (
    AccessDenied,
    HeadraceError,
    ObjectChanged,
    ObjectNotFound,
    StorageError,
    StoreUnavailable,
)
from headrace.storage import Refusal, StoredObject
from headrace.storage.s3 import S3Store

from .conftest import ACCESS_KEY
from .s3_stub import Answer, Asked, S3Stub, error, listing

OpenS3 = Callable[..., S3Store]
STORED = StoredObject("a", 10, '"v"')


def serve(content: bytes, **headers: str) -> Answer:
    """The object, with its ETag."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer(200, content, {"ETag": '"v"', **named})


def key_of(store: S3Store) -> str:
    return dict(store.describe_range(STORED, 0, 1).headers)["Authorization"].partition("Credential=")[2].split("/")[0]


def region_of(store: S3Store) -> str:
    return dict(store.describe_range(STORED, 0, 1).headers)["Authorization"].partition("Credential=")[2].split("/")[2]


# Listing


def test_pages_are_followed_and_keys_decoded_once(open_s3: OpenS3) -> None:
    pages = {
        "": listing({"m/a%20b": 1, "m/a b": 2}, folders=("m/f+g/",), token="t+/=&amp;2"),
        "t+/=&2": listing({"m/a+b": 3, "m/ü": 4}, folders=("m/%41/", "m/f+g/")),
    }
    with S3Stub(lambda asked: pages[asked.query.get("continuation-token", "")]) as stub:
        found = open_s3(endpoint=stub.endpoint).list_level()

        assert [(item.key, item.size_bytes) for item in found.objects] == [
            ("a b", 2),
            ("a%20b", 1),
            ("a+b", 3),
            ("ü", 4),
        ]
        assert found.folders == ("%41", "f+g")
        assert len(stub.asked) == 2
        assert stub.asked[0].query | {"list-type": "2"} == {
            "list-type": "2",
            "prefix": "m/",
            "delimiter": "/",
            "encoding-type": "url",
        }


def test_the_root_of_a_bucket_has_no_prefix(open_s3: OpenS3) -> None:
    with S3Stub(lambda _: listing({"a": 1}, folders=("m/",))) as stub:
        store = open_s3("s3://bucket", endpoint=stub.endpoint)
        found = store.list_level()
        assert stub.asked[0].query["prefix"] == ""
        assert [item.key for item in found.objects] == ["a"]
        assert found.folders == ("m",)
        store.list_level("m")
        assert stub.asked[1].query["prefix"] == "m/"


def test_what_lies_elsewhere_is_dropped(open_s3: OpenS3) -> None:
    """A store that knows neither prefix nor delimiter, and keys that would lead out of the folder."""
    keys = {
        "m/a": 1,
        "m/": 0,
        "m/sub/x/y": 1,
        "m-v2/b": 1,
        "z": 1,
        "m/..": 1,
        "m/.": 1,
        "m//c": 1,
        "m/sub": 0,
        "m/e": 0,
    }
    with S3Stub(lambda _: listing(keys, folders=("m/../", "m//", "n/"))) as stub:
        found = open_s3(endpoint=stub.endpoint).list_level()
    assert [item.key for item in found.objects] == ["a", "e"]
    assert found.folders == ("sub",)


def test_etags_have_their_quotes(open_s3: OpenS3) -> None:
    with S3Stub(lambda _: listing({"m/a": 1}, quotes="")) as stub:
        assert open_s3(endpoint=stub.endpoint).list_level().objects[0].version == '"e-0"'


def test_stores_are_not_asked_for_checksums(open_s3: OpenS3) -> None:
    def answer(asked: Asked) -> Answer:
        refused = [name for name in asked.headers if name.startswith(("x-amz-checksum", "x-amz-sdk"))]
        if refused:
            return error(400, "InvalidArgument", f"Header {refused}")
        return serve(b"0123456789") if asked.path.endswith("/a") else listing({"m/a": 10})

    with S3Stub(answer) as stub:
        store = open_s3(endpoint=stub.endpoint)
        store.list_level()
        assert store.stat("a") == STORED
        assert store.read_object(STORED) == b"0123456789"
        assert [asked.method for asked in stub.asked] == ["GET", "HEAD", "GET"]


def test_checksums_of_a_whole_object_do_not_disturb_the_reading_of_a_piece(open_s3: OpenS3) -> None:
    """Stores send the object's checksum, which may be one of checksums of parts, with whatever range is asked for."""
    checksums = {
        "x-amz-checksum-crc32": "AAAAAA==-3",
        "x-amz-checksum-sha256": "bm8=",
        "x-amz-checksum-type": "COMPOSITE",
    }
    answer = Answer(206, b"2345", {"ETag": '"v"', "Content-Range": "bytes 2-5/10", **checksums})
    with S3Stub(lambda _: answer) as stub:
        assert open_s3(endpoint=stub.endpoint).read_object(STORED, start=2, stop=6) == b"2345"


def test_an_empty_root_is_looked_at_twice(open_s3: OpenS3) -> None:
    def answer(asked: Asked) -> Answer:
        if asked.method == "HEAD":
            return serve(b"x" * 5) if asked.path == "/bucket/m/file" else Answer(404)
        return listing({})

    with S3Stub(answer) as stub:
        assert open_s3("s3://bucket/m", endpoint=stub.endpoint).list_level().objects == ()
        assert open_s3("s3://bucket", endpoint=stub.endpoint).list_level().objects == ()
        with pytest.raises(ObjectNotFound, match="s3://bucket/m/file is an object, not a folder") as caught:
            open_s3("s3://bucket/m/file", endpoint=stub.endpoint).list_level()
        assert "s3://bucket/m." in caught.value.mend


# Reading small objects


def test_pieces_are_asked_for_at_their_version(open_s3: OpenS3) -> None:
    def answer(asked: Asked) -> Answer:
        return Answer(206, b"2345", {"ETag": '"v"', "Content-Range": "bytes 2-5/10"})

    with S3Stub(answer) as stub:
        assert open_s3(endpoint=stub.endpoint).read_object(STORED, start=2, stop=6) == b"2345"
        assert stub.asked[0].headers["range"] == "bytes=2-5"
        assert stub.asked[0].headers["if-match"] == '"v"'
        assert stub.asked[0].path == "/bucket/m/a"


def test_a_weak_version_is_compared_and_not_asked_for(open_s3: OpenS3) -> None:
    stored = StoredObject("a", 10, 'W/"v"')
    with S3Stub(lambda _: serve(b"0123456789", ETag='W/"v"')) as stub:
        store = open_s3(endpoint=stub.endpoint)
        assert store.read_object(stored) == b"0123456789"
        assert "if-match" not in stub.asked[0].headers
        described = store.describe_range(stored, 0, 1)
        assert "If-Match" not in dict(described.headers)
        assert described.etag == 'W/"v"'
        assert store.describe_range(StoredObject("a", 10, ""), 0, 1).etag is None


def test_a_store_that_ignores_conditions_is_seen_through(open_s3: OpenS3) -> None:
    with S3Stub(lambda _: serve(b"9876543210", ETag='"w"')) as stub:
        with pytest.raises(ObjectChanged, match='It was "v" and is "w" now'):
            open_s3(endpoint=stub.endpoint).read_object(STORED)
        assert len(stub.asked) == 1


def test_a_store_that_ignores_ranges_is_seen_through(open_s3: OpenS3) -> None:
    with S3Stub(lambda _: serve(b"0123456789")) as stub:
        with pytest.raises(StorageError, match="10 bytes where 4 were asked for"):
            open_s3(endpoint=stub.endpoint).read_object(STORED, start=0, stop=4)
        assert len(stub.asked) == 1


def test_a_body_that_breaks_off_is_asked_for_again(open_s3: OpenS3) -> None:
    answers = [Answer(200, b"0123456789", {"ETag": '"v"'}, cut=4), Answer(200, b"0123456789", {"ETag": '"v"'}, cut=0)]
    with S3Stub(lambda _: answers.pop() if answers else serve(b"0123456789")) as stub:
        assert open_s3(endpoint=stub.endpoint).read_object(STORED) == b"0123456789"
        assert len(stub.asked) == 3


def test_a_body_that_always_breaks_off_is_given_up(open_s3: OpenS3) -> None:
    with S3Stub(lambda _: Answer(200, b"0123456789", {"ETag": '"v"'}, cut=4)) as stub:
        with pytest.raises(StoreUnavailable, match="broke off") as caught:
            open_s3(endpoint=stub.endpoint).read_object(STORED)
        assert "s3://bucket/m/a" in caught.value.what
        assert caught.value.__cause__ is not None
        assert len(stub.asked) == 3


def test_encoded_side_files_are_decoded_as_a_whole(open_s3: OpenS3) -> None:
    packed = gzip.compress(b'{"model_type": "llama"}')
    stored = StoredObject("a", len(packed), '"v"')
    with S3Stub(lambda _: serve(packed, Content_Encoding="gzip")) as stub:
        assert open_s3(endpoint=stub.endpoint).read_object(stored) == b'{"model_type": "llama"}'
        assert stub.asked[0].headers["accept-encoding"] == "identity"


@pytest.mark.parametrize(
    ("content", "encoding"),
    [(gzip.compress(b"x" * 100)[:-4], "gzip"), (b"no gzip", "gzip"), (b"brotli", "br"), (b"x", "gzip, br")],
)
def test_what_cannot_be_decoded_is_refused(open_s3: OpenS3, content: bytes, encoding: str) -> None:
    stored = StoredObject("a", len(content), '"v"')
    with S3Stub(lambda _: serve(content, Content_Encoding=encoding)) as stub:
        with pytest.raises(StorageError, match="Content-Encoding") as caught:
            open_s3(endpoint=stub.endpoint).read_object(stored)
        assert "Upload it again" in caught.value.mend


def test_a_piece_of_an_encoded_object_is_refused(open_s3: OpenS3) -> None:
    answer = Answer(206, b"1234", {"ETag": '"v"', "Content-Encoding": "gzip"})
    with S3Stub(lambda _: answer) as stub, pytest.raises(StorageError, match="'gzip'"):
        open_s3(endpoint=stub.endpoint).read_object(STORED, start=0, stop=4)


def test_what_uploads_leave_behind_is_no_encoding(open_s3: OpenS3) -> None:
    with S3Stub(lambda _: serve(b"0123456789", Content_Encoding="aws-chunked")) as stub:
        assert open_s3(endpoint=stub.endpoint).read_object(STORED) == b"0123456789"


# Refusals


@pytest.mark.parametrize(
    ("answer", "kind", "says"),
    [
        (error(403, "AccessDenied"), AccessDenied, "403 AccessDenied"),
        (error(404, "NoSuchBucket"), ObjectNotFound, "bucket that does not exist"),
        (error(503, "SlowDown"), StoreUnavailable, "503 SlowDown"),
        (error(403, "RequestTimeTooSkewed"), AccessDenied, "clock"),
        (Answer(403, b"<html>Sign in</html>"), AccessDenied, "403"),
        (Answer(200, b"not xml"), StoreUnavailable, "check that the endpoint is that of an S3 server"),
    ],
)
def test_listing_gives_our_errors(open_s3: OpenS3, answer: Answer, kind: type[HeadraceError], says: str) -> None:
    with S3Stub(lambda _: answer) as stub, pytest.raises(kind) as caught:
        open_s3(endpoint=stub.endpoint).list_level()
    assert type(caught.value) is kind
    assert says in str(caught.value)
    assert "s3://bucket/m" in caught.value.what
    assert caught.value.__cause__ is not None


def test_a_web_page_is_no_empty_listing(open_s3: OpenS3) -> None:
    """The address of a server's console instead of its S3 port; the SDK finds nothing wrong with its pages."""
    page = Answer(200, b"<html><body>Welcome</body></html>")
    with S3Stub(lambda _: page) as stub, pytest.raises(StorageError, match="does not answer as an S3 server does"):
        open_s3(endpoint=stub.endpoint).list_level()


def test_a_connection_that_is_closed_without_an_answer(open_s3: OpenS3) -> None:
    with S3Stub(lambda _: Answer(silent=True)) as stub:
        with pytest.raises(StoreUnavailable) as caught:
            open_s3(endpoint=stub.endpoint).list_level()
        assert stub.endpoint in caught.value.why


# Credentials that expire


def write_keys(path: Path, name: str) -> None:
    path.write_text(
        f"[default]\naws_access_key_id = {name}\naws_secret_access_key = s\naws_session_token = token-of-{name}\n"
    )


@pytest.fixture
def keys_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_s3: OpenS3) -> Path:
    """A credentials file that something else keeps up to date."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    write_keys(tmp_path / "credentials", "OLD")
    return tmp_path / "credentials"


@pytest.mark.parametrize("operation", ["list", "stat", "read"])
def test_expired_credentials_are_fetched_again(open_s3: OpenS3, keys_file: Path, operation: str) -> None:
    def answer(asked: Asked) -> Answer:
        if asked.access_key != "NEW":
            write_keys(keys_file, "NEW")
            return Answer(403) if asked.method == "HEAD" else error(400, "ExpiredToken")
        return serve(b"0123456789") if asked.path.endswith("/a") else listing({"m/a": 10})

    with S3Stub(answer) as stub:
        store = open_s3(endpoint=stub.endpoint)
        assert key_of(store) == "OLD"
        if operation == "list":
            assert [item.key for item in store.list_level().objects] == ["a"]
        elif operation == "stat":
            assert store.stat("a") == STORED
        else:
            assert store.read_object(STORED) == b"0123456789"
        assert [asked.access_key for asked in stub.asked] == ["OLD", "NEW"]
        assert key_of(store) == "NEW"


EXPIRED = Refusal(400, "Bad Request", {}, error(400, "ExpiredToken").body)


def test_a_refused_range_fetches_credentials_once_for_all_readers(open_s3: OpenS3, keys_file: Path) -> None:
    now = [1000.0]
    store = open_s3(endpoint="http://127.0.0.1:9", clock=lambda: now[0])
    write_keys(keys_file, "NEW")
    verdict = store.judge(STORED, EXPIRED)
    assert (verdict.retry, verdict.refresh_credentials) == (True, True)
    assert type(verdict.error) is AccessDenied
    assert key_of(store) == "NEW"

    write_keys(keys_file, "NEWER")
    now[0] += 0.5  # Another reader whose request was signed before the change.
    assert store.judge(STORED, EXPIRED).retry
    assert key_of(store) == "NEW"
    now[0] += 1.0
    assert store.judge(STORED, EXPIRED).retry
    assert key_of(store) == "NEWER"


def test_fixed_credentials_are_not_tried_twice(open_s3: OpenS3, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    store = open_s3(endpoint="http://127.0.0.1:9", clock=lambda: now[0])
    verdict = store.judge(STORED, EXPIRED)
    assert (verdict.retry, verdict.refresh_credentials) == (False, False)
    assert "new credentials" in verdict.error.mend
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "CHANGED")
    now[0] += 2
    assert store.judge(STORED, EXPIRED).retry
    assert key_of(store) == "CHANGED"


def test_expired_credentials_for_good_end(open_s3: OpenS3, keys_file: Path) -> None:
    with S3Stub(lambda _: error(400, "ExpiredToken")) as stub:
        with pytest.raises(AccessDenied, match="ExpiredToken"):
            open_s3(endpoint=stub.endpoint).list_level()
        assert len(stub.asked) == 3


def test_a_plain_denial_runs_the_chain_but_does_not_repeat(open_s3: OpenS3, keys_file: Path) -> None:
    with S3Stub(lambda _: Answer(403)) as stub:
        with pytest.raises(AccessDenied, match="gave no reason"):
            open_s3(endpoint=stub.endpoint).stat("a")
        assert len(stub.asked) == 1


def test_credentials_that_vanish_are_named(open_s3: OpenS3, keys_file: Path) -> None:
    now = [1000.0]
    store = open_s3(endpoint="http://127.0.0.1:9", clock=lambda: now[0])
    keys_file.write_text("[default]\naws_access_key_id = HALF\n")
    verdict = store.judge(STORED, EXPIRED)
    assert type(verdict.error) is AccessDenied
    assert not verdict.retry
    assert "Partial credentials" in verdict.error.why
    keys_file.unlink()
    now[0] += 2
    store.judge(STORED, EXPIRED)
    with pytest.raises(AccessDenied, match="no credentials"):
        store.describe_range(STORED, 0, 1)


def test_credentials_that_refresh_themselves_do(
    open_s3: OpenS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A program that gives short-lived keys is asked again as they near their end, without a refusal."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    program = tmp_path / "keys"
    program.write_text(
        '#!/bin/sh\nn=$(wc -l < "$0.log" 2>/dev/null || echo 0); echo >> "$0.log"\n'
        'printf \'{"Version": 1, "AccessKeyId": "KEY%s", "SecretAccessKey": "s", "SessionToken": "t",'
        ' "Expiration": "2000-01-01T00:00:00Z"}\' $n\n'
    )
    program.chmod(0o755)
    (tmp_path / "config").write_text(f"[default]\ncredential_process = {program}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    store = open_s3(endpoint="http://127.0.0.1:9")
    with pytest.raises(AccessDenied) as caught:
        store.describe_range(STORED, 0, 1)
    assert "credentials" in caught.value.why

    program.write_text(program.read_text().replace("2000-", "2999-"))
    assert key_of(store) == key_of(store) != ACCESS_KEY


# Regions


def test_a_bucket_elsewhere_is_found_and_remembered(open_s3: OpenS3) -> None:
    """Through the SDK and by refused ranges; then requests are signed for the region that the store named."""
    store = open_s3(endpoint="http://127.0.0.1:9")
    assert region_of(store) == "us-east-1"
    verdict = store.judge(STORED, Refusal(301, "Moved", {"x-amz-bucket-region": "eu-west-3"}))
    assert (verdict.retry, verdict.wait_s, verdict.refresh_credentials) == (True, 0.0, False)
    assert region_of(store) == "eu-west-3"
    # A reader whose request was signed before comes to the same result.
    assert store.judge(STORED, Refusal(301, "Moved", {"x-amz-bucket-region": "eu-west-3"})).retry
    assert region_of(store) == "eu-west-3"


def test_the_host_follows_the_region(open_s3: OpenS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-west-2")
    store = open_s3()
    assert store.describe_range(STORED, 0, 1).host == "bucket.s3.us-west-2.amazonaws.com"
    body = b"<Error><Code>AuthorizationHeaderMalformed</Code><Message>x</Message><Region>eu-west-3</Region></Error>"
    assert store.judge(STORED, Refusal(400, "Bad Request", {}, body)).retry
    assert store.describe_range(STORED, 0, 1).host == "bucket.s3.eu-west-3.amazonaws.com"


def test_a_redirect_without_a_region_is_an_error(open_s3: OpenS3) -> None:
    store = open_s3(endpoint="http://127.0.0.1:9")
    verdict = store.judge(STORED, Refusal(301, "Moved", {"location": "http://elsewhere"}))
    assert type(verdict.error) is StoreUnavailable
    assert not verdict.retry
    assert "AWS_DEFAULT_REGION" in verdict.error.mend
    verdict = store.judge(STORED, Refusal(301, "Moved", {"x-amz-bucket-region": "evil.example/"}))
    assert not verdict.retry
    assert region_of(store) == "us-east-1"


@pytest.mark.parametrize("operation", ["list", "stat"])
def test_the_sdk_follows_to_the_region(open_s3: OpenS3, operation: str) -> None:
    def answer(asked: Asked) -> Answer:
        if asked.region != "eu-west-3":
            headers = {"x-amz-bucket-region": "eu-west-3"}
            return Answer(301, b"" if asked.method == "HEAD" else error(301, "PermanentRedirect").body, headers)
        return serve(b"0123456789") if asked.path.endswith("/a") else listing({"m/a": 10})

    with S3Stub(answer) as stub:
        store = open_s3(endpoint=stub.endpoint)
        result: Any = store.list_level().objects[0].key if operation == "list" else store.stat("a").key
        assert result == "a"
        assert [asked.region for asked in stub.asked][-1] == "eu-west-3"


# Judging


@pytest.mark.parametrize(
    ("refusal", "kind", "retry", "wait_s"),
    [
        (Refusal(412, "", {}), ObjectChanged, False, None),
        (Refusal(416, "", {}), ObjectChanged, False, None),
        (Refusal(404, "", {}, error(404, "NoSuchKey").body), ObjectChanged, False, None),
        (Refusal(403, "", {}, error(403, "AccessDenied").body), AccessDenied, False, None),
        (Refusal(503, "", {"retry-after": "3"}, error(503, "SlowDown").body), StoreUnavailable, True, 3.0),
        (Refusal(500, "", {}), StoreUnavailable, True, None),
        (Refusal(400, "", {}), StorageError, False, None),
        (Refusal(403, "", {}), AccessDenied, False, None),
    ],
)
def test_refused_ranges(
    open_s3: OpenS3, refusal: Refusal, kind: type[HeadraceError], retry: bool, wait_s: float | None
) -> None:
    store = open_s3(endpoint="http://127.0.0.1:9")
    verdict = store.judge(STORED, refusal)
    assert type(verdict.error) is kind
    assert (verdict.retry, verdict.wait_s, verdict.refresh_credentials) == (retry, wait_s, False)
    assert "s3://bucket/m/a" in verdict.error.what
