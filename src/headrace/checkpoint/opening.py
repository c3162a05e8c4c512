"""Opens a checkpoint: lists, chooses files, pins versions, reads and checks every header. Moves no weight bytes."""

from __future__ import annotations

import logging
import os
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import MappingProxyType
from typing import Protocol

from headrace.checkpoint.checkpoint import Checkpoint, Contents
from headrace.checkpoint.headers import Fetch, read_headers
from headrace.checkpoint.resolution import resolve_entries
from headrace.checkpoint.search import survey_at
from headrace.checkpoint.snapshot import is_commit
from headrace.checkpoint.survey import Survey, survey
from headrace.checkpoint.wording import counted
from headrace.errors import InvalidUri, NoWeights
from headrace.settings import Settings
from headrace.storage import ObjectStore, StoredObject, Uri, open_store, parse_uri
from headrace.storage.past import PastStore
from headrace.storage.revision import with_revision
from headrace.transport import Surroundings
from headrace.transport import fetch as fetch_range
from headrace.units import format_bytes

_LOG = logging.getLogger("headrace")


class Phases(Protocol):
    """What opening tells about itself: `headrace.progress.LoadProgress` is one."""

    def during(self, phase: str) -> AbstractContextManager[None]:
        """Be in ``phase`` for the length of a block."""


def open_checkpoint(
    uri_or_store: str | os.PathLike[str] | Uri | ObjectStore,
    *,
    snapshot: str | None = None,
    settings: Settings | None = None,
    progress: Phases | None = None,
    fetch: Fetch | None = None,
) -> Checkpoint:
    """Return the checkpoint at a uri or in a store, with every header read and checked.

    One level is listed, and the sub-folders that the index names. ``snapshot`` is the id that it must have: then it is read from old versions, where the store keeps
    them, if what is there now has another one; of a hub repository it may be a commit. ``settings`` default to the environment's; ``fetch`` reads headers, by default
    through `headrace.transport`. A store that is given stays the caller's to close; one that is opened here is the checkpoint's.

    Raises `NoWeights`, `MissingFiles`, `InvalidIndex`, `InvalidHeader`, `TruncatedObject`, `TrailingBytes`, `ObjectChanged` for a snapshot that is not to be had, and
    what the store raises.
    """
    settings = settings or Settings.from_environment()
    with ExitStack() as undo, progress.during("opening") if progress else nullcontext():
        if isinstance(uri_or_store, (str, os.PathLike, Uri)):
            uri = parse_uri(uri_or_store)
            if uri.scheme == "hf" and snapshot is not None and is_commit(snapshot):
                uri, snapshot = with_revision(uri, snapshot), None
            store = open_store(uri, settings=settings)
            undo.callback(store.close)
            owns_store = True
        elif hasattr(uri_or_store, "describe_range"):
            uri, store, owns_store = uri_or_store.uri, uri_or_store, False
        else:
            raise InvalidUri(
                f"{uri_or_store!r} is neither a uri nor a path.", mend="Give text such as s3://bucket/model, or a path."
            )
        found = survey(store, settings) if snapshot is None else survey_at(snapshot, store, settings, uri)
        if found.store is not store and not isinstance(found.store, PastStore):
            # A store of its own (a commit of the hub): the one that led to it is of no more use.
            if owns_store:
                store.close()
            owns_store = True
            undo.callback(found.store.close)
        checkpoint = _read(found, settings, fetch or _transport_fetch(settings), owns_store)
        undo.pop_all()
    _say(checkpoint, settings)
    return checkpoint


def _say(checkpoint: Checkpoint, settings: Settings) -> None:
    num_tensors, num_files = len(checkpoint.entries), len(checkpoint.files)
    _LOG.info(
        "Opened %s: snapshot %s, %s in %s, %s.",
        checkpoint.uri,
        checkpoint.snapshot.id,
        counted(num_tensors, "tensor"),
        counted(num_files, "file"),
        format_bytes(checkpoint.total_bytes),
    )
    if settings.sources:
        _LOG.info("Settings: %s.", ", ".join(f"{name} from {source}" for name, source in settings.sources.items()))
    for note in checkpoint.notes:
        _LOG.warning("%s: %s", checkpoint.uri, note)


def _read(found: Survey, settings: Settings, fetch: Fetch, owns_store: bool) -> Checkpoint:
    """Return the checkpoint that was surveyed, with its headers read."""
    store, snapshot = found.store, found.snapshot
    headers = read_headers(store, snapshot.weights, fetch, num_threads=settings.transport.num_connections)
    entries, more_notes = resolve_entries(headers, found.index, snapshot.uri)
    if not entries:
        raise NoWeights(
            f"There is not one tensor in the weights at {snapshot.uri}.",
            "The headers of the files are valid and name none.",
            "Upload the files again from where they were made.",
        )
    contents = Contents(
        entries=entries,
        metadata=MappingProxyType({header.file: header.metadata for header in headers}),
        notes=(*found.selection_notes, *more_notes, *found.side_notes),
    )
    return Checkpoint(store, snapshot, contents, found.side_files, owns_store=owns_store)


def _transport_fetch(settings: Settings) -> Fetch:
    surroundings = Surroundings()  # one for all: it holds the TLS contexts

    def read(store: ObjectStore, stored: StoredObject, start: int, stop: int, /) -> bytes:
        return fetch_range(store, stored, start, stop, settings.transport, surroundings)

    return read
