from __future__ import annotations

import base64
import datetime
import gzip
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from headrace.errors import AccessDenied, HeadraceError, ObjectChanged, ObjectNotFound, StorageError, StoreUnavailable
from headrace.settings import TransportSettings
from headrace.storage import HttpRange, Refusal, StoredObject
from headrace.storage.gcs import GcsStore
from headrace.transport.answer import end_of_answer

from .gcs_stub import FakeCredentials, document, listing, media, metadata, opened, refusal
from .s3_stub import Answer, Asked, S3Stub

STORED = StoredObject("a", 10, "7")
PATIENT = TransportSettings(max_attempts=3, connect_timeout_s=5, idle_timeout_s=5, backoff_first_s=0, backoff_most_s=7)


def token_of(store: GcsStore) -> str:
    return dict(store.describe_range(STORED, 0, 1).headers)["authorization"]


# Listing


def test_pages_are_followed_and_keys_taken_as_they_are() -> None:
    pages = {
        "": listing({"m/a%20b": 1, "m/a b": 2}, folders=("m/f+g/",), token="t+/=&2"),
        "t+/=&2": listing({"m/a+b": 3, "m/ü": 4}, folders=("m/%41/", "m/f+g/")),
    }
    with S3Stub(lambda asked: pages[asked.query.get("pageToken", "")]) as stub, opened(stub.endpoint) as store:
        found = store.list_level()

        assert [(item.key, item.size_bytes, item.version) for item in found.objects] == [
            ("a b", 2, "2"),
            ("a%20b", 1, "1"),
            ("a+b", 3, "1"),
            ("ü", 4, "2"),
        ]
        assert found.folders == ("%41", "f+g")
        assert len(stub.asked) == 2
        assert (stub.asked[0].query["prefix"], stub.asked[0].query["delimiter"]) == ("m/", "/")


def test_nothing_is_asked_about_the_bucket_itself() -> None:
    """That would need storage.buckets.get, which readers of objects need not have."""

    def answer(asked: Asked) -> Answer:
        if asked.path == "/storage/v1/b/bucket/o":
            return listing({"m/a": 10})
        return media(b"0123456789") if "alt" in asked.query else metadata()

    with S3Stub(answer) as stub, opened(stub.endpoint) as store:
        store.list_level()
        store.stat("a")
        store.read_object(STORED)
        assert [(asked.method, asked.path) for asked in stub.asked] == [
            ("GET", "/storage/v1/b/bucket/o"),
            ("GET", "/storage/v1/b/bucket/o/m%2Fa"),
            ("GET", "/download/storage/v1/b/bucket/o/m%2Fa"),
        ]
        assert {asked.headers["authorization"] for asked in stub.asked} == {"Bearer TOKEN"}


def test_the_same_page_again_and_again_ends() -> None:
    with S3Stub(lambda _: listing({"m/a": 1}, token="same")) as stub, opened(stub.endpoint) as store:
        with pytest.raises(StorageError, match="same page"):
            store.list_level()
        assert len(stub.asked) == 2


def test_the_root_of_a_bucket_has_no_prefix() -> None:
    with (
        S3Stub(lambda _: listing({"a": 1}, folders=("m/",))) as stub,
        opened(stub.endpoint, "gs://bucket") as store,
    ):
        found = store.list_level()
        assert "prefix" not in stub.asked[0].query
        assert [item.key for item in found.objects] == ["a"]
        assert found.folders == ("m",)
        store.list_level("m")
        assert stub.asked[1].query["prefix"] == "m/"


@pytest.mark.parametrize(
    "answer", [document({}), Answer(200, b"<html>Welcome</html>"), Answer(200, b""), Answer(200, b"[]")]
)
def test_what_is_no_listing_is_no_empty_one(answer: Answer) -> None:
    with (
        S3Stub(lambda _: answer) as stub,
        opened(stub.endpoint) as store,
        pytest.raises(StorageError, match="does not answer as Google Cloud Storage does"),
    ):
        store.list_level()


