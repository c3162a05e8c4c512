"""Ranks decide alike, whatever happens on rank 0: the same collectives in the same order on all, and nobody is left in one."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.thread_ranks import ThreadGroup, ThreadLink, on_every_rank

from headrace.serving.decisions import LONG_PROMPT_TOKENS, Alone, Decision, Following, Leading, Task

SHORT = Task((1, 2, 3), 2, 5)
LONG = Task((7,) * (LONG_PROMPT_TOKENS // 2), 2, 5)
NUM_LAYERS = 3


def run_together(lead: Callable[[Leading], Any], task: Task, *, num_ranks: int = 3) -> tuple[list[Any], ThreadGroup]:
    """Return what ``lead`` returned and what the others heard, pass by pass, following one generation of ``task``; all have ended."""
    group = ThreadGroup(num_ranks, timeout_s=10)
    inboxes: list[queue.SimpleQueue[Task | None]] = [queue.SimpleQueue() for _ in range(num_ranks)]

    def tell(message: Task | None) -> None:
        for inbox in inboxes[1:]:
            inbox.put(message)

    def work(link: ThreadLink) -> Any:
        if link.rank == 0:
            try:
                return lead(Leading(link, tell))
            finally:
                tell(None)
        heard: list[Any] = []
        while (told := inboxes[link.rank].get(timeout=10)) is not None:
            heard.append(told)
            heard += follow(Following(link, told))
        return heard

    return on_every_rank(group.links(), work), group


def follow(following: Following) -> list[Any]:
    """Make passes until a decision ends them, as a model does."""
    heard: list[Any] = []
    while True:
        for layer in range(NUM_LAYERS):
            if following.at_layer():
                return [*heard, f"left at layer {layer}"]
        heard.append(following.at_token())
        if heard[-1].stop or all(heard[-1].done):
            return heard


def make_pass(leading: Leading, *, leave_at: int | None = None) -> bool:
    """Make rank 0's pass; return whether it was left."""
    leading.pass_begins()
    for layer in range(NUM_LAYERS):
        if leading.at_layer(stop=leave_at is not None and layer >= leave_at):
            return True
    leading.pass_ended()
    return False


GO = Decision(False, (5, 6), (False, True))
END = Decision(False, (8, 0), (True, True))


def test_the_others_get_rank_0s_tokens_and_ends() -> None:
    def lead(leading: Leading) -> None:
        leading.begin(SHORT)
        for decision in (GO, END):
            make_pass(leading)
            leading.at_token(decision)

    (_, *others), group = run_together(lead, SHORT)
    assert others == [[SHORT, GO, END]] * 2
    assert group.calls[0] == group.calls[1] == ["broadcast 40 from 0"] * 2


def test_tokens_survive_the_way_whatever_their_size() -> None:
    decision = Decision(True, (0, 2**40), (False, True))
    assert Decision.of(decision.numbers()) == decision


def test_a_long_prompt_is_left_at_the_same_layer_everywhere_and_a_short_one_at_its_token() -> None:
    def leave(task: Task) -> Callable[[Leading], bool]:
        def lead(leading: Leading) -> bool:
            leading.begin(task)
            left = make_pass(leading, leave_at=1)
            if not left:
                leading.at_token(Decision(True, (0, 0), (False, False)))
            return left

        return lead

    (left, *others), _ = run_together(leave(LONG), LONG)
    assert left and others == [[LONG, "left at layer 1"]] * 2
    (left, *others), _ = run_together(leave(SHORT), SHORT)
    assert not left and [heard[-1].stop for heard in others] == [True, True]


def test_layers_are_asked_in_the_prompts_pass_alone() -> None:
    def lead(leading: Leading) -> None:
        leading.begin(LONG)
        make_pass(leading)
        leading.at_token(GO)
        assert not make_pass(leading, leave_at=0)
        leading.at_token(END)

    _, group = run_together(lead, LONG)
    assert group.calls[1] == ["broadcast 8 from 0"] * NUM_LAYERS + ["broadcast 40 from 0"] * 2


@pytest.mark.parametrize("at", ["before the first pass", "after a pass", "after the end"])
def test_rank_0s_own_failure_leaves_nobody_behind(at: str) -> None:
    def lead(leading: Leading) -> list[bool]:
        leading.begin(SHORT)
        if at != "before the first pass":
            make_pass(leading)
        if at == "after the end":
            leading.at_token(END)
        in_step = [leading.is_in_step()]
        leading.begin(SHORT)  # the next generation finds all ranks in their places
        make_pass(leading)
        leading.at_token(END)
        return [*in_step, leading.is_in_step()]

    (in_step, *others), _ = run_together(lead, SHORT)
    assert in_step == [True, True]
    abandoned = Decision(True, (0, 0), (False, False))
    before = {"before the first pass": [], "after a pass": [SHORT, abandoned], "after the end": [SHORT, END]}[at]
    assert others == [[*before, SHORT, END]] * 2


@pytest.mark.parametrize("num_decided", [0, 1])
def test_a_failure_within_a_pass_is_not_in_step(num_decided: int) -> None:
    """The others are in the pass, or on their way into it: nobody can tell them anything there."""
    told: list[Task] = []
    leading = Leading(ThreadGroup(1).links()[0], told.append)
    leading.begin(SHORT)
    for _ in range(num_decided):
        make_pass(leading)
        leading.at_token(GO)
    assert leading.is_in_step() is (num_decided == 0), "before the first pass nobody has been told"
    leading.pass_begins()
    assert not leading.is_in_step()
    assert told == [SHORT]


def test_a_group_that_breaks_is_no_decision() -> None:
    group = ThreadGroup(2, timeout_s=10)
    leading = Leading(group.links()[0], lambda task: None)
    leading.begin(SHORT)
    make_pass(leading)
    group.vanish()
    with pytest.raises(RuntimeError):
        leading.at_token(END)
    with pytest.raises(RuntimeError):
        leading.is_in_step()


def test_one_process_decides_for_itself() -> None:
    alone = Alone()
    alone.begin(SHORT)
    assert alone.at_layer(stop=True) and not alone.at_layer(stop=False)
    alone.at_token(GO)
    assert alone.is_in_step()
