"""Tokens per second of the serving engine on this machine's CPU, by dtype and number of threads: what `--dtype auto`
should choose.

    python benchmarks/serve_cpu.py FOLDER    # a model's folder; float32 and bfloat16, 1 thread and all
    python benchmarks/serve_cpu.py FOLDER --dtypes float32 --threads 2 --tokens 128
    python benchmarks/serve_cpu.py FOLDER --results benchmarks/results

Each measurement is a fresh process, so that memory is its own, and goes through the engine that `headrace serve` uses:
one prompt, greedy, the tokens after the first one timed (decoding), and the first one apart (the prompt). Beside it
stands what the start of a server measures to choose: the product of a matrix and a vector. The model's folder is loaded
by Transformers, since this measures generating, not loading.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROMPT = "The history of the river begins in the mountains. " * 8


def measure(folder: str, dtype: str, num_threads: int, num_tokens: int, rounds: int) -> dict[str, Any]:
    """Return the figures of one process."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from headrace.serving.engine import SamplingOptions
    from headrace.serving.hardware import product_seconds
    from headrace.serving.transformers_engine import TransformersEngine

    torch.set_num_threads(num_threads)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True)
    engine = TransformersEngine(model, tokenizer, num_threads=num_threads)
    prompt = tokenizer(PROMPT)["input_ids"]
    options = SamplingOptions(max_tokens=num_tokens, min_tokens=num_tokens, temperature=0.0)

    async def once() -> tuple[float, float]:
        start = time.perf_counter()
        first = 0.0
        async for _ in engine.submit(prompt, options).steps():
            first = first or time.perf_counter() - start
        return first, time.perf_counter() - start - first

    try:
        asyncio.run(once())  # warm-up
        runs = [asyncio.run(once()) for _ in range(rounds)]
    finally:
        engine.close(10)
    return {
        "tokens_per_s": statistics.median((num_tokens - 1) / decoding for _, decoding in runs),
        "prompt_tokens_per_s": statistics.median(len(prompt) / first for first, _ in runs),
        "product_ms": product_seconds(dtype, num_threads=num_threads) * 1000,
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
    }


def run_apart(arguments: argparse.Namespace, dtype: str, num_threads: int) -> dict[str, Any]:
    """Run `measure` in a process of its own."""
    command = [sys.executable, __file__, arguments.folder, "--one", dtype, str(num_threads)]
    command += ["--tokens", str(arguments.tokens), "--rounds", str(arguments.rounds)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(num_threads)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{dtype} with {num_threads} threads failed:\n{done.stderr[-2000:]}")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def describe_machine() -> str:
    """Return the processor and what it can multiply, in a line."""
    import torch

    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "").split()
    name = next(
        (line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")),
        platform.processor(),
    )
    wide = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    software = f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"
    return f"{name}, {os.cpu_count()} CPUs, {' '.join(wide)}; {software}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", help="the model's folder")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--threads", nargs="+", type=int, default=sorted({1, len(os.sched_getaffinity(0))}))
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, help="a folder for the table")
    parser.add_argument("--one", nargs=2, metavar=("DTYPE", "THREADS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        dtype, threads = arguments.one
        print(json.dumps(measure(arguments.folder, dtype, int(threads), arguments.tokens, arguments.rounds)))
        return
    lines = [
        f"# Generating on a CPU: {Path(arguments.folder).name}",
        "",
        f"{describe_machine()}. `{' '.join(['python', *sys.argv])}`, median of {arguments.rounds}.",
        "",
        "| dtype | threads | tokens/s | prompt tokens/s | matrix × vector, ms | peak memory, GB |",
        "|---|---|---|---|---|---|",
    ]
    for dtype in arguments.dtypes:
        for num_threads in arguments.threads:
            got = run_apart(arguments, dtype, num_threads)
            lines.append(
                f"| {dtype} | {num_threads} | {got['tokens_per_s']:.1f} | {got['prompt_tokens_per_s']:.0f} "
                f"| {got['product_ms']:.2f} | {got['peak_gb']:.2f} |"
            )
            print(lines[-1], file=sys.stderr, flush=True)
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.results:
        name = f"serve-cpu_{platform.node() or 'machine'}_{datetime.date.today().isoformat()}.md"
        (arguments.results / name).write_text(text)


if __name__ == "__main__":
    main()
