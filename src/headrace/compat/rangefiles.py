"""Files that are named one by one, opened as if they were a checkpoint: whole safetensors files without an index, or byte ranges of anything."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import torch

from headrace.checkpoint import Checkpoint, Entry, ParsedHeader, SideFiles, Snapshot
from headrace.checkpoint.checkpoint import Contents
from headrace.checkpoint.headers import read_headers
from headrace.checkpoint.wording import listed
from headrace.compat.listing import S3Credentials, store_for
from headrace.errors import InvalidSetting
from headrace.settings import Settings
from headrace.storage import ObjectStore, StoredObject, Uri, parse_uri
from headrace.streaming import torch_dtype, torch_shape
from headrace.transport import Surroundings
from headrace.transport import fetch as fetch_range

T = TypeVar("T")


class Offsets(NamedTuple):
    """Where a tensor's bytes lie, counted from where the file's tensors begin; half open."""

    start: int
    end: int

    def get_diff(self) -> int:
        """Return the number of bytes."""
        return self.end - self.start


class TensorMetadata:
    """One stored tensor, under the names of Run:ai Model Streamer's ``SafetensorMetadata``."""

    def __init__(self, entry: Entry, data_start: int) -> None:
        self.name = entry.name
        self.dtype = entry.dtype
        """As the header spells it: ``BF16``."""
        self.shape = list(entry.shape)
        """As the header has it: of logical values."""
        self.offsets = Offsets(entry.start - data_start, entry.stop - data_start)
        self._entry = entry

    def __repr__(self) -> str:
        return f"TensorMetadata({self.name!r}, {self.dtype}, {self.shape})"

    def get_bytesize(self) -> int:
        """Return the bytes that it takes in the file."""
        return self._entry.size_bytes

    def get_torch_dtype(self) -> torch.dtype:
        """Return the dtype of the tensor that is streamed. Raises `UnsupportedDtype`."""
        return torch_dtype(self._entry)

    def get_storage_shape(self) -> list[int]:
        """Return the shape of the tensor that is streamed: two 4-bit values make one element."""
        return list(torch_shape(self._entry))

    def get_element_size(self) -> int:
        """Return the bytes of one element of the tensor that is streamed."""
        return self.get_torch_dtype().itemsize

    def get_item_count(self) -> int:
        """Return how many elements the tensor that is streamed has."""
        return torch.Size(self.get_storage_shape()).numel()


class FileChunks:
    """One file and the ranges of it that are wanted: ``offsets[i]`` to ``offsets[i] + sizes[i]``. ``id`` is the caller's own."""

    def __init__(self, id: int, path: str, offsets: Sequence[int] | int, sizes: Sequence[int]) -> None:
        """``offsets`` may be one number, as versions before 0.17 had it: the ranges then follow each other from there."""
        if isinstance(offsets, int):
            starts = [offsets]
            for size in sizes[:-1]:
                starts.append(starts[-1] + size)
            offsets = starts[: len(sizes)]
        if len(offsets) != len(sizes):
            raise InvalidSetting(f"{len(offsets)} offsets and {len(sizes)} sizes are given for {path}.")
        self.id = id
        self.path = path
        self.offsets = list(offsets)
        self.sizes = list(sizes)

    @staticmethod
    def contiguous(id: int, path: str, offset: int, sizes: Sequence[int]) -> FileChunks:
        """Return ranges of ``sizes`` that follow each other from ``offset`` on."""
        return FileChunks(id, path, offset, sizes)

    def total_size(self) -> int:
        """Return the bytes of all ranges."""
        return sum(self.sizes)

    def max_chunk_size(self) -> int:
        """Return the bytes of the longest range."""
        return max(self.sizes)


def open_files(
    paths: Sequence[str], settings: Settings, credentials: S3Credentials | None, wanted: frozenset[str] | None
) -> tuple[list[list[TensorMetadata]], Checkpoint]:
    """Return for each path the tensors to stream, and a checkpoint of them all, in the same order. Its entries have the tensors' names, or longer ones where two files hold one."""

    def collect(store: ObjectStore, objects: Sequence[StoredObject]) -> tuple[list[list[TensorMetadata]], list[Entry]]:
        headers = _headers(store, objects, settings)
        chosen = [[entry for entry in header.entries if wanted is None or entry.name in wanted] for header in headers]
        if wanted is not None:
            _check_found(wanted, [entry.name for entries in chosen for entry in entries])
        described = [
            [TensorMetadata(entry, header.data_start) for entry in entries]
            for header, entries in zip(headers, chosen, strict=True)
        ]
        return described, [entry for entries in chosen for entry in entries]

    return _opened(paths, settings, credentials, collect)


