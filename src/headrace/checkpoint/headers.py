"""Reads the headers of many files at once, each with one ranged read, or two where it is long. Moves no weight bytes on purpose."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Protocol

from headrace.checkpoint.header import ParsedHeader, header_stop, parse_header
from headrace.errors import WrongRange
from headrace.storage import ObjectStore, StoredObject
from headrace.units import KIB

GUESS_BYTES = 256 * KIB
"""What the first read asks for. Headers of models of today's sizes have 10–200 KiB; a read of this size costs hardly more than an empty one."""


class Fetch(Protocol):
    """Reads bytes ``start`` to ``stop`` (half open) of a pinned object, with retries. Called from several threads."""

    def __call__(self, store: ObjectStore, stored: StoredObject, start: int, stop: int, /) -> bytes: ...


def read_headers(
    store: ObjectStore, objects: Sequence[StoredObject], fetch: Fetch, *, num_threads: int
) -> tuple[ParsedHeader, ...]:
    """Return the parsed headers of ``objects``, in their order.

    The first failure stops files that were not begun; of several, the error of the first file is raised. All threads have ended when it returns.
    """
    failed = threading.Event()

    def read(stored: StoredObject) -> ParsedHeader | None:
        if failed.is_set():
            return None
        try:
            return _read_header(store, stored, fetch)
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(max(1, min(num_threads, len(objects))), thread_name_prefix="headrace-header") as pool:
        futures = [pool.submit(read, stored) for stored in objects]
        try:
            wait(futures)
        finally:  # whoever interrupts must not wait for all of them
            failed.set()
    # The first error in the order of the files is raised here; a header is None only where there is one.
    return tuple(header for future in futures if (header := future.result()) is not None)


def _read_header(store: ObjectStore, stored: StoredObject, fetch: Fetch) -> ParsedHeader:
    uri = store.uri_of(stored.key)
    raw = _fetch(store, stored, fetch, 0, min(stored.size_bytes, GUESS_BYTES))
    stop = header_stop(raw, stored.key, stored.size_bytes, uri=uri)
    if stop > len(raw):
        raw += _fetch(store, stored, fetch, len(raw), stop)
    return parse_header(raw, stored.key, stored.size_bytes, uri=uri)


def _fetch(store: ObjectStore, stored: StoredObject, fetch: Fetch, start: int, stop: int) -> bytes:
    if start == stop:
        return b""
    raw = fetch(store, stored, start, stop)
    if len(raw) != stop - start:
        raise WrongRange(
            f"{len(raw):,} bytes came where {stop - start:,} were asked for: {store.uri_of(stored.key)}, from byte {start:,}."
        )
    return raw
