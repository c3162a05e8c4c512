"""The process group that ranks load over, and the two things that are done with it. The only module that calls torch.distributed; knows no tensors' meaning.

All moves as bytes: FP8 and the sub-byte types have no type in gloo or NCCL.
"""

from __future__ import annotations

import contextlib
from typing import Literal, Protocol

import torch
import torch.distributed as dist

from headrace.errors import InvalidSetting
from headrace.streaming.memory import Bytes
from headrace.units import MIB

Distributed = bool | Literal["auto"]
"""Whether ranks share the reading: True, False, or ``auto``, where a process group is initialised and has more than one rank."""

_BOUNCE_BYTES = 64 * MIB
"""Device memory through which bytes pass where the group moves only what is on a device."""


class RankLink(Protocol):
    """What a group of ranks can do together. Every rank calls the same methods in the same order; each blocks until the others have called."""

    @property
    def rank(self) -> int:
        """This rank's number in the group, from 0."""

    @property
    def num_ranks(self) -> int:
        """How many ranks the group has."""

    def gather(self, record: bytes) -> list[bytes]:
        """Return every rank's ``record``, by rank. All have one length."""

    def broadcast(self, array: Bytes, rank: int) -> None:
        """Send ``array`` from ``rank`` into the array, of equal length, that every other rank calls with."""


class GroupLink:
    """A link over a process group of torch. Its collectives keep the group's own timeout, and raise RuntimeError where one fails.

    Bytes move from CPU to CPU where the group can do that (gloo), and otherwise through a buffer on the current CUDA device (NCCL).
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """``group`` None is the group that `torch.distributed.init_process_group` made."""
        self._group = group
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        self._device = _device_for(dist.get_backend_config(group))
        self._bounce: torch.Tensor | None = None

    def gather(self, record: bytes) -> list[bytes]:
        with self._on_device():
            own = torch.frombuffer(bytearray(record), dtype=torch.uint8).to(self._device)
            every = [torch.empty_like(own) for _ in range(self.num_ranks)]
            dist.all_gather(every, own, group=self._group)
            return [one.cpu().numpy().tobytes() for one in every]

    def broadcast(self, array: Bytes, rank: int) -> None:
        whole = torch.from_numpy(array)
        if self._device.type == "cpu":
            dist.broadcast(whole, group=self._group, group_src=rank)
            return
        with self._on_device():
            if self._bounce is None:
                self._bounce = torch.empty(_BOUNCE_BYTES, dtype=torch.uint8, device=self._device)
            for start in range(0, len(whole), _BOUNCE_BYTES):
                piece = whole[start : start + _BOUNCE_BYTES]
                bounce = self._bounce[: len(piece)]
                if rank == self.rank:
                    bounce.copy_(piece)
                dist.broadcast(bounce, group=self._group, group_src=rank)
                if rank != self.rank:
                    piece.copy_(bounce)

    def _on_device(self) -> contextlib.AbstractContextManager[object]:
        # The current device is a thread's own, and collectives run in a thread of ours.
        return torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext()


def find_link(distributed: Distributed, group: dist.ProcessGroup | None = None) -> GroupLink | None:
    """Return the link over which this process loads with others; None where it loads alone: not wanted, no group, or a group of one.

    ``"auto"`` shares with the ``group`` that is given and never with the world by itself: a load that only some ranks of a job call would wait for the others. True
    without a group means the one that was initialised. Raises `InvalidSetting` where ``distributed`` is True and nothing is initialised, and where this
    process is not in ``group``.
    """
    if distributed not in (True, False, "auto"):
        raise InvalidSetting(f"distributed is {distributed!r}.", "It must be True, False or 'auto'.")
    if distributed is False or (distributed == "auto" and group is None):
        return None
    if not (dist.is_available() and dist.is_initialized()):
        if distributed is True:
            raise InvalidSetting(
                "distributed=True, but this process is in no process group.",
                "Ranks exchange what they read over torch.distributed.",
                "Call torch.distributed.init_process_group first, or leave distributed at 'auto'.",
            )
        return None
    if dist.get_rank(group) < 0:
        raise InvalidSetting(
            "This process is not in the process group that it was given.",
            "Only the members of a group can load together.",
            "Pass each rank a group that it belongs to, or distributed=False.",
        )
    return GroupLink(group) if dist.get_world_size(group) > 1 else None


def _device_for(backends: str) -> torch.device:
    """Return where bytes must be for a group with these ``backends``, as torch writes them: ``cpu:gloo,cuda:nccl``."""
    known = {part.partition(":")[0] for part in backends.split(",")}
    if "cpu" in known:
        return torch.device("cpu")
    if "cuda" in known:
        return torch.device("cuda", torch.cuda.current_device())
    raise InvalidSetting(
        f"The process group moves bytes neither on CPUs nor on CUDA devices ({backends}).",
        mend="Pass a gloo group of the same ranks as process_group, or distributed=False.",
    )
