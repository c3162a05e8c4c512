"""Every byte of destination and staging memory comes from here. Knows sizes and alignment; knows no entries and no reads.

`PrivateMemory` belongs to this process. `SharedMemory` lies in a memfd, so that another process that is given the descriptor can fill it; its pages go back to
the system when the last tensor over them is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import threading
import weakref
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from headrace.errors import BudgetExceeded
from headrace.process import HomeProcess
from headrace.streaming.hugepages import HugePages
from headrace.transport.sharing import SharedPlace
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
    """Memory of this process alone: one mapping for each large piece, which goes back to the system when it dies, and a shared one for small pieces. Large ones are made of huge pages where that pays."""

    def __init__(self, huge_pages: HugePages | None = None) -> None:
        self._huge_pages = huge_pages
        self._lock = threading.Lock()
        self._slab: Bytes | None = None
        self._used = 0

    def allocate(self, num_bytes: int) -> Bytes:
        if num_bytes >= SHARE_BELOW_BYTES:
            return _fresh(num_bytes, self._huge_pages)
        with self._lock:
            if self._slab is None or self._used + num_bytes > SLAB_BYTES:
                self._slab, self._used = _fresh(SLAB_BYTES, None), 0
            piece = self._slab[self._used : self._used + num_bytes]
            self._used = _rounded_up(self._used + num_bytes, ALIGNMENT)
            return piece


class SharedFiles:
    """The memfds of one load. Opens mappings of them, and finds which of them a piece of memory lies in, for processes that fill it. Thread safe.

    A file goes, with its pages, when nothing of its mapping is referred to any more, whoever else has mapped it.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._files: dict[int, SharedPlace] = {}
        self._starts: dict[int, int] = {}

    def open_mapping(self, num_bytes: int) -> mmap.mmap:
        """Return a mapping of a new file of ``num_bytes``, zeros that cost nothing until they are written. Raises OSError."""
        descriptor = os.memfd_create("headrace", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, num_bytes)
            mapping = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED)
        except OSError:
            os.close(descriptor)
            raise
        number = next(self._numbers)
        self._starts[number] = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self._files[number] = SharedPlace(number, descriptor, num_bytes, 0)
        weakref.finalize(mapping, self._forget, number, HomeProcess()).atexit = False
        return mapping

    def find(self, piece: memoryview) -> SharedPlace | None:
        """Return where ``piece`` lies, None where that is in no file."""
        if not piece.nbytes or piece.readonly:
            return None
        address = ctypes.addressof(ctypes.c_char.from_buffer(piece))
        for number, place in list(self._files.items()):
            offset = address - self._starts[number]
            if 0 <= offset < place.size_bytes:
                return replace(place, offset=offset)
        return None

    def release(self, number: int) -> None:
        """Forget a file and close its descriptor; its pages go with the mapping. Takes no lock, so that a finalizer may call it."""
        place = self._files.pop(number, None)
        if place is not None:
            os.close(place.descriptor)

    def _forget(self, number: int, home: HomeProcess) -> None:
        # It may run in any thread at any time, so it takes no lock: each of these steps is one of the interpreter's.
        place = self._files.pop(number, None)
        if place is None:
            return
        with contextlib.suppress(OSError):
            # A forked child has the same file, and dropping its tensors must not take it from the parent.
            if home.is_here:
                os.ftruncate(place.descriptor, 0)  # The pages go now, though a reader process has them mapped.
            os.close(place.descriptor)


class SharedMemory:
    """Memory of a memfd of ``capacity_bytes``, mapped once. Pages that were never written cost nothing.

    Where an allocation lies in the file is `offset_of`, for a process that got `fileno`. Space is not handed out twice; when an array dies its pages are
    given back (MADV_REMOVE), and the file goes when the last array and this object are gone. ``files`` knows it then, too.
    """

    def __init__(self, capacity_bytes: int, files: SharedFiles | None = None) -> None:
        self.capacity_bytes = _rounded_up(max(capacity_bytes, 1), mmap.PAGESIZE)
        files = files or SharedFiles()
        self._map = files.open_mapping(self.capacity_bytes)
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        place = files.find(memoryview(self._map)[:1])
        assert place is not None
        self._descriptor = place.descriptor
        self._close = weakref.finalize(self, files.release, place.number)
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


def capacity_for(sizes: Iterable[int]) -> int:
    """Return the capacity that a `SharedMemory` needs for pieces of these sizes."""
    return sum(_rounded_up(size, mmap.PAGESIZE) for size in sizes)


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


def private_mapping(num_bytes: int, huge_pages: HugePages | None = None) -> mmap.mmap:
    """Map ``num_bytes`` of zeros that only this process sees, made of ``huge_pages`` where they pay. Raises OSError.

    MAP_PRIVATE, since Python's default would be shared with a forked child. The kernel joins neighbouring mappings, so that their number stays small.
    """
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge_pages is not None:
        huge_pages.advise(mapping)
    return mapping


def _fresh(num_bytes: int, huge_pages: HugePages | None) -> Bytes:
    # A mapping of its own, and not malloc: what is freed goes back at once, whichever thread allocated it. (Malloc keeps pieces of up to 32 MiB in its arenas.)
    try:
        return np.frombuffer(private_mapping(num_bytes, huge_pages), dtype=np.uint8)
    except OSError:  # too many mappings (vm.max_map_count)
        import torch  # Whoever makes tensors of it has; who only plans need not wait for it.

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
