"""How many threads decrypt at a time. Knows no sockets.

A thread lets go of the interpreter's lock for each TLS record, and takes it again. Where many threads do that at a time, they wait for each other, and are woken for it, 61,000 times
for a gigabyte; no more than there are processors can win anything. The others' bytes wait in the system's buffers meanwhile, which the network goes on filling.
"""

from __future__ import annotations

import math
import threading
from collections import deque

from headrace.processors import usable_processors

MOST_TURNS = 4
"""Beyond, threads meet at the interpreter's lock more often than not, whatever processors there are, and are put to sleep there and woken: with 8 or more, one interpreter handed on less than
with 4, for more CPU time (2026-11, `benchmarks/interpreter.py`). Where that is too little, reader processes have an interpreter each."""


class Turns:
    """``number`` turns, given in the order in which they are asked for. Taken as a context by who is about to decrypt, and never while waiting for the network. Thread safe.

    A semaphore would not do: who gives a turn back and wants the next has it again before any who waits is awake, and a connection may be left unread for as long as others have bytes.
    """

    def __init__(self, number: int) -> None:
        self._lock = threading.Lock()
        self._num_free = number
        self._waiting: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        with self._lock:
            if self._num_free:
                self._num_free -= 1
                return
            mine = threading.Lock()
            mine.acquire()
            self._waiting.append(mine)
        mine.acquire()

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._num_free += 1


def turns_for(processors: float) -> int:
    """Return how many turns there are to be for so many processors: one for each and for a part of one, `MOST_TURNS` at most."""
    return min(math.ceil(processors), MOST_TURNS)


def make_turns() -> Turns:
    """Return turns for the processors that this process may use."""
    return Turns(turns_for(usable_processors()))
