"""What became of every blob of a container, read off the versions that it keeps. Pure.

Source of the fields: Azure Storage REST API, "List Blobs" (2019-12-12 and later) and "Blob versioning". A version's id is the time at which it was written. A removal leaves
versions and none of them current, and does not say when it was: it counts as the last change of all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any

from headrace.storage.answers import quote_etag
from headrace.storage.store import Change, StoredObject


def changes_of(blobs: Iterable[Any], prefix: str) -> Iterator[Change]:
    """Yield what became of every key, those of one key oldest first. ``blobs`` are the SDK's, one for each version; keys are without ``prefix``.

    Blobs that have no version id were written while versioning was off, and are current if at all: they begin when they were last modified.
    """
    by_name: dict[str, list[Any]] = {}
    for blob in blobs:
        if blob.name.startswith(prefix):
            by_name.setdefault(blob.name, []).append(blob)
    for name, versions in by_name.items():
        key = name.removeprefix(prefix)
        versions.sort(key=lambda blob: (_written_s(blob), blob.version_id or ""))
        for blob in versions:
            stored = StoredObject(key, blob.size or 0, quote_etag(blob.etag), blob.version_id or "")
            yield Change(key, _written_s(blob), stored)
        if not any(blob.is_current_version or not blob.version_id for blob in versions):
            yield Change(key, float("inf"), None)


def _written_s(blob: Any) -> float:
    """Return when a version was written, in seconds since 1970, as exactly as its id says it (to 100 ns)."""
    if not blob.version_id:
        written: float = blob.last_modified.timestamp()
        return written
    whole, _, fraction = blob.version_id.rstrip("Z").partition(".")
    return datetime.fromisoformat(f"{whole}+00:00").timestamp() + float(f"0.{fraction or 0}")
