"""What stores answer to their SDKs, checked and put into our words: versions, levels of a listing, bodies that are stored encoded. Pure."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import replace

from headrace.errors import ObjectChanged, StorageError
from headrace.storage.refusal import Place
from headrace.storage.store import Listing, StoredObject

_MOST_DECODED_BYTES = 1 << 28


def quote_etag(etag: str | None) -> str:
    """Return the ETag with its quotes, which some stores leave out of listings; empty where there is none."""
    return f'"{etag}"' if etag and not etag.endswith('"') else etag or ""


def is_strong(version: str) -> bool:
    """Say whether If-Match can succeed: it compares strongly, so a weak validator never matches (RFC 9110, 13.1.1)."""
    return bool(version) and not version.startswith("W/")


class Level:
    """One level of a listing as it is gathered from the store's pages: what lies below ``prefix``, folders told from objects."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._objects: dict[str, StoredObject] = {}
        self._folders: set[str] = set()

    def add(self, key: str, size_bytes: int, version: str, version_id: str = "") -> None:
        """Take in an object. A key that goes deeper gives a folder: it is the folder's marker, or the store does not know delimiters."""
        for name, slash in self._below(key):
            if slash:
                self._folders.add(name)
            else:
                self._objects[name] = StoredObject(name, size_bytes, version, version_id)

    def add_folder(self, key: str) -> None:
        """Take in a folder, whose ``key`` may end with a slash."""
        for name, _ in self._below(key):
            self._folders.add(name)

    def listing(self, folder: str) -> Listing:
        """Return what was gathered, with keys that begin with ``folder``."""
        # Some tools mark a folder by an empty object of its name; an empty file that is no folder is one to keep.
        kept = [item for name, item in self._objects.items() if item.size_bytes or name not in self._folders]
        parent = f"{folder}/" if folder else ""
        return Listing(
            tuple(sorted((replace(item, key=parent + item.key) for item in kept), key=lambda item: item.key)),
            tuple(sorted(parent + name for name in self._folders)),
        )

    def _below(self, key: str) -> Iterator[tuple[str, str]]:
        """Yield the first name below the prefix, and the slash after it; nothing for the folder's own marker and for names that lead elsewhere."""
        name, slash, _ = key.removeprefix(self._prefix).partition("/")
        if key.startswith(self._prefix) and name not in ("", ".", ".."):
            yield name, slash


def check_answer(version: str, num_bytes: int | None, stored: StoredObject, wanted_bytes: int, place: Place) -> None:
    """Refuse an answer to a pinned read that is another version, or not the bytes asked for. Raises `ObjectChanged`, `StorageError`."""
    if version and stored.version and version != stored.version:
        raise ObjectChanged(
            f"{place.uri} is not the version that was opened.",
            f"It was {stored.version} and is {version} now.",
            "Open the checkpoint again; give each new version a folder of its own.",
        )
    if num_bytes != wanted_bytes:
        raise StorageError(
            f"{place.uri} cannot be read.",
            f"{place.endpoint} answered {num_bytes} bytes where {wanted_bytes} were asked for.",
            "Check that the endpoint supports ranged reads.",
        )


def decode_body(content: bytes, encoding: str, stored: StoredObject, place: Place) -> bytes:
    """Return the content of an object whose Content-Encoding is ``encoding``; only a whole object can be decoded. Raises `StorageError`."""
    # What some uploads leave behind; it says nothing of the stored bytes.
    encoding = encoding.replace("aws-chunked", "").strip(" ,").lower()
    if encoding in ("", "identity"):
        return content
    refused = StorageError(
        f"{place.uri} cannot be read.",
        f"It is stored with Content-Encoding {encoding!r}.",
        "Upload it again without an encoding.",
    )
    if encoding not in ("gzip", "x-gzip") or len(content) != stored.size_bytes:
        raise refused
    decoder = zlib.decompressobj(wbits=31)
    try:
        decoded = decoder.decompress(content, _MOST_DECODED_BYTES)
    except zlib.error as error:
        raise refused from error
    if not decoder.eof:
        raise refused
    return decoded
