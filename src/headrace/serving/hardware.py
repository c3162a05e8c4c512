"""What the machine is good at: how many threads a model computes with on it, and which dtype its processor multiplies fastest.

Measures; changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from headrace.processors import usable_processors

CGROUP = Path("/sys/fs/cgroup")
_PROBE_SIZE = 2048
_PROBE_ROUNDS = 9


def num_compute_threads(*, num_ranks: int = 1, processors: Callable[[], float] = usable_processors) -> int:
    """Return how many threads each of ``num_ranks`` processes computes with, at least one; ``processors`` says how many there are for all of them.

    Torch counts the host's. In a container with a quota of two on a host of 64, its 64 threads spend their time waiting for each other.
    Rounded down for the same reason: the threads of a product end together, and one for which only a part of a processor is left keeps the others waiting.
    """
    return max(1, int(processors() / num_ranks))


def available_bytes(*, meminfo: Path = Path("/proc/meminfo"), cgroup: Path = CGROUP) -> int | None:
    """Return how much memory can still be taken: the system's, held to the container's limit; None where nobody says."""
    found = []
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        found.append(int(lines["MemAvailable"].split()[0]) * 1024)
    except (OSError, ValueError, KeyError, IndexError):
        pass
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        if limit != "max":
            found.append(max(0, int(limit) - int((cgroup / "memory.current").read_text())))
    except (OSError, ValueError):
        pass
    return min(found) if found else None


def choose_cpu_dtype(stored: Mapping[str, int], *, available: int | None, seconds_of: Callable[[str], float]) -> str:
    """Return ``auto`` (as stored) or ``float32``: the faster one on this processor, if it fits.

    ``stored`` says how many bytes of weights have which dtype (``BF16``, ``F16``, …), ``available`` how much memory
    there is, and ``seconds_of`` how long a product of a matrix and a vector takes in a dtype: what generating a token
    consists of. Half floats are widened only where that is faster by a third, since it doubles the memory. Quantized
    weights are left as they are.
    """
    half = {"BF16": "bfloat16", "F16": "float16"}
    total = sum(stored.values())
    narrow = max(half, key=lambda name: stored.get(name, 0))
    if total == 0 or stored.get(narrow, 0) < 0.9 * total:
        return "auto"
    if available is not None and 2 * total > 0.8 * available:
        return "auto"
    return "float32" if 1.33 * seconds_of("float32") < seconds_of(half[narrow]) else "auto"


def product_seconds(dtype: str, *, num_threads: int = 1) -> float:
    """Return how long one product of a 2048 × 2048 matrix and a vector takes in ``dtype``, the best of nine.

    On one thread by default: what is compared is the processor's arithmetic, and several threads on a busy machine wait
    for each other at random (0.3 to 7 ms for the same product on two, 0.35 ms on one, 2026-11-29).
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        kind = getattr(torch, dtype)
        matrix = torch.ones(_PROBE_SIZE, _PROBE_SIZE, dtype=kind)
        vector = torch.ones(1, _PROBE_SIZE, dtype=kind)
        best = float("inf")
        with torch.inference_mode():
            for _ in range(_PROBE_ROUNDS + 1):  # The first one makes the kernel.
                start = time.perf_counter()
                torch.nn.functional.linear(vector, matrix)
                best = min(best, time.perf_counter() - start)
        return best
    finally:
        torch.set_num_threads(before)
