"""Threads beside reader processes, and Run:ai beside both, over TLS and plain, by the number of connections.

    python benchmarks/readers.py                                  # TLS and plain, 4 to 128 connections, three rounds: about 20 minutes
    python benchmarks/readers.py --only tls --connections 4 64 --gigabytes 2

Needs nginx, which serves the files as S3 does from the same cores; what it takes is printed beside. Each measurement is a fresh process that imports what it needs, notes
its CPU time, loads, keeps all tensors, and notes the time again, that of its reader processes included; then a sum over every tensor is compared with the file's.
CPU seconds are what can be compared on a machine that others use, too.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nginx_server import NginxServer
from stream import BUCKET, PREFIX, checksum, make_checkpoint, versions

SUBJECTS = {
    "threads": "Headrace, threads",
    "processes-1": "Headrace, 1 reader process",
    "processes-2": "Headrace, 2 reader processes",
    "processes-4": "Headrace, 4 reader processes",
    "auto": "Headrace as it chooses",
    "runai": "Run:ai Model Streamer",
}
URI = f"s3://{BUCKET}/{PREFIX}"


def _headrace(readers: int | str) -> Callable[[], dict[str, Any]]:
    import headrace
    import headrace.storage.s3

    settings = headrace.Settings.from_environment(progress=False, readers=readers)
    load_state_dict = headrace.load_state_dict
    return lambda: load_state_dict(URI, settings=settings)


def _runai() -> Callable[[], dict[str, Any]]:
    import torch  # noqa: F401
    from runai_model_streamer import SafetensorsStreamer, list_safetensors

    def load() -> dict[str, Any]:
        with SafetensorsStreamer() as streamer:
            streamer.stream_files(sorted(list_safetensors(URI)))
            return dict(streamer.get_tensors())

    return load


def measure(subject: str) -> dict[str, Any]:
    """Run one subject in this process and return its figures."""
    if subject == "runai":
        load = _runai()
    else:
        load = _headrace({"threads": 0, "auto": "auto"}.get(subject) if "-" not in subject else int(subject[-1:]))
    before, start = _cpu_s(), time.perf_counter()
    tensors = load()
    seconds, cpu_s = time.perf_counter() - start, _cpu_s() - before
    return {
        "seconds": seconds,
        "cpu_s": cpu_s,
        "bytes": sum(tensor.nbytes for tensor in tensors.values()),
        "sum": checksum(tensors),
    }


def _cpu_s() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def run(options: argparse.Namespace, *, tls: bool, expected_sum: int) -> list[str]:
    """Measure all subjects against one server, in turn, and return a Markdown table."""
    lines = [
        f"| {'TLS' if tls else 'plain'}, connections | subject | seconds | GB/s | CPU s/GB | server CPU s/GB |",
        "|---|---|---|---|---|---|",
    ]
    with NginxServer(options.folder / "checkpoint", bucket=BUCKET, prefix=PREFIX, tls=tls) as server:
        for connections in options.connections:
            figures: dict[str, list[dict[str, Any]]] = {subject: [] for subject in options.subjects}
            for _ in range(options.rounds):
                for subject, found in figures.items():
                    found.append(_run_one(subject, connections, server))
                    if found[-1]["sum"] != expected_sum:
                        raise SystemExit(f"{subject} loaded other bytes than the files hold")
            for subject, found in figures.items():
                middle = {key: statistics.median(one[key] for one in found) for key in found[0]}
                gigabytes = middle["bytes"] / 1e9
                least, most = min(one["seconds"] for one in found), max(one["seconds"] for one in found)
                lines.append(
                    f"| {connections} | {SUBJECTS[subject]} | {middle['seconds']:.2f} ({least:.2f}–{most:.2f}) | {gigabytes / middle['seconds']:.2f} "
                    f"| {middle['cpu_s'] / gigabytes:.2f} | {middle['server_s'] / gigabytes:.2f} |"
                )
                print(lines[-1], file=sys.stderr, flush=True)
    return lines


def _run_one(subject: str, connections: int, server: NginxServer) -> dict[str, Any]:
    environment = {
        **os.environ,
        **server.environment(),
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--connections", type=int, nargs="+", default=[4, 8, 16, 32, 64, 128])
    parser.add_argument("--subjects", nargs="+", choices=list(SUBJECTS), default=[s for s in SUBJECTS if s != "auto"])
    parser.add_argument("--only", choices=["tls", "plain"])
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
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    lines = [
        f"# Reader processes, {options.gigabytes:g} GB, {date}",
        "",
        f"Command: `python benchmarks/readers.py {' '.join(sys.argv[1:])}`. {options.rounds} rounds, alternating; medians (least–most).",
        f"Machine: {os.cpu_count()} cores, {platform.machine()}, {platform.system()} {platform.release()}, client and server on the same cores. {versions()}.",
        "",
    ]
    for scheme in [options.only] if options.only else ["tls", "plain"]:
        lines += [*run(options, tls=scheme == "tls", expected_sum=expected_sum), ""]
    options.results.mkdir(exist_ok=True)
    (options.results / f"readers_{options.machine}_{date}.md").write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
