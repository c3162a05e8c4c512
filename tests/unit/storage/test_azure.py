from __future__ import annotations

import gzip
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
from headrace.settings import AzureSettings
from headrace.storage import Refusal, StoredObject
from headrace.storage.azure import AzureStore

from .azure_stub import KEY, SAS, blob, error, listing, opened, properties
from .s3_stub import Answer, Asked, S3Stub

STORED = StoredObject("a", 10, '"v"')
NOWHERE = "http://127.0.0.1:9"
FOLDER = "<hdi_isfolder>true</hdi_isfolder>"


def refused(answer: Answer) -> Refusal:
    """The answer as a transport hands it over."""
    return Refusal(
        answer.status, "Reason", {name.lower(): value for name, value in answer.headers.items()}, answer.body
    )


def is_listing(asked: Asked) -> bool:
    return asked.query.get("comp") == "list"


# Listing


def test_pages_are_followed_and_keys_taken_as_they_are() -> None:
    pages = {
        "": listing({"m/a%20b": 1, "m/a b": 2}, folders=("m/f+g/",), token="2!8!t+/="),
        "2!8!t+/=": listing({"m/a+b": 3, "m/ü": 4}, folders=("m/%41/", "m/f+g/")),
    }
    with S3Stub(lambda asked: pages[asked.query.get("marker", "")]) as stub, opened(stub.endpoint) as store:
        found = store.list_level()

        assert [(item.key, item.size_bytes, item.version) for item in found.objects] == [
            ("a b", 2, '"e-1"'),
            ("a%20b", 1, '"e-0"'),
            ("a+b", 3, '"e-0"'),
            ("ü", 4, '"e-1"'),
        ]
        assert found.folders == ("%41", "f+g")
        assert len(stub.asked) == 2
        asked = stub.asked[0]
        assert asked.path == "/acct/container"
        assert asked.query == {
            "restype": "container",
            "comp": "list",
            "prefix": "m/",
            "delimiter": "/",
            "include": "metadata",
        }


@pytest.mark.parametrize("name", ["hdi_isfolder", "Hdi_isfolder", "HDI_ISFOLDER"])
def test_folders_of_a_hierarchical_namespace_are_no_blobs(name: str) -> None:
    """Their metadata tells them from empty files, in whatever letter case a tool wrote it."""
    marked = {
        "m/original": f"<{name}>true</{name}>",
        "m/empty.txt": f"<{name}>false</{name}>",
        "m/plain": "<owner>x</owner>",
    }
    with S3Stub(lambda _: listing({"m/a": 1}, marked=marked)) as stub, opened(stub.endpoint) as store:
        found = store.list_level()
    assert [item.key for item in found.objects] == ["a", "empty.txt", "plain"]
    assert found.folders == ("original",)


def test_what_lies_elsewhere_is_dropped() -> None:
    keys = {"m/a": 1, "m/": 0, "m/sub/x/y": 1, "m-v2/b": 1, "m/..": 1, "m//c": 1, "m/sub": 0, "m/e": 0}
    with S3Stub(lambda _: listing(keys, folders=("m/../", "n/"))) as stub, opened(stub.endpoint) as store:
        found = store.list_level()
    assert [item.key for item in found.objects] == ["a", "e"]
    assert found.folders == ("sub",)


def test_the_root_of_a_container_has_no_prefix() -> None:
    page = listing({"a": 1}, folders=("m/",))
    with S3Stub(lambda _: page) as stub, opened(stub.endpoint, "az://container") as store:
        assert [item.key for item in store.list_level().objects] == ["a"]
        assert stub.asked[0].query.get("prefix", "") == ""
        store.list_level("m")
        assert stub.asked[1].query["prefix"] == "m/"


def test_the_same_page_again_and_again_ends() -> None:
    with S3Stub(lambda _: listing({"m/a": 1}, token="same")) as stub, opened(stub.endpoint) as store:
        with pytest.raises(StorageError, match="same page"):
            store.list_level()
        assert len(stub.asked) == 2


def test_an_empty_root_is_looked_at_twice() -> None:
    def answer(asked: Asked) -> Answer:
        if is_listing(asked):
            return listing({})
        if asked.path == "/acct/container/m/folder":
            return properties(0, x_ms_meta_hdi_isfolder="true")
        return properties(5) if asked.path == "/acct/container/m/file" else error(404, "BlobNotFound")

    with S3Stub(answer) as stub:
        for uri in ("az://container/m", "az://container", "az://container/m/folder"):
            with opened(stub.endpoint, uri) as store:
                assert store.list_level().objects == ()
        with opened(stub.endpoint, "az://container/m/file") as store:
            with pytest.raises(ObjectNotFound, match="az://container/m/file is an object, not a folder") as caught:
                store.list_level()
            assert "az://container/m." in caught.value.mend


