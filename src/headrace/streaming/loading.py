"""The public ways in: open a checkpoint, stream its tensors, or load them all."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from headrace.checkpoint import Checkpoint, open_checkpoint
from headrace.progress import LoadProgress
from headrace.settings import Settings
from headrace.streaming.display import ProgressDisplay
from headrace.streaming.report import LoadReport
from headrace.streaming.selection import Wanted, select_entries
from headrace.streaming.stream import TensorStream

Source = str | os.PathLike[str] | Checkpoint
"""A uri, a path, or a checkpoint that is open already."""


def open(source: Source, *, settings: Settings | None = None, progress: LoadProgress | None = None) -> Checkpoint:
    """Open the checkpoint at ``source``: list it, pin its objects' versions and read every header, but no weight byte.

    Close it after use, or use it as a context manager. Raises `StorageError` and `CheckpointError` of every kind.
    """
    if isinstance(source, Checkpoint):
        return source
    return open_checkpoint(source, settings=settings or Settings.from_environment(), progress=progress)


def stream(
    source: Source,
    *,
    include: Wanted = None,
    exclude: Wanted = None,
    raw: bool = False,
    settings: Settings | None = None,
    progress: LoadProgress | None = None,
) -> TensorStream:
    """Return a stream of the tensors of ``source`` in file order; see `TensorStream`. Nothing is read before the first is asked for.

    ``include`` and ``exclude`` take globs or a predicate on names; what they leave out is never requested. With ``raw`` every tensor is flat uint8.
    """
    settings = settings or Settings.from_environment()
    progress = progress or LoadProgress()
    checkpoint = open(source, settings=settings, progress=progress)
    try:
        entries = select_entries(checkpoint.entries, include=include, exclude=exclude)
        owns = checkpoint is not source
        return TensorStream(checkpoint, entries, settings=settings, progress=progress, raw=raw, owns_checkpoint=owns)
    except BaseException:
        if checkpoint is not source:
            checkpoint.close()
        raise


def load_state_dict(
    source: Source,
    *,
    include: Wanted = None,
    exclude: Wanted = None,
    device: str | torch.device = "cpu",
    settings: Settings | None = None,
    on_report: Callable[[LoadReport], None] | None = None,
) -> dict[str, torch.Tensor]:
    """Return all tensors of ``source`` by name, in file order, each of which owns its memory.

    On the CPU the bytes arrive where they stay: no copy is made. For another ``device`` each tensor is copied there as it arrives, and host memory stays
    within the read-ahead budget plus the largest tensor. ``on_report`` is given the account of the load.
    """
    settings = settings or Settings.from_environment()
    progress = LoadProgress()
    target = torch.device(device)
    with ProgressDisplay(progress, enabled=settings.progress):
        tensors = stream(source, include=include, exclude=exclude, settings=settings, progress=progress)
        try:
            with progress.during("weights"):
                loaded: dict[str, torch.Tensor] = {}
                for name, tensor in tensors:
                    loaded[name] = tensor.to(target)
                    del tensor  # else it would be held while the next is awaited
        finally:
            tensors.close()
    if on_report is not None:
        on_report(tensors.report)
    return loaded
