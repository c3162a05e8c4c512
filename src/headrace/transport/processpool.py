"""A pool whose reads are carried out by reader processes. A thread of this process waits for each connection; what it waits for is the only difference.

So jobs, second reads, the pace and the first error are those of `ReaderPool`, and a second read is carried out in this process: what holds up a whole reader process does
not hold up its reads.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.settings import TransportSettings
from headrace.transport.pool import CLOSE_TIMEOUT_S, ReaderPool, private_scratch
from headrace.transport.remote import Means, RemoteReader


class ProcessPool(ReaderPool):
    """A `ReaderPool` over the fleet of ``means``, which it ends: when it is closed, and after a failure when the last read has been acknowledged."""

    def __init__(
        self,
        means: Means,
        settings: TransportSettings,
        *,
        scratch: Callable[[int], memoryview] = private_scratch,
    ) -> None:
        super().__init__(
            lambda: RemoteReader(means), settings, is_hedged=True, scratch=scratch, pace=means.pace, clock=means.clock
        )
        self._fleet = means.fleet
        self._num_at_work = 0  # Guarded by the lock of `_changed`.

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        if not self._home.is_here:
            return True
        super().close(timeout_s)
        self._fleet.end()  # A read that was not acknowledged in time is over with its process.
        return super().close(timeout_s)

    @property
    def num_readers(self) -> int:
        """Reader processes that were started and not to replace others; 0 while they are on demand and threads read."""
        return self._fleet.num_processes if self._fleet.has_started else 0

    @property
    def why_started(self) -> str:
        """Why processes were started that had been on demand."""
        return self._fleet.why_started

    @property
    def num_lost(self) -> int:
        """Reader processes that died before their time."""
        return self._fleet.num_lost

    @property
    def pids(self) -> list[int]:
        """The reader processes that are thought to live."""
        return self._fleet.pids

    def _work(self) -> None:
        with self._changed:
            self._num_at_work += 1
        try:
            super()._work()
        finally:
            with self._changed:
                self._num_at_work -= 1
                is_last = self._is_stopping and not self._num_at_work
            if is_last:
                self._fleet.end()
