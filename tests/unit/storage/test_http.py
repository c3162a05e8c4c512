"""The store for web servers, against a scripted server: what is found, how it is pinned, and what is refused."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest
from tests.support.fault_server import FaultServer, Script, redirect, refuse

from headrace.errors import (
    AccessDenied,
    InvalidSetting,
    InvalidUri,
    ObjectChanged,
    ObjectNotFound,
    StorageError,
    StoreUnavailable,
    WrongRange,
)
from headrace.settings import Settings, TransportSettings
from headrace.storage import HttpRange, Refusal, StoredObject, open_store, parse_uri
from headrace.storage.http import HttpOptions, HttpStore
from headrace.storage.http_search import NameSearch
from headrace.storage.model_files import INDEX, SIDE_FILES, SINGLE

QUICK = TransportSettings(
    max_attempts=2, backoff_first_s=0.001, connect_timeout_s=5, idle_timeout_s=5, num_connections=4
)
DATE = "Wed, 01 Nov 2023 10:00:00 GMT"
DATED = Script(headers={"ETag": None, "Last-Modified": DATE})
BARE = Script(headers={"ETag": None})

Open = Callable[..., HttpStore]


@pytest.fixture
def server() -> Iterator[FaultServer]:
    with FaultServer() as one:
        yield one
        assert one.wait_until_idle(), "connections were left open"


@pytest.fixture
def open_http(server: FaultServer) -> Iterator[Open]:
    """Open ``/path`` of the server as a store; all are closed in the end."""
    opened: list[HttpStore] = []

    def open_one(path: str = "/m/", **settings: Any) -> HttpStore:
        store = open_store(server.url + path, settings=Settings(transport=QUICK, **settings))
        assert isinstance(store, HttpStore)
        opened.append(store)
        return store

    yield open_one
    for store in opened:
        store.close()


def put(server: FaultServer, files: dict[str, bytes], folder: str = "m") -> None:
    for key, content in files.items():
        server.put(f"{folder}/{key}", content)


def headers_of(asked: HttpRange) -> dict[str, str]:
    return dict(asked.headers)


def test_the_files_that_the_index_names_are_found_with_side_files_and_code(
    server: FaultServer, open_http: Open
) -> None:
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "extra/model-3.safetensors"}
    put(
        server,
        {
            INDEX: json.dumps({"weight_map": weight_map}).encode(),
            "model-1.safetensors": b"1",
            "model-2.safetensors": b"22",
            "extra/model-3.safetensors": b"333",
            SINGLE: b"stray",
            "config.json": b'{"auto_map": {"AutoModel": "modeling_x.X"}}',
            "modeling_x.py": b"from .ops import f",
            "ops.py": b"",
            "tokenizer.json": b"{}",
            "chat_template.jinja": b"{{ messages }}",
            "notes.txt": b"of a name that nobody knows",
        },
    )
    server.always("m/ops.py", Script(status=416, headers={"Content-Range": "bytes */0"}))
    store = open_http()
    listing = store.list_level()
    assert [(item.key, item.size_bytes) for item in listing.objects] == [
        ("chat_template.jinja", 14),
        ("config.json", 43),
        ("model-1.safetensors", 1),
        ("model-2.safetensors", 2),
        (INDEX, len(json.dumps({"weight_map": weight_map}))),
        ("modeling_x.py", 18),
        ("ops.py", 0),
        ("tokenizer.json", 2),
    ]
    assert [(item.key, item.size_bytes) for item in store.list_level("extra").objects] == [
        ("extra/model-3.safetensors", 3)
    ]
    assert store.list_level("other").objects == ()
    fresh = open_http()
    assert [item.key for item in fresh.list_level("extra").objects] == ["extra/model-3.safetensors"]
    assert max(sent.bytes_sent for sent in server.log if sent.key.endswith(".safetensors")) == 1


def test_without_an_index_there_is_the_single_file(server: FaultServer, open_http: Open) -> None:
    put(server, {SINGLE: b"12345", "config.json": b"{}"})
    assert [item.key for item in open_http("/m").list_level().objects] == ["config.json", SINGLE]


def test_a_file_or_an_index_can_be_named(server: FaultServer, open_http: Open) -> None:
    other = "model.fp16.safetensors.index.json"
    put(
        server,
        {
            "a.safetensors": b"12",
            SINGLE: b"345",
            "config.json": b"{}",
            other: b'{"weight_map": {"x": "a.safetensors"}}',
        },
    )
    one = open_http("/m/a.safetensors")
    assert (one.selected_key, str(one.uri)) == ("a.safetensors", f"{server.url}/m")
    assert [item.key for item in one.list_level().objects] == ["a.safetensors", "config.json"]
    assert [item.key for item in open_http(f"/m/{other}").list_level().objects] == [
        "a.safetensors",
        "config.json",
        other,
    ]
    assert open_http("/m/a.safetensors/").selected_key is None


def test_where_nothing_is_found_the_names_are_said(server: FaultServer, open_http: Open) -> None:
    with pytest.raises(ObjectNotFound, match=f"There is no model at {server.url}/m") as caught:
        open_http().list_level()
    assert all(name in caught.value.why for name in (INDEX, SINGLE, server.url))
    with pytest.raises(ObjectNotFound, match=r"/m/a\.safetensors does not exist"):
        open_http("/m/a.safetensors").list_level()
    with pytest.raises(ObjectNotFound):
        open_http().stat("config.json")


def test_the_page_of_a_hub_repository_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HttpStore(parse_uri("https://huggingface.co/org/name/tree/main"), transport=QUICK)
    page = ObjectNotFound("It does not exist.")
    monkeypatch.setattr(store, "_search", NameSearch(Mock(side_effect=page), Mock(), num_threads=2))
    with pytest.raises(ObjectNotFound) as caught:
        store.list_level()
    assert caught.value.mend == "For a repository of the hub write hf://org/name."


def test_what_is_refused_is_not_taken_for_absent(server: FaultServer, open_http: Open) -> None:
    for name in (INDEX, SINGLE, *SIDE_FILES):
        server.always(f"m/{name}", refuse(401))
    with pytest.raises(AccessDenied, match="HEADRACE_HTTP_TOKEN"):
        open_http().list_level()
    put(server, {INDEX: b'{"weight_map": {"x": "a.safetensors"}}', "config.json": b"{}"})
    server.forget_scripts(f"m/{INDEX}")
    server.always("m/a.safetensors", refuse(403))
    with pytest.raises(AccessDenied, match=r"a\.safetensors.*403"):
        open_http().list_level()


def test_a_name_that_was_a_guess_may_be_refused(server: FaultServer, open_http: Open) -> None:
    """Stores that do not let anybody list answer 403 for what is absent."""
    put(server, {SINGLE: b"12"})
    for name in (INDEX, *SIDE_FILES):
        server.always(f"m/{name}", refuse(403))
    assert [item.key for item in open_http().list_level().objects] == [SINGLE]


def test_a_server_in_trouble_does_not_pass_for_an_empty_one(server: FaultServer, open_http: Open) -> None:
    put(server, {SINGLE: b"12"})
    server.always("m/config.json", refuse(503))
    with pytest.raises(StoreUnavailable, match="503"):
        open_http().list_level()


def test_a_web_page_in_place_of_a_file_is_no_file(server: FaultServer, open_http: Open) -> None:
    """Some sites answer every name with their start page, and 200."""
    for name in (INDEX, SINGLE, *SIDE_FILES):
        server.put(f"m/{name}", b"<html>welcome</html>")
        server.always(f"m/{name}", Script(headers={"Content-Type": "text/html; charset=utf-8"}))
    with pytest.raises(ObjectNotFound, match="There is no model"):
        open_http().list_level()
    with pytest.raises(ObjectNotFound, match="answers with a web page"):
        open_http().stat(SINGLE)


def test_a_server_without_ranges_is_recognised_when_it_is_opened(server: FaultServer, open_http: Open) -> None:
    put(server, {SINGLE: b"1" * 5_000_000, "config.json": b'{"a": 1}'})
    for name in (SINGLE, "config.json"):
        server.always(f"m/{name}", Script(ignores_range=True))
    store = open_http()
    with pytest.raises(WrongRange, match="does not serve byte ranges") as caught:
        store.list_level()
    assert "nginx" in caught.value.mend
    config = store.stat("config.json")
    assert store.read_object(config) == b'{"a": 1}', "small files need no ranges"
    with pytest.raises(WrongRange):
        store.read_object(config, start=1, stop=3)


@pytest.mark.parametrize(
    "script",
    [
        Script(headers={"Content-Range": None}),
        Script(headers={"Content-Range": "bytes 0-0/*"}),
        Script(headers={"Content-Range": "bytes 5-5/12"}),
        Script(status=416),
    ],
)
def test_an_answer_that_does_not_tell_the_size_is_an_error(
    server: FaultServer, open_http: Open, script: Script
) -> None:
    put(server, {SINGLE: b"123456789012"})
    server.always(f"m/{SINGLE}", script)
    with pytest.raises((StorageError, WrongRange)) as caught:
        open_http().stat(SINGLE)
    assert f"{server.url}/m/{SINGLE}" in caught.value.what


def test_a_small_file_that_is_made_as_it_is_sent_is_measured(server: FaultServer, open_http: Open) -> None:
    put(server, {"config.json": b'{"a": 1}', SINGLE: b"12345"})
    for name in ("config.json", SINGLE):
        server.always(f"m/{name}", Script(ignores_range=True, chunk_bytes=3))
    store = open_http()
    config = store.stat("config.json")
    assert config.size_bytes == 8
    assert store.read_object(config) == b'{"a": 1}'
    with pytest.raises(StorageError, match="does not say how long it is"):
        store.stat(SINGLE)


def test_a_side_file_that_cannot_be_used_is_left_out_aloud(
    server: FaultServer, open_http: Open, caplog: pytest.LogCaptureFixture
) -> None:
    put(server, {"config.json": b"{}", "tokenizer.json": b"{}", SINGLE: b"12345"})
    server.always("m/tokenizer.json", refuse(418))
    assert [item.key for item in open_http().list_level().objects] == ["config.json", SINGLE]
    assert [record.levelname for record in caplog.records if "tokenizer.json" in record.message] == ["WARNING"]
    server.always(f"m/{INDEX}", refuse(418))
    with pytest.raises(StorageError, match="418"):
        open_http().list_level()


def test_what_is_sent_compressed_is_decoded_as_a_whole_and_refused_in_ranges(
    server: FaultServer, open_http: Open
) -> None:
    text = b'{"a": 1}' * 100
    put(server, {"config.json": gzip.compress(text), SINGLE: gzip.compress(b"12345")})
    for name in ("config.json", SINGLE):
        server.always(f"m/{name}", Script(headers={"Content-Encoding": "gzip"}))
    store = open_http()
    config = store.stat("config.json")
    assert store.read_object(config) == text
    with pytest.raises(StorageError, match="gzip"):
        store.read_object(config, start=0, stop=5)
    with pytest.raises(WrongRange, match="Content-Encoding 'gzip'"):
        store.stat(SINGLE)
    assert all(sent.headers["accept-encoding"] == "identity" for sent in server.log)


@pytest.mark.parametrize(
    ("script", "version", "condition", "etag", "header"),
    [
        (Script(headers={"ETag": '"e1"', "Last-Modified": DATE}), '"e1"', ("If-Match", '"e1"'), '"e1"', None),
        (Script(headers={"ETag": 'W/"e1"'}), 'W/"e1"', None, 'W/"e1"', None),
        (Script(headers={"ETag": "e1"}), "e1", None, "e1", None),
        (DATED, f"modified {DATE}", ("If-Unmodified-Since", DATE), None, ("last-modified", DATE)),
        (BARE, "", None, None, None),
    ],
)
def test_every_range_asks_for_the_pinned_version(
    server: FaultServer,
    open_http: Open,
    script: Script,
    version: str,
    condition: tuple[str, str] | None,
    etag: str | None,
    header: Any,
) -> None:
    put(server, {SINGLE: b"12345"})
    server.always(f"m/{SINGLE}", script)
    store = open_http()
    stored = store.stat(SINGLE)
    assert stored == StoredObject(SINGLE, 5, version)
    asked = store.describe_range(stored, 1, 3)
    sent = headers_of(asked)
    assert (sent.get("If-Match"), sent.get("If-Unmodified-Since")) == (
        condition[1] if condition and condition[0] == "If-Match" else None,
        condition[1] if condition and condition[0] == "If-Unmodified-Since" else None,
    )
    assert (sent["Range"], sent["Accept-Encoding"]) == ("bytes=1-2", "identity")
    assert (asked.etag, asked.version_header, asked.start, asked.stop) == (etag, header, 1, 3)
    assert (asked.scheme, asked.host, asked.port, asked.target) == ("http", "127.0.0.1", server.port, f"/m/{SINGLE}")


def test_a_server_that_tells_no_version_is_warned_of_once(
    server: FaultServer, open_http: Open, caplog: pytest.LogCaptureFixture
) -> None:
    put(server, {SINGLE: b"1", "config.json": b"{}"})
    for name in (SINGLE, "config.json"):
        server.always(f"m/{name}", BARE)
    open_http().list_level()
    assert [record.message for record in caplog.records if "neither ETag nor" in record.message] == [
        f"{server.url} gives neither ETag nor Last-Modified: a file that is replaced is noticed only where its size differs."
    ]


def test_a_file_that_was_replaced_or_removed_is_not_read(server: FaultServer, open_http: Open) -> None:
    put(server, {"config.json": b"first", "vocab.json": b"first", "merges.txt": b"first"})
    server.always("m/vocab.json", DATED)
    store = open_http()
    config, vocab, merges = (store.stat(name) for name in ("config.json", "vocab.json", "merges.txt"))
    put(server, {"config.json": b"other", "merges.txt": b"longer"})
    with pytest.raises(ObjectChanged, match="412"):
        store.read_object(config)
    with pytest.raises(ObjectChanged, match="412"):
        store.read_object(config, start=1, stop=2)
    server.always("m/vocab.json", Script(headers={"ETag": None, "Last-Modified": DATE.replace("2023", "2024")}))
    with pytest.raises(ObjectChanged, match="modified Wed, 01 Nov 2024"):
        store.read_object(vocab)
    with pytest.raises(StorageError, match="6 bytes where 5"):
        store.read_object(StoredObject("merges.txt", 5, ""))
    server.script("m/merges.txt", Script(headers={"ETag": '"other"'}))
    with pytest.raises(ObjectChanged, match='"other" now'):
        store.read_object(StoredObject("merges.txt", 6, server.etag("m/merges.txt")))
    server.script("m/merges.txt", refuse(404))
    with pytest.raises(ObjectChanged, match="gone"):
        store.read_object(merges)


def test_pieces_are_read(server: FaultServer, open_http: Open) -> None:
    put(server, {"a.txt": bytes(range(200))})
    store = open_http()
    stored = store.stat("a.txt")
    assert store.read_object(stored) == bytes(range(200))
    assert store.read_object(stored, start=5, stop=9) == bytes([5, 6, 7, 8])
    assert store.read_object(stored, start=190) == bytes(range(190, 200))
    assert store.read_object(stored, start=7, stop=7) == b""
    server.script("m/a.txt", Script(shift=1))
    with pytest.raises(WrongRange):
        store.read_object(stored, start=5, stop=9)


def test_odd_names_are_encoded_once(server: FaultServer, open_http: Open) -> None:
    keys = ("a b", "a+b", "a%20b", "ü", "重", "a=b", "a#b", "a?b", "a&b;c", "[z]{1}|^`<>")
    put(server, {key: key.encode() for key in keys}, folder="m x+y%41")
    store = open_http("/m%20x+y%2541/")
    for key in keys:
        stored = store.stat(key)
        assert store.read_object(stored) == key.encode()
        asked = store.describe_range(stored, 0, 1)
        assert asked.target.isascii()
    assert {sent.key for sent in server.log} == {f"m x+y%41/{key}" for key in keys}
    assert store.uri_of("a b") == f"{server.url}/m%20x%2By%2541/a%20b"


@pytest.mark.parametrize("key", ["../secret", "a/../../secret", "/etc/passwd", "a//b", "", "a\0b", "."])
def test_keys_that_lead_elsewhere_are_refused(server: FaultServer, open_http: Open, key: str) -> None:
    store, stored = open_http(), StoredObject(key, 6, "x")
    for ask in (lambda: store.stat(key), lambda: store.read_object(stored), lambda: store.describe_range(stored, 0, 1)):
        with pytest.raises(InvalidUri):
            ask()
    assert server.log == []


def test_a_signature_goes_with_every_request_and_into_no_message(
    server: FaultServer, open_http: Open, caplog: pytest.LogCaptureFixture
) -> None:
    put(server, {"a.safetensors": b"12", "config.json": b"{}"})
    server.always("m/a.safetensors", BARE)
    store = open_http("/m/%61.safetensors?X-Amz-Signature=s3cr3t/&b=%2F/")
    assert store.selected_key == "a.safetensors"
    stored = store.stat("a.safetensors")
    asked = store.describe_range(stored, 0, 1)
    assert asked.target == "/m/%61.safetensors?X-Amz-Signature=s3cr3t/&b=%2F/", "as it was written and signed"
    store.list_level()
    with pytest.raises(ObjectNotFound) as caught:
        store.stat("absent.safetensors")
    server.always("m/a.safetensors", Script(ignores_range=True))
    with pytest.raises(WrongRange) as refused:
        store.stat("a.safetensors")
    said = [
        repr(store),
        repr(asked),
        repr(stored),
        str(store.uri),
        repr(store.uri),
        store.uri_of("x"),
        store.endpoint,
        caplog.text,
    ]
    said += [repr(error) for error in (caught.value, refused.value)]
    assert not [text for text in said if "s3cr3t" in text]


def test_a_folder_with_a_query_passes_it_on(server: FaultServer, open_http: Open) -> None:
    put(server, {SINGLE: b"12"})
    store = open_http("/m?Policy=p")
    assert [item.key for item in store.list_level().objects] == [SINGLE]
    assert store.describe_range(store.stat(SINGLE), 0, 1).target == f"/m/{SINGLE}?Policy=p"


def test_a_token_is_sent_to_the_server_of_the_uri_alone(server: FaultServer, open_http: Open) -> None:
    with FaultServer() as other:
        other.put("b", b"12")
        put(server, {SINGLE: b"12", "config.json": b"{}"})
        server.script("m/config.json", redirect(f"{other.url}/b"))
        store = open_http(http_token="t0ken")
        stored = store.stat(SINGLE)
        assert headers_of(store.describe_range(stored, 0, 1))["Authorization"] == "Bearer t0ken"
        assert store.stat("config.json").size_bytes == 2
        assert [sent.headers["authorization"] for sent in server.log] == ["Bearer t0ken"] * 2
        assert "authorization" not in other.log[0].headers
        store.judge(stored, Refusal(302, "Found", {"location": f"{other.url}/b?signed"}))
        assert "Authorization" not in headers_of(store.describe_range(stored, 0, 1))
        assert "t0ken" not in repr(store) + repr(Settings(http_token="t0ken")) + repr(HttpOptions(token="t0ken"))
        store.close()


@pytest.mark.parametrize("token", ["two words", "line\n", "", "ü"])
def test_a_token_that_is_none_is_refused_without_being_quoted(open_http: Open, token: str) -> None:
    with pytest.raises(InvalidSetting, match="HEADRACE_HTTP_TOKEN") as caught:
        open_http(http_token=token)
    assert not token or token not in str(caught.value)


def test_a_redirect_is_remembered_until_it_is_refused(server: FaultServer, open_http: Open) -> None:
    put(server, {SINGLE: b"12"})
    store = open_http()
    stored = store.stat(SINGLE)
    store.judge(stored, Refusal(302, "Found", {"location": "http://cdn.example/x?signature=1"}))
    asked = store.describe_range(stored, 0, 1)
    assert (asked.host, asked.port, asked.target) == ("cdn.example", 80, "/x?signature=1")
    assert headers_of(asked)["If-Match"] == stored.version
    for _ in range(2):  # Each of two readers had sent its request to the address that has ended.
        verdict = store.judge(
            stored,
            Refusal(
                403, "Forbidden", {}, b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>"
            ),
        )
        assert verdict.retry
        assert type(verdict.error) is AccessDenied
        assert "Request has expired" in verdict.error.why
    assert store.describe_range(stored, 0, 1).host == "127.0.0.1"


@pytest.mark.parametrize(
    ("status", "kind", "retry"),
    [
        (401, AccessDenied, False),
        (403, AccessDenied, False),
        (404, ObjectChanged, False),
        (407, StoreUnavailable, False),
        (410, ObjectChanged, False),
        (412, ObjectChanged, False),
        (416, ObjectChanged, False),
        (429, StoreUnavailable, True),
        (500, StoreUnavailable, True),
        (503, StoreUnavailable, True),
        (400, StorageError, False),
        (418, StorageError, False),
    ],
)
def test_refusals_of_ranges_mean_what_they_mean(open_http: Open, status: int, kind: type, retry: bool) -> None:
    verdict = open_http().judge(StoredObject(SINGLE, 5, '"x"'), Refusal(status, "Reason", {"retry-after": "3"}))
    assert type(verdict.error) is kind
    assert verdict.retry is retry
    assert verdict.wait_s == (3.0 if retry else None)
    assert verdict.error.mend
    assert "aws" not in str(verdict.error).lower()


def test_threads_share_a_store(server: FaultServer, open_http: Open) -> None:
    put(server, {str(number): b"%d" % number for number in range(16)})
    store = open_http()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda number: store.read_object(store.stat(str(number))), range(16)))
    assert answers == [b"%d" % number for number in range(16)]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_opens_connections_of_its_own(server: FaultServer, open_http: Open) -> None:
    put(server, {"a": b"12"})
    store = open_http()
    stored = store.stat("a")
    child = os.fork()
    if child == 0:
        good = store.read_object(stored) == b"12"
        store.close()
        os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.read_object(stored) == b"12"
    assert server.num_connections == 2


def test_closing_twice_is_harmless_and_the_store_can_be_used_again(server: FaultServer, open_http: Open) -> None:
    put(server, {"a": b"12"})
    store = open_http()
    stored = store.stat("a")
    store.close()
    store.close()
    assert store.read_object(stored) == b"12"
