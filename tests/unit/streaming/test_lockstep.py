"""Ranks in step, as threads: what one does not survive is raised on all, and all call the same collectives."""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.thread_ranks import ThreadGroup, ThreadLink, on_every_rank

from headrace.errors import RankFailed, ReadFailed, StreamClosed, StreamError
from headrace.streaming import lockstep as module
from headrace.streaming.lockstep import Lockstep, State, Status, Step


def in_step(
    group: ThreadGroup, work: Callable[[Lockstep], Any], *, beat_s: float = 0.02, leave_after_s: float = 10.0
) -> list[Any]:
    """Run ``work`` on every rank of ``group``; no thread of an exchange is left."""

    def run(link: ThreadLink) -> Any:
        return work(Lockstep(link, beat_s=beat_s, leave_after_s=leave_after_s))

    outcomes = on_every_rank(group.links(), run)
    assert [one.name for one in threading.enumerate() if one.name == "headrace-ranks"] == []
    return outcomes


def nothing() -> None:
    pass


def test_a_status_survives_its_record() -> None:
    status = Status(2**62, 7, State.FAILED, (1, -1, 3, 4, 5, 6, 7), "Lost: süß")
    assert Status.unpack(status.pack()) == status
    assert len(status.pack()) == len(Status(0, 0, State.READY).pack())


def test_a_long_text_is_cut_between_characters() -> None:
    text = "x" + "ü" * 5000
    again = Status.unpack(Status(0, 0, State.FAILED, text=text).pack()).text
    assert 1000 < len(again) < 5000
    assert text.startswith(again)


def test_text_that_is_no_unicode_is_told_all_the_same() -> None:
    assert Status.unpack(Status(0, 0, State.FAILED, text="a\udcffb").pack()).text == "a?b"


def test_all_ranks_get_what_each_told() -> None:
    group = ThreadGroup(3)
    finished: list[int] = []

    def work(lockstep: Lockstep) -> list[tuple[int, ...]]:
        told: list[int] = []
        step = Step(
            name="counting",
            work=lambda: told.append(10 + lockstep.link.rank),
            numbers=lambda: tuple(told),
            finish=lambda: finished.append(lockstep.link.rank),
        )
        return [status.numbers[:1] for status in lockstep.run(step)]

    assert in_step(group, work) == [[(10,), (11,), (12,)]] * 3
    assert sorted(finished) == [0, 1, 2]
    assert group.calls[0] == group.calls[1] == group.calls[2]


def test_a_slow_rank_is_waited_for() -> None:
    group = ThreadGroup(2, timeout_s=0.5)  # as a process group's timeout: for one collective, not for the work

    def work(lockstep: Lockstep) -> str:
        lockstep.run(Step(name="sleeping", work=lambda: time.sleep(1.5 * lockstep.link.rank)))
        return "done"

    assert in_step(group, work) == ["done", "done"]
    assert len(group.calls[0]) > 3


def test_the_first_error_is_raised_on_every_rank() -> None:
    group = ThreadGroup(3)
    finished: list[int] = []

    def work(lockstep: Lockstep) -> None:
        rank = lockstep.link.rank

        def read() -> None:
            if rank == 1:
                raise ReadFailed("model.safetensors cannot be read.", "The server answered 403.", "Look at it.")

        lockstep.run(Step(name="loading weights", work=read, finish=lambda: finished.append(rank)))

    first, second, third = in_step(group, work)
    assert type(second) is ReadFailed
    for error in (first, third):
        assert type(error) is RankFailed
        assert error.rank == 1
        assert error.what == "Rank 1 failed while loading weights."
        assert error.why == "ReadFailed: model.safetensors cannot be read. The server answered 403. Look at it."
        again = pickle.loads(pickle.dumps(error))
        assert (again.rank, str(again)) == (1, str(error))
    assert finished == []


def test_the_lowest_of_two_failed_ranks_is_named() -> None:
    def work(lockstep: Lockstep) -> None:
        rank = lockstep.link.rank
        lockstep.run(Step(name="dividing", work=lambda: 1 / (rank if rank == 0 else 0) and None))  # type: ignore[func-returns-value]

    group = ThreadGroup(3)
    outcomes = in_step(group, work)
    assert [type(one) for one in outcomes] == [ZeroDivisionError] * 3

    def others(lockstep: Lockstep) -> None:
        rank = lockstep.link.rank

        def fail() -> None:
            # Together, or the first would be heard alone.
            group.swap(rank, None)
            if rank:
                raise ValueError(f"of rank {rank}")
            time.sleep(0.2)

        lockstep.run(Step(name="failing", work=fail))

    group = ThreadGroup(3)
    first, second, third = in_step(group, others, beat_s=0.5)
    assert (type(first), first.rank, first.why) == (RankFailed, 1, "ValueError: of rank 1")
    assert isinstance(second, ValueError)
    assert isinstance(third, (ValueError, RankFailed))


