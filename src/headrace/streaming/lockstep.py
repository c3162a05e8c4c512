"""Ranks in step: each does its own work, all tell each other how it went, and the first failure of any is raised on every one. Knows no weights.

While a rank works it tells the others so twice a second. That is how a rank learns of another's failure long before its own work is done, and why a group's
timeout strikes a rank that says nothing, not one that is slow. A step ends when all ranks are ready or one is not well; both are decided by what all have heard, never by
one rank alone, so that all ranks call the same collectives in the same order.

The exchange of a step runs in a thread of its own while the caller works or waits: a signal in the caller's thread must not cut a collective short, which would leave the
others in it. Between two steps nothing runs, and the caller may use the group itself.
"""

from __future__ import annotations

import contextlib
import logging
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

from headrace.errors import RankFailed, StreamClosed, StreamError
from headrace.streaming.processgroup import RankLink
from headrace.units import format_seconds

logger = logging.getLogger("headrace")

T = TypeVar("T")

NUM_NUMBERS = 7
"""How many numbers of the step's own a status can hold."""
BEAT_S = 0.5
"""How often a rank that works tells the others so."""
LEAVE_AFTER_S = 10.0
"""How long a rank that failed or stopped waits for the others to hear of it, before it goes its way."""
HINT_AFTER_S = 30.0
"""When a rank says that it waits for others which have not come."""

_HEAD = struct.Struct(f"<qqqq{NUM_NUMBERS}q")
_TEXT_BYTES = 2048
"""Room for an error's text. Every exchange has this size, so that it is one collective, whatever there is to tell."""


class State(IntEnum):
    """How a rank is."""

    WORKING = 0
    READY = 1
    FAILED = 2
    STOPPED = 3


@dataclass(frozen=True, slots=True)
class Status:
    """What a rank tells the others. ``key`` and ``step`` say where it is; ``numbers`` are the step's own; ``text`` is the error's."""

    key: int
    step: int
    state: State
    numbers: tuple[int, ...] = ()
    text: str = ""

    def pack(self) -> bytes:
        numbers = (*self.numbers, *[0] * (NUM_NUMBERS - len(self.numbers)))
        text = self.text.encode("utf-8", "replace")[:_TEXT_BYTES]
        return _HEAD.pack(self.key, self.step, self.state, len(text), *numbers) + text.ljust(_TEXT_BYTES, b"\0")

    @classmethod
    def unpack(cls, record: bytes) -> Status:
        key, step, state, num_text, *numbers = _HEAD.unpack_from(record)
        text = record[_HEAD.size : _HEAD.size + num_text].decode("utf-8", "ignore")
        return cls(key, step, State(state), tuple(numbers), text)


def _nothing() -> None:
    pass


def _no_numbers() -> tuple[int, ...]:
    return ()


def _ignore(statuses: Sequence[Status]) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What is done between two agreements. Only ``work`` runs in the caller's thread, the rest in the thread of the exchange."""

    name: str
    """What the ranks are doing, for messages: ``loading weights``."""
    work: Callable[[], None]
    """This rank's own part; whatever it raises reaches all ranks."""
    numbers: Callable[[], tuple[int, ...]] = _no_numbers
    """What to tell with each status. What it returns once ``work`` is done is what all ranks get as the step's result."""
    heard: Callable[[Sequence[Status]], None] = _ignore
    """Called with what all ranks told, at every exchange."""
    finish: Callable[[], None] = _nothing
    """Called when all ranks are ready: the collectives of the step. It must not be able to fail on one rank alone, but for the group's own failure."""
    cancel: Callable[[], None] = _nothing
    """Ends ``work`` early, since another rank failed."""
    is_last: bool = False
    """Whether nothing follows: after it nobody listens."""


