from __future__ import annotations

import os
import pickle
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import InvalidUri
from headrace.storage import Uri, is_object_uri, parse_uri
from headrace.storage.uri import check_key


@pytest.mark.parametrize(
    ("given", "scheme", "bucket", "key"),
    [
        ("s3://bucket/models/llama", "s3", "bucket", "models/llama"),
        ("S3://bucket/Models", "s3", "bucket", "Models"),
        ("s3://bucket", "s3", "bucket", ""),
        ("s3://bucket/", "s3", "bucket", ""),
        ("s3://bucket/a/", "s3", "bucket", "a"),
        ("s3://bucket/a///", "s3", "bucket", "a"),
        ("s3://bucket/a//b", "s3", "bucket", "a//b"),
        ("s3:/bucket/a", "s3", "bucket", "a"),
        ("  s3://bucket/a\n", "s3", "bucket", "a"),
        ("s3://my.bucket-1/a b+c%20d=ü?x#y", "s3", "my.bucket-1", "a b+c%20d=ü?x#y"),
        ("s3://arn:aws:s3:us-west-2:1:accesspoint/x", "s3", "arn:aws:s3:us-west-2:1:accesspoint/x", ""),
        ("s3://arn:aws:s3:us-west-2:1:accesspoint:x/a:1/b/", "s3", "arn:aws:s3:us-west-2:1:accesspoint/x", "a:1/b"),
        ("s3:/arn:aws:s3:us-west-2:1:accesspoint/x/a", "s3", "arn:aws:s3:us-west-2:1:accesspoint/x", "a"),
        ("s3://arn:aws:s3:::bucket", "s3", "bucket", ""),
        ("s3://arn:aws:s3:::bucket/a/b/", "s3", "bucket", "a/b"),
        ("s3://arn:aws:s3:::bucket/a", "s3", "bucket", "a"),
        ("gs://bucket/a", "gs", "bucket", "a"),
        ("Gs://bucket/a", "gs", "bucket", "a"),
        ("az://container/a", "az", "container", "a"),
        ("az://$root/a", "az", "$root", "a"),
        ("az://container@account/a/", "az", "container@account", "a"),
        ("az://container@account.blob.core.windows.net", "az", "container@account", ""),
        ("abfss://container@account.dfs.core.windows.net/a b/", "az", "container@account", "a b"),
        ("ABFS://container/a", "az", "container", "a"),
        ("wasbs://c@account.blob.core.chinacloudapi.cn/a", "az", "c@account.blob.core.chinacloudapi.cn", "a"),
        ("hf://org/name", "hf", "org/name", ""),
        ("hf://org/name@main", "hf", "org/name@main", ""),
        ("HF://Org/Name.v2/sub/folder/", "hf", "Org/Name.v2", "sub/folder"),
        ("https://host/a/b", "https", "host", "a/b"),
        ("HTTPS://Host.Example:8443/A%20b/", "https", "host.example:8443", "A b"),
        ("http://[::1]:80/a", "http", "[::1]:80", "a"),
        ("https://host/a.safetensors?signature=secret", "https", "host", "a.safetensors"),
        ("file:///data/my%20model", "file", "", "/data/my model"),
        ("file://localhost/data", "file", "", "/data"),
        ("file:/data", "file", "", "/data"),
        ("/data/model/", "file", "", "/data/model"),
        ("/data/a%20b", "file", "", "/data/a%20b"),
        ("/", "file", "", "/"),
        (PurePosixPath("s3://bucket/models/llama"), "s3", "bucket", "models/llama"),
        (Path("GS://bucket/a"), "gs", "bucket", "a"),
        (Path("https://host/a"), "https", "host", "a"),
        (Path("hf://org/name"), "hf", "org/name", ""),
        (Path("/data/x"), "file", "", "/data/x"),
        ("org/name", "hf", "org/name", ""),
        ("Org-1/Name_2.3@v1", "hf", "Org-1/Name_2.3@v1", ""),
        (" org/name ", "hf", "org/name", ""),
    ],
)
def test_parts(given: Any, scheme: str, bucket: str, key: str) -> None:
    uri = parse_uri(given)
    assert (uri.scheme, uri.bucket, uri.key) == (scheme, bucket, key)
    assert uri.text == str(given)
    assert parse_uri(uri) is uri


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("", "empty"),
        ("  ", "empty"),
        ("s3://", "bucket"),
        ("s3:///key", "bucket"),
        ("az://", "container"),
        ("gs:///", "bucket"),
        ("s3://bucket/../other", "'..'"),
        ("s3://bucket/a/..", "'..'"),
        ("s3://bucket/./a", "'.'"),
        ("s3://bucket/a\0b", "NUL"),
        ("s3://bucket/a\tb", "control"),
        ("s3://bucket/a\\b", "backslash"),
        ("https://host/a/%2e%2e/b", "'..'"),
        ("https://host/a%00b", "NUL"),
        ("s3://-bucket/a", "not a bucket name"),
        ("s3://buck et/a", "not a bucket name"),
        ("s3://arn:aws:s3:us-west-2:1:bucket/x/a", "accesspoint/name/folder"),
        ("s3://arn:aws:s3:us-west-2:1:accesspoint/x/../a", "'..'"),
        ("gs://arn:aws:s3:us-west-2:1:accesspoint/x/a", "ports"),
        ("s3://localhost:9000/bucket/a", "ports"),
        ("hf://name", "hf://org/name"),
        ("hf://", "hf://org/name"),
        ("hf://org/name/../x", "'..'"),
        ("https:///a", "no host"),
        ("https://host:port/a", "Host or port"),
        ("file://host/a", "three slashes"),
        ("/data/a\0b", "NUL"),
        ("ftp://host/a", "Known are s3, gs, az"),
        ("gcs://bucket/a", "gs"),
        (None, "not a uri"),
        (b"/data", "not a uri"),
        (7, "not a uri"),
    ],
)
def test_what_is_no_uri_is_refused_with_a_way_out(given: Any, says: str) -> None:
    with pytest.raises(InvalidUri) as caught:
        parse_uri(given)
    assert says in str(caught.value)
    assert caught.value.mend


