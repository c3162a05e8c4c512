"""Threads beside reader processes, and awscrt, obstore and Run:ai beside both: over TLS and plain, by the number of connections, and over connections that are slow and far.

    python benchmarks/readers.py                                  # everything, again and again until eleven minutes are over
    python benchmarks/readers.py --minutes 30                     # more rounds
    python benchmarks/readers.py --cases tls tls-slow --connections 8 --subjects threads awscrt

Needs nginx, which serves the files as S3 does from the same cores; what it takes is printed beside. The slow cases give each connection 100 MB/s and each request a first byte that is 20 ms late
(`nginx_server.Link`). Each measurement is a fresh process that imports what it needs, notes its CPU time, loads, keeps all it loaded, and notes the time again, that of its reader processes
included; then a sum over every tensor is compared with the file's. CPU seconds are what can be compared on a machine that others use, too. Peers: see `benchmarks/fetching.py`.

Memory is the most that the process and its children had at one time beyond what it had after the imports, files in memory included: 1.0 times the bytes is the least that is possible.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fetching import SUBJECTS
from headrace.transport.turns import MOST_TURNS
from interpreter import rate_of as interpreter_rate_of
from memory_watch import MemoryWatch, shared_bytes
from nginx_server import Link, NginxServer
from stream import BUCKET, PREFIX, checksum, make_checkpoint, versions

DEFAULT_SUBJECTS = ("threads", "processes-2", "processes-4", "awscrt", "obstore", "runai")


@dataclass(frozen=True, slots=True)
class Case:
    """One server to load from, and over how many connections by default."""

    label: str
    tls: bool
    link: Link | None
    connections: tuple[int, ...]


CASES = {
    "tls": Case("TLS", True, None, (4, 8, 64, 128)),
    "tls-slow": Case("TLS, slow and far", True, Link(), (4, 16, 64, 128)),
    "plain": Case("plain", False, None, (8, 64)),
    "plain-slow": Case("plain, slow and far", False, Link(), (8, 64)),
}
Cell = tuple[str, int, str]
"""A case, a number of connections, a subject."""


def measure(subject: str) -> dict[str, Any]:
    """Run one subject in this process and return its figures."""
    load, to_tensors = SUBJECTS[subject][1]()
    with MemoryWatch() as memory:
        before, start = _cpu_s(), time.perf_counter()
        loaded = load()
        seconds, cpu_s = time.perf_counter() - start, _cpu_s() - before
    tensors = to_tensors(loaded)
    return {
        "seconds": seconds,
        "cpu_s": cpu_s,
        "bytes": sum(tensor.nbytes for tensor in tensors.values()),
        "sum": checksum(tensors),
        "memory_bytes": memory.peak_bytes - memory.before_bytes + shared_bytes(),
    }


def _cpu_s() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def run(options: argparse.Namespace, expected_sum: int) -> dict[Cell, list[dict[str, Any]]]:
    """Measure every cell in turn, and again while the time is not over. Return those that were reached."""
    end = time.monotonic() + 60 * options.minutes
    cells = [
        (case, connections, subject)
        for case in options.cases
        for connections in options.connections or CASES[case].connections
        for subject in options.subjects
    ]
    figures: dict[Cell, list[dict[str, Any]]] = {cell: [] for cell in cells}
    with ExitStack() as stack:
        servers = {}
        for case in options.cases:
            server = NginxServer(
                options.folder / "checkpoint",
                bucket=BUCKET,
                prefix=PREFIX,
                tls=CASES[case].tls,
                link=CASES[case].link,
            )
            servers[case] = stack.enter_context(server)
        for _ in range(options.rounds):
            for cell in cells:
                case, connections, subject = cell
                if time.monotonic() > end:
                    missing = sum(not found for found in figures.values())
                    print(f"The time is over; {missing} of {len(cells)} were not reached.", file=sys.stderr)
                    return {cell: found for cell, found in figures.items() if found}
                found = _run_one(subject, connections, servers[case])
                if found["sum"] != expected_sum:
                    raise SystemExit(f"{subject} loaded other bytes than the files hold")
                figures[cell].append(found)
                print(_row(cell, [found]), file=sys.stderr, flush=True)
    return figures


def _run_one(subject: str, connections: int, server: NginxServer) -> dict[str, Any]:
    environment = {
        **os.environ,
        **server.environment(),
        "BENCH_CONNECTIONS": str(connections),
        "HEADRACE_CONNECTIONS": str(connections),
        "RUNAI_STREAMER_CONCURRENCY": str(connections),
        "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
    }
    before = server.cpu_s()
    command = [sys.executable, __file__, "--measure", subject]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise SystemExit(f"{subject} failed:\n{done.stderr[-3000:]}")
    return {**json.loads(done.stdout.splitlines()[-1]), "server_s": server.cpu_s() - before}


def tables(figures: dict[Cell, list[dict[str, Any]]]) -> list[str]:
    """Return a Markdown table for each case."""
    lines: list[str] = []
    for case in dict.fromkeys(cell[0] for cell in figures):
        lines += [
            f"| {CASES[case].label}, connections | subject | rounds | seconds | GB/s | CPU s/GB | server CPU s/GB | memory, × the bytes |",
            "|---|---|---|---|---|---|---|---|",
            *(_row(cell, found) for cell, found in figures.items() if cell[0] == case),
            "",
        ]
    return lines


def _row(cell: Cell, found: Sequence[dict[str, Any]]) -> str:
    _, connections, subject = cell
    gigabytes = found[0]["bytes"] / 1e9
    seconds = _median(found, "seconds")
    least, most = min(one["seconds"] for one in found), max(one["seconds"] for one in found)
    spread = f" ({least:.2f}–{most:.2f})" if len(found) > 1 else ""
    return (
        f"| {connections} | {SUBJECTS[subject][0]} | {len(found)} | {seconds:.2f}{spread} | {gigabytes / seconds:.2f} "
        f"| {_median(found, 'cpu_s') / gigabytes:.2f} | {_median(found, 'server_s') / gigabytes:.2f} "
        f"| {_median(found, 'memory_bytes') / found[0]['bytes']:.2f} |"
    )


def _peers() -> str:
    return ", ".join(f"{package} {version(package)}" for package in ("awscrt", "obstore"))


def _median(found: Sequence[dict[str, Any]], key: str) -> float:
    return statistics.median(one[key] for one in found)


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine that was not measured on, for an extrapolation. Rates in GB/s."""

    num_cores: int = 32
    link: float = 12.5


