"""Loads a checkpoint over and over from an S3 server that cuts, throttles and stalls reads and whose tokens expire; compares with loads without faults.

    python benchmarks/soak.py                                   # ten minutes, at least 100 loads; prints a Markdown result
    python benchmarks/soak.py --minutes 10 --write              # the same, and writes it to benchmarks/results/
    python benchmarks/soak.py --minutes 0.5 --loads 10          # quick look
    python benchmarks/soak.py --set idle_timeout_s=5            # with other settings than the defaults

All loads are made by this process, one after the other, each from opening to the last tensor: a load without faults, three with faults, and so on, so that what the machine
does meets both alike. After each load every tensor's SHA-256 is compared with that of the bytes that were written, and threads, descriptors, sockets and files of this
process with those before. The server is `tests/support/faulty_s3.py`, a process of its own on loopback. The exit status is 1 where a load failed, was wrong or left something,
or where the throughput was less than what was aimed at.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # The server and the loop are those of the tests.

from tests.support.faulty_s3 import BUCKET, Faults, FaultyS3  # noqa: E402
from tests.support.soaking import Load, Soak, alternate, write_checkpoint  # noqa: E402

from headrace.settings import Settings  # noqa: E402

AIM = 0.6
"""Least share of the throughput without faults."""

NUM_FAULTY = 3
"""Loads with faults for each one without."""


@dataclass(slots=True)
class Account:
    """All loads of a run, in order."""

    faulty: list[Load] = field(default_factory=list)
    clean: list[Load] = field(default_factory=list)
    rss_bytes: list[int] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)

    def add(self, is_faulty: bool, load: Load) -> None:
        (self.faulty if is_faulty else self.clean).append(load)
        self.rss_bytes.append(load.rss_bytes)
        if not load.is_clean:
            what = load.error or load.left or "the tensors are not those of the file"
            self.bad.append(f"load {len(self.rss_bytes)} ({'with' if is_faulty else 'without'} faults): {what}")


def gigabytes_per_s(loads: Sequence[Load]) -> float:
    """Return all bytes over all seconds."""
    return sum(load.num_bytes for load in loads) / 1e9 / sum(load.seconds for load in loads)


def soak(options: argparse.Namespace, settings: Settings, faults: Faults) -> tuple[Account, dict[str, int], float]:
    """Run the loads; return their account, the server's, and how many seconds it took."""
    account = Account()
    with tempfile.TemporaryDirectory(prefix="headrace-soak-") as name:
        folder, watched = Path(name) / "bucket", [Path(name) / "cache", Path(name) / "temporary"]
        for place in watched:
            place.mkdir()
        truth = write_checkpoint(folder / "model", int(options.megabytes * 1e6), num_files=options.files)
        with FaultyS3(folder, faults, token_s=options.token_s) as server:
            _set_environment(server, watched[1])
            runner = Soak(
                f"s3://{BUCKET}/model",
                truth,
                replace(settings, cache_dir=watched[0], progress=False),
                watched=watched,
            )
            started = time.monotonic()
            deadline = started + 60 * options.minutes
            is_over = lambda num_done: num_done >= options.loads and time.monotonic() >= deadline  # noqa: E731
            for is_faulty, load in alternate(server, runner, num_faulty=NUM_FAULTY, is_over=is_over):
                account.add(is_faulty, load)
                _show(len(account.rss_bytes), is_faulty, load)
            seconds = time.monotonic() - started
            is_idle, counts = server.wait_until_idle(), server.account()
            if not is_idle:
                account.bad.append(f"{counts['open']} connections were open at the end")
    return account, counts, seconds


def _set_environment(server: FaultyS3, temporary: Path) -> None:
    """Leave the AWS SDK one way to the server and to credentials, and no folder for temporary files but a watched one."""
    for name in list(os.environ):
        if name.startswith("AWS_") or name.lower() in ("http_proxy", "https_proxy", "all_proxy"):
            del os.environ[name]
    os.environ.update(server.environment())
    tempfile.tempdir = str(temporary)


def _show(number: int, is_faulty: bool, load: Load) -> None:
    report = load.report
    did = f"{report.num_retries} retries, {report.num_hedges} second reads" if report else load.error
    kind = "faults" if is_faulty else "none  "
    print(f"{number:5} {kind} {load.seconds:7.2f} s  {load.rss_bytes >> 20} MiB  {did}  {load.left}", file=sys.stderr)


