"""Picks the stream for a load format. The only module that knows all of them; each is imported when it is needed."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.checkpoint import Checkpoint, Entry
from headrace.errors import InvalidSetting
from headrace.progress import LoadProgress
from headrace.settings import Settings
from headrace.streaming.formats import LoadFormat
from headrace.streaming.source import TensorSource
from headrace.streaming.stream import StreamOptions, TensorStream


def open_source(
    load_format: LoadFormat | str,
    checkpoint: Checkpoint,
    entries: Sequence[Entry] | None = None,
    *,
    options: StreamOptions | None = None,
    settings: Settings | None = None,
    progress: LoadProgress | None = None,
    owns_checkpoint: bool = False,
) -> TensorSource:
    """Return a stream of ``entries`` (default: all) of ``checkpoint`` by ``load_format``. Nothing is read before the first tensor is asked for.

    With ``owns_checkpoint`` closing the stream closes the checkpoint. Raises `InvalidSetting` for a format that streams nothing, or not from there, and `MissingDependency`.
    """
    load_format = LoadFormat.parse(load_format)
    if load_format in (LoadFormat.AUTO, LoadFormat.HEADRACE):
        return TensorStream(
            checkpoint,
            entries,
            options=options,
            settings=settings,
            progress=progress,
            owns_checkpoint=owns_checkpoint,
        )
    if load_format is LoadFormat.RUNAI_STREAMER:
        from headrace.streaming.runai import RunaiStream

        return RunaiStream(
            checkpoint,
            entries,
            options=options,
            settings=settings,
            progress=progress,
            owns_checkpoint=owns_checkpoint,
        )
    if load_format is LoadFormat.SAFETENSORS:
        from headrace.streaming.mapped import MappedStream

        return MappedStream(checkpoint, entries, options=options, progress=progress, owns_checkpoint=owns_checkpoint)
    raise InvalidSetting(
        f"load_format {load_format} streams no tensors.",
        "It is a way to load a model as a whole.",
        "Use it with load_model, or stream with auto, headrace, runai_streamer or safetensors.",
    )