def test_an_empty_root_is_looked_at_twice() -> None:
    def answer(asked: Asked) -> Answer:
        if asked.path.endswith("/o"):
            return listing({})
        return metadata("m/file", 5) if asked.path.endswith("/m%2Ffile") else refusal(404, "notFound")

    with S3Stub(answer) as stub:
        for uri in ("gs://bucket/m", "gs://bucket"):
            with opened(stub.endpoint, uri) as store:
                assert store.list_level().objects == ()
        with (
            opened(stub.endpoint, "gs://bucket/m/file") as store,
            pytest.raises(ObjectNotFound, match="gs://bucket/m/file is an object, not a folder") as caught,
        ):
            store.list_level()
        assert "gs://bucket/m." in caught.value.mend


def test_the_project_that_pays_is_named_every_time() -> None:
    def answer(asked: Asked) -> Answer:
        if asked.query.get("userProject") != "payer":
            return refusal(400, "required", "Bucket is a requester pays bucket but no user project provided.")
        if asked.path.endswith("/o"):
            return listing({"m/a": 10})
        return media(b"0123456789") if "alt" in asked.query else metadata()

    with S3Stub(answer) as stub:
        with opened(stub.endpoint, user_project="payer") as store:
            assert len(store.list_level().objects) == 1
            assert store.stat("a") == STORED
            assert store.read_object(STORED) == b"0123456789"
            assert store.describe_range(STORED, 0, 1).target.endswith("&userProject=payer")
        with opened(stub.endpoint) as store, pytest.raises(AccessDenied, match="HEADRACE_GCS_USER_PROJECT"):
            store.list_level()


# Reading small objects


def test_pieces_are_asked_for_at_their_generation() -> None:
    answer = media(b"2345", 206, Content_Range="bytes 2-5/10")
    with S3Stub(lambda _: answer) as stub, opened(stub.endpoint) as store:
        assert store.read_object(STORED, start=2, stop=6) == b"2345"
        asked = stub.asked[0]
        assert asked.headers["range"] == "bytes=2-5"
        assert asked.headers["accept-encoding"] == "gzip"
        assert (asked.query["generation"], asked.query["ifGenerationMatch"]) == ("7", "7")


def test_a_server_that_ignores_conditions_is_seen_through() -> None:
    with (
        S3Stub(lambda _: media(b"9876543210", x_goog_generation="8")) as stub,
        opened(stub.endpoint) as store,
        pytest.raises(ObjectChanged, match="It was 7 and is 8 now"),
    ):
        store.read_object(STORED)


def test_a_server_that_ignores_ranges_is_seen_through() -> None:
    with S3Stub(lambda _: media(b"0123456789")) as stub, opened(stub.endpoint) as store:
        with pytest.raises(HeadraceError) as caught:
            store.read_object(STORED, start=0, stop=4)
        assert isinstance(caught.value, StorageError)
        assert "gs://bucket/m/a" in caught.value.what


def test_a_body_that_breaks_off_is_asked_for_again() -> None:
    answers = [Answer(200, b"0123456789", {"x-goog-generation": "7"}, cut=cut) for cut in (4, 0)]
    with (
        S3Stub(lambda _: answers.pop() if answers else media(b"0123456789")) as stub,
        opened(stub.endpoint, transport=PATIENT) as store,
    ):
        assert store.read_object(STORED) == b"0123456789"
        assert len(stub.asked) == 3


def test_a_body_that_always_breaks_off_is_given_up() -> None:
    with (
        S3Stub(lambda _: Answer(200, b"0123456789", {"x-goog-generation": "7"}, cut=4)) as stub,
        opened(stub.endpoint, transport=PATIENT) as store,
    ):
        with pytest.raises(StoreUnavailable) as caught:
            store.read_object(STORED)
        assert len(stub.asked) == 3
        assert "gs://bucket/m/a" in caught.value.what
        assert caught.value.__cause__ is not None


def test_damaged_content_is_seen_by_its_checksum() -> None:
    digest = base64.b64encode(bytes(16)).decode()
    with (
        S3Stub(lambda _: media(b"0123456789", X_Goog_Hash=f"md5={digest},crc32c=AAAAAA==")) as stub,
        opened(stub.endpoint, transport=PATIENT) as store,
    ):
        with pytest.raises(StoreUnavailable, match="checksum"):
            store.read_object(STORED)
        assert len(stub.asked) == 3