@pytest.mark.parametrize(
    "given",
    [
        "s3://AKIAKEY:hunter2@bucket/a",
        "https://user:hunter2@host/a",
        "https://user:hun/ter2@host/a",
        "s3://hunter2@b/a",
        "az://hun+ter2==@account/a",
        "az://account:hunter2@host/a",
        "abfss://container@hunter2.example/a",
    ],
)
def test_secrets_in_uris_are_refused_and_not_repeated(given: str) -> None:
    with pytest.raises(InvalidUri) as caught:
        parse_uri(given)
    shown = f"{caught.value!r} {caught.value.__cause__!r}"
    assert "hun" not in shown
    assert "AKIA" not in shown


def test_a_query_stays_out_of_what_is_shown() -> None:
    uri = parse_uri("https://host/a.safetensors?X-Signature=hunter2")
    assert "hunter2" in uri.text
    assert "hunter2" not in f"{uri} {uri!r} {uri.parent!r} {uri.child('b')!r}"


def test_an_existing_path_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_uri("org/name").scheme == "hf"
    assert parse_uri(Path("org/name")).scheme == "file"
    assert parse_uri("./org/name").scheme == "file"
    (tmp_path / "org").mkdir()
    (tmp_path / "org/name").symlink_to("nowhere")
    assert parse_uri("org/name") == Uri("file", "", str(tmp_path / "org/name"))


def test_paths_are_made_absolute_and_not_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    assert str(parse_uri("link")) == str(tmp_path / "link")
    assert str(parse_uri("a/./b")) == str(tmp_path / "a/b")
    # What .. after a link means is for the system to say.
    assert str(parse_uri("link/../x")) == str(tmp_path / "link/../x")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert str(parse_uri("~/models/x")) == str(tmp_path / "models/x")


