"""When a read is so late that it is asked for a second time. Pure: compares durations, reads nothing.

There are two ways to be late: nothing comes for much longer than peers were ever silent, or the whole takes much longer than it took them. The first finds a read that
stands still, in a fraction of a second where the store is quick; the second, slower, one that trickles.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable

from headrace.transport.flight import Flight
from headrace.transport.reader import RangeReader

MOST_REMEMBERED = 64
"""Reads that a late one is compared with: the latest."""

TIMES_MEDIAN = 4.0
"""A read that takes, or is silent for, this many times as long as the median of its peers is late (and longer than the setting says)."""

SILENCE_SHARE = 1 / 6
"""A read is not late by its silence before it has been silent for this share of `TransportSettings.hedge_after_s`. S3 takes 0.1–0.2 s for a first byte (Amazon S3 User
Guide, "Performance design patterns"): there the median of peers decides, on a quicker link this."""

FIRST_SILENCE_SHARE = 1 / 3
"""The same for as long as no peer is known: the first byte comes after a connection has been made, across an ocean perhaps."""

MOST_HEDGES = 3
"""How often one read is asked for a second time, each time because the second reader is silent, too."""


class Lateness:
    """Knows how long reads took and were silent, and so how long one may. Guarded by its owner's lock."""

    def __init__(self, hedge_after_s: float) -> None:
        self._hedge_after_s = hedge_after_s
        self._durations: deque[float] = deque(maxlen=MOST_REMEMBERED)
        self._silences: deque[float] = deque(maxlen=MOST_REMEMBERED)

    def finished(self, seconds: float, longest_silence_s: float) -> None:
        """Note how long a read took, and for how long nothing came of it."""
        self._durations.append(seconds)
        self._silences.append(longest_silence_s)

    @property
    def is_off(self) -> bool:
        return not self._hedge_after_s

    @property
    def limit_s(self) -> float:
        """After how many seconds a read is late."""
        return max(self._hedge_after_s, TIMES_MEDIAN * _median(self._durations))

    @property
    def silence_limit_s(self) -> float:
        """After how many seconds without a byte a read is late."""
        if not self._silences:
            return FIRST_SILENCE_SHARE * self._hedge_after_s
        return max(SILENCE_SHARE * self._hedge_after_s, TIMES_MEDIAN * _median(self._silences))

    def find_late(self, flights: Iterable[Flight], now: float) -> tuple[Flight | None, float]:
        """Return the flight that has been late for the longest time, if any is, and else in how many seconds one may be."""
        limit_s, silence_limit_s = self.limit_s, self.silence_limit_s
        first, first_at = None, float("inf")
        for flight in flights:
            late_at = self._late_at(flight, limit_s, silence_limit_s)
            if late_at < first_at:
                first, first_at = flight, late_at
        return (first, 0.0) if first_at <= now else (None, first_at - now)

    def _late_at(self, flight: Flight, limit_s: float, silence_limit_s: float) -> float:
        """Return when a flight will be late if nothing comes until then. One that was hedged is late when its second reader is silent, too."""
        if flight.second is not None:
            again = flight.num_hedges < MOST_HEDGES
            return _heard_at(flight.second, flight.second_started) + silence_limit_s if again else float("inf")
        if flight.reader is None or flight.num_hedges:
            return float("inf")
        return min(flight.started + limit_s, _heard_at(flight.reader, flight.started) + silence_limit_s)


def _heard_at(reader: RangeReader, started: float) -> float:
    return max(started, reader.counters.heard_at)


def _median(durations: deque[float]) -> float:
    return statistics.median(durations) if durations else 0.0
