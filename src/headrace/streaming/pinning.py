"""Pinned host memory for copies to a CUDA device. Registers memory that exists; allocates none.

Written against the CUDA runtime's documented behaviour and tested with a fake one; it has not run on a GPU yet.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from typing import Any

import torch

from headrace.streaming.leases import Pinning
from headrace.units import format_bytes

logger = logging.getLogger("headrace")


def pinning_for(device: str | torch.device) -> Pinning | None:
    """Return how leases for ``device`` are pinned; None where it is no CUDA device, or there is none."""
    target = torch.device(device)
    if target.type != "cuda" or not torch.cuda.is_available():
        return None
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    return cuda_pinning(runtime, lambda: torch.cuda.synchronize(target), clear_error=clear_cuda_error)


def cuda_pinning(runtime: Any, fence: Callable[[], None], *, clear_error: Callable[[], None]) -> Pinning:
    """Return pinning through ``runtime`` (``cudaHostRegister`` and ``cudaHostUnregister``); ``fence`` waits for all copies of the device.

    A region that cannot be pinned is used pageable, with one warning: copies from it are slower and right all the same.
    """
    warned: list[int] = []

    def pin(address: int, num_bytes: int) -> bool:
        if num_bytes == 0:  # the driver refuses an empty region
            return False
        status = int(runtime.cudaHostRegister(address, num_bytes, 0))
        if status == 0:
            return True
        clear_error()  # it would be raised by the next kernel launch, wherever that is
        if not warned:
            warned.append(status)
            logger.warning(
                "%s of host memory could not be pinned (CUDA error %d); copies to the GPU will be slower. Raise the limit on locked memory (ulimit -l).",
                format_bytes(num_bytes),
                status,
            )
        return False

    def unpin(address: int) -> None:
        if int(runtime.cudaHostUnregister(address)):
            clear_error()

    return Pinning(pin, unpin, fence)


def clear_cuda_error() -> None:
    """Take the last error from the CUDA runtime that torch has loaded, so that it is not reported to somebody else."""
    version = torch.version.cuda
    if version is None:
        return
    try:
        ctypes.CDLL(f"libcudart.so.{version.partition('.')[0]}").cudaGetLastError()
    except OSError:
        logger.debug("the CUDA runtime could not be found to clear its last error")
