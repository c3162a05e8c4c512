"""Destination memory: alignment, sharing, what another process sees, and when it goes back to the system."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.errors import BudgetExceeded
from headrace.streaming.memory import (
    ALIGNMENT,
    SHARE_BELOW_BYTES,
    SLAB_BYTES,
    PrivateMemory,
    SharedMemory,
    available_memory_bytes,
    default_memory_limit,
)
from headrace.units import GIB, MIB


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


@pytest.mark.parametrize("size", [1, 63, 64, 65, 1000, SHARE_BELOW_BYTES - 1, SHARE_BELOW_BYTES, 3 * MIB + 1])
def test_private_memory_is_aligned_writable_and_of_the_size_asked_for(size: int) -> None:
    memory = PrivateMemory()
    arrays = [memory.allocate(size) for _ in range(5)]
    for value, array in enumerate(arrays):
        assert array.nbytes == size and address(array) % ALIGNMENT == 0
        array[:] = value
    assert [int(array[0]) for array in arrays] == [0, 1, 2, 3, 4], "no two overlap"
    assert [int(array[-1]) for array in arrays] == [0, 1, 2, 3, 4]


def test_small_allocations_share_and_large_ones_do_not() -> None:
    memory = PrivateMemory()
    small = [memory.allocate(2048) for _ in range(4)]
    assert address(small[3]) - address(small[0]) == 3 * 2048
    large = [memory.allocate(SHARE_BELOW_BYTES) for _ in range(2)]
    assert abs(address(large[1]) - address(large[0])) >= SHARE_BELOW_BYTES
    assert not any(address(small[0]) <= address(array) < address(small[0]) + SLAB_BYTES for array in large)


def test_a_small_tensor_has_a_storage_of_its_own_size() -> None:
    memory = PrivateMemory()
    first, second = (torch.from_numpy(memory.allocate(2048)) for _ in range(2))
    assert first.untyped_storage().nbytes() == 2048
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()


def test_shared_memory_is_filled_by_another_process_through_the_descriptor() -> None:
    memory = SharedMemory(3 * MIB)
    memory.allocate(100)
    array = memory.allocate(2 * MIB)
    code = "import os,sys; os.pwrite(int(sys.argv[1]), b'x' * int(sys.argv[3]), int(sys.argv[2]))"
    arguments = [str(memory.fileno()), str(memory.offset_of(array[1:])), str(array.nbytes - 1)]
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, pass_fds=[memory.fileno()])
    assert array[0] == 0 and bytes(array[1:]) == b"x" * (2 * MIB - 1)


def test_shared_memory_goes_back_when_the_last_view_is_gone() -> None:
    memory = SharedMemory(8 * MIB)

    def blocks() -> int:
        return os.fstat(memory.fileno()).st_blocks * 512

    kept, dropped = memory.allocate(MIB), memory.allocate(4 * MIB)
    kept[:], dropped[:] = 1, 2
    view = torch.from_numpy(dropped).view(torch.bfloat16)[10:20].detach()
    del dropped
    gc.collect()
    assert blocks() == 5 * MIB, "a view keeps all of its storage"
    assert int(view.view(torch.uint8)[0]) == 2
    del view
    gc.collect()
    assert blocks() == MIB
    assert int(kept.min()) == 1, "the neighbour is untouched"


def test_shared_memory_outlives_its_object_while_an_array_does() -> None:
    memory = SharedMemory(MIB)
    descriptor = memory.fileno()
    array = memory.allocate(1000)
    del memory
    gc.collect()
    array[:] = 7
    assert int(array.sum()) == 7000
    with pytest.raises(OSError):
        os.fstat(descriptor)


def test_shared_memory_says_when_it_is_full() -> None:
    memory = SharedMemory(MIB)
    memory.allocate(MIB - 4096)
    with pytest.raises(BudgetExceeded, match="shared memory were asked for"):
        memory.allocate(5000)
    assert memory.allocate(4096).nbytes == 4096


def test_an_address_outside_is_refused() -> None:
    with pytest.raises(ValueError, match="does not lie"):
        SharedMemory(MIB).offset_of(np.zeros(4, dtype=np.uint8))


def system(
    root: Path, *, available_kib: int, cgroup: str = "0::/a/b\n", limits: dict[str, tuple[str, str]] | None = None
) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable:   {available_kib} kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    for folder, (limit, usage) in (limits or {}).items():
        path = root / "sys/fs/cgroup" / folder
        path.mkdir(parents=True, exist_ok=True)
        version_1 = folder.startswith("memory")
        (path / ("memory.limit_in_bytes" if version_1 else "memory.max")).write_text(limit + "\n")
        (path / ("memory.usage_in_bytes" if version_1 else "memory.current")).write_text(usage + "\n")
    return root


def test_available_memory_is_the_least_that_any_group_above_allows(tmp_path: Path) -> None:
    root = system(
        tmp_path,
        available_kib=8 << 20,
        limits={"a/b": ("max", "5"), "a": (str(3 * GIB), str(1 * GIB)), "": ("max", "0")},
    )
    assert available_memory_bytes(root) == 2 * GIB


def test_available_memory_without_limits_is_the_systems(tmp_path: Path) -> None:
    assert available_memory_bytes(system(tmp_path, available_kib=1 << 20)) == GIB


def test_available_memory_knows_version_1_groups(tmp_path: Path) -> None:
    root = system(
        tmp_path,
        available_kib=8 << 20,
        cgroup="5:cpu:/x\n4:memory:/pod\n",
        limits={"memory/pod": (str(2 * GIB), str(GIB))},
    )
    assert available_memory_bytes(root) == GIB


def test_a_group_that_is_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    assert available_memory_bytes(system(tmp_path, available_kib=1, limits={"a": ("10", "20")})) == 0


@pytest.mark.parametrize(("available", "limit"), [(0, 64 * MIB), (16 * GIB, 2 * GIB), (1000 * GIB, 8 * GIB)])
def test_default_limit_is_an_eighth_within_bounds(available: int, limit: int) -> None:
    assert default_memory_limit(available) == limit
