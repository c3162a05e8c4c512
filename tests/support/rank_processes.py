"""Ranks as processes of their own, joined by a real gloo group, which carry out functions that a test sends to all of them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

JOIN_S = 15.0
"""How long a rank may take to end."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a function came to on one rank: its value, or the exception; when (`time.monotonic`); and which of our threads were left afterwards."""

    value: Any = None
    error: BaseException | None = None
    ended: float = 0.0
    threads: tuple[str, ...] = ()


class RankProcesses:
    """``num_ranks`` processes in one gloo group on the loopback device. A context manager; leaving it ends them, and says if one did not end well.

    A function that is sent must be importable (a test module's own, say); it is called as ``function(rank, *arguments)``.
    """

    def __init__(self, num_ranks: int, folder: Path, *, timeout_s: float = 60.0) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, num_ranks, str(folder / "rendezvous"), timeout_s, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *exception: object) -> None:
        codes = self.end()
        assert codes == [0] * len(codes), f"exit codes of the ranks: {codes}"

    def start(
        self, function: Callable[..., Any], *arguments: Any, per_rank: list[tuple[Any, ...]] | None = None
    ) -> None:
        """Send a function to every rank; ``per_rank`` are arguments of each rank's own, which come first."""
        for rank, pipe in enumerate(self._pipes):
            own = per_rank[rank] if per_rank is not None else ()
            pipe.send((function, (*own, *arguments)))

    def outcome(self, rank: int, timeout_s: float = 60.0) -> Outcome:
        """Wait for what the function came to on one rank. Raises EOFError where the process has ended."""
        assert self._pipes[rank].poll(timeout_s), f"rank {rank} does not answer"
        outcome = self._pipes[rank].recv()
        assert isinstance(outcome, Outcome)
        return outcome

    def run(
        self, function: Callable[..., Any], *arguments: Any, per_rank: list[tuple[Any, ...]] | None = None
    ) -> list[Outcome]:
        """Send a function to every rank and return, by rank, what it came to."""
        self.start(function, *arguments, per_rank=per_rank)
        return [self.outcome(rank) for rank in range(len(self._pipes))]

    def send_signal(self, rank: int, number: signal.Signals) -> None:
        """Send one rank a signal; SIGINT is what Ctrl-C sends."""
        os.kill(self._processes[rank].pid, number)

    def kill(self, rank: int) -> None:
        """End one rank without a word."""
        self._processes[rank].kill()
        self._processes[rank].join(JOIN_S)

    def end(self) -> list[int | None]:
        """End all ranks and return their exit codes; one that has to be killed gives None."""
        for pipe in self._pipes:
            if not pipe.closed:
                with contextlib.suppress(OSError):  # One that has ended hears nothing.
                    pipe.send(None)
        codes: list[int | None] = []
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join(JOIN_S)
            codes.append(process.exitcode)
            if process.exitcode is None:
                process.kill()
                process.join(JOIN_S)
            process.close()
            pipe.close()
        return codes


def _serve(rank: int, num_ranks: int, rendezvous: str, timeout_s: float, pipe: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout_s),
    )
    while (task := pipe.recv()) is not None:
        pipe.send(_carry_out(rank, *task))
    dist.destroy_process_group()


def _carry_out(rank: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Outcome:
    value: Any = None
    error: BaseException | None = None
    try:
        value = function(rank, *arguments)
    except BaseException as raised:
        error = raised.with_traceback(None)
        error.__cause__ = error.__context__ = None
    ended = time.monotonic()
    threads = tuple(one.name for one in threading.enumerate() if one.name.startswith("headrace"))
    return Outcome(value, error, ended, threads)
