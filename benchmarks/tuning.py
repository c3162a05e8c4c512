"""What was tried to make a connection or a byte cheaper, each beside doing without: TLS sessions that are resumed, larger receive buffers, huge pages.

    python benchmarks/tuning.py            # about three minutes

Needs nginx. CPU seconds are this process's, medians of rounds that alternate. Reads go through Headrace's own pool of threads, into memory that is there already, unless pages are the point.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import resource
import socket
import ssl
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import headrace.storage.s3  # noqa: F401
from headrace.settings import Settings
from headrace.storage import open_store
from headrace.transport import RangeRead, ReadJob, Surroundings, open_pool
from headrace.transport.stopping import StopSwitch
from nginx_server import NginxServer
from stream import BUCKET, PREFIX, make_checkpoint

Measure = Callable[[], float]
NUM_HANDSHAKES = 200
NUM_CONNECTIONS = 8
_HUGE_BYTES = 2 << 20


def rounds_of(subjects: dict[str, Measure], num_rounds: int) -> dict[str, float]:
    """Return the median of each subject, measured in turn."""
    found: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(num_rounds):
        for name, measure in subjects.items():
            found[name].append(measure())
    return {name: statistics.median(values) for name, values in found.items()}


def handshake_ms(server: NginxServer, *, resumed: bool) -> float:
    """Return this process's CPU milliseconds for a handshake, the request that follows it left out."""
    context = ssl.create_default_context(cafile=str(server.ca_file))
    session: ssl.SSLSession | None = None
    cpu_s, num_resumed = 0.0, 0
    for _ in range(NUM_HANDSHAKES):
        plain = socket.create_connection(("127.0.0.1", server.port))
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        before = time.thread_time()
        secured = context.wrap_socket(plain, server_hostname="127.0.0.1", session=session)
        cpu_s += time.thread_time() - before
        num_resumed += secured.session_reused is True
        secured.sendall(b"HEAD / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        secured.recv(4096)  # What makes a session resumable comes after the handshake in TLS 1.3.
        if resumed and session is None:
            session = secured.session
        secured.close()
    assert num_resumed == (NUM_HANDSHAKES - 1 if resumed else 0), num_resumed
    return cpu_s / NUM_HANDSHAKES * 1e3


def read_cpu_s(server: NginxServer, settings: Settings, surroundings: Surroundings, memory: memoryview) -> float:
    """Read the checkpoint's weights into ``memory`` and return the CPU seconds for each GB."""
    with contextlib.closing(open_store(f"s3://{BUCKET}/{PREFIX}", settings=settings)) as store:
        objects = [one for one in store.list_level().objects if one.key.endswith(".safetensors")]
        ended = threading.Semaphore(0)
        errors: list[BaseException] = []

        def done(error: BaseException | None) -> None:
            errors.extend([] if error is None else [error])
            ended.release()

        num_reads = offset = 0
        before = _cpu_s()
        with open_pool(store, settings.transport, surroundings=surroundings) as pool:
            for stored in objects:
                for start in range(0, stored.size_bytes, settings.transport.read_bytes):
                    stop = min(start + settings.transport.read_bytes, stored.size_bytes)
                    piece = memory[offset : offset + stop - start]
                    pool.submit(ReadJob(RangeRead(stored, start, stop), partial(lambda piece: [piece], piece), done))
                    offset, num_reads = offset + stop - start, num_reads + 1
            for _ in range(num_reads):
                ended.acquire()
        for error in errors:
            raise error
        return (_cpu_s() - before) / (offset / 1e9)


def plain_connect(
    host: str, port: int, timeout_s: float, switch: StopSwitch, *, buffer_bytes: int = 0
) -> socket.socket:
    """Connect with the system's own receive buffer, or one that is set."""
    sock = socket.create_connection((host, port), timeout_s)
    switch.watch(sock)
    if buffer_bytes:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    return sock


def fresh_memory(num_bytes: int, advice: int | None, *, at_hand: bool = False) -> memoryview:
    """Return memory that no page of is there yet; with ``at_hand`` the system had as much of it a moment ago, and need not fetch it from the host of a virtual machine."""
    if at_hand:
        with _mapping(num_bytes + 2 * _HUGE_BYTES, mmap.MADV_HUGEPAGE) as filled:
            for start in range(0, len(filled) - _HUGE_BYTES, _HUGE_BYTES):
                filled[start : start + _HUGE_BYTES] = bytes(_HUGE_BYTES)
    return memoryview(_mapping(num_bytes, advice))


def _mapping(num_bytes: int, advice: int | None) -> mmap.mmap:
    mapped = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if advice is not None:
        mapped.madvise(advice)
    return mapped


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "headrace-bench-readers")
    options = parser.parse_args()
    make_checkpoint(options.folder / "checkpoint", int(options.gigabytes * 1e9))
    num_bytes = sum(path.stat().st_size for path in (options.folder / "checkpoint").glob("*.safetensors"))
    place = partial(NginxServer, options.folder / "checkpoint", bucket=BUCKET, prefix=PREFIX)
    warm = memoryview(bytearray(num_bytes))
    for tls in (True, False):
        with place(tls=tls) as server:
            os.environ.pop("AWS_CA_BUNDLE", None)
            os.environ.update(server.environment())
            settings = Settings.from_environment(num_connections=NUM_CONNECTIONS, progress=False)
            settings = replace(settings, transport=replace(settings.transport, hedge_after_s=0.0))
            scheme = "TLS" if tls else "plain"
            if tls:
                subjects = {
                    "handshake, whole": partial(handshake_ms, server, resumed=False),
                    "handshake, session resumed": partial(handshake_ms, server, resumed=True),
                }
                for name, value in rounds_of(subjects, options.rounds).items():
                    print(f"{name}: {value:.2f} CPU ms", flush=True)
            read = partial(read_cpu_s, server, settings)
            subjects = {
                f"{scheme}, receive buffer of the system": partial(read, Surroundings(connect=plain_connect), warm),
                f"{scheme}, receive buffer of 4 MiB, set": partial(
                    read, Surroundings(connect=partial(plain_connect, buffer_bytes=4 << 20)), warm
                ),
                f"{scheme}, receive window as Headrace widens it": partial(read, Surroundings(), warm),
            }
            for name, advice in (("pages of 4 KiB", None), ("huge pages", mmap.MADV_HUGEPAGE)):
                for where, at_hand in (("", False), (", at hand", True)):
                    memory = partial(fresh_memory, num_bytes, advice, at_hand=at_hand)
                    subjects[f"{scheme}, fresh memory, {name}{where}"] = lambda memory=memory, read=read: read(
                        Surroundings(), memory()
                    )
            for name, value in rounds_of(subjects, options.rounds).items():
                print(f"{name}: {value:.2f} CPU s/GB", flush=True)


if __name__ == "__main__":
    main()
