"""Threads and dtypes: what a container allows, and what a processor is good at."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from headrace.serving.hardware import available_bytes, choose_cpu_dtype, num_usable_cpus, product_seconds

GIB = 1 << 30


def test_the_containers_quota_counts(tmp_path: Path) -> None:
    machine = len(os.sched_getaffinity(0))
    assert num_usable_cpus(cgroup=tmp_path) == machine
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert num_usable_cpus(cgroup=tmp_path) == machine
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert num_usable_cpus(cgroup=tmp_path) == 1
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert num_usable_cpus(cgroup=tmp_path) == 1  # half a CPU is one thread
    (tmp_path / "cpu.max").write_text("garbage")
    assert num_usable_cpus(cgroup=tmp_path) == machine


def test_the_older_kind_of_quota_counts_too(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("100000\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert num_usable_cpus(cgroup=tmp_path) == 1


def test_memory_is_what_the_container_has_left(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 100 kB\nMemAvailable:    64 kB\n")
    assert available_bytes(meminfo=meminfo, cgroup=tmp_path) == 65536
    (tmp_path / "memory.max").write_text("50000")
    (tmp_path / "memory.current").write_text("20000")
    assert available_bytes(meminfo=meminfo, cgroup=tmp_path) == 30000
    assert available_bytes(meminfo=tmp_path / "none", cgroup=tmp_path / "none") is None


@pytest.mark.parametrize(
    ("stored", "available", "half_s", "full_s", "expected"),
    [
        ({"BF16": GIB}, 20 * GIB, 7.0, 1.0, "float32"),
        ({"F16": GIB, "F32": 1000}, 20 * GIB, 7.0, 1.0, "float32"),
        ({"BF16": GIB}, 20 * GIB, 1.0, 1.0, "auto"),  # as fast as stored: half the memory
        ({"BF16": GIB}, 20 * GIB, 1.2, 1.0, "auto"),
        ({"BF16": GIB}, 2 * GIB, 7.0, 1.0, "auto"),  # it does not fit
        ({"BF16": GIB}, None, 7.0, 1.0, "float32"),
        ({"F32": GIB}, 20 * GIB, 7.0, 1.0, "auto"),
        ({"U8": GIB, "BF16": GIB // 4}, 20 * GIB, 7.0, 1.0, "auto"),  # quantized
        ({}, 20 * GIB, 7.0, 1.0, "auto"),
    ],
)
def test_the_dtype_of_a_cpu(
    stored: dict[str, int], available: int | None, half_s: float, full_s: float, expected: str
) -> None:
    chosen = choose_cpu_dtype(
        stored, available=available, seconds_of=lambda dtype: full_s if dtype == "float32" else half_s
    )
    assert chosen == expected


def test_the_probe_measures_and_leaves_the_threads_alone() -> None:
    before = torch.get_num_threads()
    assert 0 < product_seconds("float32") < 60
    assert torch.get_num_threads() == before
