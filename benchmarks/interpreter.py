"""How much one interpreter can hand on: Headrace's own loop over records of 16 KiB, without a network and without decryption, by many threads.

    python benchmarks/interpreter.py

Each record comes from a system call that lets go of the interpreter's lock, as OpenSSL's does, and takes a microsecond instead of eighteen. So what is measured is what threads take of the
lock, and of each other: an upper bound for TLS in one process, whatever cores it has. As many decrypt at a time as there are turns (`headrace.transport.turns`).
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any, cast

from headrace.settings import TransportSettings
from headrace.transport.connection import Inbox
from headrace.transport.patience import Patience
from headrace.transport.processors import usable_processors
from headrace.transport.turns import MOST_TURNS, turns_for

RECORD_BYTES = 16384
ROOM_BYTES = 1 << 20


class _Records:
    """Plays an SSLSocket, with the same steps in Python around each record."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def settimeout(self, timeout_s: float) -> None:
        pass

    def recv_into(self, buffer: memoryview) -> int:
        with memoryview(buffer) as view:
            num_bytes = view.nbytes
        return self._read(num_bytes, buffer)

    def _read(self, num_bytes: int, buffer: memoryview) -> int:
        return os.readv(self._descriptor, [buffer[: min(num_bytes, RECORD_BYTES)]])


def bytes_per_s(num_threads: int, num_turns: int, num_bytes: int = 2_000_000_000) -> float:
    """Return how many bytes per second ``num_threads`` threads hand on together, ``num_turns`` at a time."""
    turns = threading.Semaphore(num_turns)
    descriptor = os.open("/dev/zero", os.O_RDONLY)

    def work() -> None:
        inbox = Inbox(cast(Any, _Records(descriptor)), turns)
        inbox._comes_in_records = True
        inbox.patience = Patience(TransportSettings(), time.monotonic)
        inbox.patience.body_begins()
        room = memoryview(bytearray(ROOM_BYTES))
        for _ in range(num_bytes // num_threads // ROOM_BYTES):
            filled = 0
            while filled < ROOM_BYTES:
                filled += inbox.receive(room[filled:])

    threads = [threading.Thread(target=work) for _ in range(num_threads)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    os.close(descriptor)
    return num_threads * (num_bytes // num_threads // ROOM_BYTES) * ROOM_BYTES / seconds


def main() -> None:
    choices = {"as here": turns_for(usable_processors()), "most": MOST_TURNS, "no limit": 1000}
    for num_threads in (1, 2, 4, 8, 16, 32, 64, 128):
        rates = (f"{bytes_per_s(num_threads, turns) / 1e9:4.1f} ({what})" for what, turns in choices.items())
        print(f"{num_threads:4d} threads, GB/s by turns: {', '.join(rates)}", flush=True)


if __name__ == "__main__":
    main()
