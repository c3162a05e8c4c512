"""What lies at the uri: the listing, what of it would be loaded, and one object that the other checks read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches

from headrace.checkpoint.index import parse_index
from headrace.checkpoint.selection import Selection, choose_index, select_named, select_unindexed
from headrace.doctor.finding import Finding, failed, failed_with, ok, skipped, warning
from headrace.errors import AccessDenied, CheckpointError, HeadraceError, InvalidIndex, ObjectNotFound
from headrace.storage import Listing, ObjectStore, StoredObject, Uri
from headrace.storage.model_files import INDEX, SINGLE, is_weights
from headrace.units import format_bytes

LIST = "list"
STAT = "stat"
SIMILAR = "similar"
"""Label of a folder whose name is like the one that was given."""

_LARGEST_INDEX_BYTES = 200_000_000
_TRIED_NAMES = (INDEX, SINGLE, "config.json")
"""What is asked for by name where the listing is refused: reading may be allowed all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """What was found, by key, and the part of it that would be loaded."""

    objects: Mapping[str, StoredObject]
    weights: tuple[StoredObject, ...] = ()

    @property
    def weight_bytes(self) -> int:
        return sum(stored.size_bytes for stored in self.weights)

    @property
    def side_bytes(self) -> int:
        """Bytes of the files at the top that are not weights."""
        return sum(stored.size_bytes for key, stored in self.objects.items() if not is_weights(key))

    @property
    def probe(self) -> StoredObject | None:
        """The object to try reads on: the largest that would be loaded, or else the largest there is; None where all are empty."""
        candidates = self.weights or tuple(self.objects.values())
        largest = max(candidates, key=lambda stored: stored.size_bytes, default=None)
        return largest if largest is not None and largest.size_bytes else None


def examine_listing(store: ObjectStore, open_parent: Callable[[Uri], ObjectStore]) -> tuple[Finding, Inventory | None]:
    """List the uri and choose what would be loaded; return the finding, and what is there if it could be listed."""
    try:
        top = store.list_level()
    except HeadraceError as error:
        finding = failed_with(LIST, error)
        if isinstance(error, ObjectNotFound):
            neighbours = _neighbours(store, open_parent)
            finding = failed(LIST, error.what, error.why, _with_guess(error.mend, neighbours), neighbours)
        return finding, None
    objects = {stored.key: stored for stored in top.objects}
    details = [("found", _summary(top))]
    inventory = Inventory(objects=objects)
    try:
        selection, index = _select(store, top, objects)
    except CheckpointError as error:
        neighbours = [] if objects else _neighbours(store, open_parent)
        mend = _with_guess(error.mend, neighbours)
        return failed(LIST, error.what, error.why, mend, [*details, *neighbours]), inventory
    except AccessDenied as error:
        why = f"The folder can be listed, and the index cannot be read. {error.why}"
        return replace(failed_with(LIST, error, details), why=why), inventory
    except HeadraceError as error:
        return failed_with(LIST, error, details), inventory
    weights = tuple(objects[key] for key in selection.files)
    inventory = Inventory(objects=objects, weights=weights)
    chosen = f"{_files(len(weights))}, {format_bytes(inventory.weight_bytes)}"
    details.append(("loaded would be", f"{chosen}{f', as {index} says' if index else ''}"))
    details += [("note", note) for note in selection.notes]
    return ok(LIST, f"{chosen} of weights would be loaded.", details), inventory


def find_without_listing(store: ObjectStore) -> Inventory | None:
    """Return what can be reached by its name where the folder cannot be listed; None where nothing can."""
    names = _TRIED_NAMES if store.selected_key is None else (store.selected_key,)
    objects = {}
    for name in names:
        with contextlib.suppress(HeadraceError):
            objects[name] = store.stat(name)
    return Inventory(objects=objects) if objects else None


