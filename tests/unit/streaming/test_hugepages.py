from __future__ import annotations

import ctypes
import errno
import mmap
from pathlib import Path
from typing import Any

import pytest

from headrace.streaming.hugepages import HugePages
from headrace.streaming.memory import PrivateMemory, private_mapping
from headrace.units import KIB, MIB

HUGE = 2 * MIB
POPULATE = 23
NOT_REPORTED = 4294967295


def root_with(folder: Path, *, chosen: str = "madvise", size: int | None = HUGE, order: int | None = None) -> Path:
    """Return a root whose ``sys`` says so; None for a file that is absent."""
    settings = folder / "sys/kernel/mm/transparent_hugepage"
    settings.mkdir(parents=True)
    choices = ("always", "madvise", "never")
    settings.joinpath("enabled").write_text(" ".join(f"[{one}]" if one == chosen else one for one in choices))
    if size is not None:
        settings.joinpath("hpage_pmd_size").write_text(f"{size}\n")
    if order is not None:
        reporting = folder / "sys/module/page_reporting/parameters"
        reporting.mkdir(parents=True)
        reporting.joinpath("page_reporting_order").write_text(f"{order}\n")
    return folder


class Mapping(mmap.mmap):
    """Notes the advice that it is given, and gives none."""

    given: list[tuple[int, int, int]]
    clock: list[float]
    costs: dict[int, float]
    """Size of what is made at once to the seconds that it takes."""

    def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
        self.given.append((option, start, length))
        if option == POPULATE:
            self.clock[0] += self.costs[length]


class Kernel:
    """Makes mappings, and a clock that goes on by what their pages cost."""

    def __init__(self, *, small_s: float, huge_s: float) -> None:
        self.clock = [0.0]
        self.costs = {256 * KIB: small_s / 8, HUGE: huge_s}

    def map(self, num_bytes: int) -> Mapping:
        mapping = Mapping(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapping.given, mapping.clock, mapping.costs = [], self.clock, self.costs
        return mapping

    def cpu_s(self) -> float:
        return self.clock[0]


def first_aligned(mapping: mmap.mmap) -> int:
    return -ctypes.addressof(ctypes.c_char.from_buffer(mapping)) % HUGE


def test_whole_huge_pages_are_advised_and_the_first_is_made(tmp_path: Path) -> None:
    kernel = Kernel(small_s=0.8e-3, huge_s=0.1e-3)
    pages = HugePages(root_with(tmp_path, order=NOT_REPORTED), kernel.cpu_s)
    for number in range(6):
        mapping = kernel.map(9 * MIB + 4096)
        pages.advise(mapping)
        start = first_aligned(mapping)
        stop = start + (len(mapping) - start) // HUGE * HUGE
        small = [(POPULATE, stop - HUGE, 256 * KIB)] if number < 4 else []
        length = stop - start - (HUGE if small else 0)
        assert mapping.given == [*small, (mmap.MADV_HUGEPAGE, start, length), (POPULATE, start, HUGE)]
        assert pages.size_bytes == HUGE


def test_pages_that_cost_more_than_small_ones_end_it(tmp_path: Path) -> None:
    kernel = Kernel(small_s=0.8e-3, huge_s=4.6e-3)
    pages = HugePages(root_with(tmp_path), kernel.cpu_s)
    first, second = kernel.map(16 * MIB), kernel.map(16 * MIB)
    pages.advise(first)
    advised = first.given[1]
    assert first.given[-1] == (mmap.MADV_NOHUGEPAGE, *advised[1:])
    pages.advise(second)
    assert second.given == []


def test_one_dear_page_among_cheap_ones_does_not_end_it(tmp_path: Path) -> None:
    kernel = Kernel(small_s=0.8e-3, huge_s=0.1e-3)
    pages = HugePages(root_with(tmp_path), kernel.cpu_s)
    for huge_s in (0.1e-3, 0.1e-3, 0.1e-3, 2e-3, 0.1e-3):
        kernel.costs[HUGE] = huge_s
        pages.advise(kernel.map(16 * MIB))
        assert pages.size_bytes == HUGE


@pytest.mark.parametrize(
    "said",
    [
        {"chosen": "always"},
        {"chosen": "never"},
        {"size": None},
        {"size": 512 * MIB},
        {"order": 9},
        {"order": 0},
    ],
)
def test_where_the_system_does_not_leave_it_to_programs_nothing_is_advised(
    tmp_path: Path, said: dict[str, Any]
) -> None:
    kernel = Kernel(small_s=0.8e-3, huge_s=0.1e-3)
    mapping = kernel.map(16 * MIB)
    HugePages(root_with(tmp_path, **said), kernel.cpu_s).advise(mapping)
    HugePages(tmp_path / "absent", kernel.cpu_s).advise(mapping)
    assert mapping.given == []


def test_a_mapping_without_room_for_two_is_left_alone(tmp_path: Path) -> None:
    kernel = Kernel(small_s=0.8e-3, huge_s=0.1e-3)
    mapping = kernel.map(2 * HUGE - 4096)
    HugePages(root_with(tmp_path), kernel.cpu_s).advise(mapping)
    assert mapping.given == []


def test_a_kernel_that_makes_no_pages_on_request_ends_it(tmp_path: Path) -> None:
    class Refusing(Mapping):
        def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    pages = HugePages(root_with(tmp_path))
    pages.advise(Refusing(-1, 16 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    assert pages.size_bytes == 0


def test_memory_is_memory_whatever_its_pages(tmp_path: Path) -> None:
    pages = HugePages(root_with(tmp_path))  # This system's own calls, whatever it says of them.
    memory = PrivateMemory(pages)
    pieces = [memory.allocate(size) for size in (1000, 3 * MIB, 11 * MIB + 5, 24 * MIB)]
    for number, piece in enumerate(pieces):
        assert not piece.any()
        piece[:] = number + 1
    assert [int(piece.astype("uint64").sum()) for piece in pieces] == [
        (number + 1) * len(piece) for number, piece in enumerate(pieces)
    ]
    assert private_mapping(8 * MIB, pages)[: 8 * MIB] == bytes(8 * MIB)
