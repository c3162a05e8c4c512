"""One process that fills the cache of side files; `test_sidecache` starts several: ``python cache_worker.py MODE CACHE_DIR``.

It says ``ready``, waits for a line, and prints the folder and how many objects it has read. Modes: ``locked``, ``unlocked`` (locks that do nothing, as
on some network file systems), ``killed`` (ends without warning in the middle of the third file).
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from checkpoint.memory_store import MemoryStore
from headrace.checkpoint import mirror
from headrace.checkpoint.sidefiles import SideFiles
from headrace.checkpoint.sidelisting import list_side_files
from headrace.storage import StoredObject

OBJECTS = {f"{number}.txt": bytes([65 + number]) * 50_000 for number in range(6)} | {"sub/config.json": b"{}"}
NUM_WRITTEN = 0


class SlowStore(MemoryStore):
    """Takes long enough that all processes are at it together."""

    def read_object(self, stored: StoredObject, *, start: int = 0, stop: int | None = None) -> bytes:
        time.sleep(0.05)
        return super().read_object(stored, start=start, stop=stop)


def write_half_of_the_third(path: Path, content: bytes) -> None:
    global NUM_WRITTEN
    NUM_WRITTEN += 1
    if NUM_WRITTEN == 3:
        path.write_bytes(content[: len(content) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    path.write_bytes(content)


def main(mode: str, cache_dir: str) -> None:
    if mode == "unlocked":
        fcntl.flock = lambda *arguments: None
    if mode == "killed":
        mirror._write = write_half_of_the_third
    store = SlowStore(OBJECTS)
    side_files = SideFiles(store, list_side_files(store, store.list_level()).objects, cache_dir=Path(cache_dir))
    print("ready", flush=True)
    sys.stdin.readline()
    folder = side_files.folder()
    print(folder, store.reads.total(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