def test_nothing_is_asked_about_account_or_container() -> None:
    """That would need rights which readers of blobs need not have."""

    def answer(asked: Asked) -> Answer:
        if is_listing(asked):
            return listing({"m/a": 10})
        return properties(10) if asked.method == "HEAD" else blob(b"0123456789")

    with S3Stub(answer) as stub, opened(stub.endpoint) as store:
        store.list_level()
        assert store.stat("a") == STORED
        assert store.read_object(STORED) == b"0123456789"
        store.describe_range(STORED, 0, 1)
        assert [asked.method for asked in stub.asked] == ["GET", "HEAD", "GET"]


# Reading small objects


def test_pieces_are_asked_for_at_their_version() -> None:
    with S3Stub(lambda _: blob(b"2345", start=2, total=10)) as stub, opened(stub.endpoint) as store:
        assert store.read_object(STORED, start=2, stop=6) == b"2345"
        assert stub.asked[0].headers["x-ms-range"] == "bytes=2-5"
        assert stub.asked[0].headers["if-match"] == '"v"'
        assert stub.asked[0].path == "/acct/container/m/a"
        assert store.read_object(STORED, start=3, stop=3) == b""
        assert store.read_object(StoredObject("empty", 0, '"v"')) == b""
        assert len(stub.asked) == 1


def test_a_server_that_ignores_conditions_is_seen_through() -> None:
    with S3Stub(lambda _: blob(b"9876543210", etag='"w"')) as stub, opened(stub.endpoint) as store:
        with pytest.raises(ObjectChanged, match='It was "v" and is "w" now'):
            store.read_object(STORED)
        assert len(stub.asked) == 1


def test_a_server_that_ignores_ranges_is_seen_through() -> None:
    whole = Answer(200, b"0123456789", {"ETag": '"v"'})
    with S3Stub(lambda _: whole) as stub, opened(stub.endpoint) as store, pytest.raises(StorageError) as caught:
        store.read_object(STORED, start=0, stop=4)
    assert "az://container/m/a" in caught.value.what


def test_a_body_that_breaks_off_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("azure.storage.blob._download.time.sleep", lambda _: None)
    cut = Answer(206, b"0123456789", blob(b"0123456789").headers, cut=4)
    answers = [cut, cut]
    with S3Stub(lambda _: answers.pop() if answers else blob(b"0123456789")) as stub, opened(stub.endpoint) as store:
        assert store.read_object(STORED) == b"0123456789"
        assert len(stub.asked) == 3


def test_a_body_that_always_breaks_off_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("azure.storage.blob._download.time.sleep", lambda _: None)
    cut = Answer(206, b"0123456789", blob(b"0123456789").headers, cut=4)
    with S3Stub(lambda _: cut) as stub, opened(stub.endpoint) as store:
        with pytest.raises(StoreUnavailable, match="broke") as caught:
            store.read_object(STORED)
        assert "az://container/m/a" in caught.value.what
        assert stub.endpoint in caught.value.why
        assert len(stub.asked) == 3


def test_encoded_side_files_are_decoded_as_a_whole() -> None:
    packed = gzip.compress(b'{"model_type": "llama"}')
    stored = StoredObject("a", len(packed), '"v"')
    with S3Stub(lambda _: blob(packed, Content_Encoding="gzip")) as stub, opened(stub.endpoint) as store:
        assert store.read_object(stored) == b'{"model_type": "llama"}'


@pytest.mark.parametrize(
    ("content", "encoding"), [(gzip.compress(b"x" * 100)[:-4], "gzip"), (b"no gzip", "gzip"), (b"brotli", "br")]
)
def test_what_cannot_be_decoded_is_refused(content: bytes, encoding: str) -> None:
    stored = StoredObject("a", len(content), '"v"')
    with S3Stub(lambda _: blob(content, Content_Encoding=encoding)) as stub, opened(stub.endpoint) as store:
        with pytest.raises(StorageError, match="Content-Encoding") as caught:
            store.read_object(stored)
        assert "Upload it again" in caught.value.mend


def test_a_piece_of_an_encoded_object_is_refused() -> None:
    answer = blob(b"1234", total=10, Content_Encoding="gzip")
    with S3Stub(lambda _: answer) as stub, opened(stub.endpoint) as store, pytest.raises(StorageError, match="'gzip'"):
        store.read_object(STORED, start=0, stop=4)


