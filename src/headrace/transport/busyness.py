"""How busy the threads that read are: the processors that they fill while much is left to read. Says so once. Pure but for the clocks that it is given."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

BUSY_PROCESSORS = 2.0
"""Threads that fill so many are at half of what one interpreter lets decrypt at a time (`headrace.transport.turns`), and move 1.5 GB/s over TLS."""
LEAST_LEFT_BYTES = 4_000_000_000
"""With less to read, processes would be ready when it is over."""
LOOK_EVERY_S = 1.0


class BusyWatch:
    """Adds up the CPU time of threads that read, and calls ``on_busy`` once: when they have filled `BUSY_PROCESSORS` for a second and `LEAST_LEFT_BYTES` of ``num_bytes`` are left.

    ``on_busy`` is given the processors that they filled, in one of those threads. A consumer's CPU time does not count, whatever it does. Thread safe.
    """

    def __init__(
        self,
        num_bytes: int,
        on_busy: Callable[[float], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        thread_cpu_s: Callable[[], float] = time.thread_time,
    ) -> None:
        self._num_left = num_bytes
        self._on_busy = on_busy
        self._clock = clock
        self._thread_cpu_s = thread_cpu_s
        self._seen = threading.local()
        self._lock = threading.Lock()
        self._since: float | None = None
        self._cpu_s = 0.0
        self._is_over = False

    def note(self, num_bytes: int) -> None:
        """Note that the calling thread has received so many bytes."""
        if self._is_over:
            return
        cpu_s = self._thread_cpu_s()
        used_s, self._seen.cpu_s = cpu_s - getattr(self._seen, "cpu_s", cpu_s), cpu_s
        with self._lock:
            busy = self._busy_after(num_bytes, used_s)
        if busy is not None:
            self._on_busy(busy)

    def _busy_after(self, num_bytes: int, used_s: float) -> float | None:
        """Count in; return the processors that are filled, once, where that is to be told."""
        now = self._clock()
        self._num_left -= num_bytes
        self._cpu_s += used_s
        if self._since is None:
            self._since = now
        seconds = now - self._since
        if self._is_over or seconds < LOOK_EVERY_S:
            return None
        busy, self._since, self._cpu_s = self._cpu_s / seconds, now, 0.0
        self._is_over = self._num_left < LEAST_LEFT_BYTES or busy >= BUSY_PROCESSORS
        return busy if self._num_left >= LEAST_LEFT_BYTES and busy >= BUSY_PROCESSORS else None
