"""Pinning with a fake CUDA runtime: what is pinned, what is not, and that no error is left for others to find."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.checkpoint import Entry
from headrace.settings import Settings
from headrace.streaming.leases import Pinning
from headrace.streaming.pinning import cuda_pinning, pinning_for
from headrace.streaming.room import leased_room, rank_memory_limit
from headrace.units import GIB, MIB


class FakeRuntime:
    def __init__(self, *, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.registered: dict[int, int] = {}
        self.last_error = 0

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        if num_bytes == 0 or sum(self.registered.values()) + num_bytes > self.most_bytes:
            self.last_error = 2
            return 2
        self.registered[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        if address not in self.registered:
            self.last_error = 713
            return 713
        del self.registered[address]
        return 0

    def clear(self) -> None:
        self.last_error = 0


def test_a_region_is_pinned_and_unpinned() -> None:
    runtime = FakeRuntime(most_bytes=100)
    pinning = cuda_pinning(runtime, lambda: None, clear_error=runtime.clear)
    assert pinning.pin(4096, 60) is True and runtime.registered == {4096: 60}
    pinning.unpin(4096)
    assert runtime.registered == {} and runtime.last_error == 0


def test_what_cannot_be_pinned_is_warned_of_once_and_leaves_no_error(caplog: pytest.LogCaptureFixture) -> None:
    runtime = FakeRuntime(most_bytes=100)
    pinning = cuda_pinning(runtime, lambda: None, clear_error=runtime.clear)
    assert [pinning.pin(address, 80) for address in (0, 4096, 8192)] == [True, False, False]
    assert runtime.last_error == 0
    assert caplog.text.count("could not be pinned (CUDA error 2)") == 1


def test_an_empty_region_is_never_shown_to_the_driver() -> None:
    runtime = FakeRuntime(most_bytes=100)
    assert cuda_pinning(runtime, lambda: None, clear_error=runtime.clear).pin(0, 0) is False
    assert runtime.last_error == 0


def test_without_a_gpu_nothing_is_pinned() -> None:
    assert pinning_for("cpu") is None and pinning_for("meta") is None


def pinned_by(settings: Settings, sizes: list[int], **options: Any) -> list[int]:
    """Return the sizes of what is pinned for leases of tensors of these sizes when the first is lent."""
    asked: list[int] = []

    def pin(address: int, num_bytes: int) -> bool:
        asked.append(num_bytes)
        return True

    entries = [
        Entry(name=f"t{place}", dtype="U8", shape=(size,), file="f", start=0, stop=size)
        for place, size in enumerate(sizes)
    ]
    room = leased_room(
        entries,
        settings,
        limit_bytes=rank_memory_limit(settings, available_bytes=64 * GIB),
        available_bytes=64 * GIB,
        pinning=Pinning(pin, lambda address: None, lambda: None),
        **options,
    )
    assert room.try_allocate(entries[0]) is not None
    room.close()
    return asked


@pytest.mark.parametrize(
    ("said", "pinned_bytes"),
    [
        ({"num_connections": 8}, GIB),
        ({"num_connections": 64}, 2 * 64 * 16 * MIB),
        ({"memory_limit_bytes": 3 * GIB}, 3 * GIB),
        ({"memory_limit_bytes": 256 * MIB}, 256 * MIB),
    ],
)
def test_as_much_is_pinned_as_reads_need_unless_somebody_said_how_much(said: dict[str, int], pinned_bytes: int) -> None:
    settings = Settings.from_environment({}, **said)
    assert pinned_by(settings, [100 * MIB] * 90, on_budget="promote") == [pinned_bytes]


def test_where_all_must_fit_the_budget_it_is_pinned_whole() -> None:
    settings = Settings.from_environment({}, num_connections=8)
    assert pinned_by(settings, [GIB] * 9, on_budget="error") == [8 * GIB]
