from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from headrace.settings import TransportSettings
from headrace.transport.retry import FRUITFUL_BYTES, LONGEST_ASKED_WAIT_S, MOST_ROUNDS, Attempts

SETTINGS = TransportSettings(max_attempts=4, backoff_first_s=0.2, backoff_most_s=1.0, least_rate_bytes_per_s=1000)


def _after(*brought: int, chance: float = 1.0) -> Attempts:
    attempts = Attempts(SETTINGS, lambda: chance)
    for new_bytes in brought:
        attempts.begin()
        attempts.ended(new_bytes)
    return attempts


def test_the_backoff_doubles_up_to_its_most() -> None:
    longest = [_after(*[0] * failures).wait_s() for failures in range(1, 6)]
    assert longest == [0.2, 0.4, 0.8, 1.0, 1.0]
    assert _after(*[0] * 3, chance=0.0).wait_s() == 0.0  # Full jitter reaches down to nothing.
    assert _after(*[0] * 3, chance=0.5).wait_s() == 0.4
    assert _after(*[0] * 5000).wait_s() == 1.0  # No overflow.


def test_an_attempt_that_brought_much_and_was_cut_is_continued_at_once() -> None:
    """The bound on attempts cannot be met by such: it is more than the largest read holds."""
    assert _after(FRUITFUL_BYTES).wait_s() == 0.0
    assert _after(FRUITFUL_BYTES - 1).wait_s() == 0.2
    assert _after(FRUITFUL_BYTES, 0).wait_s() == 0.2
    assert _after(FRUITFUL_BYTES).wait_s(3.0) == 3.2
    assert SETTINGS.read_bytes <= SETTINGS.max_attempts * MOST_ROUNDS * FRUITFUL_BYTES


def test_what_the_store_asks_for_is_kept_within_bounds() -> None:
    assert _after(0, chance=0.0).wait_s(3.0) == 3.0
    assert _after(0, chance=1.0).wait_s(3.0) == 3.2
    assert _after(0, chance=1.0).wait_s(0.0) == 0.0
    assert _after(0, chance=0.0).wait_s(-5.0) == 0.0
    assert _after(0, chance=0.0).wait_s(86_400.0) == LONGEST_ASKED_WAIT_S


def test_the_last_fruitless_attempt_ends_it() -> None:
    assert not _after(0, 0, 0).are_over
    assert _after(0, 0, 0, 0).are_over
    assert not _after(0, 0, 0, 1, 0, 0, 0).are_over
    assert _after(0, 0, 0, 1, 0, 0, 0, 0).are_over


@given(st.lists(st.integers(0, 2), max_size=60))
def test_no_sequence_of_attempts_is_longer_than_the_bound(brought: list[int]) -> None:
    attempts = _after(*brought)
    assert attempts.num_in_all == len(brought)
    if len(brought) >= SETTINGS.max_attempts * MOST_ROUNDS:
        assert attempts.are_over


def test_a_trickle_is_no_progress() -> None:
    attempts = Attempts(SETTINGS, lambda: 0.0)
    attempts.ended(999, was_too_slow=True)
    assert attempts.num_fruitless == 1
    attempts.ended(1000, was_too_slow=True)
    assert attempts.num_fruitless == 0
    attempts.ended(1, was_too_slow=False)
    assert attempts.num_fruitless == 0
    unbounded = Attempts(replace(SETTINGS, least_rate_bytes_per_s=0), lambda: 0.0)
    unbounded.ended(0, was_too_slow=True)
    assert unbounded.num_fruitless == 1
