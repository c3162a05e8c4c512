"""A limit on bytes per second that all readers of a pool share. Knows no HTTP."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Bandwidth:
    """A token bucket: `delay_s` says how long whoever has just received bytes should wait before it receives more. Thread safe.

    A quarter of a second's worth may come at once after a pause; without that a limit could never be reached over several connections.
    """

    def __init__(self, bytes_per_s: float, clock: Callable[[], float]) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._lock = threading.Lock()
        self._burst_s = 0.25
        self._paid_until = clock() - self._burst_s

    def delay_s(self, num_bytes: int) -> float:
        """Note that ``num_bytes`` came, and return how many seconds to wait for them to be paid."""
        with self._lock:
            now = self._clock()
            self._paid_until = max(self._paid_until, now - self._burst_s) + num_bytes / self._bytes_per_s
            return max(0.0, self._paid_until - now)