def test_gzip_is_decoded_when_read_whole() -> None:
    content = gzip.compress(b"hello" * 20)
    stored = StoredObject("a", len(content), "7")
    with (
        S3Stub(lambda _: media(content, Content_Encoding="gzip")) as stub,
        opened(stub.endpoint) as store,
    ):
        assert store.read_object(stored) == b"hello" * 20


@pytest.mark.parametrize(
    ("content", "encoding"), [(b"0123456789", "gzip"), (gzip.compress(b"")[:10], "gzip"), (b"0123456789", "br")]
)
def test_what_cannot_be_decoded_is_refused(content: bytes, encoding: str) -> None:
    with (
        S3Stub(lambda _: media(content, Content_Encoding=encoding)) as stub,
        opened(stub.endpoint) as store,
        pytest.raises(StorageError, match=f"'{encoding}'") as caught,
    ):
        store.read_object(STORED)
    assert "Upload it again" in caught.value.mend


def test_a_piece_of_an_encoded_object_is_refused() -> None:
    answer = media(b"0123", 206, Content_Encoding="gzip", Content_Range="bytes 0-3/10")
    with (
        S3Stub(lambda _: answer) as stub,
        opened(stub.endpoint) as store,
        pytest.raises(StorageError, match="'gzip'"),
    ):
        store.read_object(STORED, start=0, stop=4)


# Ranges for the transport


def test_a_range_is_described() -> None:
    with opened("https://storage-x.p.googleapis.com/base/", "gs://bucket/m x") as store:
        stored = StoredObject("a+b/ü#?&%20", 10, "7")
        described = store.describe_range(stored, 2, 6)
    assert (described.scheme, described.host, described.port) == ("https", "storage-x.p.googleapis.com", 443)
    assert described.target == (
        "/base/download/storage/v1/b/bucket/o/m%20x%2Fa%2Bb%2F%C3%BC%23%3F%26%2520?alt=media&generation=7&ifGenerationMatch=7"
    )
    assert described.headers == (
        ("Range", "bytes=2-5"),
        ("Accept-Encoding", "gzip"),
        ("authorization", "Bearer TOKEN"),
    )
    assert described.version_header == ("x-goog-generation", "7")
    assert described.ca_file is not None
    assert "TOKEN" not in repr(described)
    assert "TOKEN" not in repr(store)


def test_answers_to_a_described_range_are_checked() -> None:
    """What an emulator answers that looks at no condition, and what comes of an object that is stored gzip-encoded."""
    with opened() as store:
        described = store.describe_range(STORED, 2, 6)
    right = {"content-range": "bytes 2-5/10", "x-goog-generation": "7"}
    assert end_of_answer(described, STORED, "gs://bucket/m/a", 206, right) == 6
    with pytest.raises(ObjectChanged, match="was 7 and is now 8"):
        end_of_answer(described, STORED, "gs://bucket/m/a", 206, right | {"x-goog-generation": "8"})
    with pytest.raises(HeadraceError, match="gzip"):
        end_of_answer(described, STORED, "gs://bucket/m/a", 206, right | {"content-encoding": "gzip"})


def test_anonymous_requests_hold_no_token() -> None:
    def never() -> Any:
        raise AssertionError("the credential chain was asked")

    with (
        S3Stub(lambda asked: refusal(401, "required") if "authorization" in asked.headers else metadata()) as stub,
        opened(stub.endpoint, credentials=never, anonymous=True) as store,
    ):
        assert store.stat("a") == STORED
        assert [name for name, _ in store.describe_range(STORED, 0, 1).headers] == ["Range", "Accept-Encoding"]


# Tokens


def test_one_token_serves_all_threads_until_it_ends() -> None:
    credentials = FakeCredentials("FIRST", "SECOND")
    with S3Stub(lambda _: metadata()) as stub, opened(stub.endpoint, credentials=lambda: credentials) as store:
        with ThreadPoolExecutor(8) as pool:
            found = set(pool.map(lambda _: token_of(store), range(64)))
        store.stat("a")
        assert found == {"Bearer FIRST"}
        assert stub.asked[0].headers["authorization"] == "Bearer FIRST"
        assert credentials.num_refreshes == 1


