"""What opening and planning the largest checkpoints takes, from headers alone: CPU seconds and memory of each step, for DeepSeek V3 and Kimi K2.5 at their real size.

    python benchmarks/planning.py                      # three rounds each; prints a Markdown result
    python benchmarks/planning.py --rounds 3 --write   # the same, and writes it to benchmarks/results/
    python benchmarks/planning.py --model deepseek     # one of the two

The headers are made by `tests/support/large_checkpoints.py` and served by an S3 server of this process on loopback; each round is a process of its own, whose CPU seconds are counted.
Its memory is the most that it ever held (VmHWM) beyond what the imports took. Python's cyclic garbage collector is paused, as `headrace inspect --plan` and `load_model` do.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # The checkpoints are those of the tests.

from tests.support.large_checkpoints import LargeCheckpoint, SparseS3, deepseek_v3, kimi_k25  # noqa: E402

MOST_S = 10.0
"""Most CPU seconds that opening and planning may take, beyond Transformers' own renaming and conversion."""
MOST_BYTES = 500_000_000
"""Most memory that they may take, beyond the imports."""

MODELS: dict[str, tuple[str, Callable[[], LargeCheckpoint], bool]] = {
    "deepseek": ("DeepSeek V3", deepseek_v3, False),
    "kimi": ("Kimi K2.5, language_only", kimi_k25, True),
}
"""Name → title, what makes it, and whether the language model alone is placed."""
OPENING, PACKING, ALONE, RANKS = "open: listing, index, headers", "what is packed", "plan, one process", "plan, 8 ranks"
PLACING, CONVERSION = "what the model takes", "of which Transformers' own"


# -- in the process that is measured


@dataclass(slots=True)
class Steps:
    """CPU seconds and peak memory of one round's steps, by name and in order."""

    before_bytes: int
    seconds: dict[str, float]
    peaks: dict[str, int]

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        start = time.process_time()
        yield
        self.seconds[name] = time.process_time() - start
        self.peaks[name] = peak_bytes() - self.before_bytes


def peak_bytes() -> int:
    """Return the most memory that this process ever held. Not ru_maxrss: a child inherits that of the process that spawned it."""
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def measure(uri: str, *, language_only: bool) -> None:
    """Open, plan and place the checkpoint at ``uri``, and print what each step took, as JSON."""
    import headrace.storage.s3  # noqa: F401  what a step would import is no part of it
    from headrace.checkpoint import open_checkpoint
    from headrace.cli.packing import examine_packing
    from headrace.engines import conversion
    from headrace.engines.collector import collector_paused
    from headrace.engines.rehearsal import rehearse_model
    from headrace.settings import Settings
    from headrace.streaming.forecast import Conditions, forecast_load
    from headrace.units import GIB

    settings = Settings.from_environment(progress=False, memory_limit_bytes=8 * GIB, hedge_after_s=0)
    import_model_class(language_only)
    steps = Steps(peak_bytes(), {}, {})
    own: list[float] = []
    convert = conversion.convert_and_load_state_dict_in_model

    def timed(*args: Any, **options: Any) -> Any:
        start = time.process_time()
        outcome = convert(*args, **options)
        own.append(time.process_time() - start)
        return outcome

    conversion.convert_and_load_state_dict_in_model = timed  # type: ignore[assignment]
    forecasts = {}
    with collector_paused():
        with steps.step(OPENING):
            checkpoint = open_checkpoint(uri, settings=settings)
        with checkpoint:
            with steps.step(PACKING):
                examine_packing(checkpoint)
            entries = list(checkpoint.entries.values())
            for name, num_ranks in ((ALONE, 1), (RANKS, 8)):
                with steps.step(name):
                    about = Conditions(num_ranks=num_ranks, available_bytes=64 * GIB)
                    found = forecast_load(entries, settings, about, bytes_checkpoint=checkpoint.total_bytes)
                forecasts[name] = found.to_dict()
            with steps.step(PLACING):
                order = rehearse_model(checkpoint, settings=settings, language_only=language_only)
    steps.seconds[CONVERSION], steps.peaks[CONVERSION] = sum(own), steps.peaks[PLACING]
    outcome = {"seconds": steps.seconds, "peaks": steps.peaks, "forecasts": forecasts, "num_placed": len(order)}
    print(json.dumps({**outcome, "num_tensors": len(entries), "bytes": checkpoint.total_bytes}))


def import_model_class(is_kimi: bool) -> None:
    """Import what Transformers imports when it is first asked for the class."""
    import transformers

    getattr(transformers, "Kimi_K25ForConditionalGeneration" if is_kimi else "DeepseekV3ForCausalLM")
    _ = transformers.DeepseekV3ForCausalLM


# -- in the process that measures


