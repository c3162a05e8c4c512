from __future__ import annotations

import contextlib
import http.client
import re
from collections.abc import Callable

import pytest
from botocore.credentials import ReadOnlyCredentials

from headrace.storage import HttpRange, StoredObject
from headrace.storage.s3 import S3Store
from headrace.storage.signing import S3Target, find_target, sign_headers

from .conftest import SECRET_KEY
from .s3_stub import Answer, Asked, S3Stub, listing, signature_is_right

TARGET = S3Target("http", "127.0.0.1", 8333, "/bucket", "us-east-1")


def send(described: HttpRange, **changed: str) -> int:
    """Send what is described, with some headers as a proxy may have changed them."""
    headers = {name.lower(): value for name, value in described.headers}
    headers.update({name.replace("_", "-"): value for name, value in changed.items()})
    with contextlib.closing(http.client.HTTPConnection(described.host, described.port, timeout=5)) as connection:
        connection.putrequest("GET", described.target, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        return connection.getresponse().status


def check_signature(asked: Asked) -> Answer:
    return Answer(206 if signature_is_right(asked, SECRET_KEY) else 403)


@pytest.mark.parametrize(
    ("key", "target"),
    [
        ("m/a.safetensors", "/bucket/m/a.safetensors"),
        ("a b", "/bucket/a%20b"),
        ("a+b", "/bucket/a%2Bb"),
        ("a%20b", "/bucket/a%2520b"),
        ("ü", "/bucket/%C3%BC"),
        ("重", "/bucket/%E9%87%8D"),
        ("a=b&c", "/bucket/a%3Db%26c"),
        ("a#b?c", "/bucket/a%23b%3Fc"),
        ("-._~", "/bucket/-._~"),
        ("!'()*;:@,$[]", "/bucket/%21%27%28%29%2A%3B%3A%40%2C%24%5B%5D"),
        ("a//b", "/bucket/a//b"),
    ],
)
def test_each_byte_of_a_key_is_encoded_once(key: str, target: str) -> None:
    assert TARGET.encode(key) == target
    assert re.fullmatch(r"[A-Za-z0-9/%._~-]*", TARGET.encode(key))


@pytest.mark.parametrize(
    ("url", "target", "authority"),
    [
        ("http://127.0.0.1:8333/bucket/k", TARGET, "127.0.0.1:8333"),
        (
            "https://b.s3.amazonaws.com/k",
            S3Target("https", "b.s3.amazonaws.com", 443, "", "us-east-1"),
            "b.s3.amazonaws.com",
        ),
        ("http://h/base/b/k", S3Target("http", "h", 80, "/base/b", "us-east-1"), "h"),
        ("https://h:80/b/k", S3Target("https", "h", 80, "/b", "us-east-1"), "h:80"),
        ("http://[::1]:9000/b/k", S3Target("http", "::1", 9000, "/b", "us-east-1"), "[::1]:9000"),
    ],
)
def test_the_target_is_read_off_a_url(url: str, target: S3Target, authority: str) -> None:
    assert find_target(url, "us-east-1") == target
    assert target.authority == authority


def test_only_what_must_be_is_signed() -> None:
    headers = dict(sign_headers(TARGET, "/bucket/a", ReadOnlyCredentials("AK", "SK", None)))
    assert set(headers) == {"X-Amz-Date", "X-Amz-Content-SHA256", "Authorization"}
    assert "SignedHeaders=host;x-amz-content-sha256;x-amz-date," in headers["Authorization"]
    assert "SK" not in repr(headers)

    headers = dict(sign_headers(TARGET, "/bucket/a", ReadOnlyCredentials("AK", "SK", "token")))
    assert headers["X-Amz-Security-Token"] == "token"
    assert "SignedHeaders=host;x-amz-content-sha256;x-amz-date;x-amz-security-token," in headers["Authorization"]


@pytest.mark.parametrize("key", ["a", "a b+c%20d=e", "ü/重", "a#b?c&d", "x;y:z@!'()*~"])
@pytest.mark.parametrize("path", ["", "/", "/base", "/base/", "/base/deeper"])
def test_a_server_finds_the_signature_right(open_s3: Callable[..., S3Store], key: str, path: str) -> None:
    with S3Stub(check_signature) as stub:
        store = open_s3(endpoint=stub.endpoint + path)
        described = store.describe_range(StoredObject(key, 10, '"v"'), 2, 5)
        assert send(described) == 206
        asked = stub.asked[0]
        assert asked.path.startswith(f"{path.rstrip('/')}/bucket/m/")
        assert asked.headers["range"] == "bytes=2-4"
        assert asked.headers["if-match"] == '"v"'
        assert asked.headers["accept-encoding"] == "identity"
        assert store.endpoint == (stub.endpoint + path).rstrip("/")


@pytest.mark.parametrize("path", ["", "/", "/base", "/base/", "/base/deeper"])
def test_a_server_finds_the_signature_of_the_sdks_calls_right(open_s3: Callable[..., S3Store], path: str) -> None:
    """Listing, looking up and small reads, below an endpoint that ends with a slash or has a path; Accept-Encoding, which front ends rewrite, is not signed."""

    def answer(asked: Asked) -> Answer:
        signed = asked.headers["authorization"].partition("SignedHeaders=")[2].partition(",")[0].split(";")
        if not signature_is_right(asked, SECRET_KEY) or "accept-encoding" in signed or "user-agent" in signed:
            return Answer(403)
        if asked.path.endswith("/m/a%20b"):
            return Answer(200, b"0123456789", {"ETag": '"v"'})
        return listing({"m/a b": 10})

    with S3Stub(answer) as stub:
        store = open_s3(endpoint=stub.endpoint + path)
        assert [stored.key for stored in store.list_level().objects] == ["a b"]
        stored = store.stat("a b")
        assert store.read_object(stored) == b"0123456789"
        assert [asked.path for asked in stub.asked] == [
            f"{path.rstrip('/')}/bucket",
            f"{path.rstrip('/')}/bucket/m/a%20b",
            f"{path.rstrip('/')}/bucket/m/a%20b",
        ]


def test_front_ends_may_change_what_is_not_signed(open_s3: Callable[..., S3Store]) -> None:
    with S3Stub(check_signature) as stub:
        store = open_s3(endpoint=stub.endpoint)
        described = store.describe_range(StoredObject("a", 10, '"v"'), 2, 5)
        assert send(described, accept_encoding="gzip", range="bytes=0-9", user_agent="proxy", via="1.1 proxy") == 206
        assert send(described, x_amz_date="20200101T000000Z") == 403
        assert send(described, authorization=dict(described.headers)["Authorization"][:-1] + "x") == 403


def test_a_session_token_is_signed(open_s3: Callable[..., S3Store], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token/+=")
    with S3Stub(check_signature) as stub:
        store = open_s3(endpoint=stub.endpoint)
        assert send(store.describe_range(StoredObject("a", 10, '"v"'), 2, 5)) == 206
        assert stub.asked[0].headers["x-amz-security-token"] == "token/+="
        described = store.describe_range(StoredObject("a", 10, '"v"'), 2, 5)
        assert send(described, x_amz_security_token="other") == 403


def test_nothing_secret_is_shown(open_s3: Callable[..., S3Store]) -> None:
    store = open_s3(endpoint="http://127.0.0.1:9")
    described = store.describe_range(StoredObject("a", 10, '"v"'), 2, 5)
    shown = f"{described!r} {store!r} {store._access!r} {store._options!r}"
    assert "Signature" not in shown
    assert SECRET_KEY not in shown
