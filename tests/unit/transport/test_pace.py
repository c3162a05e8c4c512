from __future__ import annotations

import pytest

from headrace.transport.pace import Pace


def test_refusals_of_one_moment_halve_once_and_successes_raise_again() -> None:
    now = [0.0]
    pace = Pace(8, lambda: now[0], hold_s=1.0)
    assert (pace.num_allowed, pace.quiet_s) == (8, 0.0)
    for _ in range(8):
        pace.refused()
    assert pace.num_allowed == 4
    now[0] = 1.0
    pace.refused()
    now[0] = 2.0
    pace.refused()
    now[0] = 3.0
    pace.refused()
    assert pace.num_allowed == 1  # Never none.
    pace.succeeded()
    assert pace.num_allowed == 2
    num_successes = 0
    while pace.num_allowed < 8:
        pace.succeeded()
        num_successes += 1
    assert 20 < num_successes < 40  # About one for each read under way and step: 2 + 3 + … + 7.
    pace.succeeded()
    assert pace.num_allowed == 8


def test_after_a_refusal_there_is_quiet_for_a_moment_or_for_as_long_as_the_store_asked() -> None:
    now = [100.0]
    pace = Pace(8, lambda: now[0], hold_s=1.0)
    pace.refused()
    assert pace.quiet_s == 1.0
    now[0] = 100.4
    pace.refused(5.0)
    pace.refused(0.1)
    assert pace.quiet_s == pytest.approx(5.0)
    now[0] = 105.4
    assert pace.quiet_s == 0.0
    assert pace.num_allowed == 4, "the number comes back with successes, and not with time"
