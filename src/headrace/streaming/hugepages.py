"""Whether new memory is made of huge pages, by what the first of them cost. Knows mappings; knows no tensors.

Memory that is filled for the first time has to be made by the system, page by page: a quarter of a million faults a gigabyte, which take as much CPU time as decrypting it. Huge pages take
a fifth of that where the system has them at hand, and several times as much where it has to fetch them: from the host of a virtual machine to which free memory is given back, which the system tells, or by
moving others' pages together, which nothing tells beforehand. So the first pages are timed, in CPU time, beside small ones; they are needed anyway. Measured in 2026-11 (`benchmarks/tuning.py`).
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
import time
from collections.abc import Callable
from pathlib import Path

from headrace.units import KIB, MIB

logger = logging.getLogger("headrace")

_MADV_POPULATE_WRITE = 23
"""madvise(2): make the pages now (Linux 5.14). Python has no name for it."""
_SMALL_SAMPLE_BYTES = 256 * KIB
_MOST_SMALL_SAMPLES = 4
_LARGEST_HUGE_PAGE_BYTES = 32 * MIB
"""Beyond (512 MiB with some ARM kernels) no tensor fills them."""
_SETTINGS = "sys/kernel/mm/transparent_hugepage"
_REPORTING = "sys/module/page_reporting/parameters/page_reporting_order"
"""From which power of two of small pages on free memory is given back to the host of a virtual machine; a number far larger where none is (Linux 5.14)."""
_LARGEST_ORDER = 20


class HugePages:
    """Advises the system on the mappings of one load, for as long as that pays. Thread safe.

    Only where the system leaves the choice to programs (``madvise``): where it gives everybody huge pages, or nobody, that stays as it is. ``root`` is where ``sys`` is; ``cpu_s`` returns the CPU
    seconds of the calling thread.
    """

    def __init__(self, root: Path = Path("/"), cpu_s: Callable[[], float] = time.thread_time) -> None:
        self._cpu_s = cpu_s
        self._lock = threading.Lock()
        self.size_bytes = _huge_page_bytes(root)
        """Of one huge page; 0 where there are none to be had, or none any more."""
        self._num_small = 0
        self._least_small_s = 0.0
        """For as many bytes as a huge page has."""
        self._num_huge = 0
        self._huge_s = 0.0

    def advise(self, mapping: mmap.mmap) -> None:
        """Let what of a new private mapping fills huge pages be made of them. Its first huge page, and a part of its last, may be made at once."""
        with self._lock:
            size = self.size_bytes
            if not size or len(mapping) < 2 * size:
                return
            address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
            start = -address % size
            stop = start + (len(mapping) - start) // size * size
            try:
                if stop - start >= 2 * size and self._num_small < _MOST_SMALL_SAMPLES:
                    stop -= size
                    self._note_small(
                        self._time_to_make(mapping, stop, _SMALL_SAMPLE_BYTES) * size / _SMALL_SAMPLE_BYTES
                    )
                if self._num_small and start < stop:
                    mapping.madvise(mmap.MADV_HUGEPAGE, start, stop - start)
                    self._note_huge(self._time_to_make(mapping, start, size))
                    if not self.size_bytes:
                        mapping.madvise(mmap.MADV_NOHUGEPAGE, start, stop - start)
            except OSError as error:  # An older kernel, or one without.
                logger.debug("No huge pages: %s.", error)
                self.size_bytes = 0

    def _time_to_make(self, mapping: mmap.mmap, start: int, num_bytes: int) -> float:
        before = self._cpu_s()
        mapping.madvise(_MADV_POPULATE_WRITE, start, num_bytes)
        return self._cpu_s() - before

    def _note_small(self, seconds: float) -> None:
        self._least_small_s = min(seconds, self._least_small_s) if self._num_small else seconds
        self._num_small += 1

    def _note_huge(self, seconds: float) -> None:
        self._huge_s += seconds
        self._num_huge += 1
        if self._huge_s > self._num_huge * self._least_small_s:
            logger.debug(
                "No more huge pages: %d took %.2f ms each, small ones %.2f ms for as much memory.",
                self._num_huge,
                self._huge_s / self._num_huge * 1e3,
                self._least_small_s * 1e3,
            )
            self.size_bytes = 0


def _huge_page_bytes(root: Path) -> int:
    chosen = _text_of(root / _SETTINGS / "enabled")
    size = _number_of(root / _SETTINGS / "hpage_pmd_size")
    is_taken_back = 0 <= _number_of(root / _REPORTING) <= _LARGEST_ORDER
    return size if "[madvise]" in chosen and 0 < size <= _LARGEST_HUGE_PAGE_BYTES and not is_taken_back else 0


def _text_of(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number_of(path: Path) -> int:
    try:
        return int(_text_of(path))
    except ValueError:
        return -1
