"""Progress on a terminal, in a file, and into a pipe that nobody reads."""

from __future__ import annotations

import os
import pty
import threading
import time
from pathlib import Path

import pytest

from headrace.progress import LoadProgress
from headrace.streaming.display import ProgressDisplay, write_line


def progress() -> LoadProgress:
    state = LoadProgress(clock=lambda: 0.0)
    state.phase, state.bytes_wanted, state.bytes_done = "weights", 2_000_000_000, 500_000_000
    return state


def wait_for(condition: object, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def test_without_a_terminal_it_is_one_plain_line_every_few_seconds(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("w") as stream, ProgressDisplay(progress(), stream=stream, line_interval_s=0.01):
        wait_for(lambda: path.read_text().count("\n") >= 2)
    assert set(path.read_text().splitlines()) == {"headrace: weights: 500 MB of 2 GB (25%), 0.00 s"}
    assert path.read_bytes().isascii()


def test_a_pipe_that_nobody_reads_does_not_hold_the_load_up() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    try:
        while True:
            os.write(writing, b"x" * 65536)
    except BlockingIOError:
        os.set_blocking(writing, True)
    with os.fdopen(reading, "rb"), os.fdopen(writing, "w") as stream:
        start = time.monotonic()
        with ProgressDisplay(progress(), stream=stream, line_interval_s=0.001):
            time.sleep(0.05)
        assert time.monotonic() - start < 5
        assert write_line(stream, "x") is False
    assert not [thread for thread in threading.enumerate() if thread.name == "headrace-progress"]


def test_on_a_terminal_it_is_a_bar() -> None:
    leader, follower = pty.openpty()
    with os.fdopen(leader, "rb", buffering=0) as screen, os.fdopen(follower, "w") as stream:
        seen = bytearray()
        with ProgressDisplay(progress(), stream=stream):
            wait_for(lambda: seen.extend(screen.read(4096)) or b"GB" in seen)
    assert b"weights" in seen and b"0.5/2.0 GB" in seen


def test_a_display_that_is_switched_off_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("w") as stream, ProgressDisplay(progress(), stream=stream, enabled=False, line_interval_s=0.001):
        time.sleep(0.02)
    assert path.read_text() == ""


def test_progress_counts_phases_and_speaks_plainly() -> None:
    now = [0.0]
    state = LoadProgress(clock=lambda: now[0])
    with state.during("opening"):
        now[0] = 2.0
        assert state.line() == "opening, 2.00 s"
    with state.during("opening"):
        now[0] = 3.0
    assert state.phases == {"opening": 3.0} and state.phase == "waiting"
    state.bytes_wanted = 100
    state.arrived(40)
    assert state.to_dict() == {"phase": "waiting", "bytes_done": 40, "bytes_wanted": 100, "seconds": 3.0}


def test_only_the_first_rank_of_a_group_shows_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """origin A11."""
    import torch.distributed as group

    monkeypatch.setattr(group, "is_initialized", lambda: True)
    for rank in (0, 1):
        monkeypatch.setattr(group, "get_rank", lambda rank=rank: rank)
        path = tmp_path / str(rank)
        with path.open("w") as stream, ProgressDisplay(progress(), stream=stream, line_interval_s=0.001):
            if rank == 0:
                wait_for(lambda path=path: path.read_text())
            else:
                time.sleep(0.05)
    assert (tmp_path / "0").read_text() and not (tmp_path / "1").read_text()
