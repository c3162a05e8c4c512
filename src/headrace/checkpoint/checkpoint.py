"""An open checkpoint: what it holds, at which versions. Moves no weight bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType, TracebackType
from typing import Any

from headrace.checkpoint.entry import Entry
from headrace.checkpoint.sidefiles import SideFiles
from headrace.checkpoint.snapshot import Snapshot
from headrace.errors import CheckpointError
from headrace.storage import ObjectStore, StoredObject

CONFIG_KEY = "config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What was found in the files; see the properties of `Checkpoint` of the same names."""

    entries: Mapping[str, Entry]
    metadata: Mapping[str, Mapping[str, str]]
    notes: tuple[str, ...] = ()


class Checkpoint:
    """A snapshot of weight files, every tensor's entry, and the side files. Immutable; any thread.

    A context manager; `close` it when the weights are loaded and the side files read.
    """

    def __init__(
        self, store: ObjectStore, snapshot: Snapshot, contents: Contents, side_files: SideFiles, *, owns_store: bool
    ) -> None:
        """``owns_store`` says that closing the checkpoint closes the store."""
        self._store = store
        self._snapshot = snapshot
        self._contents = contents
        self._side_files = side_files
        self._owns_store = owns_store
        self._entries = MappingProxyType(dict(contents.entries))
        self._objects = {stored.key: stored for stored in snapshot.weights}

    def __repr__(self) -> str:
        return f"Checkpoint({self.uri}, {len(self.entries):,} tensors in {len(self.files):,} files, snapshot {self.snapshot.id})"

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close what is held open, and the store if this checkpoint opened it. May be called twice."""
        self._side_files.close()
        if self._owns_store:
            self._store.close()

    @property
    def uri(self) -> str:
        """The uri of the folder, without anything secret."""
        return self._snapshot.uri

    @property
    def store(self) -> ObjectStore:
        """Where the objects are."""
        return self._store

    @property
    def snapshot(self) -> Snapshot:
        """The objects and versions that were pinned."""
        return self._snapshot

    @property
    def files(self) -> tuple[str, ...]:
        """The keys of the weight files, in the order of reading."""
        return tuple(self._objects)

    @property
    def entries(self) -> Mapping[str, Entry]:
        """Every tensor that counts, by name, in the order of files and offsets. Read-only."""
        return self._entries

    @property
    def metadata(self) -> Mapping[str, Mapping[str, str]]:
        """The free text in each weight file's header, by file."""
        return self._contents.metadata

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know about the choice of files and tensors: full sentences, which were logged as warnings."""
        return self._contents.notes

    @property
    def side_files(self) -> SideFiles:
        """What is not weights."""
        return self._side_files

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all tensors that count."""
        return sum(entry.size_bytes for entry in self.entries.values())

    @cached_property
    def config(self) -> dict[str, Any]:
        """The content of ``config.json``, read at first use; empty where there is none. Raises `CheckpointError` where it is not an object."""
        if CONFIG_KEY not in {stored.key for stored in self._side_files.objects}:
            return {}
        try:
            # As leniently as everybody reads it: some models' configurations hold Infinity.
            config = json.loads(self._side_files.read(CONFIG_KEY))
        except (ValueError, RecursionError) as error:
            raise self._invalid_config(f"It is not JSON: {error}.") from error
        if not isinstance(config, dict):
            raise self._invalid_config("It is not an object.")
        return config

    def stored(self, file: str) -> StoredObject:
        """Return the pinned object of one weight file, such as `Entry.file` names."""
        return self._objects[file]

    def _invalid_config(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self._store.uri_of(CONFIG_KEY)} is not a configuration.", why, "Upload the model's own again."
        )