# Describing ranges


def test_a_range_with_a_key() -> None:
    with opened(NOWHERE, clock=lambda: 1_700_000_000.0) as store:
        described = store.describe_range(StoredObject("a b+ü", 10, '"v"'), 2, 6)
    headers = dict(described.headers)
    assert (described.scheme, described.host, described.port) == ("http", "127.0.0.1", 9)
    assert described.target == "/acct/container/m/a%20b%2B%C3%BC"
    assert headers["x-ms-range"] == "bytes=2-5"
    assert headers["If-Match"] == '"v"'
    assert headers["Accept-Encoding"] == "identity"
    assert headers["x-ms-date"] == "Tue, 14 Nov 2023 22:13:20 GMT"
    assert headers["Authorization"].startswith("SharedKey acct:")
    assert (described.start, described.stop, described.etag, described.ca_file) == (2, 6, '"v"', None)


def test_a_range_with_a_sas_keeps_it_out_of_sight() -> None:
    with opened(NOWHERE, sas_token=f"?{SAS}") as store:
        described = store.describe_range(STORED, 0, 1)
        assert described.target == f"/acct/container/m/a?{SAS.replace(':', '%3A')}"
        assert {name.lower() for name, _ in described.headers} == {
            "x-ms-range",
            "accept-encoding",
            "if-match",
            "x-ms-version",
        }
        for shown in (repr(described), repr(store), repr(store._access), store.endpoint):
            assert "c2lnbmF0dXJl" not in shown


def test_an_anonymous_range() -> None:
    with opened(NOWHERE, anonymous=True) as store:
        described = store.describe_range(StoredObject("a", 10, ""), 0, 1)
    assert {name.lower() for name, _ in described.headers} == {"x-ms-range", "accept-encoding", "x-ms-version"}
    assert described.target == "/acct/container/m/a"
    assert described.etag is None


def test_all_requests_are_of_one_version() -> None:
    with S3Stub(lambda _: listing({"m/a": 10})) as stub, opened(stub.endpoint) as store:
        store.list_level()
        described = dict(store.describe_range(STORED, 0, 1).headers)
        assert described["x-ms-version"] == stub.asked[0].headers["x-ms-version"]


# Refusals


@pytest.mark.parametrize(
    ("answer", "kind", "says"),
    [
        (error(403, "AuthorizationPermissionMismatch"), AccessDenied, "Storage Blob Data Reader"),
        (error(403, "AuthenticationFailed"), AccessDenied, "the account key of AZURE_STORAGE_KEY"),
        (error(404, "ContainerNotFound"), ObjectNotFound, "container that does not exist"),
        (error(409, "ContainerBeingDeleted"), ObjectNotFound, "container that does not exist"),
        (error(503, "ServerBusy"), StoreUnavailable, "503 ServerBusy"),
        (error(500, "OperationTimedOut"), StoreUnavailable, "HEADRACE_CONNECTIONS"),
        (error(403, "AuthorizationFailure"), AccessDenied, "firewall"),
        (Answer(403, b"<html>Sign in</html>"), AccessDenied, "403"),
        (Answer(200, b"not xml", {"Content-Type": "application/xml"}), StorageError, "does not answer as an Azure"),
        (
            Answer(200, b"<html><body>Welcome</body></html>", {"Content-Type": "text/html"}),
            StorageError,
            "does not answer",
        ),
        (
            Answer(200, b"<html><body>Hi</body></html>", {"Content-Type": "application/xml"}),
            StorageError,
            "does not answer",
        ),
        (Answer(silent=True), StoreUnavailable, "broke"),
    ],
)
def test_listing_gives_our_errors(answer: Answer, kind: type[HeadraceError], says: str) -> None:
    with S3Stub(lambda _: answer) as stub, opened(stub.endpoint) as store:
        with pytest.raises(kind) as caught:
            store.list_level()
        assert type(caught.value) is kind
        assert says in str(caught.value)
        assert "az://container/m" in caught.value.what
        assert caught.value.__cause__ is not None


def test_both_readings_are_named_where_a_container_is_absent() -> None:
    with S3Stub(lambda _: error(404, "ContainerNotFound")) as stub, opened(stub.endpoint) as store:
        with pytest.raises(ObjectNotFound) as caught:
            store.list_level()
        assert "the container 'container' of the account 'acct'" in caught.value.why
        assert "az://container@account/folder" in caught.value.why


