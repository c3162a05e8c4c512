"""How long one attempt may take: for the next byte, for all of it, and at which least rate. Pure but for the clock it is given."""

from __future__ import annotations

from collections.abc import Callable

from headrace.settings import TransportSettings
from headrace.units import format_bytes, format_seconds


class TooSlow(TimeoutError):
    """An attempt ran out of patience; the message says which limit it met."""


class Patience:
    """The limits of one attempt, from its start. Belongs to one thread."""

    __slots__ = ("_clock", "_deadline", "_settings", "_window_bytes", "_window_started", "started")

    def __init__(self, settings: TransportSettings, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self.started = clock()
        self._deadline = self.started + settings.total_timeout_s
        self._window_started = self.started
        self._window_bytes = 0

    def wait_s(self, most_s: float | None = None) -> float:
        """Return how long the next step may block: ``most_s`` (default: the idle timeout), or what is left of the whole. Raises `TooSlow`."""
        left = self._deadline - self._clock()
        if left <= 0:
            raise self._over_total()
        return min(self._settings.idle_timeout_s if most_s is None else most_s, left)

    def now(self) -> float:
        """Return the seconds on the clock that the limits are measured with."""
        return self._clock()

    def body_begins(self) -> None:
        """Measure the rate from here: the time until the answer's first byte is the store's, not the wire's."""
        self._window_started = self._clock()
        self._window_bytes = 0

    def received(self, num_bytes: int) -> None:
        """Count body bytes. Raises `TooSlow` where the attempt as a whole takes too long, or too few came during the last window."""
        now = self._clock()
        if now >= self._deadline:
            raise self._over_total()
        self._window_bytes += num_bytes
        elapsed = now - self._window_started
        if elapsed < self._settings.least_rate_window_s:
            return
        rate = self._window_bytes / elapsed if elapsed else float("inf")
        if rate < self._settings.least_rate_bytes_per_s:
            least = format_bytes(self._settings.least_rate_bytes_per_s)
            raise TooSlow(f"only {format_bytes(rate)}/s came for {format_seconds(elapsed)}, less than {least}/s")
        self._window_started, self._window_bytes = now, 0

    def silence(self, waited_s: float) -> TooSlow:
        """Return the error for a step in which nothing came for ``waited_s``."""
        if self._clock() >= self._deadline:
            return self._over_total()
        return TooSlow(f"nothing came for {format_seconds(waited_s)}")

    def _over_total(self) -> TooSlow:
        return TooSlow(f"the attempt took longer than {format_seconds(self._settings.total_timeout_s)}")
