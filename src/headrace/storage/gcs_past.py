"""What became of every object of a bucket of Google Cloud Storage, read off the generations that it keeps. Pure.

Source of the fields: Cloud Storage JSON API, "Objects": a generation begins at ``timeCreated``; ``timeDeleted`` is when it stopped to be the live one, replaced or removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import Any

from headrace.storage.store import Change, StoredObject

LISTED_VERSIONS = "kind,nextPageToken,items(name,size,generation,timeCreated,timeDeleted)"


def changes_of(blobs: Iterable[Any], prefix: str) -> Iterator[Change]:
    """Yield what became of every key, those of one key oldest first. ``blobs`` are the SDK's, one for each generation; keys are without ``prefix``.

    A generation's end is a removal, unless another one begins by then.
    """
    by_name: dict[str, list[Any]] = {}
    for blob in blobs:
        if blob.name.startswith(prefix):
            by_name.setdefault(blob.name, []).append(blob)
    for name, generations in by_name.items():
        key = name.removeprefix(prefix)
        generations.sort(key=lambda blob: int(blob.generation))
        for blob, following in zip_longest(generations, generations[1:]):
            yield Change(key, blob.time_created.timestamp(), StoredObject(key, blob.size or 0, str(blob.generation)))
            removed = blob.time_deleted
            if removed is not None and (following is None or following.time_created > removed):
                yield Change(key, removed.timestamp(), None)