def describe(
    options: argparse.Namespace, faults: Faults, account: Account, counts: dict[str, int], seconds: float
) -> list[str]:
    """Return the result in Markdown."""
    ratio = gigabytes_per_s(account.faulty) / gigabytes_per_s(account.clean)
    medians = [statistics.median(load.seconds for load in loads) for loads in (account.clean, account.faulty)]
    reports = [load.report for load in account.faulty if load.report is not None]
    sums = Counter[str]()
    for report in reports:
        sums.update(retries=report.num_retries, seconds=report.num_hedges, requests=report.num_requests)
    rss = [number / 1e6 for number in account.rss_bytes]
    fifth, half = rss[min(4, len(rss) - 1)], rss[len(rss) // 2]
    every = (*account.faulty, *account.clean)
    wrong, num_left = sum(not load.is_right for load in every), sum(bool(load.left) for load in every)
    given = ", ".join(options.set) or "all defaults"
    return [
        f"Soak of {seconds / 60:.1f} minutes: {len(account.faulty)} loads with faults and {len(account.clean)} without, one without before every {NUM_FAULTY} with. Each loads "
        f"{account.clean[0].num_bytes / 1e6:.0f} MB of bf16 in {options.files} file{'s' * (options.files > 1)} with `headrace.load_state_dict`, and its time is that of the whole call, opening included. "
        f"Settings: {given}.",
        "",
        f"Faults, as shares of all GETs of objects (retries and second reads included): {faults.cut:.0%} cut at a random byte (every second one with a reset), {faults.throttled:.0%} refused with 503 "
        f"SlowDown (every fourth one with `Retry-After: {faults.retry_after_s}`), {faults.stalled:.0%} silent from a random byte on for as long as the client listens (every fourth one before its first byte). "
        f"A session token is good for {options.token_s:g} s, although the credentials endpoint says an hour.",
        "",
        "| | with faults | without |",
        "|---|---|---|",
        f"| loads | {len(account.faulty)} | {len(account.clean)} |",
        f"| GB/s, all bytes over all seconds | {gigabytes_per_s(account.faulty):.3f} | {gigabytes_per_s(account.clean):.3f} |",
        f"| seconds of a load, median (least–most) | {_spread(account.faulty)} | {_spread(account.clean)} |",
        "",
        f"- Throughput with faults: **{ratio:.0%}** of that without by all bytes over all seconds (aimed at: at least {AIM:.0%}), {medians[0] / medians[1]:.0%} by medians.",
        f"- Tensors: {len(every) - wrong} loads gave every tensor bit for bit, {wrong} did not.",
        f"- Faults that were met: {counts.get('reads', 0)} reads, of which {counts.get('cut', 0)} cut, {counts.get('throttled', 0)} throttled "
        f"({counts.get('throttled with Retry-After', 0)} with Retry-After), {counts.get('stalled', 0)} stalled; {counts.get('expired', 0)} requests with an expired token, "
        f"{counts.get('tokens', 0)} tokens handed out.",
        f"- What Headrace did: {sums['requests']} requests for weights, {sums['retries']} retries, {sums['seconds']} second reads.",
        "- Left after a load, beyond what was there before (threads, descriptors, sockets, files): "
        + ("nothing, after every load." if not num_left else f"something, after {num_left} loads."),
        f"- Resident memory after a load: {fifth:.0f} MB after the 5th, {half:.0f} MB half way, {rss[-1]:.0f} MB at the end, {max(rss):.0f} MB at most.",
        *(f"- **Not right:** {what}" for what in account.bad),
    ]


def _spread(loads: Sequence[Load]) -> str:
    seconds = [load.seconds for load in loads]
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f}–{max(seconds):.2f})"


def head_of(options: argparse.Namespace, date: str) -> list[str]:
    """Return what a result begins with: the command, the commit, the machine."""
    found = [
        subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=ROOT).stdout.strip()
        for arguments in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
    ]
    commit = (found[0] or "unknown") + (" with changes" if found[1] else "")
    versions = ", ".join(f"{name} {_version_of(name)}" for name in ("torch", "boto3"))
    return [
        f"# Soak with faults, {date}",
        "",
        f"Command: `{' '.join(['python benchmarks/soak.py', *sys.argv[1:]])}` at commit {commit}.",
        f"Machine: {os.cpu_count()} cores, {platform.machine()}, {platform.system()} {platform.release()}, client and server on the same cores. Python {platform.python_version()}, {versions}.",
        "",
    ]


def _version_of(package: str) -> str:
    from importlib.metadata import version

    return version(package)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long at least")
    parser.add_argument("--loads", type=int, default=100, help="how many loads with faults at least")
    parser.add_argument("--megabytes", type=float, default=200.0)
    parser.add_argument("--files", type=int, default=1)
    parser.add_argument("--token-s", type=float, default=20.0, help="how long a token is good")
    parser.add_argument("--cut", type=float, default=0.02)
    parser.add_argument("--throttled", type=float, default=0.02)
    parser.add_argument("--stalled", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="SETTING=NUMBER", help="a transport setting")
    parser.add_argument("--write", action="store_true", help="write the result to benchmarks/results/")
    parser.add_argument("--machine", default=f"{os.cpu_count()}-cores")
    return parser.parse_args()


def main() -> None:
    options = parse()
    given = {
        name: float(value) if "." in value else int(value) for name, value in (one.split("=") for one in options.set)
    }
    faults = Faults(cut=options.cut, throttled=options.throttled, stalled=options.stalled, seed=options.seed)
    account, counts, seconds = soak(options, Settings.from_environment({}, **given), faults)
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    lines = [*head_of(options, date), *describe(options, faults, account, counts, seconds)]
    print("\n".join(lines))
    if options.write:
        (ROOT / "benchmarks" / "results" / f"soak_{options.machine}_{date}.md").write_text("\n".join(lines) + "\n")
    if account.bad or gigabytes_per_s(account.faulty) < AIM * gigabytes_per_s(account.clean):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
