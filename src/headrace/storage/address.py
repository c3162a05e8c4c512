"""Where one HTTP request goes, and where a redirect leads. Pure.

An address may be a signed one, so neither its repr nor an error shows path or query.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import quote, urljoin, urlsplit

from headrace.errors import StoreUnavailable

REDIRECTS = frozenset({301, 302, 303, 307, 308})
"""Statuses whose Location is followed (RFC 9110, 15.4); for GET and HEAD they all mean the same."""

MOST_REDIRECTS = 5

_PORTS = {"http": 80, "https": 443}
_URL_CHARACTERS = "%/:?#[]@!$&'()*+,;=-._~"
_KEY_CHARACTERS = "/-._~"  # RFC 3986, unreserved
_BARE_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")


@dataclass(frozen=True, slots=True)
class Address:
    """``host`` has no brackets around an IPv6 address; ``target`` is path and query, ready to be sent."""

    scheme: str
    host: str
    port: int
    target: str = field(repr=False)

    @property
    def origin(self) -> tuple[str, str, int]:
        """What must be the same for a secret to go along: scheme, host and port."""
        return self.scheme, self.host, self.port

    @property
    def authority(self) -> str:
        """Host and port for a Host header or a message; the port only where it is not the scheme's own."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


def parse_address(url: str) -> Address:
    """Return the address that ``url`` names; what may not stand in a request is percent-encoded. Raises ValueError, which quotes nothing."""
    try:
        parts = urlsplit(url)
        scheme, host, port = parts.scheme.lower(), parts.hostname, parts.port
    except ValueError:
        raise ValueError("not a URL") from None
    if scheme not in _PORTS or not host:
        raise ValueError("not an HTTP address")
    target = encode_path(parts.path or "/") + (f"?{encode_query(parts.query)}" if parts.query else "")
    return Address(scheme, host, _PORTS[scheme] if port is None else port, target)


def encode_key(key: str) -> str:
    """Return ``key`` as it stands in a path: each byte once, by RFC 3986."""
    return quote(key, safe=_KEY_CHARACTERS)


def encode_path(path: str) -> str:
    """Return a path that somebody has encoded already, with whatever they left out encoded as well."""
    return quote(_BARE_PERCENT.sub("%25", path), safe=_URL_CHARACTERS)


def encode_query(query: str) -> str:
    """Return a query that somebody has encoded already, with what may not stand in a request encoded as well."""
    return quote(query, safe=_URL_CHARACTERS)


def follow_location(asked: Address, location: str, uri: str) -> Address:
    """Return the address that ``location``, an answer to a request at ``asked`` for ``uri``, leads to.

    Raises `StoreUnavailable` for a location that is not HTTP, or that leaves HTTPS.
    """
    host = f"[{asked.host}]" if ":" in asked.host else asked.host
    try:
        found = parse_address(urljoin(f"{asked.scheme}://{host}:{asked.port}{asked.target}", location))
    except ValueError:
        raise _refused(asked, uri, "Its Location is no HTTP address.") from None
    if asked.scheme == "https" and found.scheme == "http":
        raise _refused(asked, uri, "It leads from HTTPS to plain HTTP, where anybody could change what comes.")
    return found


def too_many(asked: Address, uri: str) -> StoreUnavailable:
    """Return the error for a chain of redirects that does not end."""
    return _refused(asked, uri, f"That was redirect number {MOST_REDIRECTS + 1} for one request.")


def _refused(asked: Address, uri: str, why: str) -> StoreUnavailable:
    return StoreUnavailable(
        f"{uri}: a redirect from {asked.authority} is not followed.",
        why,
        "Give the address that the server redirects to, or correct the server.",
    )
