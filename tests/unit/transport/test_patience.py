from __future__ import annotations

import pytest

from headrace.settings import TransportSettings
from headrace.transport.patience import Patience, TooSlow

SETTINGS = TransportSettings(
    idle_timeout_s=20, total_timeout_s=100, least_rate_bytes_per_s=1000, least_rate_window_s=10, connect_timeout_s=5
)


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_step_waits_for_the_idle_timeout_but_never_beyond_the_whole(clock: Clock) -> None:
    patience = Patience(SETTINGS, clock)
    assert patience.wait_s() == 20
    assert patience.wait_s(5) == 5
    clock.now += 90
    assert patience.wait_s() == 10
    clock.now += 10
    with pytest.raises(TooSlow, match="the attempt took longer than 100"):
        patience.wait_s()


def test_the_least_rate_is_measured_over_whole_windows_from_the_first_byte(clock: Clock) -> None:
    patience = Patience(SETTINGS, clock)
    clock.now += 15  # The store took its time: not the wire's fault.
    patience.body_begins()
    for _ in range(3):
        for _ in range(10):
            clock.now += 1
            patience.received(1000)
    patience.received(0)
    clock.now += 9.9
    patience.received(9000)  # Too few, but the window is not over.
    clock.now += 0.2
    with pytest.raises(TooSlow, match=r"only 891 B/s came for 10\.1 s, less than 1 kB/s"):
        patience.received(0)


def test_a_rate_of_none_is_never_too_slow_but_the_whole_still_ends(clock: Clock) -> None:
    patience = Patience(TransportSettings(least_rate_bytes_per_s=0, total_timeout_s=100), clock)
    for _ in range(9):
        clock.now += 11
        patience.received(1)
    clock.now += 1
    with pytest.raises(TooSlow, match="the attempt took longer than"):
        patience.received(1)


def test_silence_names_what_ran_out(clock: Clock) -> None:
    patience = Patience(SETTINGS, clock)
    clock.now += 20
    assert str(patience.silence(20)) == "nothing came for 20.0 s"
    clock.now += 80
    assert "longer than 100" in str(patience.silence(10))
