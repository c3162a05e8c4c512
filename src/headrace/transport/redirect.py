"""Where a redirected request goes, and which of its headers go along. Pure."""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import quote, urljoin, urlsplit

from headrace.errors import StoreUnavailable
from headrace.storage import HttpRange

REDIRECTS = frozenset({301, 302, 303, 307, 308})
"""Statuses whose Location is followed (RFC 9110, 15.4); for a GET they all mean the same."""

MOST_REDIRECTS = 5

_TRAVELS = frozenset({"range", "accept", "accept-encoding", "user-agent", "if-match", "if-unmodified-since"})
"""Headers that go to another host, too. All else may be, or may be bound to, a secret of the first one."""

_URL_CHARACTERS = "%/:?#[]@!$&'()*+,;=-._~"


def follow(asked: HttpRange, location: str, uri: str) -> HttpRange:
    """Return the request that ``location``, the answer to ``asked``, leads to.

    Scheme, host and port decide what another host is: what is not known to be harmless is not sent there. Raises `StoreUnavailable` for a location that
    is not HTTP, or that leaves HTTPS. No message quotes the location: it may be a signed one.
    """
    host = f"[{asked.host}]" if ":" in asked.host else asked.host
    try:
        parts = urlsplit(urljoin(f"{asked.scheme}://{host}:{asked.port}{asked.target}", location))
        scheme, name, port = parts.scheme.lower(), parts.hostname, parts.port
    except ValueError:
        raise _refused(asked, uri, "Its Location cannot be read.") from None
    if scheme not in ("http", "https") or not name:
        raise _refused(asked, uri, "Its Location is no HTTP address.")
    if asked.scheme == "https" and scheme == "http":
        raise _refused(asked, uri, "It leads from HTTPS to plain HTTP, where anybody could change the weights.")
    port = port or (443 if scheme == "https" else 80)
    target = quote(parts.path or "/", safe=_URL_CHARACTERS) + (
        f"?{quote(parts.query, safe=_URL_CHARACTERS)}" if parts.query else ""
    )
    stays = (scheme, name, port) == (asked.scheme, asked.host.lower(), asked.port)
    headers = asked.headers if stays else tuple((key, value) for key, value in asked.headers if key.lower() in _TRAVELS)
    return replace(asked, scheme=scheme, host=name, port=port, target=target, headers=headers)


def too_many(asked: HttpRange, uri: str) -> StoreUnavailable:
    """Return the error for a chain of redirects that does not end."""
    return _refused(asked, uri, f"That was redirect number {MOST_REDIRECTS + 1} for one request.")


def _refused(asked: HttpRange, uri: str, why: str) -> StoreUnavailable:
    return StoreUnavailable(
        f"{uri}: a redirect from {asked.host} is not followed.",
        why,
        "Give the address that the server redirects to, or correct the server.",
    )
