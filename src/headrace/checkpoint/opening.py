"""Opens a checkpoint: lists, chooses files, pins versions, reads and checks every header. Moves no weight bytes."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import MappingProxyType
from typing import Protocol

from headrace.checkpoint.checkpoint import Checkpoint, Contents
from headrace.checkpoint.headers import Fetch, read_headers
from headrace.checkpoint.index import WeightIndex, parse_index
from headrace.checkpoint.resolution import resolve_entries
from headrace.checkpoint.selection import Selection, choose_index, select_named, select_unindexed
from headrace.checkpoint.sidefiles import SideFiles
from headrace.checkpoint.sidelisting import SideLimits, list_side_files
from headrace.checkpoint.snapshot import Snapshot
from headrace.errors import InvalidIndex, InvalidUri, NoWeights, ObjectNotFound
from headrace.settings import Settings
from headrace.storage import Listing, ObjectStore, StoredObject, Uri, open_store
from headrace.transport import Surroundings
from headrace.transport import fetch as fetch_range

_LOG = logging.getLogger("headrace")

_LARGEST_INDEX_BYTES = 200_000_000


class Phases(Protocol):
    """What opening tells about itself: `headrace.progress.LoadProgress` is one."""

    def during(self, phase: str) -> AbstractContextManager[None]:
        """Be in ``phase`` for the length of a block."""


def open_checkpoint(
    uri_or_store: str | os.PathLike[str] | Uri | ObjectStore,
    *,
    settings: Settings | None = None,
    progress: Phases | None = None,
    fetch: Fetch | None = None,
) -> Checkpoint:
    """Return the checkpoint at a uri or in a store, with every header read and checked.

    One level is listed, and the sub-folders that the index names. ``settings`` default to the environment's; ``fetch`` reads headers, by default
    through `headrace.transport`. A store that is given stays the caller's to close; one that is opened here is the checkpoint's.

    Raises `NoWeights`, `MissingFiles`, `InvalidIndex`, `InvalidHeader`, `TruncatedObject`, `TrailingBytes`, and what the store raises.
    """
    settings = settings or Settings.from_environment()
    with ExitStack() as undo, progress.during("opening") if progress else nullcontext():
        if isinstance(uri_or_store, (str, os.PathLike, Uri)):
            store = open_store(uri_or_store, settings=settings)
            undo.callback(store.close)
            owns_store = True
        elif hasattr(uri_or_store, "describe_range"):
            store, owns_store = uri_or_store, False
        else:
            raise InvalidUri(
                f"{uri_or_store!r} is neither a uri nor a path.", mend="Give text such as s3://bucket/model, or a path."
            )
        checkpoint = _open(store, settings, fetch or _transport_fetch(settings), owns_store)
        undo.pop_all()
    for note in checkpoint.notes:
        _LOG.warning("%s: %s", checkpoint.uri, note)
    return checkpoint


def _open(store: ObjectStore, settings: Settings, fetch: Fetch, owns_store: bool) -> Checkpoint:
    uri = str(store.uri)
    top = store.list_level()
    objects = {stored.key: stored for stored in top.objects}
    # The folder of a local store is used as it is, and need not be known in depth.
    side = list_side_files(store, top, SideLimits(depth=0) if store.uri.scheme == "file" else None)
    side_files = SideFiles(store, side.objects, cache_dir=settings.cache_dir)
    index, notes = _read_index(store, objects, side_files)
    selection = _select(store, top, index, objects)
    weights = tuple(objects[key] for key in selection.files)
    headers = read_headers(store, weights, fetch, num_threads=settings.transport.num_connections)
    entries, more_notes = resolve_entries(headers, index, uri)
    if not entries:
        raise NoWeights(
            f"There is not one tensor in the weights at {uri}.",
            "The headers of the files are valid and name none.",
            "Upload the files again from where they were made.",
        )
    contents = Contents(
        entries=entries,
        metadata=MappingProxyType({header.file: header.metadata for header in headers}),
        notes=(*notes, *selection.notes, *more_notes, *side.notes),
    )
    return Checkpoint(store, Snapshot(uri, weights, side.objects), contents, side_files, owns_store=owns_store)


def _read_index(
    store: ObjectStore, objects: Mapping[str, StoredObject], side_files: SideFiles
) -> tuple[WeightIndex | None, tuple[str, ...]]:
    """Return the index, from the mirror of side files where another process has filled it with this version, and what is to be said of its choice."""
    key, notes = choose_index(objects, store.selected_key)
    if key is None:
        return None, notes
    stored = objects.get(key) or store.stat(key)
    uri = store.uri_of(key)
    if stored.size_bytes > _LARGEST_INDEX_BYTES:
        raise InvalidIndex(
            f"The index {key} is {stored.size_bytes:,} bytes.", "No index is so large.", f"Look at {uri}."
        )
    if stored in side_files.objects:
        raw = side_files.read(key)
    else:
        raw = store.read_object(stored) if stored.size_bytes else b""
    return parse_index(raw, key, uri=uri), notes


def _select(store: ObjectStore, top: Listing, index: WeightIndex | None, objects: dict[str, StoredObject]) -> Selection:
    """Choose the weight files, and add to ``objects`` those that lie elsewhere than on the top level."""
    if index is not None:
        for folder in index.folders:
            try:
                objects.update((stored.key, stored) for stored in store.list_level(folder).objects)
            except ObjectNotFound:
                continue  # its files will be listed as missing, with all others
        return select_named(index, objects)
    selected = store.selected_key
    selection = select_unindexed(objects, top.folders, str(store.uri), selected)
    if selected is not None and selected not in objects:
        objects[selected] = store.stat(selected)
    return selection


def _transport_fetch(settings: Settings) -> Fetch:
    surroundings = Surroundings()  # one for all: it holds the TLS contexts

    def read(store: ObjectStore, stored: StoredObject, start: int, stop: int, /) -> bytes:
        return fetch_range(store, stored, start, stop, settings.transport, surroundings)

    return read
