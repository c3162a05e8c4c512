"""Runs one function in several processes of this machine that are joined in a process group, and returns what it came to on each.

The group is gloo on the loopback device, found through a file, so that nothing of it can be reached from elsewhere. The processes end with this one, however that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, TypeVar

from headrace.errors import HeadraceError, RankFailed, distance_from_cause

T = TypeVar("T")

_JOIN_S = 10.0
"""How long a process may take to end once it has answered, or another has failed."""
_PR_SET_PDEATHSIG = 1  # prctl(2)


def on_ranks(num_ranks: int, work: Callable[..., T], *arguments: Any) -> list[T]:
    """Return, by rank, what ``work(*arguments)`` returned; it and they must be such as pickle can send, the work a function of a module.

    Raises what began it, where several failed; see `headrace.errors.distance_from_cause`.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="headrace-ranks-") as folder:
        processes: list[SpawnProcess] = []
        pipes: list[Connection] = []
        try:
            for rank in range(num_ranks):
                ours, theirs = context.Pipe(duplex=False)
                pipes.append(ours)
                task = (rank, num_ranks, str(Path(folder) / "rendezvous"), os.getpid(), theirs, work, arguments)
                process = context.Process(target=_serve, args=task, daemon=True)
                process.start()
                processes.append(process)
                theirs.close()
            outcomes = _collect(pipes, processes)
        finally:
            _end(processes)
            for pipe in pipes:
                pipe.close()
    errors = {rank: one for rank, one in enumerate(outcomes) if isinstance(one, BaseException)}
    if errors:
        raise errors[min(errors, key=lambda rank: distance_from_cause(rank, errors[rank]))]
    return outcomes


def _collect(pipes: list[Connection], processes: list[SpawnProcess]) -> list[Any]:
    """Wait for every rank's outcome. Once one has failed, the others have only so long to hear of it."""
    outcomes: dict[int, Any] = {}
    has_failed = False
    while len(outcomes) < len(pipes):
        awaited = [pipe for rank, pipe in enumerate(pipes) if rank not in outcomes]
        ready = wait(awaited, timeout=_JOIN_S if has_failed else None)
        if not ready:
            break  # the rest hears of nothing any more
        for rank, pipe in enumerate(pipes):
            if pipe not in ready:
                continue
            try:
                outcomes[rank] = pipe.recv()
            except (EOFError, OSError):
                processes[rank].join(_JOIN_S)
                outcomes[rank] = _vanished(rank, processes[rank].exitcode)
            has_failed = has_failed or isinstance(outcomes[rank], BaseException)
    return [outcomes.get(rank) for rank in range(len(pipes))]


def _vanished(rank: int, code: int | None) -> RankFailed:
    how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exited with {code}"
    return RankFailed(
        f"Rank {rank} ended without a word.",
        f"Its process {how}.",
        "Where memory is short the system kills processes: look at its log (dmesg), or load with fewer ranks.",
        rank,
    )


def _end(processes: list[SpawnProcess]) -> None:
    for process in processes:
        if process.exitcode is None:
            process.join(0.2)
        if process.exitcode is None:
            process.terminate()
    for process in processes:
        process.join(_JOIN_S)
        if process.exitcode is None:
            process.kill()
            process.join()
        process.close()


def _serve(
    rank: int, num_ranks: int, rendezvous: str, parent: int, pipe: Connection, work: Callable[..., Any], arguments: Any
) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return  # it ended before that could be said
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(num_ranks),
        GLOO_SOCKET_IFNAME="lo",
    )
    outcome: Any
    try:
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=num_ranks)
        try:
            outcome = work(*arguments)
        finally:
            dist.destroy_process_group()
    except KeyboardInterrupt:
        return  # it goes to all of the terminal's processes, and the first one says so
    except BaseException as error:  # noqa: BLE001 (the parent raises it)
        outcome = sendable(error)
    with contextlib.suppress(OSError):  # the parent has given up
        pipe.send(outcome)


def sendable(error: BaseException) -> BaseException:
    """Return ``error`` without what only makes sense here, or one with its words where it is not one of ours."""
    if isinstance(error, HeadraceError):
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)
    return RuntimeError(f"{type(error).__name__}: {error}")
