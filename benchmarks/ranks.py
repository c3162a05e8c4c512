"""Several processes of one machine load the same checkpoint: each by itself, or each byte once, beside one process and Run:ai's distributed mode.

    python benchmarks/ranks.py                      # 2 GB, two and four ranks, five rounds, from nginx as an S3 store
    python benchmarks/ranks.py --only seaweed --rounds 3

Every measurement is a set of fresh processes in a gloo group on loopback. Each imports what it needs and prepares; they meet at a barrier, load all tensors and keep them, and note
the time until the last of them is done, and the CPU time of all. A sum over every tensor is checked on each rank. Bytes from the store are those that the server's own workers have
sent, where it says so (nginx's log), which counts every client alike.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from headrace.cli.ranks import on_ranks
from nginx_server import NginxServer
from stream import BUCKET, PREFIX, checksum, make_checkpoint, measure, upload, versions

SUBJECTS = {
    "one": ("one process", 1),
    "each-2": ("2 ranks, each reads all", 2),
    "broadcast-2": ("2 ranks, each byte once, broadcast over gloo", 2),
    "shared-2": ("2 ranks, each byte once, memory that both map", 2),
    "runai-2": ("Run:ai Model Streamer, 2 ranks, is_distributed", 2),
    "each-4": ("4 ranks, each reads all", 4),
    "broadcast-4": ("4 ranks, each byte once, broadcast over gloo", 4),
    "shared-4": ("4 ranks, each byte once, memory that all map", 4),
    "runai-4": ("Run:ai Model Streamer, 4 ranks, is_distributed", 4),
}


def load_on_rank(subject: str, uri: str) -> dict[str, Any]:
    """Load everything on this rank, and return its seconds, CPU seconds and sum."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    load = _loader(subject, uri)
    dist.barrier()
    start, before = time.perf_counter(), _cpu_s()
    tensors = load()
    own_s = time.perf_counter() - start
    dist.barrier()
    return {
        "seconds": time.perf_counter() - start,
        "own_s": own_s,
        "cpu_s": _cpu_s() - before,
        "sum": checksum(tensors),
        "bytes": sum(tensor.nbytes for tensor in tensors.values()),
    }


def _loader(subject: str, uri: str) -> Any:
    kind = subject.partition("-")[0]
    if kind == "runai":
        from runai_model_streamer import SafetensorsStreamer, list_safetensors

        def load_with_runai() -> dict[str, Any]:
            with SafetensorsStreamer() as streamer:
                streamer.stream_files(sorted(list_safetensors(uri)), is_distributed=True)
                return dict(streamer.get_tensors())

        return load_with_runai
    import headrace
    import headrace.storage.s3
    from headrace.checkpoint import open_checkpoint
    from headrace.streaming import DistributedStream, Lockstep
    from headrace.streaming.processgroup import GroupLink

    settings = headrace.Settings.from_environment(progress=False)
    if kind in ("one", "each"):
        return lambda: headrace.load_state_dict(uri, settings=settings, distributed=False)

    def load_together() -> dict[str, Any]:
        with (
            open_checkpoint(uri, settings=settings) as checkpoint,
            DistributedStream(checkpoint, lockstep=Lockstep(GroupLink()), settings=settings, exchange=kind) as stream,  # type: ignore[arg-type]
        ):
            return dict(stream)

    return load_together


def _cpu_s() -> float:
    times = os.times()
    return times.user + times.system


def measure_ranks(subject: str, uri: str) -> dict[str, Any]:
    """Run one subject's ranks, and return what they came to together."""
    each = on_ranks(SUBJECTS[subject][1], load_on_rank, subject, uri)
    assert len({one["sum"] for one in each}) == 1, "the ranks loaded different bytes"
    return {
        "seconds": max(one["seconds"] for one in each),
        "cpu_s": sum(one["cpu_s"] for one in each),
        "sum": each[0]["sum"],
        "bytes": each[0]["bytes"],
    }


