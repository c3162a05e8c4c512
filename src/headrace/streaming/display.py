"""Shows a load's progress: a bar on a terminal, otherwise one plain line every few seconds. Runs in a thread of its own and never holds the load up."""

from __future__ import annotations

import os
import select
import sys
import threading
from types import TracebackType
from typing import TextIO

from headrace.progress import LoadProgress

_BAR_INTERVAL_S = 0.1
_LINE_INTERVAL_S = 5.0
_STOP_WAIT_S = 1.0


class ProgressDisplay:
    """A context manager that shows ``progress`` on ``stream`` (default: standard error) for as long as the block runs.

    A line that the other end does not take at once is dropped: a log pipe that nobody reads costs nothing. A display that cannot be stopped within a second is
    left behind as a daemon thread. Where `torch.distributed` is initialised, only the first rank shows anything.
    """

    def __init__(
        self,
        progress: LoadProgress,
        *,
        stream: TextIO | None = None,
        enabled: bool = True,
        line_interval_s: float = _LINE_INTERVAL_S,
    ) -> None:
        self._progress = progress
        self._stream = sys.stderr if stream is None else stream
        self._enabled = enabled and self._stream is not None and is_first_rank()
        self._line_interval_s = line_interval_s
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> ProgressDisplay:
        if self._enabled:
            show = self._show_bar if self._stream.isatty() else self._show_lines
            self._thread = threading.Thread(target=show, name="headrace-progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_STOP_WAIT_S)
            self._thread = None

    def _show_lines(self) -> None:
        while not self._stop.wait(self._line_interval_s):
            write_line(self._stream, f"headrace: {self._progress.line()}")

    def _show_bar(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        bar = Progress(*columns, console=Console(file=self._stream), auto_refresh=False, transient=True)
        task = bar.add_task(self._progress.phase, total=None)
        bar.start()
        try:
            while not self._stop.wait(_BAR_INTERVAL_S):
                now = self._progress
                bar.update(task, description=now.phase, completed=now.bytes_done, total=now.bytes_wanted or None)
                bar.refresh()
        finally:
            bar.stop()


def is_first_rank() -> bool:
    """Whether this process should show progress: it is no rank of a group, or the group's first."""
    group = sys.modules.get("torch.distributed")
    if group is None or not group.is_available() or not group.is_initialized():
        return True
    return bool(group.get_rank() == 0)


def write_line(stream: TextIO, line: str) -> bool:
    """Write one ASCII line, unless that would block; return whether it was written."""
    data = line.encode("ascii", "replace") + b"\n"
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # a stream that is no file: a test's, a notebook's
        stream.write(data.decode("ascii"))
        return True
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    ready = poll.poll(0)
    if not ready or not ready[0][1] & select.POLLOUT:
        return False
    try:
        os.write(descriptor, data[: select.PIPE_BUF])  # a pipe that polls as writable takes this much without blocking
    except OSError:
        return False
    return True