def extrapolation(figures: dict[Cell, list[dict[str, Any]]], machine: Machine) -> list[str]:
    """Return what the CPU seconds over TLS and the interpreter's loop come to on ``machine``: the least of its link, of its cores and, for one interpreter, of that. Lines of Markdown."""
    cells = [cell for cell in figures if cell[0] == "tls" and cell[2].startswith(("threads", "processes"))]
    if not cells:
        return []
    lines = [
        f"On {machine.num_cores} such cores and a link of {8 * machine.link:g} Gbit/s ({machine.link:g} GB/s), computed from the rows for TLS above: CPU seconds per GB as they are there, every core as quick "
        "as these and free, memory no limit, the server none either. What one interpreter hands on at most is measured on these cores with sleeps for decryption (`benchmarks/interpreter.py`), which are twice as long: it is the least that may be counted on.",
        "",
        "| TLS, connections | subject | cores for the whole link | GB/s that the cores allow | GB/s that interpreters hand on at most | GB/s |",
        "|---|---|---|---|---|---|",
    ]
    for cell in cells:
        _, connections, subject = cell
        num_processes = 0 if subject == "threads" else int(subject.rpartition("-")[2])
        found = figures[cell]
        cpu_s = _median(found, "cpu_s") / (found[0]["bytes"] / 1e9)
        by_cores = machine.num_cores / cpu_s
        threads_each = math.ceil(connections / max(num_processes, 1))
        each = statistics.median(interpreter_rate_of(threads_each, MOST_TURNS).bytes_per_s for _ in range(3))
        by_interpreters = max(num_processes, 1) * each / 1e9
        most = min(machine.link, by_cores, by_interpreters)
        lines.append(
            f"| {connections} | {SUBJECTS[subject][0]} | {machine.link * cpu_s:.0f} | {by_cores:.1f} | {by_interpreters:.1f} | {most:.1f} |"
        )
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=11.0, help="Begin no further measurement after so long.")
    parser.add_argument("--rounds", type=int, default=5, help="At most so many of each.")
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--connections", type=int, nargs="+")
    parser.add_argument("--subjects", nargs="+", choices=list(SUBJECTS), default=list(DEFAULT_SUBJECTS))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "headrace-bench-readers")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--machine", default=f"{os.cpu_count()}-cores")
    parser.add_argument("--measure", choices=list(SUBJECTS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return
    make_checkpoint(options.folder / "checkpoint", int(options.gigabytes * 1e9))
    from safetensors.torch import load_file

    expected: dict[str, Any] = {}
    for path in sorted((options.folder / "checkpoint").glob("*.safetensors")):
        expected.update(load_file(path))
    expected_sum = checksum(expected)
    expected.clear()
    figures = run(options, expected_sum)
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    lines = [
        f"# Fetching {options.gigabytes:g} GB: threads, reader processes, peers, {date}",
        "",
        f"Command: `python benchmarks/readers.py {' '.join(sys.argv[1:])}`. Rounds alternate; medians (least–most).",
        f"Machine: {os.cpu_count()} cores, {platform.machine()}, {platform.system()} {platform.release()}, client and server on the same cores. {versions()}, {_peers()}.",
        "",
        *tables(figures),
        *extrapolation(figures, Machine()),
    ]
    options.results.mkdir(exist_ok=True)
    (options.results / f"fetching_{options.machine}_{date}.md").write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