@pytest.mark.parametrize(
    ("answer", "kind", "retry", "wait_s"),
    [
        (error(404, "BlobNotFound"), ObjectChanged, False, None),
        (error(404, "ContainerNotFound"), ObjectNotFound, False, None),
        (error(403, "AuthorizationPermissionMismatch"), AccessDenied, False, None),
        (error(503, "ServerBusy", Retry_After="3"), StoreUnavailable, True, 3.0),
        (error(500, "InternalError"), StoreUnavailable, True, None),
        (error(429, "TooManyRequests"), StoreUnavailable, True, None),
        (error(409, "BlobArchived"), StoreUnavailable, False, None),
        (error(400, "InvalidHeaderValue"), StorageError, False, None),
        (Answer(403), AccessDenied, False, None),
        (Answer(502), StoreUnavailable, True, None),
    ],
)
def test_refused_ranges(answer: Answer, kind: type[HeadraceError], retry: bool, wait_s: float | None) -> None:
    with opened(NOWHERE) as store:
        verdict = store.judge(STORED, refused(answer))
    assert type(verdict.error) is kind
    assert (verdict.retry, verdict.wait_s, verdict.refresh_credentials) == (retry, wait_s, False)
    assert "az://container/m/a" in verdict.error.what


@pytest.mark.parametrize("answer", [error(412, "ConditionNotMet"), error(416, "InvalidRange"), Answer(412)])
def test_a_changed_object_is_named_with_both_versions(answer: Answer) -> None:
    with S3Stub(lambda _: properties(10, '"w"')) as stub, opened(stub.endpoint) as store:
        verdict = store.judge(STORED, refused(answer))
        assert type(verdict.error) is ObjectChanged
        assert not verdict.retry
        assert verdict.error.what == "az://container/m/a is not the version that was opened."
        assert 'version "v"; now "w"' in verdict.error.why
        assert [asked.method for asked in stub.asked] == ["HEAD"]


def test_a_changed_object_is_named_where_the_new_version_is_not_told() -> None:
    with S3Stub(lambda _: error(403, "AuthorizationFailure")) as stub, opened(stub.endpoint) as store:
        verdict = store.judge(STORED, refused(error(412, "ConditionNotMet")))
        assert type(verdict.error) is ObjectChanged
        assert 'version "v"' in verdict.error.why


def test_small_reads_name_both_versions_too() -> None:
    def answer(asked: Asked) -> Answer:
        return properties(10, '"w"') if asked.method == "HEAD" else error(412, "ConditionNotMet")

    with S3Stub(answer) as stub, opened(stub.endpoint) as store, pytest.raises(ObjectChanged) as caught:
        store.read_object(STORED)
    assert 'version "v"; now "w"' in caught.value.why


def test_no_message_holds_a_secret() -> None:
    """Neither the error, nor what it stands for, shows a signature: not that of a SAS in a URL, not that of a header."""
    echo = error(
        403, "AuthenticationFailed", detail=f"Signature did not match. String to sign used was {'rl/' * 20} {KEY}"
    )
    for given in ({"sas_token": SAS}, {"account_key": KEY}):
        with S3Stub(lambda _: echo) as stub, opened(stub.endpoint, **given) as store:
            errors: list[BaseException] = [store.judge(STORED, refused(echo)).error]
            for ask in (store.list_level, lambda: store.stat("a"), lambda: store.read_object(STORED)):
                with pytest.raises(AccessDenied) as caught:
                    ask()
                errors.append(caught.value)
        with opened(NOWHERE, **given) as store, pytest.raises(StoreUnavailable) as unreachable:
            store.list_level()
        for found in (*errors, unreachable.value):
            shown = f"{found!r} {found} {found.__cause__!r} {found.__context__!r}"
            assert "c2lnbmF0dXJl" not in shown
            assert KEY not in shown


# Credentials that change


class Configuration:
    """Settings that something else keeps up to date; counts how often they are read."""

    def __init__(self, endpoint: str, **secret: str) -> None:
        self.settings = AzureSettings(account="acct", endpoint=f"{endpoint}/acct", **secret)
        self.num_reads = 0

    def read(self) -> AzureSettings:
        self.num_reads += 1
        return self.settings

    def change(self, **changed: Any) -> None:
        named = {name: getattr(self.settings, name) for name in AzureSettings.__dataclass_fields__}
        self.settings = AzureSettings(**{**named, **changed})


NEW_SAS = SAS.replace("c2ln", "bmV3")
EXPIRED = error(
    403,
    "AuthenticationFailed",
    "Server failed to authenticate the request. Make sure the value of Authorization header is formed correctly including the signature. "
    "RequestId:8c8f9e0b-001e-0018-5e41-4c3f0a000000 Time:2026-11-29T20:00:00.0000000Z",
    "Signature not valid in the specified time frame: Start [Sat, 28 Nov 2026] - Expiry [Sun, 29 Nov 2026] - Current [Sun, 29 Nov 2026]",
)


