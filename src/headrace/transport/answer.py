"""Whether an answer holds the bytes that were asked for. Pure: looks at a head and says how far its body goes, or what is wrong.

Ranges follow RFC 9110: ``Content-Range: bytes first-last/total`` with both ends included (14.4), 206 for a part, 200 for the whole (15.3.7).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from headrace.errors import HeadraceError, ObjectChanged, WrongRange
from headrace.storage import HttpRange, StoredObject

_CONTENT_RANGE = re.compile(r"bytes\s+(\d+)-(\d+)/(\d+|\*)", re.IGNORECASE)
_SHOWN_CHARACTERS = 80


def end_of_answer(asked: HttpRange, stored: StoredObject, uri: str, status: int, headers: Mapping[str, str]) -> int:
    """Return where the bytes of a 200 or 206 answer stop: ``asked.stop``, or earlier where the store sends less at a time.

    ``headers`` has lower-case names. Raises `ObjectChanged` for another version, `WrongRange` for bytes that are not those asked for.
    """
    _check_encoding(headers, uri)
    etag = headers.get("etag")
    if asked.etag is not None and etag is not None and etag != asked.etag:
        raise changed(uri, f"Its ETag was {asked.etag} and is now {_shown(etag)}.")
    if asked.version_header is not None:
        name, pinned = asked.version_header
        found = headers.get(name, pinned)
        if found != pinned:
            raise changed(uri, f"Its version ({name}) was {pinned} and is now {_shown(found)}.")
    if status == 200:
        return _end_of_whole(asked, stored, uri, headers)
    text = headers.get("content-range", "")
    match = _CONTENT_RANGE.fullmatch(text.strip())
    if match is None:
        raise _wrong(
            asked, uri, f"a 206 whose Content-Range is {_shown(text)!r}" if text else "a 206 without Content-Range"
        )
    start, stop = int(match[1]), int(match[2]) + 1
    if match[3] != "*" and int(match[3]) != stored.size_bytes:
        raise changed(uri, f"It had {stored.size_bytes} bytes and now has {match[3]}.")
    if start != asked.start or not start < stop <= asked.stop:
        raise _wrong(asked, uri, f"bytes {start} to {stop}")
    length = _content_length(headers)
    if length is not None and length != stop - start:
        raise _wrong(asked, uri, f"bytes {start} to {stop}, and says that they are {length}")
    return stop


def changed(uri: str, why: str) -> HeadraceError:
    """Return the error for an object that is not the pinned version any more."""
    return ObjectChanged(
        f"{uri} was replaced while it was being read.",
        why,
        "Open the checkpoint again, and keep writers away until it is loaded.",
    )


def _end_of_whole(asked: HttpRange, stored: StoredObject, uri: str, headers: Mapping[str, str]) -> int:
    length = _content_length(headers)
    if asked.start or asked.stop != stored.size_bytes:
        raise _wrong(asked, uri, "the whole object")
    if length is None:
        raise _wrong(asked, uri, "the whole object without saying how long it is")
    if length != stored.size_bytes:
        raise changed(uri, f"It had {stored.size_bytes} bytes and now has {length}.")
    return asked.stop


def _check_encoding(headers: Mapping[str, str], uri: str) -> None:
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise WrongRange(
            f"{uri} is sent with Content-Encoding {_shown(encoding)!r}.",
            "Byte ranges of a compressed object are not the bytes of the file.",
            "Store the weights uncompressed and without that header, or turn off compression at the server or proxy.",
        )
    transfer = headers.get("transfer-encoding", "identity").strip().lower()
    if transfer not in ("identity", "chunked"):
        raise WrongRange(
            f"{uri} is sent with Transfer-Encoding {_shown(transfer)!r}.",
            "Only chunked is known here.",
            "Turn off compression at the server or proxy.",
        )


def _wrong(asked: HttpRange, uri: str, got: str) -> WrongRange:
    return WrongRange(
        f"{uri}: bytes {asked.start} to {asked.stop} were asked for, and the store answered with {got}.",
        "The store, or a proxy before it, does not serve byte ranges as HTTP demands.",
        "Use a server that supports Range requests, and take caching proxies out of the way.",
    )


def _content_length(headers: Mapping[str, str]) -> int | None:
    if "transfer-encoding" in headers:  # Then the length is not to be believed (RFC 9112, 6.3).
        return None
    text = headers.get("content-length", "").strip()
    return int(text) if text.isascii() and text.isdigit() else None


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
