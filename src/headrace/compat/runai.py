"""The names by which programs use Run:ai Model Streamer, over Headrace's own objects; that library is not imported.

Code that was written for ``runai_model_streamer`` runs after its import is changed to this module. Arguments have the names and the order of version 0.17.1. What differs:
tensors come in the order of the files and never lose their memory to another, a kept one keeps no buffer beside it, objects are pinned to one version, headers are checked
as `headrace.open` checks them, and errors are Headrace's. Classes take ``settings`` beside the library's own arguments, by default the environment's.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import torch

from headrace.checkpoint import Checkpoint
from headrace.compat.listing import S3Credentials, list_files, list_safetensors
from headrace.compat.pulling import ObjectStorageModel, pull_files
from headrace.compat.rangefiles import FileChunks, TensorMetadata, describe_files, open_files, open_ranges
from headrace.errors import InvalidSetting, StreamError
from headrace.settings import Settings
from headrace.streaming import DistributedStream, Lockstep, StreamOptions, TensorSource, TensorStream, find_link
from headrace.streaming.room import Ownership

__all__ = [
    "DistributedStreamer",
    "FileChunks",
    "FileStreamer",
    "ObjectStorageModel",
    "S3Credentials",
    "SafetensorsStreamer",
    "TensorMetadata",
    "create_torch_tensor",
    "list_safetensors",
    "prepare_request",
    "pull_files",
]

_LOG = logging.getLogger("headrace")

_DISTRIBUTED = "RUNAI_STREAMER_DIST"

Device = str | torch.device | None
"""Where tensors are wanted; None is the CPU."""


class _Streamer:
    """One stream at a time, over files of one store; what both streamers have in common."""

    def __init__(self, *, settings: Settings | None = None) -> None:
        self.settings = settings or Settings.from_environment()
        self._stream: TensorSource | None = None
        self._device = torch.device("cpu")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        if self._stream is not None:
            self._stream.close()

    def _begin(
        self,
        checkpoint: Checkpoint,
        device: Device,
        lockstep: Lockstep | None,
        *,
        options: StreamOptions,
        settings: Settings,
    ) -> None:
        """Stream all of ``checkpoint`` from now on."""
        self._device = torch.device(device or "cpu")
        try:
            if lockstep is None:
                self._stream = TensorStream(checkpoint, options=options, settings=settings, owns_checkpoint=True)
            else:
                self._stream = DistributedStream(
                    checkpoint, options=options, settings=settings, owns_checkpoint=True, lockstep=lockstep
                )
        except BaseException:
            checkpoint.close()
            raise

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self._stream is None:
            raise StreamError("Nothing was asked for.", mend="Call stream_files first.")
        stream, num_left = self._stream, len(self._stream.names_left)
        for name, tensor in stream:
            if self._device.type != "cpu":
                tensor = tensor.to(self._device)  # waits for the copy
            yield name, tensor
            del tensor  # else it would be held while the next is awaited
        if num_left:
            _LOG.info("Headrace: %s", "; ".join(f"{label} {value}" for label, value in stream.report.rows()))


class SafetensorsStreamer(_Streamer):
    """Streams the tensors of safetensors files: ``with SafetensorsStreamer() as streamer``, then `stream_files`, then `get_tensors`."""

    def __init__(self, *, settings: Settings | None = None) -> None:
        super().__init__(settings=settings)
        self.files_to_tensors_metadata: dict[int, list[TensorMetadata]] = {}
        """What will be streamed: by the file's place in ``paths``, in the order of offsets."""
        self.total_size = 0
        """Bytes of all that."""
        self._names: dict[str, str] = {}

    def stream_file(
        self,
        path: str,
        s3_credentials: S3Credentials | None = None,
        device: Device = "cpu",
        is_distributed: bool = False,
        tensor_names: Collection[str] | None = None,
        owned: bool = True,
    ) -> None:
        """Ask for the tensors of one file; see `stream_files`."""
        self.stream_files([path], s3_credentials, device, is_distributed, tensor_names, owned)

    def stream_files(
        self,
        paths: Sequence[str],
        s3_credentials: S3Credentials | None = None,
        device: Device = "cpu",
        is_distributed: bool = False,
        tensor_names: Collection[str] | None = None,
        owned: bool = True,
    ) -> None:
        """Open ``paths`` (uris or local files, of one store), read their headers, and ask for their tensors, or for those called ``tensor_names``.

        Each file is taken by itself: no index is looked at, and a name that two files hold comes twice, unless ``tensor_names`` names it: then it is an error. With
        ``is_distributed`` the ranks of `torch.distributed`'s group share the reading, where there is one of more than one rank; all call this alike. ``owned`` False lets tensors
        share memory that is used again when they are gone, and not before.

        What was asked for before is dropped. Raises `StorageError` and `CheckpointError` of every kind, and `InvalidSetting`.
        """
        self._close()
        wanted = _checked_names(tensor_names)
        lockstep = _find_lockstep(is_distributed)
        options = _options(device, owned=owned)

        def prepare() -> Checkpoint:
            described, checkpoint = open_files(paths, self.settings, s3_credentials, wanted)
            self.files_to_tensors_metadata = dict(enumerate(described))
            return checkpoint

        checkpoint = _opened(prepare, lockstep)
        names = [one.name for described in self.files_to_tensors_metadata.values() for one in described]
        self._names = dict(zip(checkpoint.entries, names, strict=True))
        self.total_size = checkpoint.total_bytes
        self._begin(checkpoint, device, lockstep, options=options, settings=self.settings)

    def get_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield ``(name, tensor)``, each once, with its stored dtype and shape, on the device that was asked for. A tensor may be kept."""
        for entry_name, tensor in self._tensors():
            yield self._names[entry_name], tensor
            del tensor


class _RangeStreamer(_Streamer):
    """What both streamers of byte ranges have in common."""

    def __init__(self, *, settings: Settings | None = None) -> None:
        super().__init__(settings=settings)
        self._places: dict[str, tuple[int, int]] = {}

    def _ask(
        self,
        requests: Sequence[FileChunks],
        credentials: S3Credentials | None,
        device: Device,
        lockstep: Lockstep | None,
        *,
        owned: bool,
        settings: Settings,
    ) -> None:
        """Begin to stream ``requests``; what was asked for before is dropped."""
        self._close()
        options = _options(device, owned=owned, raw=True)
        checkpoint = _opened(lambda: open_ranges(requests, settings, credentials), lockstep)
        places = [(one.id, index) for one in requests for index in range(len(one.sizes))]
        self._places = dict(zip(checkpoint.entries, places, strict=True))
        self._begin(checkpoint, device, lockstep, options=options, settings=settings)

    def get_chunks(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield ``(id of the file's request, index of the range, bytes)``; the bytes are ``[1, size] uint8`` and may be kept."""
        for entry_name, tensor in self._tensors():
            yield (*self._places[entry_name], tensor.view(1, -1))
            del tensor