@pytest.mark.parametrize("operation", ["list", "stat", "read"])
def test_an_expired_sas_is_read_again(operation: str) -> None:
    configuration = Configuration("", sas_token=SAS)

    def answer(asked: Asked) -> Answer:
        if asked.query["sig"] != "bmV3bmF0dXJl":
            configuration.change(sas_token=NEW_SAS)
            return EXPIRED
        if is_listing(asked):
            return listing({"m/a": 10})
        return properties(10) if asked.method == "HEAD" else blob(b"0123456789")

    with S3Stub(answer) as stub:
        configuration.change(endpoint=f"{stub.endpoint}/acct")
        with opened(stub.endpoint, read_settings=configuration.read) as store:
            if operation == "list":
                assert [item.key for item in store.list_level().objects] == ["a"]
            elif operation == "stat":
                assert store.stat("a") == STORED
            else:
                assert store.read_object(STORED) == b"0123456789"
            assert len(stub.asked) == 2
            assert "bmV3bmF0dXJl" in store.describe_range(STORED, 0, 1).target


def test_a_refused_range_reads_the_configuration_once_for_all_readers() -> None:
    now = [1000.0]
    configuration = Configuration(NOWHERE, sas_token=SAS)
    with opened(NOWHERE, read_settings=configuration.read, clock=lambda: now[0]) as store:
        configuration.change(sas_token=NEW_SAS)
        verdict = store.judge(STORED, refused(EXPIRED))
        assert (verdict.retry, verdict.refresh_credentials) == (True, True)
        assert type(verdict.error) is AccessDenied
        assert "bmV3bmF0dXJl" in store.describe_range(STORED, 0, 1).target
        now[0] += 0.5  # Another reader whose request was described before the change.
        assert store.judge(STORED, refused(EXPIRED)).retry
        assert configuration.num_reads == 2


@pytest.mark.parametrize("given", [{"sas_token": SAS}, {"account_key": KEY}])
def test_a_secret_that_stays_the_same_is_not_tried_twice(given: dict[str, str]) -> None:
    with S3Stub(lambda _: EXPIRED) as stub:
        configuration = Configuration(stub.endpoint, **given)
        with opened(stub.endpoint, read_settings=configuration.read) as store:
            with pytest.raises(AccessDenied, match="time frame"):
                store.list_level()
            assert len(stub.asked) == 1
            verdict = store.judge(STORED, refused(EXPIRED))
            assert (verdict.retry, verdict.refresh_credentials) == (False, False)


def test_a_rotated_key_is_read_again() -> None:
    configuration = Configuration(NOWHERE, account_key=KEY)
    mismatch = error(403, "AuthenticationFailed", detail="The MAC signature found in the HTTP request is not the same")
    with opened(NOWHERE, read_settings=configuration.read) as store:
        before = dict(store.describe_range(STORED, 0, 1).headers)["Authorization"]
        configuration.change(account_key=KEY[4:] + "a2tr"[:4])
        configuration.change(account_key="bmV3IGtleSBvZiB0aGUgYWNjb3VudA==")
        assert store.judge(STORED, refused(mismatch)).retry
        assert dict(store.describe_range(STORED, 0, 1).headers)["Authorization"] != before


def test_a_configuration_that_leads_elsewhere_is_not_followed() -> None:
    """What was opened stays what is read, whatever the variables say meanwhile."""
    configuration = Configuration(NOWHERE, sas_token=SAS)
    with opened(NOWHERE, read_settings=configuration.read) as store:
        configuration.change(sas_token=NEW_SAS, endpoint="http://127.0.0.1:10/acct")
        verdict = store.judge(STORED, refused(EXPIRED))
        assert not verdict.retry
        assert store.describe_range(STORED, 0, 1).port == 9


def test_a_configuration_that_has_become_useless_is_told() -> None:
    configuration = Configuration(NOWHERE, sas_token=SAS)
    with opened(NOWHERE, read_settings=configuration.read) as store:
        configuration.change(sas_token="cut")
        verdict = store.judge(STORED, refused(EXPIRED))
        assert not verdict.retry
        assert "no signature in it" in verdict.error.what


def test_closing_twice_is_harmless() -> None:
    store: AzureStore
    with opened(NOWHERE) as store:
        store.close()
    assert store.uri_of("a") == "az://container/m/a"
