"""What a web server's answers say of a file: its size, its version, whether ranges are served. Pure.

A version is an ETag as the server wrote it, or ``modified`` and the date of Last-Modified, or empty where a server gives neither. Conditions and their
comparison: RFC 9110, sections 8.8.3 and 13.1.
"""

from __future__ import annotations

import re

from headrace.errors import ObjectNotFound, StorageError, WrongRange
from headrace.storage.answers import is_strong
from headrace.storage.model_files import is_weights
from headrace.storage.refusal import Place
from headrace.storage.store import StoredObject
from headrace.storage.web import Reply
from headrace.storage.web_connections import Headers

FIRST_BYTE: Headers = (("Range", "bytes=0-0"),)
"""The question to which `stored_of` takes the answer."""

FIRST_BYTE_ANSWERS = frozenset({200, 206, 416})

_CONTENT_RANGE = re.compile(r"bytes\s+(?:(\d+)-\d+|\*)/(\d+)", re.IGNORECASE)
_MODIFIED = "modified "
_SHOWN_CHARACTERS = 40


def stored_of(key: str, reply: Reply, place: Place) -> StoredObject:
    """Return size and version of a file from the answer to a request for its first byte.

    Raises `ObjectNotFound` where a web page came in place of the file, `WrongRange` for weights that are not served by ranges or sent compressed, and
    `StorageError` where the size is not told.
    """
    headers, version = reply.headers, version_of(reply)
    start, total = _content_range(reply)
    if reply.status == 416:  # An empty file has no first byte.
        if total != 0:
            raise no_ranges(place)
        return StoredObject(key, 0, version)
    if headers.get("content-type", "").strip().lower().startswith("text/html"):
        raise ObjectNotFound(
            f"{place.uri} does not exist.",
            f"{place.endpoint} answers with a web page in its place.",
            "Check the address; a page that shows files has another one than the files themselves.",
        )
    encoding = headers.get("content-encoding", "").strip().lower()
    if is_weights(key) and encoding not in ("", "identity"):
        raise WrongRange(
            f"{place.uri} is sent with Content-Encoding {encoding[:_SHOWN_CHARACTERS]!r}.",
            "Byte ranges of a compressed file are not the bytes of the file.",
            "Turn off compression for .safetensors files at the server or proxy.",
        )
    length = headers.get("content-length", "").strip()
    if reply.status == 206 and start == 0 and total is not None:
        return StoredObject(key, total, version)
    if reply.status == 206 or not (length.isascii() and length.isdigit()):
        raise StorageError(
            f"{place.uri} cannot be read.",
            f"{place.endpoint} does not say how long it is.",
            "Use a server that gives Content-Length, and Content-Range with it.",
        )
    if is_weights(key) and int(length) > 1:
        raise no_ranges(place)
    return StoredObject(key, int(length), version)


def version_of(reply: Reply) -> str:
    """Return the version that an answer gives."""
    etag, date = reply.headers.get("etag", ""), reply.headers.get("last-modified", "")
    return etag or (f"{_MODIFIED}{date}" if date else "")


def version_like(version: str, reply: Reply) -> str:
    """Return the version that an answer gives, of the kind that ``version`` is; empty where it gives none of that kind."""
    if version.startswith(_MODIFIED):
        date = reply.headers.get("last-modified", "")
        return f"{_MODIFIED}{date}" if date else ""
    return reply.headers.get("etag", "")


def etag_of(stored: StoredObject) -> str | None:
    """Return what an answer's ETag must equal; None where the file has none."""
    return None if stored.version.startswith(_MODIFIED) else stored.version or None


def date_of(stored: StoredObject) -> tuple[str, str] | None:
    """Return the header that stands in for the ETag, in lower case, and what it must equal; None where there is an ETag, or neither."""
    if not stored.version.startswith(_MODIFIED):
        return None
    return "last-modified", stored.version.removeprefix(_MODIFIED)


def conditions(stored: StoredObject) -> Headers:
    """Return the header by which the server refuses another version; a weak ETag can only be compared with that of the answer."""
    etag = etag_of(stored)
    if etag is not None:
        return (("If-Match", etag),) if is_strong(etag) and etag.startswith('"') else ()
    date = date_of(stored)
    return () if date is None else (("If-Unmodified-Since", date[1]),)


def starts_at(reply: Reply, start: int) -> bool:
    """Say whether an answer is a piece that begins at ``start``."""
    return reply.status == 206 and _content_range(reply)[0] == start


def no_ranges(place: Place) -> WrongRange:
    """Return the error for a server that answers a request for some bytes with others."""
    return WrongRange(
        f"{place.uri} cannot be streamed.",
        f"{place.endpoint} does not serve byte ranges: it was asked for some bytes, and answered with others.",
        "Use a server that supports Range requests (nginx, Apache, Caddy and object stores do; python -m http.server does not).",
    )


def _content_range(reply: Reply) -> tuple[int | None, int | None]:
    """Return the first byte and the total that Content-Range names (RFC 9110, 14.4)."""
    match = _CONTENT_RANGE.fullmatch(reply.headers.get("content-range", "").strip())
    if match is None:
        return None, None
    return None if match[1] is None else int(match[1]), int(match[2])
