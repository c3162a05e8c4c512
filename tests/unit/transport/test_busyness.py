"""When threads that read are busy enough to be relieved: by their own CPU time, over a second, while much is left."""

from __future__ import annotations

import threading

import pytest

from headrace.transport.busyness import LEAST_LEFT_BYTES, BusyWatch

MUCH = 4 * LEAST_LEFT_BYTES
PIECE = 500_000


class Clocks:
    """Time passes, and this thread uses the processor, as the test says."""

    def __init__(self) -> None:
        self.now = 100.0
        self.cpu_s = 7.0
        self.told: list[float] = []

    def watch(self, num_bytes: int) -> BusyWatch:
        return BusyWatch(num_bytes, self.told.append, clock=lambda: self.now, thread_cpu_s=lambda: self.cpu_s)

    def run(self, watch: BusyWatch, *, seconds: float, processors: float, num_bytes: int = PIECE) -> None:
        for _ in range(round(seconds * 16)):
            self.now += 1 / 16
            self.cpu_s += processors / 16
            watch.note(num_bytes)


def test_two_processors_for_a_second_are_told_once() -> None:
    clocks = Clocks()
    watch = clocks.watch(MUCH)
    watch.note(PIECE)
    clocks.run(watch, seconds=15 / 16, processors=2.5)
    assert clocks.told == []
    clocks.run(watch, seconds=10, processors=2.5)
    assert clocks.told == [pytest.approx(2.5)]


def test_less_is_not_told_however_long_it_lasts() -> None:
    clocks = Clocks()
    watch = clocks.watch(MUCH)
    clocks.run(watch, seconds=60, processors=1.9)
    assert clocks.told == []
    clocks.run(watch, seconds=3, processors=2.1)
    assert len(clocks.told) == 1


def test_it_is_too_late_when_little_is_left() -> None:
    clocks = Clocks()
    watch = clocks.watch(LEAST_LEFT_BYTES + 32 * PIECE)
    clocks.run(watch, seconds=60, processors=4.0, num_bytes=3 * PIECE)
    assert clocks.told == []


def test_the_time_of_all_threads_counts_and_that_before_the_first_bytes_does_not() -> None:
    now, told = [0.0], list[float]()
    cpu_s = threading.local()
    watch = BusyWatch(MUCH, told.append, clock=lambda: now[0], thread_cpu_s=lambda: cpu_s.value)
    steps = threading.Barrier(4)

    def work() -> None:
        for step in range(3):
            cpu_s.value = 1000.0 + 0.7 * step
            watch.note(PIECE)
            if steps.wait() == 0:
                now[0] += 0.6
            steps.wait()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # At 1.2 seconds the first of four to come counts in its own 0.7, beside what all used in the step before.
    assert told == [pytest.approx((4 * 0.7 + 0.7) / 1.2)]
