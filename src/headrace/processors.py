"""How many processors this process may use: those that it may be scheduled on, and no more than the quota of its cgroups (v2 or v1). Does not know what for."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

_OF_ROOT = ("0::/", "0:cpu:/")
"""What is looked at where the system does not say which cgroups are ours: those at the root, which are a container's own."""


def usable_processors(root: Path = Path("/")) -> float:
    """Return the number of processors, more than 0; a quota may come to a part of one, and how to round that is the caller's to say.

    ``root`` is where ``proc`` and ``sys`` are. A cgroup and all above it count, as each is held to its own quota.
    """
    found = float(len(os.sched_getaffinity(0)))
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = list(_OF_ROOT)
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found = min(found, _least_quota(root / "sys/fs/cgroup", path, _quota_v2))
        elif "cpu" in controllers.split(","):
            found = min(found, _least_quota(root / "sys/fs/cgroup/cpu", path, _quota_v1))
    return found


def _least_quota(base: Path, path: str, quota_of: Callable[[Path], float]) -> float:
    """Return the least quota of a cgroup and of all above it, in processors."""
    folder = base / path.lstrip("/")
    return min(quota_of(one) for one in (folder, *folder.parents) if one.is_relative_to(base))


def _quota_v2(folder: Path) -> float:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return math.inf if quota == "max" else _quotient(int(quota), int(period))
    except (OSError, ValueError):
        return math.inf


def _quota_v1(folder: Path) -> float:
    try:
        quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
    except (OSError, ValueError):
        return math.inf
    return _quotient(quota, period)


def _quotient(quota: int, period: int) -> float:
    """Return the processors of a quota in each period; without one (v1 says -1) all."""
    return quota / period if quota > 0 and period > 0 else math.inf
