"""Tensors that come in another's order: waiting, holding, errors, limits, closing. The bringer is scripted."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from headrace.errors import ReadFailed, ReadStalled, StreamClosed
from headrace.streaming.arrivals import Arrivals, Bringer

PATIENCE_S = 20.0
SIZE = 16


class Script:
    """Brings ``names`` one by one; says how far it has come and in which thread it ended. ``hold`` stops it before a name, as a library that hangs does."""

    def __init__(self, names: Iterable[str], *, error: BaseException | None = None, hold: str | None = None) -> None:
        self.names = list(names)
        self.error = error
        self.hold = hold
        self.held = threading.Event()
        self.release = threading.Event()
        self.brought: list[str] = []
        self.ended_in: threading.Thread | None = None
        self.was_exhausted = False

    def bring(self) -> Bringer:
        try:
            for name in self.names:
                if name == self.hold:
                    self.held.set()
                    assert self.release.wait(PATIENCE_S)
                self.brought.append(name)
                yield name, tensor(name)
            if self.error is not None:
                raise self.error
            self.was_exhausted = True
        finally:
            self.ended_in = threading.current_thread()


def tensor(name: str) -> torch.Tensor:
    return torch.full((SIZE,), sum(name.encode()) % 251, dtype=torch.uint8)


def arrivals(script: Script, **options: Any) -> Arrivals:
    values: dict[str, Any] = {"num_expected": len(script.names), "longest_wait_s": PATIENCE_S}
    return Arrivals(script.bring, describe=lambda: "the script runs", **{**values, **options})


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(int(PATIENCE_S * 200)):
        if condition():
            return
        threading.Event().wait(0.005)
    raise AssertionError("it never came to that")


def test_each_is_given_to_who_asked_for_it_in_any_order() -> None:
    script = Script("dbac")
    come = arrivals(script)
    for name in "abcd":
        assert torch.equal(come.fetch(name), tensor(name))
    assert come.bytes_come == 4 * SIZE
    assert come.peak_bytes == 3 * SIZE
    assert come.close(patience_s=PATIENCE_S)
    assert script.was_exhausted


def test_nothing_comes_before_it_is_waited_for() -> None:
    script = Script("abcd")
    come = arrivals(script)
    assert script.brought == []
    come.fetch("b")
    assert script.brought == ["a", "b"]
    come.fetch("a")
    assert script.brought == ["a", "b"]
    come.fetch("c")
    assert script.brought == ["a", "b", "c"]
    assert come.close(patience_s=PATIENCE_S)
    assert not script.was_exhausted
    assert script.brought == ["a", "b", "c"]


def test_the_last_one_ends_the_bringer_without_being_asked() -> None:
    script = Script("ab")
    come = arrivals(script)
    come.fetch("a")
    come.fetch("b")
    wait_until(lambda: script.was_exhausted)
    assert script.ended_in is not threading.current_thread()
    assert come.close(patience_s=PATIENCE_S)


def test_an_error_is_raised_in_every_fetch_and_the_thread_ends() -> None:
    script = Script("a", error=ReadFailed("The disk burns."))
    come = arrivals(script, num_expected=3)
    come.fetch("a")
    for name in "bc":
        with pytest.raises(ReadFailed, match="The disk burns"):
            come.fetch(name)
    assert come.close(patience_s=PATIENCE_S)


def test_what_came_before_an_error_can_still_be_had() -> None:
    script = Script("ab", error=ReadFailed("The disk burns."))
    come = arrivals(script, num_expected=3)
    with pytest.raises(ReadFailed, match="burns"):
        come.fetch("c")
    assert torch.equal(come.fetch("a"), tensor("a"))
    assert come.close(patience_s=PATIENCE_S)


def test_a_bringer_that_leaves_one_out_is_an_error() -> None:
    come = arrivals(Script("ab"), num_expected=3)
    come.fetch("a")
    with pytest.raises(ReadFailed, match=r"'c' did not come.*ended without it: the script runs"):
        come.fetch("c")
    assert come.close(patience_s=PATIENCE_S)


def test_standing_still_is_an_error_after_a_while() -> None:
    script = Script("ab", hold="b")
    come = arrivals(script, longest_wait_s=0.05)
    come.fetch("a")
    with pytest.raises(ReadStalled, match=r"No tensor has come for 0.05 s.*the script runs"):
        come.fetch("b")
    assert not come.close(patience_s=0.05)
    script.release.set()
    assert come.close(patience_s=PATIENCE_S)
    assert not script.was_exhausted


def test_close_wakes_who_waits_and_drops_what_came() -> None:
    script = Script("ab", hold="b")
    come = arrivals(script)
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            come.fetch("b")
        except StreamClosed as error:
            raised.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert script.held.wait(PATIENCE_S)
    assert not come.close(patience_s=0.01)
    waiter.join(PATIENCE_S)
    assert "'b' was waited for when the stream was closed" in str(raised[0])
    script.release.set()
    assert come.close(patience_s=PATIENCE_S)
    with pytest.raises(StreamClosed):
        come.fetch("a")


def test_close_ends_a_bringer_that_waits_in_its_own_thread() -> None:
    script = Script("abc")
    come = arrivals(script)
    come.fetch("a")
    assert come.close(patience_s=PATIENCE_S)
    assert script.ended_in is not None
    assert not script.ended_in.is_alive()
    assert script.ended_in is not threading.current_thread()


def test_close_before_the_first_fetch_starts_nothing() -> None:
    script = Script("a")
    come = arrivals(script)
    assert come.close(patience_s=0.0)
    with pytest.raises(StreamClosed):
        come.fetch("a")
    assert script.brought == []


def test_an_error_while_closing_is_nobodys() -> None:
    def bring() -> Bringer:
        try:
            yield "a", tensor("a")
            yield "b", tensor("b")
        finally:
            raise ReadFailed("It does not want to end.")

    come = Arrivals(bring, num_expected=2, longest_wait_s=PATIENCE_S, describe=lambda: "")
    come.fetch("a")
    assert come.close(patience_s=PATIENCE_S)


def test_what_was_fetched_is_held_by_nobody_else() -> None:
    def bring() -> Bringer:
        for name in "ab":
            yield name, tensor(name)

    come = Arrivals(bring, num_expected=2, longest_wait_s=PATIENCE_S, describe=lambda: "")
    fetched = come.fetch("a")
    gone = weakref.ref(fetched)
    del fetched
    wait_until(lambda: gc.collect() >= 0 and gone() is None)
    assert come.close(patience_s=PATIENCE_S)


def test_several_may_wait_at_once() -> None:
    names = [f"t{number}" for number in range(40)]
    come = arrivals(Script(reversed(names)))
    fetched: dict[str, torch.Tensor] = {}

    def fetch(some: list[str]) -> None:
        for name in some:
            fetched[name] = come.fetch(name)

    threads = [threading.Thread(target=fetch, args=(names[start::4],)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert fetched.keys() == set(names)
    assert all(torch.equal(fetched[name], tensor(name)) for name in names)
    assert come.close(patience_s=PATIENCE_S)
