"""How much one interpreter can hand on where processors are many: Headrace's own loop over TLS records of 16 KiB, by many threads, in turns.

    python benchmarks/interpreter.py

A record takes its time here without filling a processor: a sleep of `DECRYPTION_S`, in which the interpreter's lock is let go as it is during decryption. So threads meet each other at the lock as
they would with a processor for each, on a machine with two. What it shows is what the lock costs: each thread that finds it taken is put to sleep and woken again, which takes the system
longer than all that is done under it. The system's sleeps are longer than asked, by what the first row says.
"""

from __future__ import annotations

import ctypes
import threading
import time
from dataclasses import dataclass
from resource import RUSAGE_SELF, getrusage
from typing import Any, cast

from headrace.settings import TransportSettings
from headrace.transport.connection import Inbox
from headrace.transport.patience import Patience
from headrace.transport.turns import Turns

RECORD_BYTES = 16384
ROOM_BYTES = 1 << 20
DECRYPTION_S = 15e-6
"""Of a record, into memory that has to be made: 1.1 CPU seconds per GB, less what is done under the lock."""
SECONDS = 2.0
_SET_TIMER_SLACK = 29
"""``PR_SET_TIMERSLACK`` of prctl(2): by how many nanoseconds a sleep may be longer; threads have it from who starts them."""


class _Records:
    """Plays an SSLSocket, with the same steps in Python around each record."""

    def settimeout(self, timeout_s: float) -> None:
        pass

    def recv_into(self, buffer: memoryview) -> int:
        with memoryview(buffer) as view:
            num_bytes = view.nbytes
        return self._read(num_bytes)

    def _read(self, num_bytes: int) -> int:
        time.sleep(DECRYPTION_S)
        return min(num_bytes, RECORD_BYTES)


@dataclass(frozen=True, slots=True)
class Rate:
    """What threads handed on together."""

    bytes_per_s: float
    cpu_s_per_gb: float
    """For the loop and the lock alone."""


def rate_of(num_threads: int, num_turns: int) -> Rate:
    """Let ``num_threads`` threads hand records on for `SECONDS`, ``num_turns`` of them at a time."""
    ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, 1000, 0, 0, 0)
    turns = Turns(num_turns)
    is_over = threading.Event()
    received = [0] * num_threads

    def work(number: int) -> None:
        inbox = Inbox(cast(Any, _Records()), turns)
        inbox._comes_in_records = True
        inbox.patience = Patience(TransportSettings(), time.monotonic)
        inbox.patience.body_begins()
        room = memoryview(bytearray(ROOM_BYTES))
        while not is_over.is_set():
            received[number] += inbox.receive(room)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(num_threads)]
    start, before = time.perf_counter(), _cpu_s()
    for thread in threads:
        thread.start()
    is_over.wait(SECONDS)
    is_over.set()
    for thread in threads:
        thread.join()
    seconds, cpu_s = time.perf_counter() - start, _cpu_s() - before
    return Rate(sum(received) / seconds, cpu_s / (sum(received) / 1e9))


def _cpu_s() -> float:
    usage = getrusage(RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    alone = rate_of(1, 1)
    print(f"one thread: {RECORD_BYTES / alone.bytes_per_s * 1e6:.0f} µs a record, {alone.bytes_per_s / 1e9:.2f} GB/s")
    for num_threads in (8, 64):
        for num_turns in (1, 2, 4, 8, 16, 64):
            if num_turns <= num_threads:
                rate = rate_of(num_threads, num_turns)
                print(
                    f"{num_threads} threads, {num_turns} turns: {rate.bytes_per_s / 1e9:.2f} GB/s, {rate.cpu_s_per_gb:.2f} CPU s/GB",
                    flush=True,
                )


if __name__ == "__main__":
    main()
