from __future__ import annotations

import base64
from types import SimpleNamespace
from urllib.parse import quote

import pytest
from azure.core.pipeline import PipelineContext, PipelineRequest
from azure.core.rest import HttpRequest
from azure.storage.blob._shared.authentication import SharedKeyCredentialPolicy
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import InvalidSetting
from headrace.storage.azure_signing import AzureKey, find_target, read_key, sign_headers

from .azure_stub import KEY

NOW = 1_700_000_000.0


def signature_of_the_sdk(account: str, url: str, headers: list[tuple[str, str]]) -> str:
    """The Authorization header that azure-storage-blob makes for the same request."""
    request = HttpRequest("GET", url, headers=dict(headers))
    context = PipelineContext(SimpleNamespace())  # type: ignore[arg-type]
    SharedKeyCredentialPolicy(account, KEY).on_request(PipelineRequest(request, context))
    return str(request.headers["Authorization"])


@pytest.mark.parametrize(
    ("account_url", "container"),
    [
        ("https://acct.blob.core.windows.net", "container"),
        ("http://127.0.0.1:10000/acct", "container"),
        ("https://acct.blob.core.windows.net", "$root"),
    ],
)
@pytest.mark.parametrize(
    "key", ["m/a.safetensors", "a b", "a+b", "a%20b", "ü/重", "a=b&c", "a#b?c", "-._~", "!'()*;:@,$[]"]
)
@pytest.mark.parametrize("version", ['"0x8DC"', ""])
@pytest.mark.parametrize("version_id", ["2026-01-02T03:04:05.1234567Z", ""])
def test_signatures_are_those_of_the_sdk(
    account_url: str, container: str, key: str, version: str, version_id: str
) -> None:
    target = find_target(account_url, container)
    path = target.encode(key)
    asked = [("x-ms-range", "bytes=5-9"), ("Accept-Encoding", "identity"), ("x-ms-version", "2025-11-05")]
    if version:
        asked.append(("If-Match", version))
    signed = sign_headers(read_key("acct", KEY), path, asked, NOW, version_id)
    query = f"?versionid={quote(version_id, safe='')}" if version_id else ""
    *shown, (name, signature) = signed
    assert name == "Authorization"
    assert ("x-ms-date", "Tue, 14 Nov 2023 22:13:20 GMT") in shown
    assert set(asked) < set(shown)
    host = account_url.partition("://")[2].partition("/")[0]
    assert signature == signature_of_the_sdk("acct", f"{target.scheme}://{host}{path}{query}", shown)


def test_what_proxies_rewrite_is_not_signed() -> None:
    path = find_target("https://acct.blob.core.windows.net", "c").encode("a")
    key = read_key("acct", KEY)
    plain = sign_headers(key, path, [("x-ms-version", "1")], NOW)
    other = sign_headers(key, path, [("x-ms-version", "1"), ("Accept-Encoding", "gzip")], NOW)
    assert plain[-1] == other[-1]
    assert sign_headers(key, path, [("x-ms-version", "2")], NOW)[-1] != plain[-1]
    assert sign_headers(key, path, [("x-ms-version", "1")], NOW + 1)[-1] != plain[-1]


@given(st.text(st.characters(exclude_categories=("Cs",)), min_size=1))
def test_each_byte_of_a_key_is_encoded_once(key: str) -> None:
    encoded = find_target("http://127.0.0.1:1/acct", "c").encode(key)
    assert encoded == "/acct/c/" + "".join(part if part == "/" else quote(part, safe="") for part in key)
    assert encoded.isascii()
    assert " " not in encoded


def test_targets() -> None:
    target = find_target("https://acct.blob.core.windows.net", "models")
    assert (target.scheme, target.host, target.port, target.path) == (
        "https",
        "acct.blob.core.windows.net",
        443,
        "/models",
    )
    target = find_target("http://[::1]:10000/acct", "models")
    assert (target.scheme, target.host, target.port, target.path) == ("http", "::1", 10000, "/acct/models")


def test_a_key_is_decoded_and_kept_out_of_sight() -> None:
    assert read_key("acct", KEY) == AzureKey("acct", b"k" * 64)
    assert "kkk" not in repr(read_key("acct", KEY))


@pytest.mark.parametrize(
    "text",
    ["hunter2!", "hunter2", "AccountName=hunter2;AccountKey=x", "hünter2", base64.b64encode(b"hunter2x").decode()[:-1]],
)
def test_what_is_no_key_is_not_repeated(text: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        read_key("acct", text)
    assert text not in f"{caught.value!r} {caught.value.__cause__!r}"
    assert "az storage account keys list" in caught.value.mend
