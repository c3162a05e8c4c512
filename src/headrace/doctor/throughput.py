"""How fast weights come, over one connection and over as many as a load uses. Reads real weights into scratch memory and drops them; bounded in time and bytes."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from headrace.doctor.finding import Finding, failed, failed_with, ok, skipped, warning
from headrace.doctor.world import World
from headrace.errors import Cancelled, HeadraceError
from headrace.settings import TransportSettings
from headrace.storage import ObjectStore, StoredObject
from headrace.transport import RangeRead, ReaderPool, ReadJob, open_pool
from headrace.units import MIB, format_bytes, format_seconds

STEP = "throughput"

LEAST_BYTES = MIB
"""Of less than this nothing can be said."""
_SLOW_BYTES_PER_S = 10e6
_HELPS = 1.3
"""Where several connections bring less than this many times what one does, they do not help."""
_SCALES = 0.7
_CLOSE_TIMEOUT_S = 5.0
_MOST_SCRATCH_BYTES = 128 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How much one measurement may take."""

    seconds: float = 3.0
    num_bytes: int = 256 * 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """What one measurement brought."""

    num_connections: int
    num_bytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.seconds if self.seconds > 0 else 0.0

    def __str__(self) -> str:
        return f"{format_bytes(self.bytes_per_s)}/s ({format_bytes(self.num_bytes)} in {format_seconds(self.seconds)})"


