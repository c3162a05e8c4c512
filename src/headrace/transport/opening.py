"""Picks the reader for a store, and puts readers to work: a pool for many reads, `fetch` for one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from headrace.settings import TransportSettings
from headrace.storage import ObjectStore, StoredObject
from headrace.transport.bandwidth import Bandwidth
from headrace.transport.busyness import BusyWatch
from headrace.transport.file import FileReader
from headrace.transport.flight import ReadJob
from headrace.transport.http import HttpReader
from headrace.transport.pace import Pace
from headrace.transport.pool import ReaderPool, private_scratch
from headrace.transport.processes import Fleet
from headrace.transport.processpool import ProcessPool
from headrace.transport.reader import RangeRead, RangeReader
from headrace.transport.remote import Means
from headrace.transport.sharing import SharedPlaces
from headrace.transport.surroundings import Surroundings


def is_local(store: ObjectStore) -> bool:
    """Whether the store's ranges are of files of this machine, and so read with `FileReader`."""
    return store.uri.scheme == "file"


def open_reader(
    store: ObjectStore,
    settings: TransportSettings,
    surroundings: Surroundings | None = None,
    *,
    pace: Pace | None = None,
    bandwidth: Bandwidth | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> RangeReader:
    """Return a reader for ``store``; it connects when it first reads. Close it after use.

    ``on_bytes`` is told how many bytes came, in the reader's thread, a few hundred KiB at a time.
    """
    surroundings = surroundings or Surroundings()
    if is_local(store):
        return FileReader(store, on_bytes=on_bytes, clock=surroundings.clock)
    return HttpReader(store, settings, surroundings, pace=pace, bandwidth=bandwidth, on_bytes=on_bytes)


def open_pool(
    store: ObjectStore,
    settings: TransportSettings,
    *,
    on_bytes: Callable[[int], None] | None = None,
    scratch: Callable[[int], memoryview] = private_scratch,
    surroundings: Surroundings | None = None,
    num_processes: int = 0,
    places: SharedPlaces | None = None,
    on_demand_for_bytes: int | None = None,
) -> ReaderPool:
    """Return a pool of readers for ``store``, which must stay open for as long as the pool. Late reads of remote stores are hedged.

    ``on_bytes`` is called as in `open_reader`, from several threads; what a retry or a hedge brings twice is counted twice. With ``num_processes`` reads into memory
    that ``places`` knows are carried out by as many reader processes, all others by threads of this one; with ``on_demand_for_bytes``, how much there is to be read, from when
    on threads are seen to be busy with it.
    """
    world = surroundings or Surroundings()
    pace = Pace(settings.num_connections, world.clock)
    limit = settings.bandwidth_bytes_per_s
    bandwidth = Bandwidth(limit, world.clock) if limit else None
    settings = _with_time_for(settings, limit)

    def open_own() -> RangeReader:
        return open_reader(store, settings, world, pace=pace, bandwidth=bandwidth, on_bytes=on_own_bytes)

    on_own_bytes = on_bytes
    if num_processes and places is not None and not is_local(store):
        fleet = Fleet(settings, num_processes, on_demand=on_demand_for_bytes is not None)
        if on_demand_for_bytes is not None:
            on_own_bytes = _watched(fleet, on_demand_for_bytes, on_bytes, world)
        return ProcessPool(
            Means(
                store=store,
                fleet=fleet,
                places=places,
                open_own=open_own,
                pace=pace,
                on_bytes=on_bytes,
                clock=world.clock,
            ),
            settings,
            scratch=scratch,
        )
    return ReaderPool(
        open_own,
        settings,
        is_hedged=not is_local(store),
        scratch=scratch,
        pace=pace,
        clock=world.clock,
    )


def _watched(
    fleet: Fleet, num_bytes: int, on_bytes: Callable[[int], None] | None, world: Surroundings
) -> Callable[[int], None]:
    """Return what is to be told of bytes that threads receive: it passes that on, and starts the fleet once they are busy."""

    def on_busy(processors: float) -> None:
        fleet.start(f"auto: TLS, and threads filled {processors:.1f} processors")

    watch = BusyWatch(num_bytes, on_busy, clock=world.clock)

    def note(num_bytes: int) -> None:
        watch.note(num_bytes)
        if on_bytes is not None:
            on_bytes(num_bytes)

    return note


def _with_time_for(settings: TransportSettings, bandwidth_bytes_per_s: int) -> TransportSettings:
    """Return settings whose limits on slow reads allow for a share of the bandwidth: what we hold back ourselves is nobody's fault."""
    if not bandwidth_bytes_per_s:
        return settings
    share = bandwidth_bytes_per_s / settings.num_connections
    return replace(
        settings,
        least_rate_bytes_per_s=min(settings.least_rate_bytes_per_s, int(share / 4)),
        total_timeout_s=max(settings.total_timeout_s, 4 * settings.read_bytes / share),
        hedge_after_s=0.0,  # a second read of the same bytes would be paid from the same bandwidth
    )


def fetch(
    store: ObjectStore,
    stored: StoredObject,
    start: int,
    stop: int,
    settings: TransportSettings,
    surroundings: Surroundings | None = None,
) -> bytes:
    """Return bytes ``start`` to ``stop`` (half open) of an object at its pinned version, with the retries and the hedge of any other read.

    For headers and other small pieces: it connects anew each time. Raises what `RangeReader.read` raises.
    """
    found = bytearray(stop - start)
    if not found:
        return b""
    ended = threading.Event()
    errors: list[BaseException] = []

    def done(error: BaseException | None) -> None:
        errors.extend([] if error is None else [error])
        ended.set()

    # Two threads: one for the read, and one that asks again where the first is late.
    with open_pool(store, replace(settings, num_connections=2), surroundings=surroundings) as pool:
        pool.submit(ReadJob(RangeRead(stored, start, stop), lambda: [memoryview(found)], done))
        ended.wait()
    for error in errors:
        raise error
    return bytes(found)
