from __future__ import annotations

from headrace.streaming.readahead import FIRST_BYTES, ReadAhead


def test_reads_are_held_back_while_so_much_waits_for_the_consumer() -> None:
    ahead = ReadAhead(is_limited=True)
    ahead.arrived(FIRST_BYTES - 1)
    assert ahead.may_read_on()
    ahead.arrived(1)
    assert not ahead.may_read_on()
    ahead.handed_out(1)
    assert ahead.may_read_on()


def test_memory_that_is_not_used_again_holds_nothing_back() -> None:
    ahead = ReadAhead(is_limited=False)
    ahead.arrived(100 * FIRST_BYTES)
    assert ahead.may_read_on()
    assert not ahead.consumer_waits()


def test_a_consumer_that_waits_gets_more_read_ahead_only_where_reads_had_been_held_back() -> None:
    ahead = ReadAhead(is_limited=True)
    assert not ahead.consumer_waits()  # The store is slower than the consumer: reads are never held back.
    assert ahead.most_bytes == FIRST_BYTES
    ahead.arrived(FIRST_BYTES)
    assert not ahead.may_read_on()
    ahead.handed_out(FIRST_BYTES)
    assert ahead.consumer_waits()
    assert ahead.most_bytes == 2 * FIRST_BYTES
    assert not ahead.consumer_waits()
    ahead.arrived(FIRST_BYTES)
    assert ahead.may_read_on()
