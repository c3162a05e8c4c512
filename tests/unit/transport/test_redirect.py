from __future__ import annotations

import pytest

from headrace.errors import StoreUnavailable
from headrace.storage import HttpRange
from headrace.transport.redirect import follow

HEADERS = (
    ("Range", "bytes=0-9"),
    ("Accept-Encoding", "identity"),
    ("If-Match", '"v"'),
    ("Authorization", "Bearer hush"),
    ("Cookie", "hush"),
    ("x-amz-security-token", "hush"),
    ("X-Something-New", "hush"),
)
ASKED = HttpRange("https", "host.example", 443, "/a/b?x=1", HEADERS, 0, 10, '"v"', "ca.pem", True)


@pytest.mark.parametrize(
    ("location", "goes_to"),
    [
        ("/c?y=2", ("https", "host.example", 443, "/c?y=2")),
        ("c", ("https", "host.example", 443, "/a/c")),
        ("//HOST.example/c", ("https", "host.example", 443, "/c")),
        ("https://host.example:443/c#part", ("https", "host.example", 443, "/c")),
        ("https://host.example", ("https", "host.example", 443, "/")),
        ("/a%20b/ü c", ("https", "host.example", 443, "/a%20b/%C3%BC%20c")),
    ],
)
def test_on_the_same_host_everything_goes_along(location: str, goes_to: tuple[str, str, int, str]) -> None:
    asked = follow(ASKED, location, "uri")
    assert (asked.scheme, asked.host, asked.port, asked.target) == goes_to
    assert asked.headers == HEADERS
    assert (asked.start, asked.stop, asked.etag, asked.ca_file) == (0, 10, '"v"', "ca.pem")


@pytest.mark.parametrize(
    ("location", "goes_to"),
    [
        ("https://other.example/c?X-Amz-Signature=1%2F2", ("https", "other.example", 443, "/c?X-Amz-Signature=1%2F2")),
        ("https://host.example:8443/c", ("https", "host.example", 8443, "/c")),
        ("https://user:word@[::1]:9/c", ("https", "::1", 9, "/c")),
        ("https://host.example.evil.example/", ("https", "host.example.evil.example", 443, "/")),
    ],
)
def test_to_another_host_only_what_is_harmless_goes_along(location: str, goes_to: tuple[str, str, int, str]) -> None:
    asked = follow(ASKED, location, "uri")
    assert (asked.scheme, asked.host, asked.port, asked.target) == goes_to
    assert asked.headers == HEADERS[:3]


@pytest.mark.parametrize(
    "location",
    ["http://host.example/?hush", "ftp://host.example/hush", "https://[hush/", "https://h:hush/", "file:///hush"],
)
def test_what_is_not_followed_is_not_quoted_either(location: str) -> None:
    with pytest.raises(StoreUnavailable) as caught:
        follow(ASKED, location, "s3://bucket/key")
    assert "s3://bucket/key" in str(caught.value)
    assert "hush" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_from_plain_http_to_https_is_followed_without_secrets() -> None:
    asked = follow(HttpRange("http", "::1", 80, "/a", HEADERS, 0, 10), "https://[::1]/a", "uri")
    assert (asked.scheme, asked.host, asked.port) == ("https", "::1", 443)
    assert asked.headers == HEADERS[:3]
    assert follow(HttpRange("http", "::1", 80, "/a", HEADERS, 0, 10), "b", "uri").headers == HEADERS
