"""What ranks settle before the first read: that they load the same, and by which limits. Each brings its facts; all draw the same conclusion from them."""

from __future__ import annotations

import hashlib
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.checkpoint import Checkpoint, Entry
from headrace.errors import StreamError
from headrace.settings import Settings
from headrace.streaming.memory import available_memory_bytes, default_memory_limit
from headrace.units import MIB, UNLIMITED

_LARGEST_WINDOW_BYTES = 256 * MIB
"""A window is held whole by every rank, beside what it reads ahead; a larger one would not be exchanged any faster."""

_LEAST_FOR_READS_BYTES = 4 * MIB
"""For how much memory reads are planned at least: a window is never smaller than 1 MiB for each rank, so shorter reads would save nothing."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """What the ranks settled before the first read. Sizes in bytes."""

    window_bytes: int
    ahead_bytes: int
    """How much of its shares a rank may read ahead; `UNLIMITED` is possible."""
    local_ranks: int
    """The most ranks that one machine has."""
    hosts: tuple[int, ...]
    """By rank, what tells its machine from others."""

    def neighbours(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of the machine that ``rank`` is on, itself among them, in order."""
        return tuple(other for other, host in enumerate(self.hosts) if host == self.hosts[rank])

    @property
    def most_neighbours(self) -> int:
        """How many ranks of the group the machine has that has the most."""
        return max(Counter(self.hosts).values())


@dataclass(frozen=True, slots=True)
class Facts:
    """What a rank brings to the agreement. Travels as five numbers."""

    snapshot: int
    entries: int
    """A digest of the entries in their order."""
    limit_bytes: int
    """The node's memory limit as this rank sees it."""
    local_ranks: int
    host: int

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> Facts:
        """Return the facts that `numbers` gave; what follows them is nothing."""
        return cls(*numbers[:5])

    def numbers(self) -> tuple[int, ...]:
        return self.snapshot, self.entries, self.limit_bytes, self.local_ranks, self.host


def agree(told: Sequence[Facts], *, uri: str, snapshot_id: str) -> Agreement:
    """Return what follows from every rank's facts, the same on all. Raises `StreamError` where they do not load the same tensors of the same snapshot. Pure."""
    first = told[0]
    for rank, facts in enumerate(told):
        if facts.snapshot != first.snapshot:
            raise StreamError(
                f"Rank {rank} opened snapshot {facts.snapshot:012x}, rank 0 {first.snapshot:012x}; this rank opened {snapshot_id} of {uri}.",
                "An object was replaced while the ranks opened it, or they were given different uris, or a local folder is not the same one on every machine.",
                "Load again; where folders differ, pass each machine's ranks as process_group, or distributed=False.",
            )
        if facts.entries != first.entries:
            raise StreamError(
                f"Rank {rank} asked for other tensors of {uri} than rank 0, or in another order.",
                "Ranks that load together read the same tensors.",
                "Ask for the same on every rank, or pass distributed=False where ranks load different tensors.",
            )
    # The least, not this rank's own: a decision that each rank took by its own free memory would leave them in different windows.
    limit = min((facts.limit_bytes for facts in told if facts.limit_bytes != UNLIMITED), default=UNLIMITED)
    hosts = tuple(facts.host for facts in told)
    local_ranks = max(Counter(hosts).most_common(1)[0][1], *(facts.local_ranks for facts in told))
    if limit == UNLIMITED:
        return Agreement(_LARGEST_WINDOW_BYTES, UNLIMITED, local_ranks, hosts)
    share = limit // local_ranks
    window_bytes = min(share // 2, _LARGEST_WINDOW_BYTES)
    return Agreement(window_bytes, share - window_bytes, local_ranks, hosts)


def facts_of(checkpoint: Checkpoint, entries: Sequence[Entry], settings: Settings, *, raw: bool) -> Facts:
    """Return what this rank brings: what it opened and wants, and how much memory its node may use."""
    digest = hashlib.sha256(b"raw" if raw else b"")
    for entry in entries:
        digest.update(repr(entry).encode("utf-8", "surrogatepass"))
    limit_bytes = settings.memory_limit_bytes
    if limit_bytes is None:
        limit_bytes = default_memory_limit(available_memory_bytes())
    return Facts(
        snapshot=int(checkpoint.snapshot.id, 16),
        entries=_number_of(digest.digest()),
        limit_bytes=limit_bytes,
        local_ranks=settings.local_ranks,
        host=_number_of(hashlib.sha256(_host().encode()).digest()),
    )


def settings_of_rank(settings: Settings, agreement: Agreement) -> Settings:
    """Return the settings of a rank's own stream of its shares, such as its part of the agreement leaves them."""
    # No gaps: what lies between two parts of this rank is mostly another's to read.
    transport = replace(settings.transport, gap_bytes=0)
    local_ranks, limit_bytes = agreement.local_ranks, agreement.ahead_bytes
    if limit_bytes != UNLIMITED:  # The room keeps to the limit; here it says how long a read may be.
        limit_bytes = max(limit_bytes, _LEAST_FOR_READS_BYTES) * local_ranks
    return replace(settings, local_ranks=local_ranks, memory_limit_bytes=limit_bytes, transport=transport)


def _number_of(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little") >> 1


def _host() -> str:
    """Return what tells this machine from others. Containers of one machine are one: they share its memory and its network."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return socket.gethostname()
