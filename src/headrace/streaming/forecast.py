"""What a load will ask for, known from entries and settings alone: bytes and requests of each rank, and how long they take at least. Pure; opens and reads nothing.

The plans are those of a load: `plan_reads` with what `fitting_reads` leaves of the settings, and for ranks `agree`, `plan_windows` and `parts_of`. So the figures are those
that the load's report will have, where no read is repeated and the memory is the same: with `Settings.memory_limit_bytes` None the limit follows what is available then.
The requests that open a checkpoint (its listing, one or two for each header, side files) are no part of it.

Two lower bounds say how long a load takes; see `Forecast.least_seconds` and `Forecast.seconds`. Both leave out opening, handshakes, the store's own limits, the consumer, and
ranks that wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from headrace.checkpoint.entry import Entry
from headrace.errors import InvalidSetting
from headrace.settings import Settings
from headrace.streaming.agreement import Agreement, Facts, agree, settings_of_rank
from headrace.streaming.memory import default_memory_limit
from headrace.streaming.plan import Plan, PlannedRead, plan_reads
from headrace.streaming.room import Ownership, fitting_reads, stream_memory_limit
from headrace.streaming.shares import parts_of, plan_windows
from headrace.transport.file import MOST_PIECES, STEP_BYTES

LINKS_BITS_PER_S = (10**9, 10**10, 10**11)
"""The links for which a forecast is told: 1, 10 and 100 Gbit/s."""

REQUEST_LATENCY_S = 0.1
"""From a request to the first byte of its answer. Amazon gives 100 to 200 ms for large objects (S3 User Guide, "Best practices design patterns: optimizing Amazon S3 performance")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What a forecast must know of a load beside its entries and settings."""

    num_ranks: int = 1
    """Ranks that share the load, all on one node."""
    is_local: bool = False
    """The files are of this machine: a request is a system call, which has no latency to speak of."""
    ownership: Ownership = "owned"
    available_bytes: int
    """Memory that the process may still allocate; see `headrace.streaming.memory.available_memory_bytes`."""

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise InvalidSetting(f"num_ranks is {self.num_ranks}.", "It must be a whole number, at least 1.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankForecast:
    """What one rank does."""

    bytes_read: int
    """Body bytes, those in gaps included."""
    bytes_received: int
    """Tensor bytes that other ranks read for it. They do not use the node's link: its ranks share memory, or broadcast within the node."""
    num_requests: int
    """Ranged reads; for local files system calls."""
    num_connections: int
    """At once; for local files readers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What a load will do. All sizes in bytes, all times in seconds."""

    num_tensors: int
    bytes_checkpoint: int
    """Tensor bytes that the checkpoint holds."""
    bytes_wanted: int
    """Tensor bytes that are asked for. Every rank gets them all."""
    read_bytes: int
    """The longest single read."""
    ranks: tuple[RankForecast, ...]
    is_local: bool
    """The files are of this machine, and requests are system calls."""
    request_latency_s: float
    """From a request to its first byte, as `seconds` counts it; 0 for local files."""
    bandwidth_bytes_per_s: int = 0
    """What the settings allow each rank; 0 for any."""

    @property
    def bytes_read(self) -> int:
        """Body bytes that all ranks read together: what the node's link carries."""
        return sum(rank.bytes_read for rank in self.ranks)

    @property
    def bytes_received(self) -> int:
        """Bytes that ranks read for each other, counted by each rank that gets them."""
        return sum(rank.bytes_received for rank in self.ranks)

    @property
    def num_requests(self) -> int:
        return sum(rank.num_requests for rank in self.ranks)

    @property
    def bytes_skipped(self) -> int:
        """Tensor bytes of the checkpoint that nobody asks for."""
        return self.bytes_checkpoint - self.bytes_wanted

    @property
    def bytes_in_gaps(self) -> int:
        """Bytes that are read and dropped, since they lie between two wanted ranges and skipping them would cost a request."""
        return self.bytes_read - self.bytes_wanted

    def least_seconds(self, link_bits_per_s: float) -> float:
        """Return how long the node's link is busy: all bytes that are read, over its rate."""
        return self.bytes_read * 8 / link_bits_per_s

    def seconds(self, link_bits_per_s: float) -> float:
        """Return how long the load takes at least, with requests that each wait `request_latency_s`. The greatest of these:

        - the link's time, `least_seconds`;
        - for each rank ``(num_requests * request_latency_s + bytes_read / link) / num_connections``: a connection asks for one read after the other, waits the latency of
          each, and receives no faster than the whole link; work that is spread evenly over the connections ends soonest;
        - for each rank ``bytes_read / bandwidth_bytes_per_s``, where the settings limit that.
        """
        bounds = [self.least_seconds(link_bits_per_s)]
        for rank in self.ranks:
            waiting_s = rank.num_requests * self.request_latency_s
            bounds.append((waiting_s + rank.bytes_read * 8 / link_bits_per_s) / rank.num_connections)
            if self.bandwidth_bytes_per_s:
                bounds.append(rank.bytes_read / self.bandwidth_bytes_per_s)
        return max(bounds)

    def to_dict(self) -> dict[str, object]:
        """Return all figures under their names, JSON-ready."""
        links = [
            {"link_bits_per_s": link, "least_seconds": self.least_seconds(link), "seconds": self.seconds(link)}
            for link in LINKS_BITS_PER_S
        ]
        totals = {
            name: getattr(self, name)
            for name in ("bytes_read", "bytes_received", "bytes_skipped", "bytes_in_gaps", "num_requests")
        }
        return {**asdict(self), **totals, "links": links}


