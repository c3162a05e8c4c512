"""Every byte of destination and staging memory comes from here. Knows sizes and alignment; knows no entries and no reads.

`PrivateMemory` belongs to this process. `SharedMemory` lies in a memfd, so that another process that is given the descriptor can fill it; its pages go back to
the system when the last tensor over them is gone.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from headrace.errors import BudgetExceeded
from headrace.process import HomeProcess
from headrace.units import GIB, MIB, format_bytes

ALIGNMENT = 64
"""Every tensor starts at a multiple of this: a cache line, and the widest vector load."""
SHARE_BELOW_BYTES = MIB
"""Tensors smaller than this share an allocation."""
SLAB_BYTES = 4 * MIB
"""Size of the allocations that small tensors share."""

Bytes = npt.NDArray[np.uint8]
"""A flat, writable array of bytes; it keeps its memory alive."""


class Memory(Protocol):
    """Where tensors get their bytes from. Thread safe."""

    def allocate(self, num_bytes: int) -> Bytes:
        """Return ``num_bytes`` (at least 1), aligned to `ALIGNMENT`, contents undefined. The array and its views own the memory."""


class PrivateMemory:
    """Memory of this process alone: one mapping for each large piece, which goes back to the system when it dies, and a shared one for small pieces."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slab: Bytes | None = None
        self._used = 0

    def allocate(self, num_bytes: int) -> Bytes:
        if num_bytes >= SHARE_BELOW_BYTES:
            return _fresh(num_bytes)
        with self._lock:
            if self._slab is None or self._used + num_bytes > SLAB_BYTES:
                self._slab, self._used = _fresh(SLAB_BYTES), 0
            piece = self._slab[self._used : self._used + num_bytes]
            self._used = _rounded_up(self._used + num_bytes, ALIGNMENT)
            return piece


class SharedMemory:
    """Memory of a memfd of ``capacity_bytes``, mapped once. Pages that were never written cost nothing.

    Where an allocation lies in the file is `offset_of`, for a process that got `fileno`. Space is not handed out twice; when an array dies its pages are
    given back (MADV_REMOVE), and the file goes when the last array and this object are gone.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = _rounded_up(max(capacity_bytes, 1), mmap.PAGESIZE)
        self._descriptor = os.memfd_create("headrace", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._descriptor, self.capacity_bytes)
            self._map = mmap.mmap(self._descriptor, self.capacity_bytes, flags=mmap.MAP_SHARED)
        except OSError:
            os.close(self._descriptor)
            raise
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self._lock = threading.Lock()
        self._used = 0

    def fileno(self) -> int:
        """Return the descriptor of the memfd; it stays ours and closes with this object."""
        return self._descriptor

    def allocate(self, num_bytes: int) -> Bytes:
        # A page of its own for each allocation: giving back a neighbour's page would zero living bytes.
        size = _rounded_up(num_bytes, mmap.PAGESIZE)
        with self._lock:
            start = self._used
            if start + size > self.capacity_bytes:
                raise BudgetExceeded(
                    f"{format_bytes(num_bytes)} of shared memory were asked for; {format_bytes(self.capacity_bytes - start)} are left.",
                    f"The shared file was made for {format_bytes(self.capacity_bytes)}.",
                )
            self._used += size
        array = np.frombuffer(self._map, dtype=np.uint8, count=num_bytes, offset=start)
        weakref.finalize(array, _give_back, self._map, start, size, HomeProcess()).atexit = False
        return array

    def offset_of(self, array: Bytes) -> int:
        """Return where ``array``, or a view of it, starts in the file."""
        offset = array.ctypes.data - self._start
        if not 0 <= offset < self.capacity_bytes:
            raise ValueError("the array does not lie in this memory")
        return int(offset)


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Return how many bytes this process may still allocate: the least of what the system has and what its cgroups (v2 or v1) allow."""
    limits = [_system_available(root / "proc/meminfo")]
    for limit, usage in _cgroup_files(root):
        try:
            allowed, used = limit.read_text().strip(), int(usage.read_text())
        except (OSError, ValueError):
            continue
        if allowed.isdigit():
            limits.append(max(int(allowed) - used, 0))
    return min(limits)


def default_memory_limit(available_bytes: int) -> int:
    """Return how much may be read ahead where nobody said: an eighth of what is available, at most 8 GiB, at least 64 MiB."""
    return max(64 * MIB, min(available_bytes // 8, 8 * GIB))


def private_mapping(num_bytes: int) -> mmap.mmap:
    """Map ``num_bytes`` of zeros that only this process sees. Raises OSError.

    MAP_PRIVATE, since Python's default would be shared with a forked child. The kernel joins neighbouring mappings, so that their number stays small.
    """
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _fresh(num_bytes: int) -> Bytes:
    # A mapping of its own, and not malloc: what is freed goes back at once, whichever thread allocated it. (Malloc keeps pieces of up to 32 MiB in its arenas.)
    try:
        return np.frombuffer(private_mapping(num_bytes), dtype=np.uint8)
    except OSError:  # too many mappings (vm.max_map_count)
        array: Bytes = torch.empty(num_bytes, dtype=torch.uint8).numpy()
        return array


def _give_back(mapped: mmap.mmap, start: int, size: int, home: HomeProcess) -> None:
    if home.is_here:  # A forked child has the same pages, and dropping its tensors must not take them from the parent.
        mapped.madvise(mmap.MADV_REMOVE, start, size)


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _system_available(meminfo: Path) -> int:
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 8 * GIB


def _cgroup_files(root: Path) -> list[tuple[Path, Path]]:
    """Return (limit, usage) files of this process's cgroup and all above it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[tuple[Path, Path]] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = base / path.lstrip("/")
        while True:
            found.append((folder / names[0], folder / names[1]))
            if folder == base:
                break
            folder = folder.parent
    return found
