"""Whether a read is tried again, and after how long. Pure: counts attempts, waits for nothing."""

from __future__ import annotations

from collections.abc import Callable

from headrace.settings import TransportSettings
from headrace.units import MIB

MOST_ROUNDS = 10
"""A read is given up after this many times `TransportSettings.max_attempts` attempts in all, even if each of them brought a few bytes."""

LONGEST_ASKED_WAIT_S = 60.0
"""A store that asks for a longer wait than this (Retry-After) is asked again after this."""

FRUITFUL_BYTES = MIB
"""An attempt that brought as much and was then cut says nothing against the store: the next one begins at once."""


class Attempts:
    """The attempts at one read. An attempt that brought new bytes starts the count of fruitless ones anew. Belongs to one thread."""

    __slots__ = ("_random", "_settings", "_was_fruitful", "num_fruitless", "num_in_all")

    def __init__(self, settings: TransportSettings, random: Callable[[], float]) -> None:
        self._settings = settings
        self._random = random
        self._was_fruitful = False
        self.num_in_all = 0
        self.num_fruitless = 0
        """Attempts that have ended without a new byte since the last one that brought some."""

    def begin(self) -> None:
        """Count an attempt."""
        self.num_in_all += 1

    def ended(self, new_bytes: int, *, was_too_slow: bool = False) -> None:
        """Note that the attempt ended after ``new_bytes`` had arrived, whether all was well with it or not.

        One that ran out of patience must have brought a second's worth of the least rate to count as progress: a trickle is to end in an error, too.
        """
        least = self._settings.least_rate_bytes_per_s if was_too_slow else 0
        self.num_fruitless = 0 if new_bytes and new_bytes >= least else self.num_fruitless + 1
        self._was_fruitful = new_bytes >= FRUITFUL_BYTES

    @property
    def are_over(self) -> bool:
        """Whether the read is to be given up now."""
        most = self._settings.max_attempts
        return self.num_fruitless >= most or self.num_in_all >= most * MOST_ROUNDS

    def wait_s(self, asked_s: float | None = None) -> float:
        """Return how long to wait before the next attempt: what the store asked for plus a little, else nothing after an attempt that brought much, else exponential
        backoff with full jitter.

        Full jitter (a uniform wait between nothing and a doubling bound) spreads clients best under contention: "Exponential Backoff And Jitter",
        AWS Architecture Blog, 2015.
        """
        settings = self._settings
        if asked_s is not None:
            return min(max(asked_s, 0.0), LONGEST_ASKED_WAIT_S) + self._random() * min(
                settings.backoff_first_s, asked_s
            )
        if self._was_fruitful:
            return 0.0
        doublings = min(max(self.num_fruitless - 1, 0), 60)
        return self._random() * min(settings.backoff_most_s, settings.backoff_first_s * 2.0**doublings)
