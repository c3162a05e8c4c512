"""What ranks that compute one model together must decide alike, token by token: rank 0 decides, the others do as it says. Knows no models.

Every rank runs the same passes of the model, whose layers hold collectives. A rank that stopped by itself, or chose another token, would leave the others in one. So after each pass
rank 0 tells which tokens were chosen and which samples go on, and within a long pass over a prompt, at every layer, whether anybody still waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from headrace.streaming.processgroup import RankLink

LONG_PROMPT_TOKENS = 256
"""From so many on (of all samples) a prompt's pass can be left at any layer. A shorter one is over as soon as that could be agreed on."""

_GO, _STOP = 0, 1


@dataclass(frozen=True, slots=True)
class Task:
    """One generation, as far as the other ranks need to know: they choose no token, and so need no sampling options."""

    prompt: tuple[int, ...]
    num_samples: int
    max_tokens: int

    @property
    def is_long(self) -> bool:
        """Whether every layer of the prompt's pass asks if it shall go on."""
        return len(self.prompt) * self.num_samples >= LONG_PROMPT_TOKENS


@dataclass(frozen=True, slots=True)
class Decision:
    """What holds after one pass. ``tokens`` and ``done`` have one item for each sample."""

    stop: bool
    """Whether the generation is abandoned; the rest means nothing then."""
    tokens: tuple[int, ...]
    done: tuple[bool, ...]
    """Which samples have their last token."""

    def numbers(self) -> list[int]:
        return [_STOP if self.stop else _GO, *self.tokens, *map(int, self.done)]

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Decision:
        num_samples = (len(numbers) - 1) // 2
        tokens, done = numbers[1 : 1 + num_samples], numbers[1 + num_samples :]
        return cls(numbers[0] == _STOP, tuple(tokens), tuple(map(bool, done)))


class Lead(Protocol):
    """What the engine asks at each place where ranks could part. It may raise RuntimeError where the group has broken."""

    def begin(self, task: Task) -> None:
        """Get ready for a generation."""

    def at_layer(self, *, stop: bool) -> bool:
        """Return whether to leave the pass before this layer, where this rank would like to ``stop``."""

    def at_token(self, decision: Decision) -> None:
        """Let ``decision`` hold on all ranks."""

    def is_in_step(self) -> bool:
        """Return, after a failure on this rank alone, whether the others are where they can go on to the next generation."""


class Alone:
    """One process: whatever it decides holds."""

    def begin(self, task: Task) -> None:
        pass

    def at_layer(self, *, stop: bool) -> bool:
        return stop

    def at_token(self, decision: Decision) -> None:
        pass

    def is_in_step(self) -> bool:
        return True


class Leading:
    """Rank 0. One thread generates; ``tell`` sends a task to all other ranks, which then come to the collectives of ``link``."""

    def __init__(self, link: RankLink, tell: Callable[[Task], None]) -> None:
        self._link = link
        self._tell = tell
        self._task = Task((), 0, 0)
        self._is_told = False
        self._num_passes = 0
        self._is_in_pass = False
        self._is_over = True

    def begin(self, task: Task) -> None:
        """Get ready. Nobody is told before the first pass begins: what fails until then is this rank's own affair."""
        self._task = task
        self._is_told = self._is_in_pass = self._is_over = False
        self._num_passes = 0

    def pass_begins(self) -> None:
        """Say that the model is about to be called."""
        if not self._is_told:
            self._is_told = True
            self._tell(self._task)
        self._is_in_pass = True

    def pass_ended(self) -> None:
        """Say that the model has returned: the others wait for a decision."""
        self._is_in_pass = False

    def at_layer(self, *, stop: bool) -> bool:
        """See `Lead.at_layer`. Where layers are not asked, a stop has to wait for the token."""
        if self._num_passes or not self._task.is_long:
            return False
        share(self._link, [_STOP if stop else _GO])
        self._is_over = stop
        return stop

    def at_token(self, decision: Decision) -> None:
        share(self._link, decision.numbers())
        self._num_passes += 1
        self._is_over = decision.stop or all(decision.done)
        self._is_in_pass = True  # The others are, or will be in a moment.

    def is_in_step(self) -> bool:
        """See `Lead.is_in_step`; tells the others to abandon the generation where they wait for a decision."""
        if not self._is_told or self._is_over:
            return True
        if self._is_in_pass:
            return False
        nothing = (0,) * self._task.num_samples
        self.at_token(Decision(True, nothing, tuple(map(bool, nothing))))
        return True


class Following:
    """Any other rank, for one task."""

    def __init__(self, link: RankLink, task: Task) -> None:
        self._link = link
        self._task = task
        self._num_passes = 0

    def at_layer(self) -> bool:
        """Return whether to leave the pass before this layer."""
        if self._num_passes or not self._task.is_long:
            return False
        return share(self._link, [_GO])[0] == _STOP

    def at_token(self) -> Decision:
        """Wait for rank 0's decision after a pass."""
        self._num_passes += 1
        return Decision.of(share(self._link, [_GO] * (1 + 2 * self._task.num_samples)))


def share(link: RankLink, numbers: Sequence[int]) -> list[int]:
    """Return rank 0's ``numbers`` (whole, below 2^63) on every rank; all give equally many."""
    array = np.array(numbers, dtype=np.int64)
    link.broadcast(array.view(np.uint8), 0)
    return [int(number) for number in array]
