"""From flat bytes to tensors: which torch dtype and shape an entry has, and how its memory is seen as one."""

from __future__ import annotations

import torch

from headrace.checkpoint import DTYPES, Entry
from headrace.errors import UnsupportedDtype
from headrace.streaming.memory import Bytes

STREAMED = "_headrace_streamed"
"""The attribute by which a consumer knows a streamed tensor. Nothing here needs it."""


def torch_dtype(entry: Entry) -> torch.dtype:
    """Return the torch dtype of ``entry``. Raises `UnsupportedDtype` where torch, or this version of it, has none."""
    name = DTYPES[entry.dtype].torch_name
    dtype = getattr(torch, name, None) if name else None
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedDtype(
            f"Tensor {entry.name!r} in {entry.file} has dtype {entry.dtype}.",
            f"torch {torch.__version__} has no such dtype.",
            "Leave it out with exclude, or ask for its raw bytes with raw=True.",
        )
    return dtype


def torch_shape(entry: Entry) -> tuple[int, ...]:
    """Return the shape that torch gives ``entry``: as stored, except that two 4-bit values make one element of the last dimension."""
    return DTYPES[entry.dtype].torch_shape(entry.shape) or entry.shape


class Destination:
    """The memory of one tensor while its bytes arrive; ``array`` is None where there are none. Holds as ``num_reads`` how many reads have yet to come."""

    __slots__ = ("array", "entry", "num_reads", "raw")

    def __init__(self, entry: Entry, array: Bytes | None, *, num_reads: int, raw: bool = False) -> None:
        self.entry = entry
        self.array = array
        self.num_reads = num_reads
        self.raw = raw

    def view(self, offset: int, size_bytes: int) -> memoryview:
        """Return the writable bytes from ``offset`` on, for a reader to fill."""
        assert self.array is not None
        return self.array[offset : offset + size_bytes].data

    def tensor(self) -> torch.Tensor:
        """Return the tensor over this memory: ``entry``'s dtype and shape, or flat uint8 when raw. Its storage keeps the memory alive."""
        flat = torch.empty(0, dtype=torch.uint8) if self.array is None else torch.from_numpy(self.array)
        if self.raw:
            return flat
        dtype = torch_dtype(self.entry)
        if self.array is None:
            return torch.empty(torch_shape(self.entry), dtype=dtype)
        return flat.view(dtype).view(torch_shape(self.entry))


def mark(tensor: torch.Tensor) -> None:
    """Set `STREAMED` on a tensor and on its storage: views lose a tensor's attributes, but share its storage."""
    setattr(tensor, STREAMED, True)
    setattr(tensor.untyped_storage(), STREAMED, True)