def describe_files(
    paths: Sequence[str], settings: Settings, credentials: S3Credentials | None
) -> list[tuple[int, list[TensorMetadata], list[int]]]:
    """Return for each path where its tensors begin, what they are, and their sizes in bytes."""

    def collect(
        store: ObjectStore, objects: Sequence[StoredObject]
    ) -> tuple[list[tuple[int, list[TensorMetadata], list[int]]], list[Entry]]:
        headers = _headers(store, objects, settings)
        return [
            (
                header.data_start,
                [TensorMetadata(entry, header.data_start) for entry in header.entries],
                [entry.size_bytes for entry in header.entries],
            )
            for header in headers
        ], []

    described, checkpoint = _opened(paths, settings, credentials, collect)
    checkpoint.close()
    return described


def open_ranges(requests: Sequence[FileChunks], settings: Settings, credentials: S3Credentials | None) -> Checkpoint:
    """Return a checkpoint whose entries are the ranges of ``requests``, in order, as bytes. Raises `InvalidSetting` for a range that leaves its file."""

    def collect(store: ObjectStore, objects: Sequence[StoredObject]) -> tuple[None, list[Entry]]:
        entries = []
        for stored, request in zip(objects, requests, strict=True):
            for start, size in zip(request.offsets, request.sizes, strict=True):
                if start < 0 or size < 0 or start + size > stored.size_bytes:
                    raise InvalidSetting(
                        f"The range {start} to {start + size} is not one of {store.uri_of(stored.key)}.",
                        f"It has {stored.size_bytes} bytes.",
                    )
                entries.append(
                    Entry(f"bytes {start} to {start + size}", "U8", (size,), stored.key, start, start + size)
                )
        return None, entries

    _, checkpoint = _opened([request.path for request in requests], settings, credentials, collect)
    return checkpoint


def _opened(
    paths: Sequence[str],
    settings: Settings,
    credentials: S3Credentials | None,
    collect: Callable[[ObjectStore, Sequence[StoredObject]], tuple[T, list[Entry]]],
) -> tuple[T, Checkpoint]:
    root, keys = _split(paths)
    store = store_for(root, settings, credentials)
    try:
        with ThreadPoolExecutor(settings.transport.num_connections, "headrace-stat") as pool:
            objects = list(pool.map(store.stat, keys))
        result, entries = collect(store, objects)
    except BaseException:
        store.close()
        raise
    unique = tuple({stored.key: stored for stored in objects}.values())
    contents = Contents(entries={entry.name: entry for entry in _named_apart(entries)}, metadata={})
    side_files = SideFiles(store, (), cache_dir=settings.cache_dir)
    snapshot = Snapshot(str(root), unique, ())
    return result, Checkpoint(store, snapshot, contents, side_files, owns_store=True)


def _headers(store: ObjectStore, objects: Sequence[StoredObject], settings: Settings) -> tuple[ParsedHeader, ...]:
    surroundings = Surroundings()

    def fetch(store: ObjectStore, stored: StoredObject, start: int, stop: int, /) -> bytes:
        return fetch_range(store, stored, start, stop, settings.transport, surroundings)

    return read_headers(store, objects, fetch, num_threads=settings.transport.num_connections)


def _split(paths: Sequence[str]) -> tuple[Uri, list[str]]:
    """Return the root of the store that all ``paths`` are in, and their keys below it."""
    if not paths:
        raise InvalidSetting("No file is named.", mend="Give at least one path.")
    uris = [parse_uri(_resolved(path)) for path in paths]
    roots = {(uri.scheme, uri.bucket): uri for uri in uris}
    if len(roots) > 1:
        raise InvalidSetting(
            f"The files of one call lie in several stores: {listed([str(uri) for uri in roots.values()])}.",
            mend="Make one call for each.",
        )
    scheme, bucket = next(iter(roots))
    root = Uri(scheme, bucket, "/" if scheme == "file" else "")
    return root, [uri.key.removeprefix("/") for uri in uris]


def _resolved(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Return a local path without ``..``, whose meaning after a link is for the system to say; others as they are."""
    return os.path.realpath(path) if parse_uri(path).scheme == "file" and ".." in os.fspath(path).split("/") else path


def _named_apart(entries: Iterable[Entry]) -> list[Entry]:
    entries = list(entries)
    times = Counter(entry.name for entry in entries)
    return [
        entry
        if times[entry.name] == 1
        else Entry(
            f"{entry.name} ({place + 1} in {entry.file})", entry.dtype, entry.shape, entry.file, entry.start, entry.stop
        )
        for place, entry in enumerate(entries)
    ]


def _check_found(wanted: frozenset[str], found: Sequence[str]) -> None:
    absent = sorted(wanted - set(found))
    if absent:
        raise InvalidSetting(f"tensor_names are in none of the files: {listed(absent)}.", mend="Check the names.")
    doubled = sorted(name for name, times in Counter(found).items() if times > 1)
    if doubled:
        raise InvalidSetting(
            f"tensor_names are in more than one of the files: {listed(doubled)}.", mend="Leave files out."
        )
