"""Which objects of a store a checkpoint is made of: lists, chooses files, pins versions. Reads nothing but the index."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.checkpoint.index import WeightIndex, parse_index
from headrace.checkpoint.selection import Selection, choose_index, select_named, select_unindexed
from headrace.checkpoint.sidefiles import SideFiles
from headrace.checkpoint.sidelisting import SideLimits, list_side_files
from headrace.checkpoint.snapshot import Snapshot
from headrace.errors import InvalidIndex, ObjectNotFound
from headrace.settings import Settings
from headrace.storage import Listing, ObjectStore, StoredObject

_LARGEST_INDEX_BYTES = 200_000_000

Indexes = dict[tuple[str, str], WeightIndex]
"""Indexes that were read already, by key and version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What is known of a checkpoint before any header has been read."""

    store: ObjectStore
    snapshot: Snapshot
    index: WeightIndex | None
    side_files: SideFiles
    selection_notes: tuple[str, ...]
    side_notes: tuple[str, ...]


def survey(store: ObjectStore, settings: Settings, indexes: Indexes | None = None) -> Survey:
    """Return what is at ``store`` as it is now. ``indexes`` is looked into and added to.

    Raises `NoWeights`, `MissingFiles`, `InvalidIndex`, and what the store raises.
    """
    top = store.list_level()
    objects = {stored.key: stored for stored in top.objects}
    # The folder of a local store is used as it is, and need not be known in depth.
    side = list_side_files(store, top, SideLimits(depth=0) if store.uri.scheme == "file" else None)
    side_files = SideFiles(store, side.objects, cache_dir=settings.cache_dir)
    index, notes = _read_index(store, objects, side_files, {} if indexes is None else indexes)
    selection = _select(store, top, index, objects)
    weights = tuple(objects[key] for key in selection.files)
    return Survey(
        store=store,
        snapshot=Snapshot(str(store.uri), weights, side.objects),
        index=index,
        side_files=side_files,
        selection_notes=(*notes, *selection.notes),
        side_notes=side.notes,
    )


def _read_index(
    store: ObjectStore, objects: Mapping[str, StoredObject], side_files: SideFiles, indexes: Indexes
) -> tuple[WeightIndex | None, tuple[str, ...]]:
    """Return the index, from the mirror of side files where another process has filled it with this version, and what is to be said of its choice."""
    key, notes = choose_index(objects, store.selected_key)
    if key is None:
        return None, notes
    stored = objects.get(key) or store.stat(key)
    known = indexes.get((key, stored.version))
    if known is not None:
        return known, notes
    uri = store.uri_of(key)
    if stored.size_bytes > _LARGEST_INDEX_BYTES:
        raise InvalidIndex(
            f"The index {key} is {stored.size_bytes:,} bytes.", "No index is so large.", f"Look at {uri}."
        )
    if stored in side_files.objects:
        raw = side_files.read(key)
    else:
        raw = store.read_object(stored) if stored.size_bytes else b""
    index = indexes[key, stored.version] = parse_index(raw, key, uri=uri)
    return index, notes


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