def run_rounds(uri: str, environment: dict[str, str], rounds: int, sent: Any) -> dict[str, list[dict[str, Any]]]:
    """Run every subject once per round, in turn; ``sent`` returns the bytes that the server has sent so far, or None."""
    figures: dict[str, list[dict[str, Any]]] = {subject: [] for subject in SUBJECTS}
    for number in range(rounds):
        for subject in SUBJECTS:
            before = sent()
            command = [sys.executable, __file__, "--measure", subject, "--source", uri]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
            if done.returncode and subject.startswith("runai"):
                last = done.stderr.strip().splitlines()[-1]
                print(f"round {number + 1} {subject:12} failed: {last}", file=sys.stderr)
                continue
            if done.returncode:
                raise SystemExit(f"{subject} failed:\n{done.stderr[-3000:]}")
            result = json.loads(done.stdout.splitlines()[-1])
            after = sent()
            result["sent"] = None if after is None else after - before
            figures[subject].append(result)
            print(
                f"round {number + 1} {subject:12} {result['seconds']:.2f} s {result['cpu_s']:.1f} CPU s",
                file=sys.stderr,
            )
    return figures


def table(figures: dict[str, list[dict[str, Any]]], source: str, num_bytes: int) -> list[str]:
    """Return the medians as the lines of a Markdown table."""
    base = statistics.median(one["seconds"] for one in figures["one"])
    lines = [
        f"| from {source} | seconds | × one process | CPU s, all ranks | bytes from the store, × the checkpoint |",
        "|---|---|---|---|---|",
    ]
    for subject, results in figures.items():
        if not results:
            lines.append(f"| {SUBJECTS[subject][0]} | failed in every round | – | – | – |")
            continue
        seconds = statistics.median(one["seconds"] for one in results)
        low, high = min(one["seconds"] for one in results), max(one["seconds"] for one in results)
        cpu_s = statistics.median(one["cpu_s"] for one in results)
        sent = [one["sent"] for one in results if one["sent"] is not None]
        share = f"{statistics.median(sent) / num_bytes:.2f}" if sent else "–"
        lines.append(
            f"| {SUBJECTS[subject][0]} | {seconds:.2f} ({low:.2f}–{high:.2f}) | {seconds / base:.2f} | {cpu_s:.2f} | {share} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--only", choices=["nginx", "seaweed"])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "headrace-bench")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--machine", default=f"{os.cpu_count()}-cores")
    parser.add_argument("--measure", choices=sorted(SUBJECTS), help=argparse.SUPPRESS)
    parser.add_argument("--source", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure_ranks(options.measure, options.source)))
        return
    checkpoint = options.folder / "checkpoint"
    make_checkpoint(checkpoint, int(options.gigabytes * 1e9))
    expected = measure("safetensors", str(checkpoint))
    common = {**os.environ, "HEADRACE_PROGRESS": "0", "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0"}
    uri = f"s3://{BUCKET}/{PREFIX}"
    lines: list[str] = []
    if options.only != "seaweed":
        with NginxServer(checkpoint, bucket=BUCKET, prefix=PREFIX) as fast:
            figures = run_rounds(uri, {**common, **fast.environment()}, options.rounds, fast.bytes_sent)
        lines += [*_checked(figures, expected, "S3 (nginx, which costs little)"), ""]
    if options.only != "nginx":
        from headrace.cli.seaweed import SeaweedServer

        with SeaweedServer() as server:
            upload(server, checkpoint)
            environment = {**common, **server.environment(), "AWS_ENDPOINT_URL": server.endpoint}
            figures = run_rounds(uri, environment, options.rounds, lambda: None)
        lines += [*_checked(figures, expected, "S3 (SeaweedFS, signed)"), ""]
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    head = [
        f"# Ranks that load {options.gigabytes:g} GB, {date}",
        "",
        f"Command: `python benchmarks/ranks.py {' '.join(sys.argv[1:])}`. {options.rounds} rounds, alternating; medians (least–most).",
        f"Machine: {os.cpu_count()} cores, server and all ranks on the same cores; one torch thread per rank. {versions()}.",
        "",
    ]
    path = options.results / f"ranks_{options.machine}_{date}.md"
    path.write_text("\n".join(head + lines) + "\n")
    print("\n".join(head + lines))


def _checked(figures: dict[str, list[dict[str, Any]]], expected: dict[str, Any], source: str) -> list[str]:
    for subject, results in figures.items():
        if any(one["sum"] != expected["sum"] for one in results):
            raise SystemExit(f"{subject} loaded other bytes than the files hold")
    return table(figures, source, expected["bytes"])


if __name__ == "__main__":
    main()