@pytest.mark.parametrize(
    ("given", "canonical"),
    [
        ("S3://bucket/a b/", "s3://bucket/a b"),
        ("s3:/bucket", "s3://bucket"),
        ("HTTPS://Host/a%20b%2Bc?x=1", "https://host/a%20b%2Bc"),
        ("org/name", "hf://org/name"),
        ("abfss://container@account.dfs.core.windows.net/a/", "az://container@account/a"),
        ("file:///data/x/", "/data/x"),
    ],
)
def test_the_canonical_form_parses_to_the_same(given: str, canonical: str) -> None:
    uri = parse_uri(given)
    assert str(uri) == canonical
    assert parse_uri(str(uri)) == uri
    assert pickle.loads(pickle.dumps(uri)) == uri


@given(st.text(st.characters(exclude_categories=("Cc", "Cs"), exclude_characters="\\"), min_size=1))
def test_any_key_comes_back(key: str) -> None:
    key = key.strip().strip("/")
    if any(part in (".", "..") for part in key.split("/")):
        return
    for scheme, bucket in (("s3", "bucket"), ("https", "host")):
        uri = Uri(scheme, bucket, key)
        assert parse_uri(str(uri)) == uri


@pytest.mark.parametrize(
    ("given", "child", "parent", "name"),
    [
        ("s3://bucket/a/b", "s3://bucket/a/b/x/y", "s3://bucket/a", "b"),
        ("s3://bucket/a", "s3://bucket/a/x/y", "s3://bucket", "a"),
        ("s3://bucket", "s3://bucket/x/y", "s3://bucket", ""),
        ("/data", "/data/x/y", "/", "data"),
        ("/", "/x/y", "/", ""),
        ("https://host/a", "https://host/a/x/y", "https://host", "a"),
    ],
)
def test_relatives(given: str, child: str, parent: str, name: str) -> None:
    uri = parse_uri(given)
    assert str(uri.child("x/y")) == child
    assert uri.child("") is uri
    assert str(uri.parent) == parent
    assert uri.name == name


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("s3://bucket/a", True),
        ("S3://bucket", True),
        (" gs://b/a", True),
        ("az://c/a", True),
        ("abfss://c@account.dfs.core.windows.net/a", True),
        ("Wasb://c/a", True),
        ("hf://org/name", True),
        ("https://host", True),
        (Path("s3://bucket/a"), True),
        ("s3://", True),
        (Uri("s3", "b", ""), True),
        (Uri("file", "", "/a"), False),
        ("org/name", False),
        ("file:///a", False),
        ("/data/s3", False),
        ("s3", False),
        ("s3:bucket", False),
        ("ftp://host", False),
        ("", False),
        (None, False),
        (b"s3://bucket", False),
        (42, False),
    ],
)
def test_object_uris_are_told_by_their_scheme(given: object, expected: bool) -> None:
    assert is_object_uri(given) is expected


def test_asking_does_not_touch_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("looked at the disk")

    monkeypatch.setattr(os.path, "lexists", refuse)
    monkeypatch.setattr(os, "stat", refuse)
    assert is_object_uri("s3://bucket/a")
    assert not is_object_uri("org/name")


@pytest.mark.parametrize("key", ["a", "a/b", "a b", "a\\b", "..a", "a..", "...", "ü"])
def test_keys_below_the_root(key: str) -> None:
    assert check_key(key) == key


@pytest.mark.parametrize("key", ["", "/", "/a", "a/", "a//b", "..", ".", "../a", "a/../b", "a/.", "a\0"])
def test_keys_that_are_not_below_the_root(key: str) -> None:
    with pytest.raises(InvalidUri, match="does not name anything below the root"):
        check_key(key)
