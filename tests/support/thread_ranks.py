"""Ranks as threads of one process: a `RankLink` without processes or sockets, and a way to run one function on all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from headrace.streaming.memory import Bytes

TIMEOUT_S = 30.0
"""How long a rank waits for the others before the test has failed."""


class ThreadGroup:
    """What the links of one group share."""

    def __init__(self, num_ranks: int, timeout_s: float = TIMEOUT_S) -> None:
        self.num_ranks = num_ranks
        self._barrier = threading.Barrier(num_ranks, timeout=timeout_s)
        self._slots: list[Any] = [None] * num_ranks
        self.calls: list[list[str]] = [[] for _ in range(num_ranks)]
        """The collectives that each rank called, in order."""

    def links(self) -> list[ThreadLink]:
        return [ThreadLink(self, rank) for rank in range(self.num_ranks)]

    def swap(self, rank: int, value: Any) -> list[Any]:
        """Give ``value`` and return every rank's. Raises RuntimeError (a broken barrier) where another has vanished."""
        self._slots[rank] = value
        self._barrier.wait()
        every = list(self._slots)
        self._barrier.wait()
        return every

    def vanish(self) -> None:
        """End as a killed process does: whoever waits for it finds the connection closed."""
        self._barrier.abort()


class ThreadLink:
    """One rank's link."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self.group = group
        self.rank = rank
        self.num_ranks = group.num_ranks
        self.bytes_sent = 0

    def gather(self, record: bytes) -> list[bytes]:
        self.group.calls[self.rank].append("gather")
        return self.group.swap(self.rank, record)

    def broadcast(self, array: Bytes, rank: int) -> None:
        self.group.calls[self.rank].append(f"broadcast {len(array)} from {rank}")
        if rank == self.rank:
            self.bytes_sent += len(array)
        sent = self.group.swap(self.rank, array)[rank]
        if rank != self.rank:
            array[:] = sent
        self.group.swap(self.rank, None)  # nobody goes on while another still copies


def on_every_rank(links: list[ThreadLink], work: Callable[[ThreadLink], Any]) -> list[Any]:
    """Return, by rank, what ``work`` returned or the exception that it raised; all threads have ended."""
    outcomes: list[Any] = [None] * len(links)

    def run(link: ThreadLink) -> None:
        try:
            outcomes[link.rank] = work(link)
        except BaseException as error:
            outcomes[link.rank] = error

    threads = [threading.Thread(target=run, args=(link,), name=f"rank-{link.rank}") for link in links]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT_S)
    assert not any(thread.is_alive() for thread in threads)
    return outcomes
