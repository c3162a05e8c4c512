"""What a store held before, made of the versions that its bucket keeps: one state for every change, each of them a store. Opens no connection of its own.

A bucket with versioning keeps what was overwritten or removed. The states are not written down anywhere, so they are made again: all changes in the order in which
they happened, and after each of them the set of objects that were current.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from headrace.errors import ObjectNotFound, StorageError
from headrace.storage.answers import Level
from headrace.storage.store import Change, FileRange, HttpRange, Listing, ObjectStore, Refusal, StoredObject, Verdict
from headrace.storage.uri import Uri

MOST_STATES = 2000
"""How many states are looked at, from the newest on. A model of 200 files that was uploaded ten times has as many."""
MOST_CHANGES = 100_000
"""How many versions are listed at most: a folder of more is no model's."""


class PastStore:
    """``store`` with exactly ``objects``, by key: an `ObjectStore` that lists what was there, and reads it from there. Any thread; closing it closes ``store``."""

    def __init__(self, store: ObjectStore, objects: Mapping[str, StoredObject]) -> None:
        self._store = store
        self._objects = dict(objects)
        self._levels: dict[str, Level] | None = None

    def __repr__(self) -> str:
        return f"PastStore({self._store!r}, {len(self._objects)} objects)"

    @property
    def uri(self) -> Uri:
        """The root, which is that of the present."""
        return self._store.uri

    @property
    def selected_key(self) -> str | None:
        """The single object that the user's uri named; None where it named a folder."""
        return self._store.selected_key

    @property
    def endpoint(self) -> str:
        """Where requests go, for messages."""
        return self._store.endpoint

    def uri_of(self, key: str) -> str:
        """Return the full uri of one object, for messages."""
        return self._store.uri_of(key)

    def list_level(self, folder: str = "") -> Listing:
        """List one level as it was. Asks nobody."""
        if self._levels is None:
            self._levels = _levels_of(self._objects)
        level = self._levels.get(folder)
        return Listing((), ()) if level is None else level.listing(folder)

    def stat(self, key: str) -> StoredObject:
        """Return the object as it was. Raises `ObjectNotFound`."""
        stored = self._objects.get(key)
        if stored is None:
            raise ObjectNotFound(f"{self.uri_of(key)} did not exist then.", mend="Take another snapshot.")
        return stored

    def read_object(self, stored: StoredObject, *, start: int = 0, stop: int | None = None) -> bytes:
        """Read a small object, or a piece of it, at its version."""
        return self._store.read_object(stored, start=start, stop=stop)

    def describe_range(self, stored: StoredObject, start: int, stop: int) -> FileRange | HttpRange:
        """Describe one ranged read of ``stored`` at its version."""
        return self._store.describe_range(stored, start, stop)

    def judge(self, stored: StoredObject, refusal: Refusal) -> Verdict:
        """Say what a refused ranged read means."""
        return self._store.judge(stored, refusal)

    def close(self) -> None:
        """Close the store. May be called twice."""
        self._store.close()


def past_states(store: ObjectStore, changes: Sequence[Change]) -> Iterator[PastStore]:
    """Yield ``store`` as it was after each of ``changes``, the newest state first; ``changes`` of one key must be in their order, the others may be in any.

    Changes of one second have no order among themselves where a store dates no finer (S3): those of one key stay in theirs, and a state between two keys' changes
    of the same second may be left out. At most `MOST_STATES` are yielded.
    """
    ordered = _in_order(changes)
    current: dict[str, StoredObject] = {}
    undo: list[tuple[str, StoredObject | None]] = []
    for change in ordered:
        undo.append((change.key, current.get(change.key)))
        _put(current, change.key, change.stored)
    for num_states, (key, before) in enumerate(reversed(undo)):
        if num_states == MOST_STATES:
            return
        yield PastStore(store, current)
        _put(current, key, before)


def too_many_versions(uri: str) -> StorageError:
    """Return the error for a folder of more than `MOST_CHANGES`."""
    return StorageError(
        f"The versions of {uri} cannot be looked through.",
        f"There are more than {MOST_CHANGES:,}.",
        "Name the model's own folder, and not one above it.",
    )


def _in_order(changes: Sequence[Change]) -> list[Change]:
    """Return ``changes`` oldest first; of one moment, the first of every key comes before the second of any."""
    latest: dict[str, tuple[float, int]] = {}
    ranked: list[tuple[float, int, Change]] = []
    for change in changes:
        last_s, rank = latest.get(change.key, (float("-inf"), 0))
        # A key's own order counts, whatever the clocks of a store's machines say.
        when_s = max(change.when_s, last_s)
        rank = rank + 1 if when_s == last_s else 0
        latest[change.key] = (when_s, rank)
        ranked.append((when_s, rank, change))
    return [change for _, _, change in sorted(ranked, key=lambda item: item[:2])]


def _put(objects: dict[str, StoredObject], key: str, stored: StoredObject | None) -> None:
    if stored is None:
        objects.pop(key, None)
    else:
        objects[key] = stored


def _levels_of(objects: Mapping[str, StoredObject]) -> dict[str, Level]:
    """Return the listing of every folder, as the store's own would be."""
    levels: dict[str, Level] = {}

    def level_of(folder: str) -> Level:
        if folder not in levels:
            levels[folder] = Level(f"{folder}/" if folder else "")
        return levels[folder]

    for key, stored in objects.items():
        folder = key.rpartition("/")[0]
        level_of(folder).add(key, stored.size_bytes, stored.version, stored.version_id)
        while folder:
            parent = folder.rpartition("/")[0]
            level_of(parent).add_folder(f"{folder}/")
            folder = parent
    return levels