def examine_throughput(
    store: ObjectStore,
    objects: Sequence[StoredObject],
    transport: TransportSettings,
    world: World,
    *,
    load_bytes: int,
    bounds: Bounds | None = None,
) -> Finding:
    """Read ``objects`` for a few seconds over one connection, and over all; ``load_bytes`` is what a load would read in all."""
    bounds = bounds or Bounds()
    total = sum(stored.size_bytes for stored in objects)
    if total < LEAST_BYTES:
        return skipped(STEP, f"There are {format_bytes(total)} to read, too few to tell how fast they come.")
    # Scratch memory is bounded, too: a container for this check may be a small one.
    size_bytes = max(LEAST_BYTES, min(transport.read_bytes, _MOST_SCRATCH_BYTES // transport.num_connections))
    reads = cut(objects, size_bytes)
    counts = (1,) if transport.num_connections == 1 else (1, transport.num_connections)
    rates = []
    for count in counts:
        try:
            rates.append(measure(store, reads, replace(transport, num_connections=count), world, bounds))
        except HeadraceError as error:
            return failed_with(STEP, error, [(_label(rate.num_connections), str(rate)) for rate in rates])
    return judge_rates(rates, load_bytes, limit=transport.bandwidth_bytes_per_s, is_local=store.uri.scheme == "file")


def judge_rates(rates: Sequence[Rate], load_bytes: int, *, limit: int = 0, is_local: bool = False) -> Finding:
    """Return what the rates mean; the last one is that of a load."""
    details = [(_label(rate.num_connections), str(rate)) for rate in rates]
    best = rates[-1]
    if not best.num_bytes:
        return failed(
            STEP,
            f"No byte came in {format_seconds(best.seconds)}.",
            "Requests are answered, and bodies do not arrive.",
            "Check the network for a firewall that inspects what passes, and for a too small MTU (VPN, overlay network).",
            details,
        )
    if load_bytes:
        details.append(
            ("the load", f"{format_bytes(load_bytes)} would take about {format_seconds(load_bytes / best.bytes_per_s)}")
        )
    if is_local:
        details.append(
            ("note", "what was read lately comes from memory (the page cache), and faster than from the disk")
        )
    advice = _advice(rates, limit, is_local)
    if advice:
        details.append(("connections", advice))
    what = f"{format_bytes(best.bytes_per_s)}/s over {_label(best.num_connections)}."
    if best.bytes_per_s < _SLOW_BYTES_PER_S:
        return warning(
            STEP,
            f"Weights come at {what}",
            f"A load is limited to {format_bytes(limit)}/s (HEADRACE_BANDWIDTH_LIMIT)."
            if limit
            else "That is slow for weights.",
            "Raise the limit."
            if limit
            else "Use a store in the same region and network, a VPC endpoint in place of a NAT gateway or proxy, or a faster disk.",
            details,
        )
    return ok(STEP, what, details)


def cut(objects: Sequence[StoredObject], read_bytes: int) -> list[RangeRead]:
    """Return reads over all ``objects``, cut as a load cuts them."""
    return [
        RangeRead(stored, start, min(start + read_bytes, stored.size_bytes))
        for stored in objects
        for start in range(0, stored.size_bytes, read_bytes)
    ]


def measure(
    store: ObjectStore, reads: Sequence[RangeRead], transport: TransportSettings, world: World, bounds: Bounds
) -> Rate:
    """Read over ``transport.num_connections`` connections, from the beginning again where all has been read, and return the rate.

    The time runs from the first request to the last byte. Raises what the reads raise.
    """
    clock = world.surroundings.clock
    arrived = _Arrived(clock)
    # A second request for a late read would count its bytes twice.
    settings = replace(transport, hedge_after_s=0.0)
    pool = open_pool(store, settings, on_bytes=arrived.add, surroundings=world.surroundings)
    started = clock()
    try:
        _keep_busy(pool, reads, settings, arrived, clock, started + bounds.seconds, bounds.num_bytes)
    finally:
        num_bytes, last = arrived.num_bytes, arrived.last
        pool.close(_CLOSE_TIMEOUT_S)
    return Rate(num_connections=settings.num_connections, num_bytes=num_bytes, seconds=max(last - started, 1e-6))


class _Arrived:
    """Counts bytes; any thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self.num_bytes = 0
        self.last = clock()

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self.num_bytes += num_bytes
            self.last = self._clock()


def _keep_busy(
    pool: ReaderPool,
    reads: Sequence[RangeRead],
    settings: TransportSettings,
    arrived: _Arrived,
    clock: Callable[[], float],
    deadline: float,
    most_bytes: int,
) -> None:
    """Keep one read for each connection under way until time or bytes are up. Raises the first failure."""
    ended: queue.SimpleQueue[tuple[bytearray, BaseException | None]] = queue.SimpleQueue()
    largest = max(read.size_bytes for read in reads)
    endless: Iterator[RangeRead] = itertools.cycle(reads)
    for _ in range(settings.num_connections):
        pool.submit(_job(next(endless), bytearray(largest), ended))
    while arrived.num_bytes < most_bytes and (left := deadline - clock()) > 0:
        try:
            memory, error = ended.get(timeout=min(left, 0.1))
        except queue.Empty:
            continue
        if error is not None and not isinstance(error, Cancelled):
            raise error
        pool.submit(_job(next(endless), memory, ended))


def _job(
    read: RangeRead, memory: bytearray, ended: queue.SimpleQueue[tuple[bytearray, BaseException | None]]
) -> ReadJob:
    return ReadJob(
        read,
        lambda: [memoryview(memory)[: read.size_bytes]],
        lambda error: ended.put((memory, error)),
    )


def _label(num_connections: int) -> str:
    return "1 connection" if num_connections == 1 else f"{num_connections} connections"


def _advice(rates: Sequence[Rate], limit: int, is_local: bool) -> str:
    """Return what the rates say about the number of connections; empty where they say nothing."""
    if len(rates) < 2 or not rates[0].num_bytes:
        return ""
    one, many = rates[0], rates[-1]
    gain = many.bytes_per_s / one.bytes_per_s
    if limit and many.bytes_per_s > 0.8 * limit:
        return f"the limit of {format_bytes(limit)}/s (HEADRACE_BANDWIDTH_LIMIT) is reached"
    if gain < _HELPS:
        bound = (
            "the disk, or this machine's processors, are"
            if is_local
            else "the network, or what the store gives to one client, is"
        )
        return f"{many.num_connections} bring {gain:.1f} times what 1 does: {bound} the limit, and more of them do not help"
    if gain > _SCALES * many.num_connections:
        return f"{many.num_connections} bring {gain:.1f} times what 1 does: more of them (HEADRACE_CONNECTIONS) may bring more"
    return f"{many.num_connections} bring {gain:.1f} times what 1 does"
