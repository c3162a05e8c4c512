"""When a read is so late that it is asked for a second time. Pure: compares durations, reads nothing."""

from __future__ import annotations

import statistics
from collections import deque

MOST_REMEMBERED = 64
"""Durations of the latest reads that a late one is compared with."""

TIMES_MEDIAN = 4.0
"""A read that takes this many times as long as the median of its peers is late (and longer than the setting says)."""


class Lateness:
    """Knows how long reads took, and so how long one may take. Guarded by its owner's lock."""

    def __init__(self, hedge_after_s: float) -> None:
        self._hedge_after_s = hedge_after_s
        self._durations: deque[float] = deque(maxlen=MOST_REMEMBERED)

    def finished(self, seconds: float) -> None:
        """Note how long a read took."""
        self._durations.append(seconds)

    @property
    def is_off(self) -> bool:
        return not self._hedge_after_s

    @property
    def limit_s(self) -> float:
        """After how many seconds a read is late."""
        peers = statistics.median(self._durations) if self._durations else 0.0
        return max(self._hedge_after_s, TIMES_MEDIAN * peers)