class _Talk:
    """The exchange of one step, from the first status to the agreement."""

    def __init__(self, link: RankLink, step: Step, where: tuple[int, int], beat_s: float) -> None:
        self._link = link
        self._step = step
        self._where = where
        self._beat_s = beat_s
        self._settled = threading.Event()
        self._lock = threading.Lock()
        self._state = State.WORKING
        self._text = ""
        self.statuses: list[Status] = []
        """What all ranks told last."""
        self.lost: BaseException | None = None
        """Why there can be no more exchange."""
        self.has_agreed = False
        """Whether all ranks were ready and the step was finished."""
        self.last_heard = time.monotonic()
        self.thread = threading.Thread(target=self._converse, name="headrace-ranks", daemon=True)

    def start(self) -> None:
        try:
            self.thread.start()
        except RuntimeError as error:  # The system allows no more threads: then the others hear of that.
            self.settle(State.FAILED, _text_of(error))
            self._converse()
            raise

    def settle(self, state: State, text: str = "") -> None:
        """Say how this rank's work went. A failure is final."""
        with self._lock:
            if self._state < State.FAILED:
                self._state, self._text = state, text
        self._settled.set()

    def fail(self, error: BaseException) -> None:
        self.settle(State.FAILED, _text_of(error))

    @property
    def has_told_trouble(self) -> bool:
        """Whether the others have heard that this rank failed or stopped."""
        return bool(self.statuses) and self.statuses[self._link.rank].state >= State.FAILED

    @property
    def trouble(self) -> tuple[int, Status] | None:
        """The first rank that failed or stopped, or else the first that is not where this one is."""
        ranks = list(enumerate(self.statuses))
        failed = [(rank, status) for rank, status in ranks if status.state >= State.FAILED]
        astray = [(rank, status) for rank, status in ranks if (status.key, status.step) != self._where]
        return next(iter(failed + astray), None)

    def _converse(self) -> None:
        try:
            while not self._exchange():
                pass
            if self.trouble is None:
                self._step.finish()
                self.has_agreed = True
        except BaseException as error:  # noqa: BLE001 (the caller's thread raises it)
            self.lost = error
        if not self.has_agreed and self._state == State.WORKING:
            self._step.cancel()

    def _exchange(self) -> bool:
        """Tell and hear once; return whether that decides the step."""
        self._settled.wait(self._beat_s)
        with self._lock:
            own = Status(*self._where, self._state, text=self._text)
        # After the state: what was counted when the work was done is complete.
        own = Status(own.key, own.step, own.state, self._step.numbers(), own.text)
        self.statuses = [Status.unpack(record) for record in self._link.gather(own.pack())]
        self.last_heard = time.monotonic()
        self._step.heard(self.statuses)
        return self.trouble is not None or all(status.state == State.READY for status in self.statuses)