class DistributedStreamer(_RangeStreamer):
    """Streams byte ranges of any files: ``with DistributedStreamer() as streamer``, then `stream_files`, then `get_chunks`."""

    def stream_files(
        self,
        file_stream_requests: Sequence[FileChunks],
        credentials: S3Credentials | None = None,
        device: Device = "cpu",
        is_distributed: bool = False,
        owned: bool = True,
        discover_ranks: bool | None = None,
    ) -> None:
        """Ask for ranges of files of one store. ``is_distributed`` and ``owned`` are as in `SafetensorsStreamer.stream_files`; ``discover_ranks`` changes nothing."""
        self._ask(
            file_stream_requests,
            credentials,
            device,
            _find_lockstep(is_distributed),
            owned=owned,
            settings=self.settings,
        )


class FileStreamer(_RangeStreamer):
    """Streams byte ranges of any files to one process, and lists files: ``with FileStreamer() as streamer``, then `stream_files`, then `get_chunks`."""

    def stream_files(
        self,
        file_stream_requests: Sequence[FileChunks],
        credentials: S3Credentials | None = None,
        device: Device = "cpu",
        memory_limit: int | None = None,
        owned: bool = True,
    ) -> None:
        """Ask for ranges of files of one store. ``memory_limit`` is in bytes: -1 is unlimited, 0 the smallest that works; None is what the settings say."""
        limited = self.settings
        if memory_limit is not None:
            limited = self.settings.changed("memory_limit", memory_limit_bytes=memory_limit)
        self._ask(file_stream_requests, credentials, device, None, owned=owned, settings=limited)

    def list_files(
        self,
        prefix: str,
        is_recursive: bool = True,
        allow_patterns: Sequence[str] | None = None,
        ignore_patterns: Sequence[str] | None = None,
    ) -> list[tuple[str, int]]:
        """Return path and size in bytes of files in the folder ``prefix``; see `headrace.compat.listing.list_files`."""
        return list_files(prefix, is_recursive, allow_patterns, ignore_patterns)


def prepare_request(
    fs: DistributedStreamer,
    paths: Sequence[str],
    s3_credentials: S3Credentials | None = None,
    discover_ranks: bool = True,
) -> list[tuple[int, list[TensorMetadata], list[int]]]:
    """Return for each safetensors file where its tensors begin, what they are and how many bytes each has, in the order of offsets. Reads headers alone."""
    return describe_files(paths, fs.settings, s3_credentials)


def create_torch_tensor(buffer: torch.Tensor, tensor_metadata: TensorMetadata) -> torch.Tensor:
    """Return the tensor in ``buffer``, such as `DistributedStreamer.get_chunks` yields; it shares the buffer's memory."""
    dtype, shape = tensor_metadata.get_torch_dtype(), tensor_metadata.get_storage_shape()
    if not tensor_metadata.get_bytesize():
        return torch.empty(shape, dtype=dtype, device=buffer.device)
    return buffer.reshape(-1).view(dtype).view(shape)


def _find_lockstep(is_distributed: bool) -> Lockstep | None:
    """Return what the ranks of the initialised group load in step with, where that is wanted and there is more than one; ``RUNAI_STREAMER_DIST=0`` is that library's way to say no."""
    is_group = is_distributed and torch.distributed.is_available() and torch.distributed.is_initialized()
    if not is_group or os.environ.get(_DISTRIBUTED) == "0":
        return None
    link = find_link(True)
    return Lockstep(link) if link is not None else None


def _opened(prepare: Callable[[], Checkpoint], lockstep: Lockstep | None) -> Checkpoint:
    """Return what ``prepare`` opens, on all ranks or on none."""
    return prepare() if lockstep is None else lockstep.do("opening the files", prepare, undo=Checkpoint.close)


def _options(device: Device, *, owned: bool, raw: bool = False) -> StreamOptions:
    target = torch.device(device or "cpu")
    # What is copied to a device goes through memory that is used again.
    ownership: Ownership = "owned" if owned and target.type == "cpu" else "leased"
    return StreamOptions(ownership=ownership, device=target, raw=raw)


def _checked_names(tensor_names: Any) -> frozenset[str] | None:
    if tensor_names is None:
        return None
    if isinstance(tensor_names, str) or not tensor_names:
        raise InvalidSetting(
            f"tensor_names is {tensor_names!r}.", "It must be a collection of at least one name, or None for all."
        )
    return frozenset(tensor_names)