def examine_stat(store: ObjectStore, inventory: Inventory, *, was_listed: bool) -> Finding:
    """Look one object up by its name, and compare what is said of it with the listing."""
    listed = inventory.probe
    if listed is None:
        return skipped(STAT, "There is no object that holds anything.")
    try:
        found = store.stat(listed.key)
    except HeadraceError as error:
        return failed_with(STAT, error)
    details = [
        ("object", found.key),
        ("size", f"{found.size_bytes:,} bytes"),
        ("version", found.version or "none"),
    ]
    if not was_listed:
        return ok(STAT, f"{found.key} can be looked up by its name, although the folder cannot be listed.", details)
    if (found.size_bytes, found.version) != (listed.size_bytes, listed.version):
        return warning(
            STAT,
            f"{found.key} is another one than the listing says.",
            f"The listing says {listed.size_bytes:,} bytes, version {listed.version or 'none'}. Somebody is writing it now, or the store's listing is old.",
            "Wait until the upload is complete; a load that begins before fails, or is of the old files.",
            details,
        )
    if not found.version:
        return warning(
            STAT,
            f"{store.endpoint} gives no version of its files.",
            "There is neither ETag nor Last-Modified, so a file that is replaced during a load is noticed only if its size differs.",
            "Use a server that gives ETags, and never replace files in place: give each version of a model a folder of its own.",
            details,
        )
    return ok(STAT, f"{found.key} has {found.size_bytes:,} bytes.", details)


def _select(store: ObjectStore, top: Listing, objects: dict[str, StoredObject]) -> tuple[Selection, str | None]:
    """Return the weights as a load chooses them, and the index that names them; add to ``objects`` what lies elsewhere than at the top."""
    key, notes = choose_index(objects, store.selected_key)
    if key is None:
        selection = select_unindexed(objects, top.folders, str(store.uri), store.selected_key)
        for file in selection.files:
            if file not in objects:
                objects[file] = store.stat(file)
        return Selection(selection.files, (*notes, *selection.notes)), None
    stored = objects.get(key) or store.stat(key)
    if stored.size_bytes > _LARGEST_INDEX_BYTES:
        uri = store.uri_of(key)
        raise InvalidIndex(f"{uri} is {stored.size_bytes:,} bytes.", "No index is so large.", f"Look at {uri}.")
    raw = store.read_object(stored) if stored.size_bytes else b""
    index = parse_index(raw, key, uri=store.uri_of(key))
    for folder in index.folders:
        with contextlib.suppress(ObjectNotFound):
            objects.update((found.key, found) for found in store.list_level(folder).objects)
    selection = select_named(index, objects)
    return Selection(selection.files, (*notes, *selection.notes)), key


def _summary(top: Listing) -> str:
    size = sum(stored.size_bytes for stored in top.objects)
    folders = f", {len(top.folders)} folder{'' if len(top.folders) == 1 else 's'}" if top.folders else ""
    return f"{len(top.objects):,} object{'' if len(top.objects) == 1 else 's'}, {format_bytes(size)}{folders}"


def _files(number: int) -> str:
    return f"{number} file" if number == 1 else f"{number:,} files"


def _neighbours(store: ObjectStore, open_parent: Callable[[Uri], ObjectStore]) -> list[tuple[str, str]]:
    """Return the folders beside a folder that is absent or empty, those with similar names first: most often the name was mistyped."""
    uri = store.uri
    if uri.scheme not in ("s3", "gs", "az", "file") or uri.parent.key == uri.key:
        return []
    try:
        with contextlib.closing(open_parent(uri.parent)) as parent:
            names = [folder.rpartition("/")[2] for folder in parent.list_level().folders]
    except HeadraceError:
        return []
    names = [name for name in names if name != uri.name]
    similar = get_close_matches(uri.name, names, n=3, cutoff=0.6)
    found = [(SIMILAR, str(uri.parent.child(name))) for name in similar]
    if not found and names:
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        found.append(("beside it", shown))
    return found


def _with_guess(mend: str, neighbours: list[tuple[str, str]]) -> str:
    guess = next((value for label, value in neighbours if label == SIMILAR), "")
    return f"Did you mean {guess}? {mend}" if guess else mend
