"""Where objects were redirected to: signed addresses that are used again until shortly before they end. Pure but for the clock it is given.

Without this every range of an object behind a redirect costs two requests. Sources for the names of a signed address's end: Amazon S3 (Signature
Version 4 in query parameters), Google Cloud Storage (V4 signed URLs), Amazon CloudFront (signed URLs), Azure Storage (shared access signatures).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import parse_qsl

from headrace.storage.address import Address, parse_address

_MARGIN_S = 30.0
"""How long before its end an address is given up: a request takes its time, and clocks differ."""
_UNSTATED_LIFETIME_S = 300.0
"""How long an address is used that does not say when it ends."""
_EPOCH_MOST = 1e11


@dataclass(frozen=True, slots=True)
class Link:
    """An address, and until when it is used, in seconds since 1970."""

    address: Address
    until_s: float


class LinkBook:
    """The links of one store, by key. Any thread; each step is one operation on a dict, so that a fork may come at any time."""

    def __init__(self, *, secure: bool, clock: Callable[[], float]) -> None:
        """``secure`` refuses addresses that are not HTTPS; ``clock`` is the wall clock."""
        self._secure = secure
        self._clock = clock
        self._links: dict[str, Link] = {}
        self._redirected: set[str] = set()

    def find(self, key: str) -> Address | None:
        """Return the address to ask at; None where the store itself is to be asked."""
        link = self._links.get(key)
        return link.address if link is not None and self._clock() < link.until_s else None

    def learn(self, key: str, location: str) -> None:
        """Remember where the store redirected to. A location that is relative leads to the store itself, and is not kept."""
        try:
            address = parse_address(location)
        except ValueError:
            return
        if self._secure and address.scheme != "https":
            return
        now = self._clock()
        end = end_of_address(address)
        self._redirected.add(key)
        self._links[key] = Link(address, now + _UNSTATED_LIFETIME_S if end is None else end - _MARGIN_S)

    def forget(self, key: str) -> bool:
        """Give the address up, since what is there refuses; say whether ``key`` was ever redirected, so that asking the store again may help."""
        self._links.pop(key, None)
        return key in self._redirected


def end_of_address(address: Address) -> float | None:
    """Return when a signed address ends, in seconds since 1970; the earliest where it says so twice; None where it does not say."""
    query = {name.lower(): value for name, value in parse_qsl(address.target.partition("?")[2])}
    ends = (
        _after(query, "x-amz-date", "x-amz-expires"),
        _after(query, "x-goog-date", "x-goog-expires"),
        _seconds(query.get("expires", "")),
        _date(query.get("se", "")),
    )
    return min((end for end in ends if end is not None), default=None)


def _after(query: Mapping[str, str], date: str, seconds: str) -> float | None:
    begun, lasting = _date(query.get(date, "")), _seconds(query.get(seconds, ""))
    return None if begun is None or lasting is None else begun + lasting


def _seconds(text: str) -> float | None:
    return float(text) if text.isascii() and text.isdigit() and float(text) < _EPOCH_MOST else None


def _date(text: str) -> float | None:
    try:
        date = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (date if date.tzinfo is not None else date.replace(tzinfo=UTC)).timestamp()
