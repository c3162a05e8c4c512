"""The public ways in: open a checkpoint, stream its tensors, or load them all."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from headrace.checkpoint import Checkpoint, Entry, open_checkpoint
from headrace.errors import InvalidSetting
from headrace.progress import LoadProgress
from headrace.settings import Settings
from headrace.streaming.display import ProgressDisplay
from headrace.streaming.formats import ExtraConfig, LoadFormat, parse_extra_config
from headrace.streaming.leases import OnBudget
from headrace.streaming.lockstep import Lockstep
from headrace.streaming.opening import open_source
from headrace.streaming.processgroup import Distributed, RankLink, find_link
from headrace.streaming.ranks import DistributedStream, Scope, check_scope
from headrace.streaming.report import LoadReport
from headrace.streaming.room import Ownership
from headrace.streaming.selection import Wanted, select_entries
from headrace.streaming.source import TensorSource
from headrace.streaming.stream import StreamOptions

Source = str | os.PathLike[str] | Checkpoint
"""A uri, a path, or a checkpoint that is open already."""

Extra = ExtraConfig | Mapping[str, Any] | str | None
"""What an extra config may be given as; see `parse_extra_config`."""


def open(
    source: Source,
    *,
    snapshot: str | None = None,
    settings: Settings | None = None,
    progress: LoadProgress | None = None,
) -> Checkpoint:
    """Open the checkpoint at ``source``: list it, pin its objects' versions and read every header, but no weight byte.

    ``snapshot`` is the id of the snapshot that it must be, as reports and logs show it: `ObjectChanged` where it is neither what is there now nor to be had from old
    versions that the store keeps. Close it after use, or use it as a context manager. Raises `StorageError` and `CheckpointError` of every kind.
    """
    if isinstance(source, Checkpoint):
        if snapshot not in (None, source.snapshot.id):
            raise InvalidSetting(
                f"The checkpoint that was given is snapshot {source.snapshot.id}, and {snapshot} is asked for.",
                mend="Open the uri with that snapshot, or leave it out.",
            )
        return source
    return open_checkpoint(
        source, snapshot=snapshot, settings=settings or Settings.from_environment(), progress=progress
    )


def stream(
    source: Source,
    *,
    include: Wanted = None,
    exclude: Wanted = None,
    ownership: Ownership = "owned",
    on_budget: OnBudget = "promote",
    device: str | torch.device = "cpu",
    raw: bool = False,
    snapshot: str | None = None,
    load_format: LoadFormat | str = LoadFormat.AUTO,
    extra_config: Extra = None,
    distributed: Distributed = "auto",
    process_group: dist.ProcessGroup | None = None,
    scope: Scope = "node",
    settings: Settings | None = None,
    progress: LoadProgress | None = None,
) -> TensorSource:
    """Return a stream of the tensors of ``source`` in file order; see `TensorStream`. Nothing is read before the first is asked for.

    ``include`` and ``exclude`` take globs, compiled regular expressions or a predicate on names; what they leave out is never requested. The other keywords are those of
    `StreamOptions`. Close it, or use it as a context manager.

    With a ``process_group`` of `torch.distributed`, or with ``distributed`` True for the one that was initialised, all its ranks must call this alike: those of each machine read every
    byte once among them, or, with ``scope`` ``group``, all ranks do; see `DistributedStream`. ``distributed`` False reads everything here.

    ``load_format`` names who moves the bytes: Headrace (``auto``, ``headrace``), Run:ai Model Streamer (``runai_streamer``) or, for local files, the safetensors library
    (``safetensors``); with the latter two every rank reads everything itself. ``extra_config`` (``concurrency``, ``memory_limit``, ``distributed``) takes the place of what
    ``settings`` say; its ``distributed`` is as the keyword. ``snapshot`` is as for `open`.
    """
    load_format, extra = LoadFormat.parse(load_format), parse_extra_config(extra_config)
    settings = extra.applied_to(settings or Settings.from_environment())
    progress = progress or LoadProgress()
    link = link_for(load_format, extra, distributed, process_group, scope)

    def prepare() -> _Opened:
        options = StreamOptions(ownership=ownership, on_budget=on_budget, device=device, raw=raw)
        checkpoint = open(source, snapshot=snapshot, settings=settings, progress=progress)
        opened = _Opened(checkpoint, load_format, options, owns_checkpoint=checkpoint is not source)
        try:
            opened.entries = select_entries(checkpoint.entries, include=include, exclude=exclude)
        except BaseException:
            opened.close()
            raise
        return opened

    return _stream(prepare, link, scope, settings, progress)


@dataclass(slots=True)
class _Opened:
    """A checkpoint on its way into a stream."""

    checkpoint: Checkpoint
    load_format: LoadFormat
    options: StreamOptions
    owns_checkpoint: bool
    entries: list[Entry] = field(default_factory=list)

    def close(self) -> None:
        if self.owns_checkpoint:
            self.checkpoint.close()


def _stream(
    prepare: Callable[[], _Opened], link: RankLink | None, scope: Scope, settings: Settings, progress: LoadProgress
) -> TensorSource:
    lockstep = Lockstep(link) if link is not None else None
    opened = prepare() if lockstep is None else lockstep.do("opening the checkpoint", prepare, undo=_Opened.close)
    try:
        if lockstep is None:
            return open_source(
                opened.load_format,
                opened.checkpoint,
                opened.entries,
                options=opened.options,
                settings=settings,
                progress=progress,
                owns_checkpoint=opened.owns_checkpoint,
            )
        return DistributedStream(
            opened.checkpoint,
            opened.entries,
            lockstep=lockstep,
            options=opened.options,
            settings=settings,
            progress=progress,
            scope=scope,
            owns_checkpoint=opened.owns_checkpoint,
        )
    except BaseException:
        opened.close()
        raise


def link_for(
    load_format: LoadFormat,
    extra: ExtraConfig,
    distributed: Distributed,
    process_group: dist.ProcessGroup | None,
    scope: Scope,
) -> RankLink | None:
    """Return the link to the ranks that share a load, None where this process loads alone; what the keyword leaves open the extra config says."""
    check_scope(scope)
    if load_format in (LoadFormat.AUTO, LoadFormat.HEADRACE):
        shares = extra.distributed if distributed == "auto" and extra.distributed is not None else distributed
        return find_link(shares, process_group)
    if distributed is True:
        raise InvalidSetting(
            f"distributed is True, and load_format is {load_format}.",
            "Only Headrace's own transport shares the reading among ranks.",
            "Use load_format headrace, or let every rank read everything.",
        )
    return None


def load_state_dict(
    source: Source,
    *,
    include: Wanted = None,
    exclude: Wanted = None,
    device: str | torch.device = "cpu",
    snapshot: str | None = None,
    load_format: LoadFormat | str = LoadFormat.AUTO,
    extra_config: Extra = None,
    distributed: Distributed = "auto",
    process_group: dist.ProcessGroup | None = None,
    scope: Scope = "node",
    settings: Settings | None = None,
    on_report: Callable[[LoadReport], None] | None = None,
) -> dict[str, torch.Tensor]:
    """Return all tensors of ``source`` by name, in file order, each of which owns its memory.

    On the CPU the bytes arrive where they stay: no copy is made. For another ``device`` each tensor is copied there as it arrives, through leased memory (pinned for CUDA):
    host memory stays within the memory limit, and the largest tensor twice where that is more. ``on_report`` is given the account of the load. ``snapshot``, ``load_format``, ``extra_config``,
    ``distributed``, ``process_group`` and ``scope`` are those of `stream`; the first rank alone shows progress. What another library than ours moves may share memory: with
    ``safetensors`` the tensors of one file are parts of its mapping.
    """
    load_format, extra = LoadFormat.parse(load_format), parse_extra_config(extra_config)
    settings = settings or Settings.from_environment()
    progress = LoadProgress()
    target = torch.device(device)
    ownership: Ownership = "owned" if target.type == "cpu" else "leased"
    link = link_for(load_format, extra, distributed, process_group, scope)
    with ProgressDisplay(progress, enabled=settings.progress and (link is None or link.rank == 0)):
        tensors = stream(
            source,
            include=include,
            exclude=exclude,
            ownership=ownership,
            device=target,
            snapshot=snapshot,
            load_format=load_format,
            extra_config=extra,
            distributed=distributed,
            process_group=process_group,
            scope=scope,
            settings=settings,
            progress=progress,
        )
        # Our leases are used again only after a fence; of another library's memory nobody knows when its copy has ended.
        is_fenced = target.type == "cuda" and load_format in (LoadFormat.AUTO, LoadFormat.HEADRACE)
        with tensors, progress.during("weights"):
            loaded: dict[str, torch.Tensor] = {}
            for name, tensor in tensors:
                loaded[name] = tensor.to(target, non_blocking=is_fenced)
                del tensor  # else it would be held while the next is awaited
            if target.type == "cuda":
                torch.cuda.synchronize(target)
    if on_report is not None:
        on_report(tensors.report)
    return loaded
