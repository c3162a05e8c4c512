from __future__ import annotations

from headrace.transport.hedge import MOST_REMEMBERED, Lateness


def test_late_is_four_times_the_median_and_not_less_than_the_setting() -> None:
    lateness = Lateness(3.0)
    assert not lateness.is_off
    assert lateness.limit_s == 3.0
    for seconds in (0.1, 0.1, 50.0):
        lateness.finished(seconds)
    assert lateness.limit_s == 3.0
    for _ in range(MOST_REMEMBERED):
        lateness.finished(2.0)  # Everything is slow here: what was fast long ago is forgotten.
    assert lateness.limit_s == 8.0


def test_nothing_is_late_where_hedging_is_off() -> None:
    assert Lateness(0.0).is_off
