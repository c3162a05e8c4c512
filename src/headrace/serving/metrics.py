"""What `/metrics` shows. A registry of its own: two servers in one process do not share counters."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from headrace.errors import MissingDependency

if TYPE_CHECKING:
    from headrace.streaming.report import RankReport

try:
    from prometheus_client import (
        CollectorRegistry,
        Counter,
        Gauge,
        Histogram,
        PlatformCollector,
        ProcessCollector,
        generate_latest,
    )
    from prometheus_client.exposition import CONTENT_TYPE_LATEST
except ImportError as error:
    raise MissingDependency(
        "Serving needs prometheus-client.",
        f"Importing it failed: {error}.",
        'Install it with: pip install "headrace[serve]"',
    ) from error

# From a first token on a fast GPU to the last of a long answer on a CPU.
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Counters of one server. Thread-safe."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self._requests = Counter(
            "headrace_requests", "Answers, by route and status.", ("route", "status"), registry=self.registry
        )
        self._duration = Histogram(
            "headrace_request_seconds",
            "From the head of a request to the end of its answer.",
            ("route",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._first = Histogram(
            "headrace_first_token_seconds",
            "From the queue to the first token.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._prompt = Counter("headrace_prompt_tokens", "Tokens of prompts.", registry=self.registry)
        self._output = Counter("headrace_output_tokens", "Tokens that were generated.", registry=self.registry)
        self._disconnects = Counter(
            "headrace_disconnects", "Clients that left before their answer was complete.", registry=self.registry
        )
        self._ready = Gauge("headrace_ready", "1 while requests are taken.", registry=self.registry)
        self._running = Gauge("headrace_running", "Generations that the model works on.", registry=self.registry)
        self._waiting = Gauge("headrace_waiting", "Generations that wait for their turn.", registry=self.registry)
        self._load_seconds = Gauge(
            "headrace_load_seconds", "Seconds per phase of the load.", ("phase",), registry=self.registry
        )
        self._load_bytes = Gauge("headrace_load_bytes", "Bytes of weights that have arrived.", registry=self.registry)
        self._rank_read = Gauge(
            "headrace_load_rank_read_bytes",
            "Bytes that a rank read from the store.",
            ("rank",),
            registry=self.registry,
        )
        self._rank_received = Gauge(
            "headrace_load_rank_received_bytes",
            "Bytes of weights that other ranks read for a rank.",
            ("rank",),
            registry=self.registry,
        )
        self._rank_seconds = Gauge(
            "headrace_load_rank_seconds",
            "Seconds of the load in which a rank waited for its own reads (source=store), and for other ranks and what they sent (source=ranks).",
            ("rank", "source"),
            registry=self.registry,
        )
        self._snapshot = Gauge(
            "headrace_model_snapshot",
            "1 for the snapshot that the model was loaded from.",
            ("model", "snapshot"),
            registry=self.registry,
        )

    def count_request(self, route: str, status: int, seconds: float) -> None:
        """Count one answer."""
        self._requests.labels(route, str(status)).inc()
        self._duration.labels(route).observe(seconds)

    def count_disconnect(self) -> None:
        """Count a client that left early."""
        self._disconnects.inc()

    def count_prompt_tokens(self, number: int) -> None:
        """Count the tokens of a prompt whose turn has come."""
        self._prompt.inc(number)

    def count_output_tokens(self, number: int) -> None:
        """Count generated tokens."""
        self._output.inc(number)

    def observe_first_token(self, seconds: float) -> None:
        """Record how long a request waited for its first token."""
        self._first.observe(seconds)

    def watch_readiness(self, ready: Callable[[], float]) -> None:
        """Ask ``ready`` whenever somebody looks."""
        self._ready.set_function(ready)

    def watch_engine(self, *, running: Callable[[], float], waiting: Callable[[], float]) -> None:
        """Ask these whenever somebody looks."""
        self._running.set_function(running)
        self._waiting.set_function(waiting)

    def record_load(self, *, bytes_done: int, phases: Mapping[str, float]) -> None:
        """Keep what the load did."""
        self._load_bytes.set(bytes_done)
        for phase, seconds in phases.items():
            self._load_seconds.labels(phase).set(seconds)

    def record_ranks(self, ranks: Iterable[RankReport]) -> None:
        """Keep what each rank did for the load."""
        for one in ranks:
            rank = str(one.rank)
            self._rank_read.labels(rank).set(one.bytes_read)
            self._rank_received.labels(rank).set(one.bytes_received)
            self._rank_seconds.labels(rank, "store").set(one.seconds_reading)
            self._rank_seconds.labels(rank, "ranks").set(one.seconds_waiting)

    def record_snapshot(self, *, model: str, snapshot: str) -> None:
        """Keep which snapshot of the weights answers under which name."""
        self._snapshot.labels(model, snapshot).set(1)

    def text(self) -> bytes:
        """Return everything in the Prometheus text format."""
        return generate_latest(self.registry)
