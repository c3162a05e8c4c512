"""Where a load is: one small object that the load writes and anybody may read. Showing it is the work of `headrace.streaming.display`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from headrace.units import format_bytes, format_seconds


@dataclass(slots=True)
class LoadProgress:
    """The state of one load. Written by the load's own thread (simple assignments), read from any thread without a lock."""

    clock: Callable[[], float] = time.monotonic
    phase: str = "waiting"
    """waiting, opening, side files, planning, weights, finishing, calibrating, warming up, ready or failed."""
    bytes_wanted: int = 0
    bytes_done: int = 0
    """Wanted bytes that have arrived."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds spent in each phase that has ended."""
    describe_holdup: Callable[[], str] = lambda: ""
    """Says which object and connection the load waits for now; set while weights arrive."""
    started: float = field(init=False)
    changed: float = field(init=False)
    """When bytes last arrived or the phase last changed, by `clock`."""

    def __post_init__(self) -> None:
        self.started = self.changed = self.clock()

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Be in ``phase`` for the length of a block, and keep its seconds."""
        outer, start = self.phase, self.clock()
        self.phase, self.changed = phase, start
        try:
            yield
        finally:
            self.changed = self.clock()
            self.phases[phase] = self.phases.get(phase, 0.0) + self.changed - start
            self.phase = outer

    def touch(self, num_bytes: int) -> None:
        """Note that bytes came, wanted or not: a load that is slow is not a load that stands."""
        self.changed = self.clock()

    def arrived(self, num_bytes: int) -> None:
        """Count wanted bytes."""
        self.bytes_done += num_bytes
        self.changed = self.clock()

    @property
    def seconds(self) -> float:
        return self.clock() - self.started

    def to_dict(self) -> dict[str, Any]:
        """Return the state, JSON-ready: for a readiness answer."""
        return {
            "phase": self.phase,
            "bytes_done": self.bytes_done,
            "bytes_wanted": self.bytes_wanted,
            "seconds": round(self.seconds, 1),
        }

    def line(self) -> str:
        """Return the state as one line of ASCII."""
        if not self.bytes_wanted:
            return f"{self.phase}, {format_seconds(self.seconds)}"
        percent = 100 * self.bytes_done // self.bytes_wanted
        return f"{self.phase}: {format_bytes(self.bytes_done)} of {format_bytes(self.bytes_wanted)} ({percent}%), {format_seconds(self.seconds)}"
