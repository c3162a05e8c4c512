from __future__ import annotations

import pytest

from headrace.storage.address import parse_address
from headrace.storage.links import LinkBook, end_of_address

NOW = 1_700_000_000.0
S3 = "https://cdn/x?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Date=20231114T221320Z&X-Amz-Expires=600&X-Amz-Signature=s"


class Clock:
    now = NOW

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("url", "end"),
    [
        (S3, NOW + 600),
        ("https://cdn/x?X-Goog-Date=20231114T221320Z&X-Goog-Expires=60", NOW + 60),
        ("https://cdn/x?Expires=1700000050&Policy=p&Signature=s&Key-Pair-Id=k", NOW + 50),
        (S3 + "&Expires=1700000050", NOW + 50),
        ("https://account/x?se=2023-11-14T22%3A13%3A30Z&sig=s", NOW + 10),
        ("https://cdn/x", None),
        ("https://cdn/x?Expires=soon&se=later", None),
        ("https://cdn/x?X-Amz-Date=20231114T221320Z", None),
        ("https://cdn/x?Expires=" + "9" * 40, None),
    ],
)
def test_the_end_of_a_signed_address_is_read(url: str, end: float | None) -> None:
    assert end_of_address(parse_address(url)) == end


def test_a_link_is_used_until_shortly_before_its_end() -> None:
    clock = Clock()
    book = LinkBook(secure=True, clock=clock)
    book.learn("a", S3)
    assert book.find("a") == parse_address(S3)
    assert book.find("b") is None
    clock.now = NOW + 569
    assert book.find("a") is not None
    clock.now = NOW + 571
    assert book.find("a") is None


def test_a_link_that_does_not_say_when_it_ends_is_used_for_five_minutes() -> None:
    clock = Clock()
    book = LinkBook(secure=True, clock=clock)
    book.learn("a", "https://cdn/x")
    clock.now = NOW + 299
    assert book.find("a") is not None
    clock.now = NOW + 301
    assert book.find("a") is None


@pytest.mark.parametrize("location", ["/api/elsewhere", "x", "http://cdn/x", "ftp://cdn/x", "//cdn/x"])
def test_what_is_relative_or_less_secure_is_not_kept(location: str) -> None:
    book = LinkBook(secure=True, clock=Clock())
    book.learn("a", location)
    assert book.find("a") is None
    assert not book.forget("a"), "asking anew would give the same"


def test_a_link_that_was_refused_is_forgotten_and_its_readers_may_ask_anew() -> None:
    book = LinkBook(secure=False, clock=Clock())
    book.learn("a", "http://cdn/x")
    assert book.forget("a")
    assert book.find("a") is None
    assert book.forget("a"), "another reader's refusal of the same link"
    assert not book.forget("b")
