"""How many reads at once a store that throttles can bear: halved when it refuses, raised again as reads succeed. Knows no HTTP."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Pace:
    """The number of reads that may be under way, between 1 and ``most``. Thread safe.

    Additive increase, multiplicative decrease, as TCP does: a refusal halves the number, at most once in ``hold_s`` (the refusals of one moment are one
    message); as many successes as reads are under way raise it by one.
    """

    def __init__(self, most: int, clock: Callable[[], float], hold_s: float = 1.0) -> None:
        self._lock = threading.Lock()
        self._most = most
        self._clock = clock
        self._hold_s = hold_s
        self._allowed = float(most)
        self._cut_at: float | None = None
        self._quiet_until = float("-inf")

    @property
    def num_allowed(self) -> int:
        return int(self._allowed)

    @property
    def quiet_s(self) -> float:
        """For how many seconds more the store is not to be asked for anything beyond what is needed; 0 where it has not refused lately."""
        return max(0.0, self._quiet_until - self._clock())

    def refused(self, wait_s: float | None = None) -> None:
        """Note that the store said it is too busy, and for how long, if it did."""
        with self._lock:
            now = self._clock()
            self._quiet_until = max(self._quiet_until, now + max(self._hold_s, wait_s or 0.0))
            if self._cut_at is None or now - self._cut_at >= self._hold_s:
                self._allowed = max(1.0, self._allowed / 2)
                self._cut_at = now

    def succeeded(self) -> None:
        """Note that a read was carried out."""
        with self._lock:
            self._allowed = min(float(self._most), self._allowed + 1 / self._allowed)
