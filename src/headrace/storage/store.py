"""What every store can do, and the words for it. Knows no tensors, opens no connection.

A store is rooted at the folder that its uri names. All keys are relative to that root, use ``/`` and never start with one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from headrace.errors import HeadraceError
from headrace.storage.uri import Uri


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One stored file, pinned: ``version`` is an ETag (with its quotes), a generation, or inode, mtime and size.

    ``version_id`` is what an older version must be asked for by, where that is not ``version`` itself (S3); empty for what is there now. It is a part of how
    the object is read and not of what it is, so comparisons leave it out.
    """

    key: str
    size_bytes: int
    version: str
    version_id: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Change:
    """What became of one key at one moment (seconds since 1970): ``stored`` is what was there from then on, None where it was removed."""

    key: str
    when_s: float
    stored: StoredObject | None


@dataclass(frozen=True, slots=True)
class Listing:
    """One level under a folder: objects sorted by key, sub-folders as relative keys without a trailing slash."""

    objects: tuple[StoredObject, ...]
    folders: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes ``start`` (inclusive) to ``stop`` (exclusive) of a local file that must still have ``version``."""

    path: str
    start: int
    stop: int
    version: str


@dataclass(frozen=True, slots=True)
class HttpRange:
    """One ready-to-send ranged GET, valid for this attempt only: signed headers age and credentials rotate.

    ``headers`` holds everything but ``Host``: Range, the condition on the version, Accept-Encoding identity and the signature. It is left out of
    the repr, since it may hold secrets; so is ``target`` (path and query), which may be a signed one. ``ca_file`` None means the system's CAs.
    ``host`` has no brackets around an IPv6 address; the Host header is host and port, the port left out where it is the scheme's own.
    ``etag`` is what the answer's ETag must equal; None where the condition is another header or the store has none. ``version_header`` is such a
    header: its lower-case name, and what it must equal where the answer has it.
    """

    scheme: str
    host: str
    port: int
    target: str = field(repr=False)
    headers: tuple[tuple[str, str], ...] = field(repr=False)
    start: int
    stop: int
    etag: str | None = None
    ca_file: str | None = None
    verify_tls: bool = True
    version_header: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """An HTTP answer that is not the bytes asked for. ``headers`` has lower-case names; ``body`` is its first 8 KiB at most."""

    status: int
    reason: str
    headers: Mapping[str, str]
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a refusal means: the error to raise if it stays, and whether asking again can help.

    ``wait_s`` is what the store asked for (Retry-After); None lets the caller's backoff decide. Where ``refresh_credentials`` is set, the store has
    been told to fetch new credentials before the next `ObjectStore.describe_range`.
    """

    error: HeadraceError
    retry: bool = False
    wait_s: float | None = None
    refresh_credentials: bool = False


class ObjectStore(Protocol):
    """A place that a uri points into. Every method may be called from any thread."""

    @property
    def uri(self) -> Uri:
        """The root of this store, as a uri."""

    @property
    def selected_key(self) -> str | None:
        """The single object that the user's uri named, relative to the root; None where it named a folder."""

    @property
    def endpoint(self) -> str:
        """Where requests go, for messages: ``http://127.0.0.1:8333`` or ``this machine``. Never holds a secret."""

    def uri_of(self, key: str) -> str:
        """Return the full uri of one object, for messages."""

    def list_level(self, folder: str = "") -> Listing:
        """List one level under ``folder``, folder markers dropped.

        Raises `ObjectNotFound` where the root itself (bucket, directory) does not exist; an empty prefix gives an empty listing.
        """

    def stat(self, key: str) -> StoredObject:
        """Return size and version of one object. Raises `ObjectNotFound`."""

    def read_object(self, stored: StoredObject, *, start: int = 0, stop: int | None = None) -> bytes:
        """Read a small object, or a piece of it, at its pinned version. Raises `ObjectChanged` where that is gone.

        An object that is stored gzip-encoded is decoded when it is read whole, and refused in pieces.
        """

    def describe_range(self, stored: StoredObject, start: int, stop: int) -> FileRange | HttpRange:
        """Describe one ranged read for a transport to carry out now; ``start < stop <= stored.size_bytes``."""

    def judge(self, stored: StoredObject, refusal: Refusal) -> Verdict:
        """Say what a refused ranged read means, in this store's dialect. Local stores are never asked."""

    def close(self) -> None:
        """Close what listing and small reads hold open. May be called twice."""


@runtime_checkable
class KeepsPast(Protocol):
    """A store that can show what was there before. Part of `ObjectStore` for those that can."""

    def open_past(self) -> Iterator[ObjectStore]:
        """Yield the store as it was before, the newest state first, each as a store of its own; a bounded number of them.

        What is there now may be the first. Raises `AccessDenied` where old versions may not be listed, and what listing raises.
        """
