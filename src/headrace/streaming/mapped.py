"""The files of a local folder, mapped into memory by the safetensors library: nothing is read before it is used. The only module that imports it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from headrace.checkpoint import Checkpoint, Entry
from headrace.errors import InvalidSetting, MissingDependency, ObjectChanged, UnsupportedDtype
from headrace.progress import LoadProgress
from headrace.streaming.formats import LoadFormat
from headrace.streaming.handout import HandOutStream
from headrace.streaming.stream import StreamOptions
from headrace.streaming.tensors import torch_dtype, torch_shape


class MappedStream(HandOutStream):
    """Hands out ``entries`` of a local ``checkpoint`` as parts of its files; used as `headrace.streaming.TensorStream` is.

    The tensors of one file share its private mapping: a tensor that is kept keeps it, writing to one changes no file, and whoever rewrites a file in place changes what
    is not in memory yet. That is so whatever ``options`` say of ownership. On network file systems the pages come slowly, one by one.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        entries: Sequence[Entry] | None = None,
        *,
        options: StreamOptions | None = None,
        progress: LoadProgress | None = None,
        owns_checkpoint: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises `InvalidSetting` for a checkpoint that is not local, and `MissingDependency`. No file is opened yet."""
        if checkpoint.store.uri.scheme != "file":
            raise InvalidSetting(
                f"load_format safetensors cannot read {checkpoint.uri}.",
                "It maps files into memory, and only local files can be mapped.",
                "Use load_format auto, which streams every uri.",
            )
        chosen = tuple(checkpoint.entries.values()) if entries is None else tuple(entries)
        progress = progress or LoadProgress()
        super().__init__(
            checkpoint,
            chosen,
            _MappedFeed(checkpoint, chosen, progress, _import_open()),
            load_format=LoadFormat.SAFETENSORS,
            options=options or StreamOptions(),
            progress=progress,
            owns_checkpoint=owns_checkpoint,
            clock=clock,
        )


class _MappedFeed:
    """The files that are open: each from its first tensor to its last."""

    num_connections = 1
    bytes_read = 0  # what is read later, by whoever uses a tensor, is not seen here
    peak_bytes = 0

    def __init__(
        self, checkpoint: Checkpoint, entries: Sequence[Entry], progress: LoadProgress, open_file: Callable[..., Any]
    ) -> None:
        self._checkpoint = checkpoint
        self._num_left = Counter(entry.file for entry in entries)
        self._progress = progress
        self._open_file = open_file
        self._lock = threading.Lock()
        self._files: dict[str, Any] = {}

    def describe_holdup(self) -> str:
        return "files are mapped, and read when they are used"

    def fetch(self, entry: Entry) -> torch.Tensor:
        with self._lock:
            try:
                tensor: torch.Tensor = self._opened(entry.file).get_tensor(entry.name)
            except (AttributeError, TypeError, ValueError) as error:  # what it raises for a dtype that it does not know
                raise _unknown(entry, error) from error
            if (tensor.dtype, tuple(tensor.shape)) != (torch_dtype(entry), torch_shape(entry)):
                raise _unknown(entry, f"it gives {tensor.dtype} {tuple(tensor.shape)}")
            self._num_left[entry.file] -= 1
            if not self._num_left[entry.file]:
                del self._files[entry.file]
        self._progress.arrived(entry.size_bytes)
        return tensor

    def close(self) -> None:
        with self._lock:
            self._files.clear()

    def _opened(self, file: str) -> Any:
        if file not in self._files:
            store = self._checkpoint.store
            opened = self._open_file(store.uri_of(file), framework="pt", device="cpu")
            # After it is open: what has another version now is perhaps not what was opened.
            if store.stat(file) != self._checkpoint.stored(file):
                raise ObjectChanged(
                    f"{store.uri_of(file)} is not the version that was opened.",
                    "It was written after the checkpoint had been opened.",
                    "Open the checkpoint again; give each new version a folder of its own.",
                )
            self._files[file] = opened
        return self._files[file]


def _unknown(entry: Entry, why: object) -> UnsupportedDtype:
    return UnsupportedDtype(
        f"Tensor {entry.name!r} in {entry.file} has dtype {entry.dtype} and shape {list(entry.shape)}.",
        f"The installed safetensors library cannot hand it out: {why}.",
        "Use load_format auto.",
    )


def _import_open() -> Callable[..., Any]:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise MissingDependency(
            "The safetensors library cannot be imported.",
            f"{error}.",
            "Install it with: pip install safetensors, or use load_format auto, which does not need it.",
        ) from error
    opener: Callable[..., Any] = safe_open
    return opener