class Lockstep:
    """The steps of one load, on each rank of a group. One thread at a time may take a step.

    ``key`` tells two loads of one group apart once it is set, equally on all ranks.
    """

    def __init__(self, link: RankLink, *, beat_s: float = BEAT_S, leave_after_s: float = LEAVE_AFTER_S) -> None:
        self.link = link
        self.key = 0
        self.is_over = False
        """Whether there will be no more exchange: after the last step, and after the first failure."""
        self.leave_after_s = leave_after_s
        self._beat_s = beat_s
        self._num_steps = 0
        self._running: tuple[_Talk, Step] | None = None

    def do(self, name: str, work: Callable[[], T], *, undo: Callable[[T], None] | None = None) -> T:
        """Do ``work`` on every rank and return this rank's result when all have one. Where another rank failed, ``undo`` gets the result. Raises as `run`."""
        results: list[T] = []
        try:
            self.run(Step(name=name, work=lambda: results.append(work())))
        except BaseException:
            if results and undo is not None:
                undo(results[0])
            raise
        return results[0]

    def run(self, step: Step) -> list[Status]:
        """Take one step and return what each rank told at its end, by rank.

        Raises what ``work`` raised here, `RankFailed` where another rank failed, stopped or vanished, and `StreamError` where the ranks are not at the same step.
        """
        if self.is_over:
            raise StreamClosed("The ranks of the group load together no longer.")
        self.is_over = True  # until all have agreed
        talk = _Talk(self.link, step, (self.key, self._num_steps), self._beat_s)
        self._running = talk, step
        error: BaseException | None = None
        try:
            talk.start()
            step.work()
            talk.settle(State.READY)
            self._wait(talk, step)
        except BaseException as raised:  # noqa: BLE001 (raised again once the others have heard of it)
            error = raised
            talk.fail(raised)
            self._leave(talk)
        self._running = None
        return self._conclude(talk, step, error)

    def stop(self, error: BaseException | None = None) -> None:
        """Tell the other ranks that this one takes no further step, because of ``error`` or because it needs no more. Does nothing where the load is over."""
        if self.is_over:
            return
        self.is_over = True
        talk = _Talk(self.link, Step(name="", work=_nothing), (self.key, self._num_steps), self._beat_s)
        if error is None:
            talk.settle(State.STOPPED)
        else:
            talk.fail(error)
        with contextlib.suppress(RuntimeError):  # no thread was to be had, but the others have heard all the same
            talk.start()
        self._leave(talk)

    def interrupt(self) -> None:
        """End the step that another thread takes now, if any: it raises `StreamClosed` there, and on the other ranks `RankFailed`."""
        running = self._running
        if running is not None:
            talk, step = running
            talk.settle(State.STOPPED)
            step.cancel()

    def _wait(self, talk: _Talk, step: Step) -> None:
        has_said = False
        while talk.thread.is_alive():
            talk.thread.join(1.0)
            silence_s = time.monotonic() - talk.last_heard
            if silence_s > HINT_AFTER_S and not has_said and talk.thread.is_alive():
                has_said = True
                logger.warning(
                    "Rank %d of %d has waited %s for the others while %s. Every rank of the group must load; pass distributed=False where only some do.",
                    self.link.rank,
                    self.link.num_ranks,
                    format_seconds(silence_s),
                    step.name,
                )

    def _leave(self, talk: _Talk) -> None:
        """Give the others time to hear of a failure, but not for ever: a rank whose consumer is busy hears of it when it next asks."""
        if talk.thread.is_alive():
            talk.thread.join(self.leave_after_s)
        if talk.thread.is_alive():
            logger.warning("Rank %d leaves the load, and the other ranks have not heard of it yet.", self.link.rank)

    def _conclude(self, talk: _Talk, step: Step, error: BaseException | None) -> list[Status]:
        if talk.has_agreed:
            self._num_steps += 1
            self.is_over = step.is_last
            if error is not None:  # It came too late for this step.
                self.stop(error)
                raise error
            return talk.statuses
        failure = None if talk.has_told_trouble or talk.thread.is_alive() else self._failure(talk, step)
        if error is not None and (failure is None or not isinstance(error, Exception)):
            raise error
        if failure is None:
            raise StreamClosed(f"The stream was closed while {step.name}.")
        # A stream that was closed to end the work early is no cause.
        raise failure from (talk.lost or (None if isinstance(error, StreamClosed) else error))

    def _failure(self, talk: _Talk, step: Step) -> StreamError | None:
        if talk.lost is not None:
            return RankFailed(
                f"A rank of the group vanished while {step.name}.",
                f"The exchange with it failed: {str(talk.lost).partition(chr(10))[0]}",
                "Look at what the other ranks wrote: one has ended, or was silent for longer than the group's timeout.",
            )
        if talk.trouble is None:
            return None
        rank, status = talk.trouble
        if status.state == State.FAILED:
            return RankFailed(f"Rank {rank} failed while {step.name}.", status.text, rank=rank)
        if status.state == State.STOPPED:
            return RankFailed(
                f"Rank {rank} stopped before everything was loaded.",
                "Its consumer closed the stream.",
                "Take all tensors on every rank, or stop at the same one.",
                rank,
            )
        return StreamError(
            f"Rank {rank} is not where rank {self.link.rank} is while {step.name}.",
            "The ranks use several streams in different orders.",
            "Open and read streams over one group in the same order on every rank.",
        )


def _text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")
