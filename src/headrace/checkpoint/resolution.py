"""Which file's copy of each name counts. Pure: takes parsed headers and the index, returns entries.

With an index it decides per name: the copy in the file that it maps the name to, and no other; a stored tensor that it does not name is left out, with
a note. Without one a name may be stored once only.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.checkpoint.entry import Entry
from headrace.checkpoint.header import ParsedHeader
from headrace.checkpoint.index import WeightIndex
from headrace.checkpoint.wording import counted, listed, quoted
from headrace.errors import CheckpointError, InvalidIndex


def resolve_entries(
    headers: Sequence[ParsedHeader], index: WeightIndex | None, uri: str
) -> tuple[dict[str, Entry], tuple[str, ...]]:
    """Return every name's entry, in the order of ``headers`` and of offsets, and notes.

    Raises `InvalidIndex` where the index names a tensor that its file lacks, and `CheckpointError` where two files store the same name and no index
    says which counts.
    """
    return _all_once(headers, uri) if index is None else _as_indexed(headers, index, uri)


def _all_once(headers: Sequence[ParsedHeader], uri: str) -> tuple[dict[str, Entry], tuple[str, ...]]:
    entries: dict[str, Entry] = {}
    for header in headers:
        for entry in header.entries:
            other = entries.setdefault(entry.name, entry)
            if other is not entry:
                raise CheckpointError(
                    f"Tensor {quoted(entry.name)} is stored twice: in {other.file} and in {entry.file}.",
                    "There is no index that says which copy counts.",
                    f"Remove the file that does not belong to {uri}, upload its index, or name one file in the uri.",
                )
    return entries, ()


def _as_indexed(
    headers: Sequence[ParsedHeader], index: WeightIndex, uri: str
) -> tuple[dict[str, Entry], tuple[str, ...]]:
    entries: dict[str, Entry] = {}
    unnamed: list[str] = []
    copies: list[str] = []
    for header in headers:
        for entry in header.entries:
            file = index.weight_map.get(entry.name)
            if file == entry.file:
                entries[entry.name] = entry
            elif file is None:
                unnamed.append(entry.name)
            else:
                copies.append(entry.name)
    absent = [name for name in index.weight_map if name not in entries]
    if absent:
        first = absent[0]
        raise InvalidIndex(
            f"{index.key} names {counted(len(absent), 'tensor')} that the mapped file does not hold, such as "
            f"{quoted(first)} in {index.weight_map[first]}.",
            f"Index and files are not of the same export. Absent are {listed(absent)}.",
            f"Upload both again, or compare them with: headrace inspect {uri}",
        )
    notes = []
    if unnamed:
        notes.append(
            f"Left out: {counted(len(unnamed), 'stored tensor')} that {index.key} does not name: {listed(unnamed)}."
        )
    if copies:
        notes.append(
            f"Left out: {counted(len(copies), 'stored tensor')} that lie in another file than {index.key} says: {listed(copies)}."
        )
    return entries, tuple(notes)
