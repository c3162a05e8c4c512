"""The side files of one checkpoint: config, tokenizer, chat template, remote code; as bytes, or as one local folder."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

from headrace.checkpoint import mirror
from headrace.checkpoint.sidecache import SideFileCache
from headrace.checkpoint.wording import quoted
from headrace.errors import CacheError, ObjectNotFound, StoreUnavailable
from headrace.storage import ObjectStore, StoredObject

_LOG = logging.getLogger("headrace")


class SideFiles:
    """The side files of one checkpoint, at their pinned versions. Any thread.

    ``cache_dir`` is the folder of the node's cache. Nothing is read or written before it is asked for.
    """

    def __init__(self, store: ObjectStore, objects: Sequence[StoredObject], *, cache_dir: Path) -> None:
        self._store = store
        self._objects = {stored.key: stored for stored in sorted(objects, key=lambda stored: stored.key)}
        self._cache = SideFileCache(cache_dir)
        self._lock = threading.Lock()
        self._folder: Path | None = None
        self._private: weakref.finalize[[Path, int], SideFiles] | None = None

    def __repr__(self) -> str:
        return f"SideFiles({self._store.uri}, {len(self._objects)} files)"

    @property
    def objects(self) -> tuple[StoredObject, ...]:
        """The side files, by key."""
        return tuple(self._objects.values())

    @property
    def link(self) -> Path:
        """Where the cache's link for this uri is: the path that a consumer can find from the uri alone, after `folder` has run."""
        return self._cache.link_of(str(self._store.uri))

    def folder(self) -> Path:
        """Return a local folder that holds the side files, and for a bucket nothing else.

        The folder of a local store is its own. Others are mirrored once per node and version, and the folder never changes afterwards; an unchanged
        snapshot costs no read. Where the cache cannot be written to, the files go into a private folder that lasts until `close` or the end of the
        process. Raises `CacheError` where the cache is not to be trusted, the disk is full, or a key cannot be a path.
        """
        with self._lock:
            if self._folder is None:
                self._folder = self._find_local() or self._mirrored()
            return self._folder

    def read(self, key: str) -> bytes:
        """Return the content of one side file; from the mirror where it has been filled. Raises `ObjectNotFound`."""
        stored = self._objects.get(key)
        if stored is None:
            where = f"There is no side file {quoted(key)} at {self._store.uri}."
            raise ObjectNotFound(where, mend="Upload it beside the weights.")
        folder = self._folder or self._find_local() or self._find_mirrored()
        if folder is not None:
            with contextlib.suppress(OSError):
                return (folder / key).read_bytes()
        return self._read_object(stored)

    def close(self) -> None:
        """Remove the private folder, if there is one. May be called twice."""
        with self._lock:
            if self._private is not None:
                self._private()
                self._private = self._folder = None

    def _find_local(self) -> Path | None:
        uri = self._store.uri
        return Path(uri.key) if uri.scheme == "file" else None

    def _find_mirrored(self) -> Path | None:
        try:
            return self._cache.find(str(self._store.uri), self.objects, self._store.endpoint)
        except CacheError:  # whoever needs the folder will hear of it
            return None

    def _mirrored(self) -> Path:
        try:
            return self._cache.folder(str(self._store.uri), self.objects, self._read_object, self._store.endpoint)
        except OSError as error:
            _LOG.warning(
                "The cache of side files cannot be written (%s: %s). They go into a private folder for this process; "
                "set HEADRACE_CACHE_DIR to a folder that can be written to keep them.",
                error.filename,
                error.strerror,
            )
        return self._filled_private()

    def _filled_private(self) -> Path:
        try:
            private = Path(tempfile.mkdtemp(prefix="headrace-"))  # mode 0700
        except OSError as error:
            raise CacheError(
                "There is no place for the side files.",
                f"Neither the cache nor a temporary folder can be written: {error}.",
                "Set HEADRACE_CACHE_DIR to a folder that can be written.",
            ) from error
        self._private = weakref.finalize(self, _remove_private, private, os.getpid())
        try:
            mirror.fill(private, self.objects, self._read_object)
        except BaseException as error:
            self._private()
            self._private = None
            if isinstance(error, OSError):
                raise CacheError("The side files cannot be written.", f"{error}.", "Set HEADRACE_CACHE_DIR.") from error
            raise
        return private

    def _read_object(self, stored: StoredObject) -> bytes:
        if not stored.size_bytes:
            return b""
        try:
            return self._store.read_object(stored)
        except OSError as error:  # must not pass for trouble with the cache
            raise StoreUnavailable(f"{self._store.uri_of(stored.key)} cannot be read.", f"{error}.") from error


def _remove_private(folder: Path, owner_pid: int) -> None:
    # A forked child inherits the finalizer, and the parent may still use the folder.
    if os.getpid() == owner_pid:
        mirror.remove([folder])
