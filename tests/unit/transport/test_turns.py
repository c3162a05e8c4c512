from __future__ import annotations

import threading
import time

from headrace.transport.turns import MOST_TURNS, Turns, make_turns, turns_for


def test_turns_are_as_many_as_processors_and_not_too_many() -> None:
    assert turns_for(0.5) == 1
    assert turns_for(1.5) == 2
    assert turns_for(64) == MOST_TURNS
    with make_turns():  # At least one.
        pass


def wait_until_waiting(turns: Turns, number: int) -> None:
    deadline = time.monotonic() + 30
    while len(turns._waiting) < number:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_turns_are_given_in_the_order_in_which_they_were_asked_for() -> None:
    turns = Turns(1)
    order: list[str] = []

    def take(name: str) -> None:
        with turns:
            order.append(name)

    threads = [threading.Thread(target=take, args=(name,)) for name in ("first", "second")]
    with turns:
        for number, thread in enumerate(threads, start=1):
            thread.start()
            wait_until_waiting(turns, number)
    take("who had it")  # It asks again at once, and those that waited come before.
    for thread in threads:
        thread.join(30)
    assert order == ["first", "second", "who had it"]


def test_as_many_have_a_turn_at_a_time_as_there_are_whatever_is_raised_in_one() -> None:
    turns = Turns(3)
    lock = threading.Lock()
    num_taken = most_taken = 0

    def work() -> None:
        nonlocal num_taken, most_taken
        for number in range(200):
            try:
                with turns:
                    with lock:
                        num_taken += 1
                        most_taken = max(most_taken, num_taken)
                    if number % 10 == 0:
                        time.sleep(0)
                    with lock:
                        num_taken -= 1
                    if number % 7 == 0:
                        raise OSError
            except OSError:
                pass

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert num_taken == 0
    assert most_taken <= 3
    with turns, turns, turns:  # All have come back.
        pass
