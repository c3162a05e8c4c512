"""Streams whose bytes another library brings: what they owe their consumer, and how they keep account. Where tensors come from is their feed's business."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, Self

import torch

from headrace.checkpoint import Checkpoint, Entry
from headrace.errors import StreamClosed, StreamError
from headrace.process import HomeProcess
from headrace.progress import LoadProgress
from headrace.streaming.formats import LoadFormat
from headrace.streaming.report import LoadReport
from headrace.streaming.stream import StreamOptions
from headrace.streaming.tensors import mark, torch_dtype


class Feed(Protocol):
    """Where the tensors of a `HandOutStream` come from."""

    @property
    def num_connections(self) -> int:
        """Connections, or readers, at once."""

    @property
    def bytes_read(self) -> int:
        """Bytes that came, as far as that is known."""

    @property
    def peak_bytes(self) -> int:
        """Most memory at one time for tensors not handed out."""

    def describe_holdup(self) -> str:
        """Say what the load waits for."""

    def fetch(self, entry: Entry) -> torch.Tensor:
        """Wait for the tensor of ``entry``, which is asked for once, and return it with its stored dtype and shape. Called from any thread."""

    def close(self) -> None:
        """Stop, and free what was not fetched. Called once."""


class HandOutStream:
    """Hands out ``entries`` of ``checkpoint``, each once, from ``feed``; a `headrace.streaming.source.TensorSource`.

    Tensors are on the CPU, and valid for as long as anything refers to their storage. `take` may be called from several threads.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        entries: Sequence[Entry],
        feed: Feed,
        *,
        load_format: LoadFormat,
        options: StreamOptions,
        progress: LoadProgress,
        owns_checkpoint: bool,
        sources: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.checkpoint = checkpoint
        self.options = options
        self.progress = progress
        self.load_format = load_format
        self._feed = feed
        self._entries = {entry.name: entry for entry in entries}
        if len(self._entries) != len(entries):
            raise StreamError("A tensor was asked for twice in one stream.", "Each tensor is handed out once.")
        for entry in entries:
            torch_dtype(entry)  # refuse what cannot be represented before the first byte
        self._owns_checkpoint = owns_checkpoint
        self._sources = sources or {}
        self._clock = clock
        self._home = HomeProcess()
        self._lock = threading.Lock()
        self._taken: set[str] = set()
        self._num_handed_out = 0
        self._started: float | None = None
        self._ended: float | None = None
        self._closed = False
        self.bytes_wanted = sum(entry.size_bytes for entry in entries)
        progress.bytes_wanted += self.bytes_wanted

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what has not been handed out yet, in order; the end closes the stream."""
        for name in self.names_left:
            if name not in self._taken:
                yield name, self.take(name)
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "bytes_wanted"):
            self.close()

    def take(self, name: str) -> torch.Tensor:
        """Wait for one tensor and hand it out; the stream keeps no reference to it.

        Raises the load's first error, `StreamClosed`, or `StreamError` for a name that is not part of the stream or was handed out already.
        """
        entry = self._reserve(name)
        tensor = self._feed.fetch(entry)
        with self._lock:
            self._num_handed_out += 1
            if self._num_handed_out == len(self._entries):
                self._ended = self._clock()
        if self.options.raw:
            tensor = tensor.reshape(-1).view(torch.uint8)
        mark(tensor)
        return tensor

    def close(self) -> None:
        """Stop all reads, wait until they have ended, and free what was not handed out. May be called twice, from any thread. In a forked child it does nothing."""
        if not self._home.is_here:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._ended is None and self._started is not None:
                self._ended = self._clock()
        self._feed.close()
        if self._owns_checkpoint:
            self.checkpoint.close()

    @property
    def names_left(self) -> list[str]:
        """The names that have not been asked for, in order."""
        self._home.check("A stream")
        with self._lock:
            return [name for name in self._entries if name not in self._taken]

    @property
    def report(self) -> LoadReport:
        """The account so far; final after the end or `close`. The library does not say how many requests it makes."""
        self._home.check("A stream")
        with self._lock:
            stopped = self._ended if self._ended is not None else self._clock()
            return LoadReport(
                uri=str(self.checkpoint.uri),
                snapshot_id=self.checkpoint.snapshot.id,
                load_format=self.load_format,
                ownership=self.options.ownership,
                num_files=len(self.checkpoint.files),
                num_tensors=self._num_handed_out,
                bytes_checkpoint=self.checkpoint.total_bytes,
                bytes_wanted=self.bytes_wanted,
                bytes_read=self._feed.bytes_read,
                num_requests=0,
                num_retries=0,
                knows_requests=False,
                num_connections=self._feed.num_connections,
                seconds=0.0 if self._started is None else stopped - self._started,
                phases=dict(self.progress.phases),
                peak_staging_bytes=self._feed.peak_bytes,
                settings_from=dict(self._sources),
            )

    def _reserve(self, name: str) -> Entry:
        self._home.check("A stream")
        with self._lock:
            entry = self._entries.get(name)
            if entry is None:
                raise StreamError(
                    f"Tensor {name!r} is not part of this stream.",
                    "Only what was asked for before the first read is read.",
                )
            if name in self._taken:
                raise StreamError(
                    f"Tensor {name!r} was handed out already.", "Each tensor is handed out once; keep the one you got."
                )
            if self._closed:
                raise StreamClosed(f"Tensor {name!r} was asked for after the stream had been closed.")
            if self._started is None:
                self._started = self._clock()
                self.progress.describe_holdup = self._feed.describe_holdup
            self._taken.add(name)
            return entry