def forecast_load(
    entries: Sequence[Entry], settings: Settings, conditions: Conditions, *, bytes_checkpoint: int
) -> Forecast:
    """Return what a load of ``entries``, in their order, will do. ``bytes_checkpoint`` is `Checkpoint.total_bytes`.

    With several ranks it is what `DistributedStream` does on one node, otherwise what `TensorStream` does. Raises `InvalidSetting` for ranks that cannot be.
    """
    if conditions.num_ranks == 1:
        plan, read_bytes = _plan(entries, settings, conditions.ownership, conditions)
        connections = settings.rank_transport.num_connections
        ranks: tuple[RankForecast, ...] = (_rank(plan, 0, connections, conditions),)
    else:
        ranks, read_bytes = _shared(entries, settings, conditions)
    return Forecast(
        num_tensors=len(entries),
        bytes_checkpoint=bytes_checkpoint,
        bytes_wanted=sum(entry.size_bytes for entry in entries),
        read_bytes=read_bytes,
        ranks=ranks,
        is_local=conditions.is_local,
        request_latency_s=0.0 if conditions.is_local else REQUEST_LATENCY_S,
        bandwidth_bytes_per_s=0 if conditions.is_local else settings.transport.bandwidth_bytes_per_s,
    )


def _plan(
    entries: Sequence[Entry], settings: Settings, ownership: Ownership, conditions: Conditions
) -> tuple[Plan, int]:
    """Return the plan of a `TensorStream` of ``entries``, and the longest read that it may hold."""
    limit_bytes = stream_memory_limit(
        entries, settings, ownership=ownership, available_bytes=conditions.available_bytes
    )
    transport = settings.rank_transport
    read_bytes, window_bytes = fitting_reads(limit_bytes, transport)
    plan = plan_reads(entries, read_bytes=read_bytes, gap_bytes=transport.gap_bytes, window_bytes=window_bytes)
    return plan, read_bytes


def _shared(
    entries: Sequence[Entry], settings: Settings, conditions: Conditions
) -> tuple[tuple[RankForecast, ...], int]:
    """Return what each rank of a `DistributedStream` does, one after the other, so that only one rank's plan is held."""
    agreement = _agreement(settings, conditions)
    windows = plan_windows(entries, num_ranks=conditions.num_ranks, window_bytes=agreement.window_bytes)
    own = settings_of_rank(settings, agreement)
    bytes_wanted = sum(entry.size_bytes for entry in entries)
    ranks: list[RankForecast] = []
    read_bytes = 0
    for rank in range(conditions.num_ranks):
        parts = [part.entry for window in windows for part in parts_of(window, entries, rank)]
        plan, read_bytes = _plan(parts, own, "owned", conditions)
        received = bytes_wanted - plan.bytes_wanted
        ranks.append(_rank(plan, received, own.rank_transport.num_connections, conditions))
    return tuple(ranks), read_bytes


def _agreement(settings: Settings, conditions: Conditions) -> Agreement:
    """Return what ranks agree on that all see the same: the snapshot, the entries, the node's memory."""
    limit_bytes = settings.memory_limit_bytes
    if limit_bytes is None:
        limit_bytes = default_memory_limit(conditions.available_bytes)
    facts = Facts(snapshot=0, entries=0, limit_bytes=limit_bytes, local_ranks=settings.local_ranks, host=0)
    return agree([facts] * conditions.num_ranks, uri="", snapshot_id="")


def _rank(plan: Plan, bytes_received: int, num_connections: int, conditions: Conditions) -> RankForecast:
    reads = plan.reads
    return RankForecast(
        bytes_read=sum(read.size_bytes for read in reads),
        bytes_received=bytes_received,
        num_requests=sum(_num_calls(read) for read in reads) if conditions.is_local else len(reads),
        num_connections=num_connections,
    )


def _num_calls(read: PlannedRead) -> int:
    """Return in how many system calls a file is read for ``read``: each fills at most `STEP_BYTES` and `MOST_PIECES` pieces."""
    num_calls = room_bytes = room_pieces = 0
    for piece in read.pieces:
        left = piece.size_bytes
        while left:
            if not room_bytes or not room_pieces:
                num_calls += 1
                room_bytes, room_pieces = STEP_BYTES, MOST_PIECES
            filled = min(left, room_bytes)
            left -= filled
            room_bytes -= filled
            room_pieces -= 1
    return num_calls
