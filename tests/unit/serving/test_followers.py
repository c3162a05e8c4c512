"""Rank 0's view of the others: ready, failed, gone; and which failure of several is the one that is said."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import pytest

from headrace.errors import ObjectNotFound, RankFailed
from headrace.serving.followers import Failed, Followers, Ready

KILLED = "Its process was killed by SIGKILL."


class Others:
    """Two other ranks, each the far end of a connection."""

    def __init__(self) -> None:
        pairs = {rank: multiprocessing.Pipe() for rank in (1, 2)}
        self.ends: dict[int, Connection] = {rank: theirs for rank, (_, theirs) in pairs.items()}
        self.ended: list[bool] = []
        self.followers = Followers(
            {rank: ours for rank, (ours, _) in pairs.items()},
            how_ended=lambda rank: KILLED,
            end_processes=self.ended.append,
        )

    def close(self) -> None:
        for end in self.ends.values():
            end.close()


@pytest.fixture
def others() -> Iterator[Others]:
    others = Others()
    yield others
    others.close()
    others.followers._thread.join(10)
    assert not others.followers._thread.is_alive()


def test_all_are_told_and_all_are_waited_for(others: Others) -> None:
    others.followers.tell(("load", 1))
    assert [end.recv() for end in others.ends.values()] == [("load", 1)] * 2
    others.ends[2].send(Ready("second"))
    others.ends[1].send(Ready("first"))
    assert [one.report for one in others.followers.wait_ready()] == ["first", "second"]
    assert others.followers.death is None


def test_a_rank_that_is_gone_is_named_to_everybody_who_asks(others: Others) -> None:
    heard: list[RankFailed] = []
    others.followers.watch(heard.append)
    others.ends[2].close()
    with pytest.raises(RankFailed, match="Rank 2 ended without a word") as caught:
        others.followers.wait_ready()
    assert (caught.value.rank, caught.value.why) == (2, KILLED)
    assert others.followers.wait_for_death() is caught.value
    others.ends[1].close()  # one after the other is no news
    others.followers._thread.join(10)
    others.followers.watch(heard.append)
    assert heard == [caught.value] * 2
    others.followers.tell("nobody is there")


def test_an_error_that_a_rank_told_is_raised_as_its_own(others: Others) -> None:
    others.ends[1].send(Failed(ObjectNotFound("There is no such object.", "It went away.", "Look for it.")))
    others.ends[1].close()
    with pytest.raises(ObjectNotFound) as caught:
        others.followers.wait_ready()
    assert caught.value.mend == "Look for it."
    death = others.followers.death
    assert death is not None and (death.rank, death.what) == (1, "Rank 1 failed.")
    assert "There is no such object." in death.why


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (ObjectNotFound("Rank 0's own."), "Rank 0's own."),
        (RankFailed("A rank of the group vanished while loading weights."), "Rank 2's own."),
        (RuntimeError("Connection closed by peer"), "Rank 2's own."),
    ],
)
def test_of_several_failures_the_cause_is_raised(others: Others, own: Exception, expected: str) -> None:
    def fail() -> None:
        others.ends[1].send(Failed(RankFailed("Rank 2 failed while loading weights.", rank=2)))
        others.ends[2].send(Failed(ObjectNotFound("Rank 2's own.")))
        others.ends[2].close()
        raise own

    with pytest.raises(Exception, match=r"own\.") as caught:
        others.followers.during(fail)
    assert str(caught.value) == expected


def test_a_rank_that_is_gone_is_named_rather_than_what_a_library_says_of_it(others: Others) -> None:
    def fail() -> None:
        others.ends[1].close()
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(RankFailed, match="Rank 1 ended without a word") as caught:
        others.followers.during(fail)
    assert caught.value.why == KILLED


def test_what_a_rank_raised_is_said_rather_than_that_it_failed(others: Others) -> None:
    others.ends[1].send(Failed(RuntimeError("ValueError: of another library")))
    others.ends[1].close()
    with pytest.raises(RuntimeError, match=r"^ValueError: of another library$"):
        others.followers.wait_ready()


def test_work_that_waits_for_a_rank_that_is_gone_is_left(others: Others) -> None:
    release = threading.Event()
    threading.Timer(0.1, others.ends[1].close).start()
    try:
        with pytest.raises(RankFailed, match="Rank 1"):
            others.followers.during(lambda: release.wait(60))
        assert others.followers.has_left_work
    finally:
        release.set()


def test_work_is_done_where_nobody_fails(others: Others) -> None:
    assert others.followers.during(lambda: 5) == 5
    assert not others.followers.has_left_work


@pytest.mark.parametrize("at_once", [False, True])
def test_the_end_is_no_loss(at_once: bool, others: Others, read_end: Callable[[Connection], list[object]]) -> None:
    heard: list[RankFailed] = []
    others.followers.watch(heard.append)
    others.followers.end(at_once=at_once)
    assert others.ended == [at_once]
    for end in others.ends.values():
        assert read_end(end) == ([] if at_once else [None])
    others.followers._thread.join(10)
    others.followers.end(at_once=True)
    assert heard == [] and others.followers.death is None


@pytest.fixture
def read_end() -> Callable[[Connection], list[object]]:
    def read(end: Connection) -> list[object]:
        """Return what still comes; hangs where the other side does not close."""
        found = []
        try:
            while end.poll(10):
                found.append(end.recv())
        except EOFError:
            return found
        raise AssertionError("the connection stays open")

    return read