def rounds_of(name: str, num_rounds: int) -> tuple[list[dict[str, Any]], int, int]:
    """Return what each round found, and how many reads of headers with how many bytes the first one asked for."""
    _, make, language_only = MODELS[name]
    found: list[dict[str, Any]] = []
    with SparseS3(make()) as server, tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, __file__, "--measure", server.uri, *(["--language-only"] if language_only else [])]
        environment = {**os.environ, **server.environment(), "PYTHONPATH": str(ROOT / "src")}
        num_reads = bytes_asked = 0
        for number in range(num_rounds):
            own = {"HEADRACE_CACHE_DIR": f"{cache}/{number}"}  # or a later round would not ask for the index
            done = subprocess.run(command, env={**environment, **own}, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(done.stderr)
            found.append(json.loads(done.stdout.splitlines()[-1]))
            if not number:
                num_reads, bytes_asked = len(server.reads), server.bytes_asked
    return found, num_reads, bytes_asked


def describe(name: str, num_rounds: int) -> tuple[list[str], bool]:
    """Return a section about one checkpoint, and whether all is as it was aimed at."""
    found, num_reads, bytes_asked = rounds_of(name, num_rounds)
    first = found[0]
    seconds = {step: statistics.median(one["seconds"][step] for one in found) for step in first["seconds"]}
    peaks = {step: max(one["peaks"][step] for one in found) for step in first["peaks"]}
    own = seconds[OPENING] + seconds[ALONE] + seconds[PLACING] - seconds[CONVERSION]
    lines = [
        f"## {MODELS[name][0]}",
        "",
        f"{first['num_tensors']:,} tensors, {first['bytes'] / 1e9:.1f} GB. Opening took {num_reads} reads of headers, {bytes_asked / 1e6:.1f} MB. "
        f"The model takes {first['num_placed']:,} of the tensors.",
        "",
        "| step | CPU s | most memory until then, MB |",
        "|---|---|---|",
        *(f"| {step} | {seconds[step]:.2f} | {peaks[step] / 1e6:.0f} |" for step in seconds),
        "",
        f"- Opening, one plan and the model's placement, without Transformers' own part: **{own:.1f} CPU s** (aimed at: at most {MOST_S:.0f}).",
        f"- Memory beyond the imports, every step together: **{max(peaks.values()) / 1e6:.0f} MB** (aimed at: at most {MOST_BYTES / 1e6:.0f}).",
        "",
        "| load of every tensor | requests | read by each rank, GB | seconds at 1, 10, 100 Gbit/s by bytes alone | with 0.1 s for each request |",
        "|---|---|---|---|---|",
    ]
    for step in (ALONE, RANKS):
        told = first["forecasts"][step]
        least, most = ([f"{link[key]:,.0f}" for link in told["links"]] for key in ("least_seconds", "seconds"))
        each = max(rank["bytes_read"] for rank in told["ranks"]) / 1e9
        lines.append(f"| {step} | {told['num_requests']:,} | {each:.1f} | {', '.join(least)} | {', '.join(most)} |")
    return [*lines, ""], own <= MOST_S and max(peaks.values()) <= MOST_BYTES


def head_of(options: argparse.Namespace, date: str) -> list[str]:
    """Return what a result begins with: the command, the commit, the machine."""
    found = [
        subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=ROOT, check=False).stdout.strip()
        for arguments in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
    ]
    commit = (found[0] or "unknown") + (" with changes" if found[1] else "")
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "boto3"))
    return [
        f"# Opening and planning from headers alone, {date}",
        "",
        f"Command: `{' '.join(['python benchmarks/planning.py', *sys.argv[1:]])}` at commit {commit}.",
        f"Machine: {os.cpu_count()} cores, {platform.machine()}, {platform.system()} {platform.release()}, client and server on the same cores. Python {platform.python_version()}, {versions}.",
        f"Medians of {options.rounds} rounds, each in a process of its own; the most memory of all rounds. Settings: defaults (8 connections, reads of 16 MiB), with a memory limit of 8 GiB and without second reads.",
        "",
    ]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", choices=MODELS, action="append", help="only this one")
    parser.add_argument("--write", action="store_true", help="write the result to benchmarks/results/")
    parser.add_argument("--machine", default=f"{os.cpu_count()}-cores")
    parser.add_argument("--measure", metavar="URI", help=argparse.SUPPRESS)
    parser.add_argument("--language-only", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.measure:
        measure(options.measure, language_only=options.language_only)
        return
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    lines, is_good = head_of(options, date), True
    for name in options.model or MODELS:
        section, is_as_aimed = describe(name, options.rounds)
        lines += section
        is_good &= is_as_aimed
    print("\n".join(lines))
    if options.write:
        (ROOT / "benchmarks" / "results" / f"planning_{options.machine}_{date}.md").write_text("\n".join(lines))
    if not is_good:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