def test_a_token_is_fetched_before_the_last_one_ends() -> None:
    credentials = FakeCredentials("FIRST", "SECOND", lives_s=60)
    with opened(credentials=lambda: credentials) as store:
        assert token_of(store) == "Bearer FIRST"
        credentials.lives_s = 3600
        assert token_of(store) == "Bearer SECOND"
        assert token_of(store) == "Bearer SECOND"
    assert credentials.num_refreshes == 2


def test_a_token_that_still_holds_bridges_a_failing_service() -> None:
    credentials = FakeCredentials("FIRST", lives_s=60)
    with opened(credentials=lambda: credentials) as store:
        token_of(store)
        credentials.fails = True
        assert [token_of(store) for _ in range(8)] == ["Bearer FIRST"] * 8
        assert credentials.num_refreshes == 2  # Not for every read.
        credentials.expiry -= datetime.timedelta(minutes=5)
        with pytest.raises(AccessDenied, match="invalid_grant") as caught:
            token_of(store)
    assert "gs://bucket/m/a" in caught.value.what
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize("operation", ["list", "stat", "read"])
@pytest.mark.parametrize(
    "answer", [refusal(401, "authError", "Invalid Credentials"), Answer(401, b"Invalid Credentials")]
)
def test_a_refused_token_is_replaced(operation: str, answer: Answer) -> None:
    tokens = ["OLD", "NEW", "NEWER"]

    def serve(asked: Asked) -> Answer:
        if asked.headers["authorization"] == "Bearer OLD":
            return answer
        if asked.path.endswith("/o"):
            return listing({"m/a": 10})
        return media(b"0123456789") if "alt" in asked.query else metadata()

    with S3Stub(serve) as stub, opened(stub.endpoint, credentials=lambda: FakeCredentials(tokens.pop(0))) as store:
        if operation == "list":
            assert [item.key for item in store.list_level().objects] == ["a"]
        elif operation == "stat":
            assert store.stat("a") == STORED
        else:
            assert store.read_object(STORED) == b"0123456789"
        assert [asked.headers["authorization"] for asked in stub.asked] == ["Bearer OLD", "Bearer NEW"]
        assert token_of(store) == "Bearer NEW"


def test_a_token_that_is_refused_for_good_ends() -> None:
    tokens = iter("ABCDEF")
    with (
        S3Stub(lambda _: refusal(401, "authError", "Invalid Credentials")) as stub,
        opened(stub.endpoint, credentials=lambda: FakeCredentials(next(tokens))) as store,
    ):
        with pytest.raises(AccessDenied, match="Invalid Credentials"):
            store.list_level()
        assert len(stub.asked) == 2


EXPIRED = Refusal(401, "Unauthorized", {}, b"Invalid Credentials")


def test_a_refused_range_fetches_a_token_once_for_all_readers() -> None:
    now, tokens = [1000.0], iter(("OLD", "NEW", "NEWER"))
    with opened(credentials=lambda: FakeCredentials(next(tokens)), clock=lambda: now[0]) as store:
        assert token_of(store) == "Bearer OLD"
        verdict = store.judge(STORED, EXPIRED)
        assert (verdict.retry, verdict.refresh_credentials) == (True, True)
        assert type(verdict.error) is AccessDenied
        assert token_of(store) == "Bearer NEW"
        now[0] += 0.5  # Another reader, whose request left before the change.
        assert store.judge(STORED, EXPIRED).retry
        assert token_of(store) == "Bearer NEW"
        now[0] += 1.0
        assert store.judge(STORED, EXPIRED).retry
        assert token_of(store) == "Bearer NEWER"


def test_the_same_token_is_not_tried_twice() -> None:
    """A metadata service keeps its token until it ends."""
    with opened() as store:
        token_of(store)
        verdict = store.judge(STORED, EXPIRED)
    assert (verdict.retry, verdict.refresh_credentials) == (False, False)
    assert "gcloud auth application-default login" in verdict.error.mend


def test_a_chain_that_fails_meanwhile_is_named() -> None:
    made: list[FakeCredentials] = []

    def find() -> FakeCredentials:
        made.append(FakeCredentials())
        made[-1].fails = len(made) > 1
        return made[-1]

    with opened(credentials=find) as store:
        token_of(store)
        verdict = store.judge(STORED, EXPIRED)
        assert not verdict.retry
        assert "invalid_grant" in verdict.error.why
        assert token_of(store) == "Bearer TOKEN"  # The store is still of use.