def test_a_rank_at_work_is_ended_when_another_fails() -> None:
    group = ThreadGroup(2)
    started = time.monotonic()

    def work(lockstep: Lockstep) -> None:
        end = threading.Event()

        def wait() -> None:
            if lockstep.link.rank == 0:
                raise MemoryError
            end.wait(30)
            raise StreamClosed("The stream was closed.")

        lockstep.run(Step(name="loading weights", work=wait, cancel=end.set))

    first, second = in_step(group, work)
    assert isinstance(first, MemoryError)
    assert (type(second), second.rank, second.why) == (RankFailed, 0, "MemoryError")
    assert second.__cause__ is None  # that the stream was closed is a consequence
    assert time.monotonic() - started < 20


def test_an_interrupted_rank_tells_the_others_and_raises_the_interrupt() -> None:
    group = ThreadGroup(2)

    def work(lockstep: Lockstep) -> None:
        def interrupted() -> None:
            if lockstep.link.rank == 1:
                raise KeyboardInterrupt

        lockstep.run(Step(name="loading weights", work=interrupted))

    first, second = in_step(group, work)
    assert (type(first), first.rank, first.why) == (RankFailed, 1, "KeyboardInterrupt")
    assert type(second) is KeyboardInterrupt


def test_a_rank_that_stops_is_named_by_the_others() -> None:
    group = ThreadGroup(2)

    def work(lockstep: Lockstep) -> None:
        lockstep.run(Step(name="loading weights", work=nothing))
        if lockstep.link.rank == 0:
            lockstep.stop()
            lockstep.stop()  # nothing more to say
        else:
            lockstep.run(Step(name="loading weights", work=nothing))

    first, second = in_step(group, work)
    assert first is None
    assert (type(second), second.rank) == (RankFailed, 0)
    assert "stopped" in second.what
    assert group.calls[0] == group.calls[1]


def test_the_consumers_error_reaches_the_others() -> None:
    group = ThreadGroup(2)

    def work(lockstep: Lockstep) -> None:
        if lockstep.link.rank == 0:
            lockstep.stop(ValueError("the consumer's own"))
        else:
            lockstep.run(Step(name="loading weights", work=nothing))

    first, second = in_step(group, work)
    assert first is None
    assert (second.rank, second.why) == (0, "ValueError: the consumer's own")


def test_ranks_that_all_stop_at_one_step_hear_no_error() -> None:
    assert in_step(ThreadGroup(3), lambda lockstep: lockstep.stop()) == [None] * 3


def test_after_the_last_step_nothing_is_exchanged() -> None:
    group = ThreadGroup(2)

    def work(lockstep: Lockstep) -> None:
        lockstep.run(Step(name="loading weights", work=nothing, is_last=True))
        before = len(group.calls[lockstep.link.rank])
        lockstep.stop(ValueError())
        assert len(group.calls[lockstep.link.rank]) == before
        with pytest.raises(StreamClosed):
            lockstep.run(Step(name="loading weights", work=nothing))

    assert in_step(group, work) == [None, None]


def test_a_rank_that_vanishes_is_an_error_on_the_others() -> None:
    group = ThreadGroup(2)

    def work(lockstep: Lockstep) -> None:
        if lockstep.link.rank == 1:
            group.vanish()
            return
        ended = threading.Event()
        lockstep.run(Step(name="loading weights", work=lambda: ended.wait(30) and None, cancel=ended.set))  # type: ignore[func-returns-value]

    first, _ = in_step(group, work)
    assert (type(first), first.rank) == (RankFailed, -1)
    assert "vanished while loading weights" in first.what
    assert isinstance(first.__cause__, threading.BrokenBarrierError)


