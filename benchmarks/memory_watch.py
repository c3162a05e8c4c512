"""The most memory that this process and its children had of their own while something ran, and what they share. For benchmarks."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType


class MemoryWatch:
    """Samples while the context lasts; ``peak_bytes`` is the most anonymous memory of the process and its children together, and ``before_bytes`` what it was at first.

    Files in memory are not in it, since several processes map the same ones: add `shared_bytes`, once they are mapped and touched.
    """

    def __init__(self, every_s: float = 0.05) -> None:
        self.peak_bytes = self.before_bytes = 0
        self._every_s = every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self.before_bytes = self.peak_bytes = _private_bytes()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            self.peak_bytes = max(self.peak_bytes, _private_bytes())
        self.peak_bytes = max(self.peak_bytes, _private_bytes())


def shared_bytes() -> int:
    """Return this process's part of what it has mapped of files in memory, in bytes: all of it where nobody else maps it."""
    return _figure(Path("/proc/self/smaps_rollup"), "Pss_Shmem:")


def _private_bytes() -> int:
    """Return the anonymous memory of this process and its children. One that is about to become another program has this one's memory still, which does not count twice."""
    own = Path("/proc/self/cmdline").read_bytes()
    children = [pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]
    others = [pid for pid in children if _command(pid) != own]
    return sum(_figure(Path(f"/proc/{pid}/status"), "RssAnon:") for pid in [os.getpid(), *others])


def _command(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # The process has ended.
        return b""


def _figure(path: Path, label: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:  # The process has ended.
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(label)), 0)
