"""What a load did: bytes, requests, seconds. A value, its JSON and its table; measures nothing itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from headrace.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What one rank did for a load that several shared."""

    rank: int
    bytes_read: int
    """Body bytes that it read from the store."""
    bytes_received: int
    """Tensor bytes that others read for it."""
    seconds_reading: float
    """How long it waited for its own reads."""
    seconds_waiting: float
    """How long it waited for the others, and for what they sent; of the last window only those know it that came later."""

    def describe(self) -> str:
        """Return all of it in words."""
        return (
            f"{format_bytes(self.bytes_read)} read in {format_seconds(self.seconds_reading)}, "
            f"{format_bytes(self.bytes_received)} from others, {format_seconds(self.seconds_waiting)} waiting for them"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """The account of one load. All sizes in bytes, all times in seconds."""

    uri: str
    snapshot_id: str
    load_format: str = "headrace"
    ownership: str = "owned"
    num_files: int
    num_tensors: int
    """Tensors that were handed out."""
    bytes_checkpoint: int
    """Tensor bytes that the checkpoint holds."""
    bytes_wanted: int
    """Tensor bytes that were asked for."""
    bytes_read: int
    """Body bytes that arrived: wanted, gaps, and what a retry or a hedge brought twice."""
    num_requests: int
    num_retries: int
    num_hedges: int = 0
    num_connections: int
    num_readers: int = 0
    """Reader processes; 0 where threads of the load's own process read."""
    readers_why: str = ""
    """Why so many: what was set, or what decided."""
    seconds: float
    """From the first byte of the plan to the last tensor handed out."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds per phase, in order: opening, side files, planning, weights, finishing."""
    peak_staging_bytes: int
    """Most memory that was in use at one time for tensors not yet handed out (owned), or not yet dropped (leased)."""
    num_promotions: int = 0
    """How often memory was allocated beyond the limit because the consumer kept tensors."""
    promoted_bytes: int = 0
    settings_from: dict[str, str] = field(default_factory=dict)
    """Setting to the environment variable that its value was read from, or another source than the caller's code; see `headrace.settings.Settings.sources`."""
    exchange: str = ""
    """How ranks that load together exchanged what they read: shared, through memory that all map, or broadcast; empty where one process loaded alone."""
    ranks: tuple[RankReport, ...] = ()
    """What each rank did, by rank, as of the last exchange."""
    knows_requests: bool = True
    """False where another library reads, and does not say how many requests and retries it makes."""

    @property
    def bytes_skipped(self) -> int:
        """Tensor bytes of the checkpoint that nobody asked for."""
        return self.bytes_checkpoint - self.bytes_wanted

    @property
    def gigabytes_per_s(self) -> float:
        return self.bytes_wanted / 1e9 / self.seconds if self.seconds > 0 else 0.0

    def to_dict(self) -> dict[str, object]:
        """Return all figures under their names, JSON-ready; what is not known is None."""
        figures = asdict(self)
        if not figures.pop("knows_requests"):
            figures.update(num_requests=None, num_retries=None, num_hedges=None)
        return {**figures, "bytes_skipped": self.bytes_skipped, "gigabytes_per_s": round(self.gigabytes_per_s, 4)}

    def rows(self) -> list[tuple[str, str]]:
        """Return what a person wants to read: label and value, in order."""
        phases = " · ".join(f"{name} {format_seconds(seconds)}" for name, seconds in self.phases.items())
        rows = [
            ("checkpoint", f"{self.uri} (snapshot {self.snapshot_id}, {self.num_files} files)"),
            ("tensors", f"{self.num_tensors} handed out"),
            ("wanted", f"{format_bytes(self.bytes_wanted)} of {format_bytes(self.bytes_checkpoint)}"),
            ("read", f"{format_bytes(self.bytes_read)}{self._requests()}"),
            (
                "speed",
                f"{self.gigabytes_per_s:.2f} GB/s over {self.num_connections} connections, {format_seconds(self.seconds)}",
            ),
            ("readers", self._readers()),
            ("staging", f"{format_bytes(self.peak_staging_bytes)} at most, {self.ownership}{self._promotions()}"),
            ("exchange", _EXCHANGES.get(self.exchange, "")),
            *((f"rank {one.rank}", one.describe()) for one in self.ranks),
            ("phases", phases),
            ("settings", ", ".join(f"{name} from {source}" for name, source in self.settings_from.items())),
        ]
        return [row for row in rows if row[1]]

    def _requests(self) -> str:
        if not self.knows_requests:
            return f" by {self.load_format}"
        return f" in {self.num_requests} requests, {self.num_retries} retried"

    def _readers(self) -> str:
        if not self.readers_why:
            return ""
        number = self.num_readers
        who = "threads" if not number else f"{number} process{'es' if number > 1 else ''}"
        return f"{who} ({self.readers_why})"

    def _promotions(self) -> str:
        return f", {format_bytes(self.promoted_bytes)} beyond the limit for kept tensors" if self.num_promotions else ""


_EXCHANGES = {"shared": "through memory that all ranks map", "broadcast": "by broadcast over the process group"}
