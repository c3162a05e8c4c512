"""How the workers of one tensor-parallel group open a source together: all the same snapshot or none, and whether they share the reading. Knows no engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.checkpoint import Checkpoint, Entry
from headrace.errors import StreamError
from headrace.progress import LoadProgress
from headrace.settings import Settings
from headrace.streaming import DistributedStream, Lockstep, StreamOptions, TensorSource, TensorStream
from headrace.streaming.agreement import Facts, facts_of
from headrace.streaming.lockstep import Step
from headrace.streaming.processgroup import RankLink

_LOG = logging.getLogger("headrace")


@dataclass(frozen=True, slots=True)
class Opened:
    """What one worker opened, and which of its entries it needs."""

    checkpoint: Checkpoint
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTerms:
    """How a source is streamed, equally on all ranks of a group."""

    options: StreamOptions
    settings: Settings
    progress: LoadProgress
    distributed: bool | None
    """Whether ranks share the reading; None: where they need the same tensors, some are on one machine, and they read from elsewhere."""


def open_stream(prepare: Callable[[], Opened], link: RankLink | None, terms: StreamTerms) -> TensorSource | None:
    """Return the stream of what ``prepare`` opens, which closes its checkpoint; None where nothing of it is needed here. With a ``link`` every rank must call this.

    Raises what ``prepare`` raises, on every rank: `RankFailed` where another one failed. Raises `StreamError` where the ranks opened different snapshots.
    """
    lockstep = Lockstep(link) if link is not None else None
    opened = prepare() if lockstep is None else lockstep.do("opening the checkpoint", prepare, undo=_close)
    try:
        is_shared = lockstep is not None and _agree(lockstep, opened, terms)
        if not opened.entries:
            _close(opened)
            return None
        if is_shared:
            assert lockstep is not None
            return DistributedStream(
                opened.checkpoint,
                opened.entries,
                lockstep=lockstep,
                options=terms.options,
                settings=terms.settings,
                progress=terms.progress,
                owns_checkpoint=True,
            )
        return TensorStream(
            opened.checkpoint,
            opened.entries,
            options=terms.options,
            settings=terms.settings,
            progress=terms.progress,
            owns_checkpoint=True,
        )
    except BaseException:
        _close(opened)
        raise


def shares_reading(told: Sequence[Facts], *, distributed: bool | None, is_remote: bool) -> bool:
    """Return whether ranks with these facts share the reading, the same on all of them. Pure."""
    if distributed is False or len({facts.entries for facts in told}) > 1:
        return False
    return distributed is True or (is_remote and len({facts.host for facts in told}) < len(told))


def check_snapshots(told: Sequence[Facts], *, uri: str, is_remote: bool) -> None:
    """Raise `StreamError` where not all ranks opened the same snapshot: each would load a slice of another model. Pure.

    Versions of local files are of one machine, so ranks of several are not compared where ``is_remote`` is False.
    """
    for rank, facts in enumerate(told):
        other = next(place for place, one in enumerate(told) if is_remote or one.host == facts.host)
        if facts.snapshot != told[other].snapshot:
            raise StreamError(
                f"Worker {rank} opened snapshot {facts.snapshot:012x} of {uri}, worker {other} {told[other].snapshot:012x}.",
                "An object was replaced while the workers opened it.",
                "Load again.",
            )


def _agree(lockstep: Lockstep, opened: Opened, terms: StreamTerms) -> bool:
    """Compare what the ranks opened; return whether they share the reading."""
    checkpoint = opened.checkpoint
    is_remote = checkpoint.store.uri.scheme != "file"
    facts = facts_of(checkpoint, opened.entries, terms.settings, raw=terms.options.raw)
    step = Step(name="planning", work=lambda: None, numbers=facts.numbers)
    told = [Facts.from_numbers(status.numbers) for status in lockstep.run(step)]
    check_snapshots(told, uri=checkpoint.uri, is_remote=is_remote)
    is_shared = shares_reading(told, distributed=terms.distributed, is_remote=is_remote)
    if terms.distributed and not is_shared and lockstep.link.rank == 0:
        _LOG.warning(
            "distributed is true, and the workers need different tensors of %s: each reads its own.", checkpoint.uri
        )
    return is_shared


def _close(opened: Opened) -> None:
    opened.checkpoint.close()
