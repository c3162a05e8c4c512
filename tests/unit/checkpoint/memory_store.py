"""A store in memory that counts what is asked of it: stands for a bucket."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from typing import Any

from headrace.errors import ObjectChanged, ObjectNotFound
from headrace.storage import FileRange, HttpRange, Listing, Refusal, StoredObject, Uri, Verdict, parse_uri

from .header_files import file_of, tensor


class MemoryStore:
    """Objects by key. ``reads`` counts body reads by key, ``listings`` counts listed folders."""

    def __init__(
        self, objects: dict[str, bytes], uri: str = "s3://bucket/model", selected_key: str | None = None
    ) -> None:
        self.objects = dict(objects)
        self.reads: Counter[str] = Counter()
        self.listings: Counter[str] = Counter()
        self.num_closed = 0
        self._uri = parse_uri(uri)
        self._selected_key = selected_key
        self._lock = threading.Lock()

    @property
    def uri(self) -> Uri:
        return self._uri

    @property
    def selected_key(self) -> str | None:
        return self._selected_key

    @property
    def endpoint(self) -> str:
        return "http://127.0.0.1:1"

    def uri_of(self, key: str) -> str:
        return f"{self._uri}/{key}"

    def list_level(self, folder: str = "") -> Listing:
        self.listings[folder] += 1
        prefix = f"{folder}/" if folder else ""
        below = sorted(key for key in self.objects if key.startswith(prefix))
        folders = {prefix + key[len(prefix) :].partition("/")[0] for key in below if "/" in key[len(prefix) :]}
        here = [self.stat(key) for key in below if "/" not in key[len(prefix) :]]
        return Listing(tuple(here), tuple(sorted(folders)))

    def stat(self, key: str) -> StoredObject:
        if key not in self.objects:
            raise ObjectNotFound(f"{self.uri_of(key)} does not exist.")
        content = self.objects[key]
        return StoredObject(key, len(content), f'"{hashlib.md5(content).hexdigest()}"')

    def read_object(self, stored: StoredObject, *, start: int = 0, stop: int | None = None) -> bytes:
        with self._lock:
            self.reads[stored.key] += 1
        if self.stat(stored.key) != stored:
            raise ObjectChanged(f"{self.uri_of(stored.key)} has changed.")
        return self.objects[stored.key][start:stop]

    def describe_range(self, stored: StoredObject, start: int, stop: int) -> FileRange | HttpRange:
        raise AssertionError("no transport here")

    def judge(self, stored: StoredObject, refusal: Refusal) -> Verdict:
        raise AssertionError("no transport here")

    def close(self) -> None:
        self.num_closed += 1


def fetch(store: Any, stored: StoredObject, start: int, stop: int) -> bytes:
    """Read a range as a transport would."""
    return bytes(store.read_object(stored, start=start, stop=stop))


def weights(**values: int) -> bytes:
    """Build a safetensors file with a U8 tensor of one element for each name; two underscores in a name stand for a dot."""
    header = {name.replace("__", "."): tensor([1], place, place + 1, "U8") for place, name in enumerate(values)}
    return file_of(header, bytes(values.values()))


def index(**files: str) -> bytes:
    """Build an index that maps each name to a file."""
    weight_map = {name.replace("__", "."): file for name, file in files.items()}
    return json.dumps({"metadata": {"total_size": len(files)}, "weight_map": weight_map}).encode()
