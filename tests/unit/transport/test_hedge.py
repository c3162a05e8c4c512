from __future__ import annotations

import pytest

from headrace.storage import StoredObject
from headrace.transport import RangeRead, ReadJob
from headrace.transport.flight import Flight
from headrace.transport.hedge import MOST_HEDGES, MOST_REMEMBERED, Lateness

from .fakes import FakeReader


def _flight(started: float, heard_at: float = 0.0) -> Flight:
    job = ReadJob(RangeRead(StoredObject("k", 100, "v"), 0, 100), list, lambda error: None)
    return Flight(job, started, _reader(heard_at))


def _reader(heard_at: float) -> FakeReader:
    reader = FakeReader()
    reader.counters.heard_at = heard_at
    return reader


def test_late_is_four_times_the_median_and_not_less_than_the_setting() -> None:
    lateness = Lateness(3.0)
    assert not lateness.is_off
    assert lateness.limit_s == 3.0
    for seconds in (0.1, 0.1, 50.0):
        lateness.finished(seconds, 0.0)
    assert lateness.limit_s == 3.0
    for _ in range(MOST_REMEMBERED):
        lateness.finished(2.0, 0.0)  # Everything is slow here: what was fast long ago is forgotten.
    assert lateness.limit_s == 8.0


def test_too_silent_is_four_times_the_median_of_silences_and_not_less_than_a_sixth_of_the_setting() -> None:
    lateness = Lateness(3.0)
    assert lateness.silence_limit_s == 1.0, "nobody knows yet what this store is like"
    lateness.finished(0.1, 0.01)
    assert lateness.silence_limit_s == pytest.approx(0.5)
    for _ in range(MOST_REMEMBERED):
        lateness.finished(10.0, 0.4)  # A store that is slow to begin, or a link that loses packets.
    assert lateness.silence_limit_s == pytest.approx(1.6)


def test_a_read_that_stands_still_is_found_by_its_silence_long_before_one_that_only_takes_long() -> None:
    lateness = Lateness(3.0)
    lateness.finished(0.5, 0.125)
    steady, stuck = _flight(10.0, heard_at=10.9), _flight(10.2, heard_at=10.3)
    late, wait_s = lateness.find_late([steady, stuck], 10.7)
    assert late is None
    assert wait_s == pytest.approx(0.1)  # Until the one that is stuck has said nothing for half a second.
    assert lateness.find_late([steady, stuck], 10.8) == (stuck, 0.0)
    steady.reader = _reader(heard_at=12.99)
    assert lateness.find_late([steady], 12.99)[0] is None
    assert lateness.find_late([steady], 13.0) == (steady, 0.0)


def test_the_wait_before_an_attempt_is_not_silence() -> None:
    lateness = Lateness(3.0)
    waits = _flight(10.0, heard_at=11.5)  # The next attempt begins then.
    assert lateness.find_late([waits], 12.4)[0] is None
    assert lateness.find_late([waits], 12.5) == (waits, 0.0)


def test_a_read_without_a_reader_is_not_late_and_nothing_is_where_there_is_none() -> None:
    opening = _flight(10.0)
    opening.reader = None
    assert Lateness(3.0).find_late([opening], 100.0) == (None, float("inf"))
    assert Lateness(3.0).find_late([], 100.0) == (None, float("inf"))


def test_a_hedged_read_is_late_again_only_where_the_second_reader_is_silent_too_and_not_for_ever() -> None:
    lateness = Lateness(3.0)
    flight = _flight(10.0)
    flight.num_hedges = 1
    assert lateness.find_late([flight], 100.0) == (None, float("inf")), "the second one has not begun, or it failed"
    flight.second, flight.second_started = _reader(heard_at=11.0), 10.6
    assert lateness.find_late([flight], 11.9)[0] is None
    assert lateness.find_late([flight], 12.0) == (flight, 0.0)
    flight.num_hedges = MOST_HEDGES
    assert lateness.find_late([flight], 100.0) == (None, float("inf"))


def test_nothing_is_late_where_hedging_is_off() -> None:
    assert Lateness(0.0).is_off
