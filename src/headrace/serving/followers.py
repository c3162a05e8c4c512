"""Rank 0's view of the other ranks that compute a model with it: tells them what to do, hears when one is ready, has failed or is gone. Knows neither models nor how they were started.

Each is at the other end of a connection, whose closing is how both sides learn that the other process has ended, however it did. A rank that fails is lost, and with it all of them:
the others may be waiting for it in a collective.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from headrace.errors import RankFailed, distance_from_cause

T = TypeVar("T")

_GRACE_S = 2.0
"""How long a step may go on once a rank is lost: time for the failure to come out of the collective by itself, and for the others' words."""


@dataclass(frozen=True, slots=True)
class Ready:
    """What a rank says once it has its part of the model."""

    report: Any = None
    """The account of its load."""


@dataclass(frozen=True, slots=True)
class Failed:
    """What a rank says before it ends because of ``error``."""

    error: BaseException


class Followers:
    """The ranks from 1 on, by their connections. Thread safe. Their processes are ended by `end`.

    ``how_ended`` says of a rank whose connection has closed what became of its process, as a sentence, or nothing; ``end_processes`` ends those that still run, at once or when they
    have had time to end by themselves.
    """

    def __init__(
        self,
        connections: Mapping[int, Connection],
        *,
        how_ended: Callable[[int], str] = lambda rank: "",
        end_processes: Callable[[bool], None] = lambda at_once: None,
    ) -> None:
        self._connections = dict(connections)
        self._how_ended = how_ended
        self._end_processes = end_processes
        self._changed = threading.Condition()
        self._ready: dict[int, Ready] = {}
        self._errors: dict[int, BaseException] = {}
        self._on_death: list[Callable[[RankFailed], None]] = []
        self._is_over = False
        self.death: RankFailed | None = None
        """The first loss of a rank; None while all live."""
        self.has_left_work = False
        """Whether `during` left its work behind, in a thread that may never end."""
        self._thread = threading.Thread(target=self._listen, name="headrace-followers", daemon=True)
        self._thread.start()

    def tell(self, message: object) -> None:
        """Send ``message`` to every rank. One that is gone is not told."""
        for connection in self._connections.values():
            with contextlib.suppress(OSError):  # The listening thread says so.
                connection.send(message)

    def watch(self, on_death: Callable[[RankFailed], None]) -> None:
        """Call ``on_death`` once, in a thread of ours, when a rank is lost; at once where one is."""
        with self._changed:
            if self.death is None:
                self._on_death.append(on_death)
                return
            death = self.death
        on_death(death)

    def wait_for_death(self, timeout_s: float = _GRACE_S) -> RankFailed | None:
        """Return the loss of a rank, which may become known a moment after a collective has failed for it."""
        with self._changed:
            self._changed.wait_for(lambda: self.death is not None, timeout_s)
            return self.death

    def wait_ready(self) -> Sequence[Ready]:
        """Return what all ranks said when they were ready, by rank. Raises what the first one to fail raised, or `RankFailed`."""
        with self._changed:
            self._changed.wait_for(lambda: self.death is not None or len(self._ready) == len(self._connections))
        if self.death is not None:
            raise self.cause(self.death)
        return [self._ready[rank] for rank in sorted(self._ready)]

    def during(self, work: Callable[[], T]) -> T:
        """Return what ``work`` returns. Where it fails, or a rank is lost meanwhile, raises the failure that the others follow from; ``work`` may then be left behind in its thread."""
        outcome: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                outcome.append(work())
            except BaseException as error:  # noqa: BLE001  Raised by whoever waits.
                errors.append(error)
            with self._changed:
                self._changed.notify_all()

        thread = threading.Thread(target=run, name="headrace-rank-0", daemon=True)
        thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self.death is not None or bool(outcome or errors))
            if self.death is not None:
                self.has_left_work = not self._changed.wait_for(lambda: bool(outcome or errors), _GRACE_S)
        if errors:
            if distance_from_cause(0, errors[0]):
                self.wait_for_death()
            raise self.cause(errors[0])
        if self.death is not None:
            raise self.cause(self.death)
        return outcome[0]

    def cause(self, error: BaseException) -> BaseException:
        """Return, of ``error``, which is rank 0's, and of all that the others came to, what the rest follows from; see `headrace.errors.distance_from_cause`."""
        with self._changed:
            outcomes = [(0, error), *sorted(self._errors.items(), key=lambda told: told[0])]
            if self.death is not None and self.death.rank not in self._errors:
                outcomes.append((self.death.rank, self.death))
        return min(outcomes, key=lambda outcome: distance_from_cause(*outcome))[1]

    def end(self, *, at_once: bool = False) -> None:
        """Let all ranks end: when they have heard of it, or ``at_once`` where they may be stuck. May be called twice."""
        with self._changed:
            self._is_over = True
        if not at_once:
            self.tell(None)
        self._end_processes(at_once)
        for connection in self._connections.values():
            # Not closed here: the listening thread may be reading it.
            with contextlib.suppress(OSError):
                shut_down(connection)

    def _listen(self) -> None:
        open_ranks = {connection: rank for rank, connection in self._connections.items()}
        while open_ranks:
            for connection in wait(list(open_ranks)):
                assert isinstance(connection, Connection)
                rank = open_ranks[connection]
                try:
                    self._heard(rank, connection.recv())
                except Exception:  # noqa: BLE001  It has closed, or says what cannot be read: it is of no use either way.
                    del open_ranks[connection]
                    connection.close()
                    self._lost(rank)

    def _heard(self, rank: int, message: Ready | Failed) -> None:
        with self._changed:
            if isinstance(message, Ready):
                self._ready[rank] = message
            else:
                self._errors[rank] = message.error
            self._changed.notify_all()

    def _lost(self, rank: int) -> None:
        error = self._errors.get(rank)
        # Asked before the lock is taken: the process may need a moment to be gone.
        how = "" if error is not None or self._is_over else self._how_ended(rank)
        with self._changed:
            if self._is_over or self.death is not None:
                return
            self.death = _vanished(rank, how) if error is None else _failed(rank, error)
            listeners = list(self._on_death)
            self._changed.notify_all()
        for on_death in listeners:
            on_death(self.death)


def shut_down(connection: Connection) -> None:
    """Close both directions of a connection over a socket, so that whoever reads it, here or there, finds its end. Raises OSError."""
    with socket.socket(fileno=connection.fileno()) as shared:
        try:
            shared.shutdown(socket.SHUT_RDWR)
        finally:
            shared.detach()  # The descriptor stays the connection's.


def _vanished(rank: int, how: str) -> RankFailed:
    return RankFailed(
        f"Rank {rank} ended without a word.",
        how,
        "Where memory is short the system kills processes: look at its log (dmesg).",
        rank,
    )


def _failed(rank: int, error: BaseException) -> RankFailed:
    return RankFailed(f"Rank {rank} failed.", f"{type(error).__name__}: {error}", "", rank)