def test_anonymous_refusals_ask_nobody() -> None:
    with opened(anonymous=True) as store:
        verdict = store.judge(STORED, EXPIRED)
    assert (type(verdict.error), verdict.retry, verdict.refresh_credentials) == (AccessDenied, False, False)
    assert "anonymous" in verdict.error.mend


# Refusals


def test_a_busy_store_is_asked_again_after_its_own_time() -> None:
    answers = [refusal(503, "backendError"), refusal(429, "rateLimitExceeded", Retry_After="3")]
    waits: list[float] = []
    with (
        S3Stub(lambda _: answers.pop() if answers else metadata()) as stub,
        opened(stub.endpoint, transport=PATIENT, sleep=waits.append) as store,
    ):
        assert store.stat("a") == STORED
        assert len(stub.asked) == 3
    assert waits == [3.0, 0.0]


@pytest.mark.parametrize(
    ("answer", "kind", "says"),
    [
        (
            refusal(403, "forbidden", "x does not have storage.objects.list access."),
            AccessDenied,
            "storage.objects.list",
        ),
        (refusal(404, "notFound"), ObjectNotFound, "bucket that does not exist"),
        (refusal(503, "backendError"), StoreUnavailable, "503 backendError"),
        (Answer(502, b"<html>Bad gateway</html>"), StoreUnavailable, "web page"),
        (Answer(403, b"<html>Sign in</html>"), AccessDenied, "403"),
        (Answer(silent=True), StoreUnavailable, "127.0.0.1"),
    ],
)
def test_listing_gives_our_errors(answer: Answer, kind: type[HeadraceError], says: str) -> None:
    with S3Stub(lambda _: answer) as stub, opened(stub.endpoint) as store, pytest.raises(kind) as caught:
        store.list_level()
    assert type(caught.value) is kind
    assert says in str(caught.value)
    assert "gs://bucket/m" in caught.value.what
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize(
    ("refused", "kind", "retry", "wait_s"),
    [
        (Refusal(412, "Precondition Failed", {}, b"Precondition Failed"), ObjectChanged, False, None),
        (Refusal(416, "", {}), ObjectChanged, False, None),
        (Refusal(404, "Not Found", {}, b"No such object: bucket/m/a"), ObjectChanged, False, None),
        (Refusal(403, "Forbidden", {}, b"x does not have access"), AccessDenied, False, None),
        (Refusal(403, "", {}, refusal(403, "userRateLimitExceeded").body), StoreUnavailable, True, None),
        (Refusal(429, "", {"retry-after": "3"}), StoreUnavailable, True, 3.0),
        (Refusal(503, "", {}), StoreUnavailable, True, None),
        (Refusal(400, "", {}), StorageError, False, None),
    ],
)
def test_refused_ranges(refused: Refusal, kind: type[HeadraceError], retry: bool, wait_s: float | None) -> None:
    with S3Stub(lambda _: refusal(404, "notFound")) as stub, opened(stub.endpoint) as store:
        verdict = store.judge(STORED, refused)
    assert type(verdict.error) is kind
    assert (verdict.retry, verdict.wait_s, verdict.refresh_credentials) == (retry, wait_s, False)
    assert "gs://bucket/m/a" in verdict.error.what


@pytest.mark.parametrize("status", [404, 412, 416])
def test_a_change_names_both_generations(status: int) -> None:
    with S3Stub(lambda _: metadata(generation=8)) as stub, opened(stub.endpoint) as store:
        error = store.judge(STORED, Refusal(status, "", {})).error
    assert type(error) is ObjectChanged
    assert "gs://bucket/m/a" in error.what
    assert "It was generation 7 and is generation 8 now." in error.why


def test_a_change_is_named_without_the_store_s_help_too() -> None:
    with opened() as store:  # Nobody listens there.
        error = store.judge(STORED, Refusal(412, "", {})).error
    assert type(error) is ObjectChanged
    assert "version 7" in error.why


def test_a_range_of_a_store_that_is_closed_needs_no_connection() -> None:
    with opened() as store:
        pass
    store.close()
    assert isinstance(store.describe_range(STORED, 0, 1), HttpRange)
