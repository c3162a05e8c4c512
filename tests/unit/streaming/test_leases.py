"""Leases return when the last reference to their storage is gone, and not a moment earlier."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest
import torch

from headrace.errors import BudgetExceeded, InvalidSetting
from headrace.streaming.leases import LeasedMemory, LeaseTerms, Pinning
from headrace.units import MIB


def lender(
    limit: int = MIB, *, hard: int = 64 * MIB, wanted: int = 1 << 40, pinning: Pinning | None = None, **terms: Any
) -> LeasedMemory:
    return LeasedMemory(
        LeaseTerms(limit_bytes=limit, hard_limit_bytes=hard, **terms), wanted_bytes=wanted, pinning=pinning
    )


def lend(memory: LeasedMemory, num_bytes: int, label: str = "") -> torch.Tensor:
    array = memory.try_allocate(num_bytes, label)
    assert array is not None
    return torch.from_numpy(array)


def resident_bytes(array: np.ndarray) -> int:
    """Return how much of the pages under ``array`` is in memory."""
    import ctypes
    import mmap

    start = array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    num_pages = -(-(array.ctypes.data + array.nbytes - start) // mmap.PAGESIZE)
    flags = (ctypes.c_ubyte * num_pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(num_pages * mmap.PAGESIZE), flags) == 0
    return sum(flag & 1 for flag in flags) * mmap.PAGESIZE


@pytest.mark.parametrize(
    "keep",
    [
        lambda tensor: tensor[3:5],
        lambda tensor: tensor.detach(),
        lambda tensor: tensor.view(torch.bfloat16).view(8, -1)[2],
        lambda tensor: tensor.untyped_storage(),
        lambda tensor: tensor.numpy(),
        lambda tensor: torch.nn.Parameter(tensor, requires_grad=False).data,
        lambda tensor: memoryview(tensor.numpy()),
        lambda tensor: [tensor],
    ],
)
def test_whatever_refers_to_the_storage_keeps_the_lease(keep: Any) -> None:
    memory = lender()
    tensor = lend(memory, 4096, "kept")
    kept = keep(tensor)
    del tensor
    gc.collect()
    assert memory.lent_bytes == 4096 and memory.held_labels == ["kept"]
    del kept
    gc.collect()
    assert memory.lent_bytes == 0 and memory.held_labels == []


def test_a_copy_keeps_nothing() -> None:
    memory = lender()
    copy = lend(memory, 4096).clone()
    assert memory.lent_bytes == 0 and copy.numel() == 4096


def test_a_small_tensor_pins_only_itself() -> None:
    memory = lender()
    small, large = lend(memory, 2048), lend(memory, MIB // 2)
    del large
    assert memory.lent_bytes == 2048
    assert memory.try_allocate(MIB // 2) is not None
    assert small.numel() == 2048


def test_no_room_is_none_and_room_comes_back_from_any_thread() -> None:
    memory = lender()
    held = [lend(memory, MIB // 4) for _ in range(4)]
    assert memory.try_allocate(64) is None
    thread = threading.Thread(target=held.pop)
    thread.start()
    thread.join()
    assert memory.try_allocate(64) is not None


def test_memory_is_reused_only_after_it_came_back() -> None:
    memory = lender(poison=True)
    first = lend(memory, 4096)
    first[:] = 1
    address = first.data_ptr()
    other = lend(memory, 4096)
    assert other.data_ptr() != address and int(first.max()) == 1
    del first
    again = lend(memory, 4096)
    assert again.data_ptr() == address and set(again.tolist()) == {255}, "what came back was poisoned"


def test_a_full_buffer_is_left_to_its_holders_and_another_opened() -> None:
    memory = lender()
    kept = [lend(memory, MIB // 4, f"t{place}") for place in range(4)]
    for place, tensor in enumerate(kept):
        tensor[:] = place
    array = memory.allocate_beyond(MIB // 4, "t4")
    array[:] = 9
    assert (memory.num_promotions, memory.promoted_bytes) == (1, MIB)
    assert [int(tensor.float().mean()) for tensor in kept] == [0, 1, 2, 3], "nothing that is held was touched"
    assert memory.try_allocate(MIB // 4) is not None, "the new buffer is used as the first was"


def test_a_retired_buffer_gives_back_all_pages_but_those_that_are_held() -> None:
    memory = lender(2 * MIB)
    arrays = [memory.try_allocate(MIB // 4) for _ in range(8)]
    for array in arrays:
        assert array is not None
        array[:] = 1
    kept = arrays[3]
    whole = arrays[0].base  # type: ignore[union-attr]
    assert resident_bytes(whole) == 2 * MIB  # type: ignore[arg-type]
    memory.allocate_beyond(64)
    del arrays, array
    gc.collect()
    assert memory.lent_bytes <= MIB // 4 + 64
    assert resident_bytes(whole) == MIB // 4  # type: ignore[arg-type]
    assert kept is not None and int(kept.min()) == 1


def test_an_oversized_tensor_has_a_buffer_of_its_own_that_goes_with_it() -> None:
    memory = lender()
    assert memory.try_allocate(3 * MIB) is None
    array = memory.allocate_beyond(3 * MIB, "large")
    array[:] = 1
    assert memory.num_promotions == 0 and memory.lent_bytes == 3 * MIB
    del array
    gc.collect()
    assert memory.lent_bytes == 0 and not memory._buffers


def test_the_hard_limit_is_an_error_that_names_what_is_held() -> None:
    memory = lender(hard=2 * MIB)
    kept = [lend(memory, MIB // 4, f"layer.{place}") for place in range(4)]
    memory.allocate_beyond(MIB // 4, "layer.4")
    kept += [lend(memory, MIB // 4, f"layer.{place}") for place in range(5, 9)]
    with pytest.raises(
        BudgetExceeded,
        match=r"no room for layer\.9.*the hard limit is 2\.1 MB.*holds 8 tensors of 2\.1 MB \(layer\.0, layer\.1, layer\.2, \.\.\.\)",
    ) as caught:
        memory.allocate_beyond(MIB // 4, "layer.9")
    assert "ownership='owned'" in caught.value.mend


def test_on_budget_error_raises_instead_of_promoting() -> None:
    memory = lender(on_budget="error")
    kept = [lend(memory, MIB // 4) for _ in range(4)]
    with pytest.raises(BudgetExceeded, match=r"memory_limit is 1\.05 MB"):
        memory.allocate_beyond(64)
    assert memory.num_promotions == 0 and len(kept) == 4


def test_a_buffer_is_no_larger_than_what_is_wanted() -> None:
    assert lender(64 * MIB, wanted=10_000).capacity_bytes == 12288


def test_closing_leaves_what_is_lent_and_gives_back_the_rest() -> None:
    memory = lender()
    kept, dropped = lend(memory, 8192), lend(memory, MIB // 2)
    kept[:] = 5
    dropped[:] = 6
    del dropped
    memory.close()
    memory.close()
    assert set(kept.tolist()) == {5}


def test_a_lender_that_is_gone_leaves_its_leases_valid() -> None:
    memory = lender()
    tensor = lend(memory, 4096)
    tensor[:] = 3
    del memory
    gc.collect()
    assert set(tensor.tolist()) == {3}


def test_terms_are_checked() -> None:
    with pytest.raises(InvalidSetting, match="on_budget is 'shrug'"):
        LeaseTerms(limit_bytes=1, hard_limit_bytes=1, on_budget="shrug")  # type: ignore[arg-type]


class FakeDevice:
    """Pins what it is told to, up to a limit, and notes the order of events."""

    def __init__(self, limit: int = 1 << 40) -> None:
        self.events: list[str] = []
        self.pinned: dict[int, int] = {}
        self.limit = limit

    def pin(self, address: int, num_bytes: int) -> bool:
        if sum(self.pinned.values()) + num_bytes > self.limit:
            return False
        self.pinned[address] = num_bytes
        return True

    def unpin(self, address: int) -> None:
        del self.pinned[address]

    def fence(self) -> None:
        self.events.append("fence")

    @property
    def pinning(self) -> Pinning:
        return Pinning(self.pin, self.unpin, self.fence)


def test_pinned_memory_is_reused_only_after_a_fence() -> None:
    device = FakeDevice()
    memory = lender(pinning=device.pinning)
    tensor = lend(memory, MIB // 2)
    assert list(device.pinned.values()) == [MIB] and device.events == []
    lend(memory, MIB // 2)
    assert device.events == [], "nothing has come back yet when the second is lent"
    del tensor
    assert memory.try_allocate(MIB // 2) is not None
    assert device.events == ["fence"]


def test_pinned_buffers_are_unpinned_when_they_are_retired_and_what_is_held_stays() -> None:
    device = FakeDevice()
    memory = lender(pinning=device.pinning)
    kept = [lend(memory, MIB // 4) for _ in range(4)]
    kept[0][:] = 5
    memory.allocate_beyond(MIB // 4)
    assert len(device.pinned) == 1 and device.events == ["fence"], "the new one is pinned, the old one is not any more"
    memory.close()
    assert device.pinned == {} and set(kept[0].tolist()) == {5}


def test_what_cannot_be_pinned_is_lent_pageable() -> None:
    device = FakeDevice(limit=MIB)
    memory = lender(pinning=device.pinning)
    device.limit = 0
    tensor = lend(memory, MIB // 2)
    tensor[:] = 1
    memory.close()
    assert device.pinned == {} and device.events == []
