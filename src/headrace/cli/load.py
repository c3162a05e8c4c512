"""`headrace load`: streams a checkpoint's tensors into memory and says what that took. No engine, no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from headrace.cli.console import print_json, print_rows
from headrace.cli.ranks import on_ranks
from headrace.settings import Settings
from headrace.streaming import ExtraConfig, LoadProgress, LoadReport, ProgressDisplay, parse_extra_config
from headrace.streaming.loading import stream


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What the command line asked for."""

    uri: str
    settings: Settings
    include: Sequence[str] = ()
    """Globs on whole tensor names; empty wants all."""
    exclude: Sequence[str] = ()
    load_format: str = "auto"
    extra_config: ExtraConfig = field(default_factory=ExtraConfig)
    """It takes the place of what ``settings`` say; see `unsaid`."""
    snapshot: str | None = None
    """The id of the snapshot to take; None for what is there now."""
    keep: bool = False
    """Hold every tensor until the end, as an engine does, rather than drop each as it comes."""
    json: bool = False
    num_ranks: int = 1
    """How many processes of this machine load together, each byte once."""


def unsaid(extra_config: str | None, *, connections: int | None, memory_limit: int | None) -> ExtraConfig:
    """Return what ``extra_config`` says and no option of ours says already. Raises `InvalidSetting`."""
    extra = parse_extra_config(extra_config)
    if connections is not None:
        extra = replace(extra, concurrency=None)
    if memory_limit is not None:
        extra = replace(extra, memory_limit=None)
    return extra


def load(options: LoadOptions) -> None:
    """Stream the tensors and print the account. Raises what streaming raises; then nothing is printed."""
    report = stream_once(options) if options.num_ranks == 1 else on_ranks(options.num_ranks, stream_once, options)[0]
    if options.json:
        print_json(report.to_dict())
    else:
        print_rows(report.rows())


def stream_once(options: LoadOptions) -> LoadReport:
    """Stream the tensors that ``options`` name, and return the account of it: of all ranks, where this is one of several."""
    progress = LoadProgress()
    is_shared = options.num_ranks > 1
    with ProgressDisplay(progress, enabled=options.settings.progress):
        tensors = stream(
            options.uri,
            include=options.include or None,
            exclude=options.exclude or None,
            # What is dropped at once may come through memory that is used again, as an engine's copies do.
            ownership="owned" if options.keep else "leased",
            snapshot=options.snapshot,
            load_format=options.load_format,
            extra_config=options.extra_config,
            distributed=True if is_shared else "auto",
            settings=options.settings,
            progress=progress,
        )
        kept = []
        with tensors, progress.during("weights"):
            for _, tensor in tensors:
                if options.keep:
                    kept.append(tensor)
                del tensor  # or it would be held while the next one is awaited
    return tensors.report