def test_a_failed_rank_leaves_others_that_do_not_come(caplog: pytest.LogCaptureFixture) -> None:
    group = ThreadGroup(2)
    has_left = threading.Event()

    def work(link: ThreadLink) -> None:
        lockstep = Lockstep(link, beat_s=0.02, leave_after_s=0.2)
        if link.rank == 0:
            try:
                lockstep.run(Step(name="loading weights", work=lambda: 1 / 0 and None))  # type: ignore[func-returns-value]
            finally:
                has_left.set()
        else:
            assert has_left.wait(20)  # busy elsewhere
            lockstep.run(Step(name="loading weights", work=nothing))

    with caplog.at_level(logging.WARNING, logger="headrace"):
        first, second = on_every_rank(group.links(), work)
    assert isinstance(first, ZeroDivisionError)
    assert "Rank 0 leaves" in caplog.text
    assert (type(second), second.rank) == (RankFailed, 0)  # it hears of it when it comes


def test_steps_in_different_orders_are_an_error_on_both() -> None:
    def work(lockstep: Lockstep) -> None:
        lockstep.key = lockstep.link.rank
        lockstep.run(Step(name="loading weights", work=nothing))

    first, second = in_step(ThreadGroup(2), work)
    assert type(first) is type(second) is StreamError
    assert "Rank 1 is not where rank 0 is" in first.what
    assert "different orders" in second.why


def test_interrupting_ends_the_step_of_another_thread() -> None:
    group = ThreadGroup(2)

    def work(lockstep: Lockstep) -> None:
        ended = threading.Event()

        def wait() -> None:
            if lockstep.link.rank == 1:
                lockstep.interrupt()
            assert ended.wait(20)
            raise StreamClosed("The stream was closed.")

        lockstep.run(Step(name="loading weights", work=wait, cancel=ended.set))

    first, second = in_step(group, work)
    assert (type(first), first.rank) == (RankFailed, 1)
    assert "stopped" in first.what
    assert type(second) is StreamClosed


def test_what_was_done_is_undone_where_another_rank_failed() -> None:
    undone: list[int] = []

    def work(lockstep: Lockstep) -> int:
        return lockstep.do("opening", lambda: 100 // lockstep.link.rank, undo=undone.append)

    first, second = in_step(ThreadGroup(2), work)
    assert isinstance(first, ZeroDivisionError)
    assert (type(second), second.rank) == (RankFailed, 0)
    assert undone == [100]


def test_what_was_done_is_returned() -> None:
    assert in_step(ThreadGroup(2), lambda lockstep: lockstep.do("opening", lambda: lockstep.link.rank)) == [0, 1]


def test_a_lone_rank_says_that_it_waits(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(module, "HINT_AFTER_S", 0.5)
    group = ThreadGroup(2)

    def work(lockstep: Lockstep) -> None:
        if lockstep.link.rank == 1:
            time.sleep(2.5)
        lockstep.run(Step(name="opening the checkpoint", work=nothing))

    with caplog.at_level(logging.WARNING, logger="headrace"):
        assert in_step(group, work) == [None, None]
    assert [record.message.partition(". ")[0] for record in caplog.records if "distributed=False" in record.message]
    assert "Rank 0 of 2 has waited" in caplog.text
    assert "while opening the checkpoint" in caplog.text


def test_an_error_that_comes_after_the_agreement_is_told_at_the_next_step() -> None:
    """A signal arrives while this rank waits for the end of a step that all have agreed on: its collectives are carried out, then the others hear."""
    group = ThreadGroup(2)
    finished: list[int] = []

    def work(lockstep: Lockstep) -> None:
        rank = lockstep.link.rank
        if rank == 1:
            wait = lockstep._wait

            def interrupted(talk: Any, step: Step) -> None:
                wait(talk, step)
                raise KeyboardInterrupt

            lockstep._wait = interrupted  # type: ignore[method-assign]
        for _ in range(2):
            lockstep.run(Step(name="loading weights", work=nothing, finish=lambda: finished.append(rank)))

    first, second = in_step(group, work)
    assert type(second) is KeyboardInterrupt
    assert (type(first), first.rank, first.why) == (RankFailed, 1, "KeyboardInterrupt")
    assert sorted(finished) == [0, 1]
    assert group.calls[0] == group.calls[1]


def test_a_rank_that_gets_no_thread_tells_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "headrace-ranks" and threading.current_thread().name == "rank-1":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    first, second = in_step(ThreadGroup(2), lambda lockstep: lockstep.run(Step(name="loading weights", work=nothing)))
    assert type(second) is RuntimeError
    assert (type(first), first.rank) == (RankFailed, 1)
    assert "can't start new thread" in first.why
    first, second = in_step(ThreadGroup(2), lambda lockstep: lockstep.stop())
    assert (first, second) == (None, None)
