"""How many processors this process may use: those that it may be scheduled on, and no more than the quota of its cgroups (v2 or v1)."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path


def usable_processors(root: Path = Path("/")) -> int:
    """Return the number of processors, at least 1. ``root`` is where ``proc`` and ``sys`` are."""
    found = float(len(os.sched_getaffinity(0)))
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found = min(found, _least_quota(root / "sys/fs/cgroup", path, _quota_v2))
        elif "cpu" in controllers.split(","):
            found = min(found, _least_quota(root / "sys/fs/cgroup/cpu", path, _quota_v1))
    return max(1, math.ceil(found))


def _least_quota(base: Path, path: str, quota_of: Callable[[Path], float]) -> float:
    """Return the least quota of a cgroup and of all above it, in processors."""
    folder = base / path.lstrip("/")
    return min(quota_of(one) for one in (folder, *folder.parents) if one.is_relative_to(base))


def _quota_v2(folder: Path) -> float:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return math.inf
    return math.inf if quota == "max" else int(quota) / int(period)


def _quota_v1(folder: Path) -> float:
    try:
        quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
    except (OSError, ValueError):
        return math.inf
    return math.inf if quota < 0 else quota / period
