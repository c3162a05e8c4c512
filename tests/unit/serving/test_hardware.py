"""Threads and dtypes: what a container allows, and what a processor is good at."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from headrace.processors import usable_processors
from headrace.serving.hardware import available_bytes, choose_cpu_dtype, num_compute_threads, product_seconds

GIB = 1 << 30


@pytest.mark.parametrize(
    ("processors", "num_ranks", "expected"),
    [(16.0, 1, 16), (2.9, 1, 2), (0.5, 1, 1), (7.0, 2, 3), (7.5, 8, 1), (1.0, 4, 1)],
)
def test_threads_are_no_more_than_the_processors(processors: float, num_ranks: int, expected: int) -> None:
    assert num_compute_threads(num_ranks=num_ranks, processors=lambda: processors) == expected


def test_a_quota_above_the_process_holds_the_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)))
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/pod/container\n")
    (tmp_path / "sys/fs/cgroup/pod").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/pod/cpu.max").write_text("290000 100000\n")
    assert num_compute_threads(processors=partial(usable_processors, tmp_path)) == 2


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
