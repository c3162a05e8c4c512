from __future__ import annotations

from headrace.transport.pace import Pace


def test_refusals_of_one_moment_halve_once_and_successes_raise_again() -> None:
    now = [0.0]
    pace = Pace(8, lambda: now[0], hold_s=1.0)
    assert (pace.num_allowed, pace.is_reduced) == (8, False)
    for _ in range(8):
        pace.refused()
    assert (pace.num_allowed, pace.is_reduced) == (4, True)
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
    while pace.is_reduced:
        pace.succeeded()
        num_successes += 1
    assert 20 < num_successes < 40  # About one for each read under way and step: 2 + 3 + … + 7.
    pace.succeeded()
    assert pace.num_allowed == 8
