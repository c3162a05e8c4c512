from __future__ import annotations

import pytest

from headrace.errors import StoreUnavailable
from headrace.storage.address import Address, encode_key, follow_location, parse_address

ASKED = Address("https", "host", 443, "/a/b?x=secret")


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("https://Host/a/b?x=1", Address("https", "host", 443, "/a/b?x=1")),
        ("http://host", Address("http", "host", 80, "/")),
        ("HTTP://host:8080/a%20b", Address("http", "host", 8080, "/a%20b")),
        ("https://[::1]:9/ü b", Address("https", "::1", 9, "/%C3%BC%20b")),
        ("https://host/100%?q=a b", Address("https", "host", 443, "/100%25?q=a%20b")),
        ("https://host/a%2Fb+c", Address("https", "host", 443, "/a%2Fb+c")),
    ],
)
def test_a_url_becomes_an_address_whose_encoding_is_kept_and_completed(url: str, address: Address) -> None:
    assert parse_address(url) == address


@pytest.mark.parametrize(
    "url", ["ftp://host/a", "https:///a", "/a", "", "https://host:port/a", "https://[::1/a?t=secret"]
)
def test_what_is_no_http_address_is_refused_without_being_quoted(url: str) -> None:
    with pytest.raises(ValueError, match=r"^not a") as caught:
        parse_address(url)
    assert "secret" not in str(caught.value)


def test_neither_path_nor_query_is_in_the_repr() -> None:
    assert "secret" not in repr(ASKED)
    assert ASKED.authority == "host"
    assert Address("https", "::1", 8443, "/").authority == "[::1]:8443"


@pytest.mark.parametrize(
    ("location", "target"),
    [
        ("https://other:1/c?d=e", Address("https", "other", 1, "/c?d=e")),
        ("/c?d", Address("https", "host", 443, "/c?d")),
        ("c", Address("https", "host", 443, "/a/c")),
        ("//other/c", Address("https", "other", 443, "/c")),
    ],
)
def test_a_redirect_leads_to_an_address(location: str, target: Address) -> None:
    assert follow_location(ASKED, location, "https://host/a/b") == target


@pytest.mark.parametrize("location", ["http://host/a/b?t=secret", "ftp://host/secret", "https://host:port/secret"])
def test_a_redirect_that_leaves_https_is_refused_without_being_quoted(location: str) -> None:
    with pytest.raises(StoreUnavailable, match="https://host/a/b: a redirect from host is not followed") as caught:
        follow_location(ASKED, location, "https://host/a/b")
    assert "secret" not in str(caught.value)
    assert caught.value.mend


def test_a_key_is_encoded_once() -> None:
    assert encode_key("m/a b+c%41/ü#?&=重~.txt") == "m/a%20b%2Bc%2541/%C3%BC%23%3F%26%3D%E9%87%8D~.txt"
