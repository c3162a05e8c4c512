"""The public ways in: open a checkpoint, stream its tensors, or load them all."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from headrace.checkpoint import Checkpoint, open_checkpoint
from headrace.progress import LoadProgress
from headrace.settings import Settings
from headrace.streaming.display import ProgressDisplay
from headrace.streaming.leases import OnBudget
from headrace.streaming.report import LoadReport
from headrace.streaming.room import Ownership
from headrace.streaming.selection import Wanted, select_entries
from headrace.streaming.stream import StreamOptions, TensorStream

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
    ownership: Ownership = "owned",
    on_budget: OnBudget = "promote",
    device: str | torch.device = "cpu",
    raw: bool = False,
    settings: Settings | None = None,
    progress: LoadProgress | None = None,
) -> TensorStream:
    """Return a stream of the tensors of ``source`` in file order; see `TensorStream`. Nothing is read before the first is asked for.

    ``include`` and ``exclude`` take globs, compiled regular expressions or a predicate on names; what they leave out is never requested. The other keywords are those of
    `StreamOptions`. Close it, or use it as a context manager.
    """
    options = StreamOptions(ownership=ownership, on_budget=on_budget, device=device, raw=raw)
    settings = settings or Settings.from_environment()
    progress = progress or LoadProgress()
    checkpoint = open(source, settings=settings, progress=progress)
    owns = checkpoint is not source
    try:
        entries = select_entries(checkpoint.entries, include=include, exclude=exclude)
        return TensorStream(
            checkpoint, entries, options=options, settings=settings, progress=progress, owns_checkpoint=owns
        )
    except BaseException:
        if owns:
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

    On the CPU the bytes arrive where they stay: no copy is made. For another ``device`` each tensor is copied there as it arrives, through leased memory (pinned for CUDA):
    host memory stays within the memory limit, and the largest tensor twice where that is more. ``on_report`` is given the account of the load.
    """
    settings = settings or Settings.from_environment()
    progress = LoadProgress()
    target = torch.device(device)
    ownership: Ownership = "owned" if target.type == "cpu" else "leased"
    with ProgressDisplay(progress, enabled=settings.progress):
        tensors = stream(
            source,
            include=include,
            exclude=exclude,
            ownership=ownership,
            device=target,
            settings=settings,
            progress=progress,
        )
        with tensors, progress.during("weights"):
            loaded: dict[str, torch.Tensor] = {}
            for name, tensor in tensors:
                loaded[name] = tensor.to(target, non_blocking=target.type == "cuda")  # leases are fenced
                del tensor  # else it would be held while the next is awaited
            if target.type == "cuda":
                torch.cuda.synchronize(target)
    if on_report is not None:
        on_report(tensors.report)
    return loaded
