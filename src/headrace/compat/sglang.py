"""The names by which SGLang's loader reaches object storage, over Headrace's own objects; neither SGLang nor Run:ai Model Streamer is imported.

They are called as SGLang 0.5.23 calls its own: `ObjectStorageModel.download_and_get_path` once, before worker processes exist; `ObjectStorageModel.get_path` wherever
configuration and tokenizer are read; `list_safetensors` and `runai_safetensors_weights_iterator` where the weights are loaded. What differs is said with each
name. Each takes ``settings`` beside SGLang's own arguments, by default the environment's.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import takewhile
from pathlib import Path
from types import TracebackType

import torch

from headrace.checkpoint import Checkpoint, Entry, open_checkpoint
from headrace.checkpoint.sidecache import SideFileCache
from headrace.checkpoint.sidelisting import is_side_file, list_side_files
from headrace.checkpoint.wording import listed
from headrace.errors import CacheError, InvalidSetting, ObjectNotFound, StoreUnavailable
from headrace.settings import Settings
from headrace.storage import ObjectStore, StoredObject, Uri, is_object_uri, open_store, parse_uri
from headrace.storage.uri import BUCKET_SCHEMES
from headrace.streaming import DistributedStream, LoadProgress, Lockstep, ProgressDisplay, StreamOptions, TensorStream
from headrace.streaming.processgroup import find_link
from headrace.streaming.source import TensorSource
from headrace.streaming.tensors import mark

__all__ = ["ObjectStorageModel", "is_runai_obj_uri", "list_safetensors", "runai_safetensors_weights_iterator"]

_LOG = logging.getLogger("headrace")

SGLANG_STREAMED = "_sglang_runai_streamer_tensor"
"""The attribute by which SGLang's models know a tensor that they must not keep without a copy. Ours may be kept; they copy it all the same."""

_MOST_PULLS = 3
"""How often a pull is begun anew because somebody else pointed the path elsewhere in the meantime."""

WeightsIterator = Iterator[tuple[str, torch.Tensor]]


def is_runai_obj_uri(model_or_path: str | os.PathLike[str]) -> bool:
    """Say whether this is an ``s3``, ``gs`` or ``az`` uri, in any letter case, as text or as a path object. Never touches the disk, never raises.

    `headrace.is_object_uri` says the same of ``hf`` and ``http`` uris, too.
    """
    scheme = str(model_or_path).strip().partition(":")[0].lower()
    return scheme in BUCKET_SCHEMES and is_object_uri(model_or_path)


def list_safetensors(path: str | os.PathLike[str] = "", *, settings: Settings | None = None) -> list[str]:
    """Return the safetensors files that are the checkpoint at ``path``, each as ``os.path.join(path, key)``, in natural order.

    With an index these are the files that it names; without one, all at the top that belong together (see `headrace.checkpoint.selection`). So duplicates that
    the index does not name are gone already, and filtering the list by the same index changes nothing. Every header is read, so that a file that is cut or
    absent is an error here: raises `StorageError` and `CheckpointError` of every kind, `NoWeights` where the list would be empty.
    """
    with open_checkpoint(path, settings=settings) as checkpoint:
        return [_spelled(path, key, checkpoint) for key in checkpoint.files]


class ObjectStorageModel:
    """The side files of the model at ``url`` (configuration, tokenizer, remote code), in the node's cache. A context manager; any process, any thread.

    They are found at ``<cache>/model_streamer/<first 16 digits of the SHA-256 of the uri>``. ``<cache>`` is `Settings.cache_dir`, and the uri is hashed as
    ``str(headrace.parse_uri(url))``, so that ``S3://bucket/llama/`` and ``s3://bucket/llama`` are one. That path is a link to a folder that holds one version and never
    changes; a pull of another version swaps it in one step. The side files of a local folder are the folder itself, and are never copied.

    Weights never become side files, whatever the patterns say: what is mirrored is named by an allow-list, 100 MB at most.
    """

    def __init__(self, url: str | os.PathLike[str], *, settings: Settings | None = None) -> None:
        self._settings = settings or Settings.from_environment()
        self._uri = parse_uri(url)
        self._cache = SideFileCache(self._settings.cache_dir)
        self._path = _path_of(self._uri, self._cache)
        self.dir = str(self._path)
        """The path where the side files are once they have been pulled."""

    def __repr__(self) -> str:
        return f"ObjectStorageModel({self._uri}, dir={self.dir!r})"

    def __enter__(self) -> ObjectStorageModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is held between two pulls, and a pull that fails leaves nothing behind."""

    @classmethod
    def get_path(cls, model_path: str | os.PathLike[str], *, settings: Settings | None = None) -> str:
        """Return where the side files are, or will be once they have been pulled. Asks no store, and makes nothing."""
        return cls(model_path, settings=settings).dir

    @classmethod
    def download_and_get_path(cls, model_path: str | os.PathLike[str], *, settings: Settings | None = None) -> str:
        """Bring all side files into the cache, and return the same path as `get_path`.

        An unchanged model costs a listing and no read. Any number of processes may do this at once.
        """
        with cls(model_path, settings=settings) as model:
            model.pull_files()
            return model.dir

    def pull_files(
        self, allow_pattern: Sequence[str] | None = None, ignore_pattern: Sequence[str] | None = None
    ) -> None:
        """Bring those side files into the cache that ``allow_pattern`` matches (default: all) and ``ignore_pattern`` does not (default: none).

        Patterns are globs; one matches a file by its key relative to the model, or by its name alone. A pull adds: what the path showed before it still shows, in the
        version that is in the store now. Processes that pull *different* files of one model at the same moment may leave the path with those of one of them.

        Raises `ObjectNotFound` where there is nothing at the uri, `InvalidSetting` where ``allow_pattern`` asks for weights alone, `CacheError` where the cache
        cannot be written to or is not to be trusted, and what the store raises. The path then leads where it led before.
        """
        if self._uri.scheme == "file":
            return
        for _ in range(_MOST_PULLS):
            with contextlib.closing(open_store(self._uri, settings=self._settings)) as store:
                folder = self._mirrored(store, _matcher(allow_pattern, ignore_pattern), allow_pattern)
            if self._path.resolve() == folder.resolve():
                return
        raise CacheError(
            f"{self._path} does not lead to the side files of {self._uri}.",
            "The cache can only be read, or other processes pull other versions of this model all the time.",
            "Set HEADRACE_CACHE_DIR to a folder that can be written to.",
        )

    def _mirrored(
        self, store: ObjectStore, is_wanted: Callable[[str], bool], allow_pattern: Sequence[str] | None
    ) -> Path:
        top = store.list_level()
        if not top.objects and not top.folders:
            raise ObjectNotFound(
                f"There is nothing at {self._uri}.", mend="Check the uri; it names the model's folder."
            )
        side = list_side_files(store, top)
        for note in side.notes:
            _LOG.warning("%s: %s", self._uri, note)
        chosen = [stored for stored in side.objects if is_wanted(stored.key)]
        weights = [stored.key for stored in top.objects if is_wanted(stored.key) and not is_side_file(stored.key)]
        if allow_pattern is not None and weights and not chosen:
            raise InvalidSetting(
                f"allow_pattern={list(allow_pattern)!r} matches no side file of {self._uri}, but {listed(weights)}.",
                "Weights are streamed and never copied to the disk.",
                "Take them from runai_safetensors_weights_iterator.",
            )
        keys = {stored.key for stored in chosen}
        chosen += [one for one in side.objects if one.key not in keys and (self._path / one.key).is_file()]
        try:
            return self._cache.folder(str(self._uri), chosen, lambda stored: _read(store, stored), store.endpoint)
        except OSError as error:
            raise CacheError(
                f"The cache of side files cannot be written: {self._settings.cache_dir}.",
                f"{error.strerror or error}.",
                "Set HEADRACE_CACHE_DIR to a folder that can be written to.",
            ) from error


def runai_safetensors_weights_iterator(
    hf_weights_files: Iterable[str | os.PathLike[str]],
    is_distributed: bool = False,
    device: str | torch.device = "cpu",
    *,
    settings: Settings | None = None,
) -> WeightsIterator:
    """Yield ``(name, tensor)`` of every tensor in these files, file by file in the order given, with a progress bar on the first rank.

    The files are uris or local paths below one folder, such as `list_safetensors` returns. That folder is opened as the checkpoint it is: its index decides where two
    files hold one name, and a file of it that is absent or cut is an error even if it is not among these. A single file, and one that does not belong to the checkpoint
    (an ``mtp.safetensors`` that the index forgot), is opened by itself. Nothing is opened before the first tensor is asked for.

    A tensor has its stored dtype and shape. On the ``"cpu"`` it lies in leased memory, which is used again when nothing refers to it any more, and never before: it may be
    kept, and the iterator may be put into a list. Kept tensors make the stream allocate more and warn once. For another ``device`` it is a copy there, through leased
    (for CUDA, pinned) memory. Tensor and storage carry ``_headrace_streamed`` and ``_sglang_runai_streamer_tensor``.

    With ``is_distributed`` all ranks of the process group that `torch.distributed` was initialised with must call this alike: each reads a share and sends it to the others,
    and what fails on one fails on all. Without a group, or with a group of one, each reads what it asks for, within its share of the node's memory and connections.
    Raises what opening and streaming raise. The end, an error, or closing the iterator ends all reads.
    """
    settings = settings or Settings.from_environment()
    progress = LoadProgress()
    target = torch.device(device)
    shares = is_distributed and torch.distributed.is_available() and torch.distributed.is_initialized()
    load = _Load(target=target, settings=settings, progress=progress, shares=shares)
    with ProgressDisplay(progress, enabled=settings.progress):
        uris = list(dict.fromkeys(parse_uri(file) for file in hf_weights_files))
        alone = uris
        if len(uris) > 1:
            with load.open(_common_folder(uris)) as (checkpoint, lockstep):
                keys = {checkpoint.store.uri.child(key): key for key in checkpoint.files}
                alone = [uri for uri in uris if uri not in keys]
                entries = _entries_by_file(checkpoint, [keys[uri] for uri in uris if uri in keys])
                yield from load.stream(checkpoint, entries, lockstep)
        for uri in alone:
            with load.open(uri) as (checkpoint, lockstep):
                yield from load.stream(checkpoint, list(checkpoint.entries.values()), lockstep)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """How the files of one call are read."""

    target: torch.device
    settings: Settings
    progress: LoadProgress
    shares: bool
    """Whether the ranks of the process group share the reading."""

    @contextmanager
    def open(self, uri: Uri) -> Iterator[tuple[Checkpoint, Lockstep | None]]:
        """Open the checkpoint at ``uri``, on all ranks or on none."""

        def opening() -> Checkpoint:
            return open_checkpoint(uri, settings=self.settings, progress=self.progress)

        link = find_link(True) if self.shares else None
        lockstep = Lockstep(link) if link is not None else None
        if lockstep is None:
            checkpoint = opening()
        else:
            checkpoint = lockstep.do("opening the checkpoint", opening, undo=Checkpoint.close)
        with checkpoint:
            yield checkpoint, lockstep

    def stream(self, checkpoint: Checkpoint, entries: list[Entry], lockstep: Lockstep | None) -> WeightsIterator:
        """Yield the tensors of ``entries``, marked."""
        options = StreamOptions(ownership="leased", device=self.target)
        stream: TensorSource
        if lockstep is None:
            stream = TensorStream(checkpoint, entries, options=options, settings=self.settings, progress=self.progress)
        else:
            stream = DistributedStream(
                checkpoint, entries, lockstep=lockstep, options=options, settings=self.settings, progress=self.progress
            )
        with stream, self.progress.during("weights"):
            yield from _marked(stream, self.target)


def _marked(stream: TensorSource, target: torch.device) -> WeightsIterator:
    for name, tensor in stream:
        if target.type != "cpu":
            tensor = tensor.to(target)  # waits for the copy: who takes it may read it on another CUDA stream
        mark(tensor)
        for marked in (tensor, tensor.untyped_storage()):
            setattr(marked, SGLANG_STREAMED, True)
        yield name, tensor
        del tensor, marked  # else it would be held while the next is awaited


def _entries_by_file(checkpoint: Checkpoint, files: list[str]) -> list[Entry]:
    """Return the entries in ``files``, in the order of the files and of offsets in each."""
    entries: dict[str, list[Entry]] = {file: [] for file in files}
    for entry in checkpoint.entries.values():
        if entry.file in entries:
            entries[entry.file].append(entry)
    return [entry for file in files for entry in entries[file]]


def _common_folder(uris: Sequence[Uri]) -> Uri:
    """Return the folder that all ``uris`` lie below. Raises `InvalidSetting` where that cannot be one."""
    first = uris[0]
    for uri in uris:
        if (uri.scheme, uri.bucket) != (first.scheme, first.bucket):
            raise InvalidSetting(
                f"{first} and {uri} lie in different stores.",
                "The files of one call are files of one checkpoint.",
                "Make one call for each folder.",
            )
    parts = first.parent.key.split("/")
    for uri in uris:
        pairs = zip(parts, uri.parent.key.split("/"), strict=False)
        parts = [part for part, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
    key = "/".join(parts) or ("/" if first.scheme == "file" else "")
    folder = Uri(first.scheme, first.bucket, key)
    return replace(folder, text=f"{folder}/")  # the slash says that it is a folder, whatever its name


def _path_of(uri: Uri, cache: SideFileCache) -> Path:
    return Path(uri.key) if uri.scheme == "file" else cache.link_of(str(uri))


def _spelled(path: str | os.PathLike[str], key: str, checkpoint: Checkpoint) -> str:
    """Return the uri of ``key`` as the caller spells it: SGLang compares it with ``os.path.join(path, key)``."""
    uri = parse_uri(path)
    text = path.strip() if isinstance(path, str) else str(uri)
    if uri.scheme not in BUCKET_SCHEMES and ":" in text.partition("/")[0]:
        return checkpoint.store.uri_of(key)  # a URL is percent-encoded, and a key is not
    if checkpoint.store.selected_key is not None:
        text = text.rpartition("/")[0]
    return os.path.join(text, key)  # noqa: PTH118 (a uri is no path, and its two slashes must stay)


def _matcher(allow: Sequence[str] | None, ignore: Sequence[str] | None) -> Callable[[str], bool]:
    allowed = ["*"] if allow is None else [allow] if isinstance(allow, str) else list(allow)
    ignored = [ignore] if isinstance(ignore, str) else list(ignore or ())
    return lambda key: _matches(key, allowed) and not _matches(key, ignored)


def _matches(key: str, patterns: Sequence[str]) -> bool:
    name = key.rpartition("/")[2]
    return any(fnmatchcase(key, pattern) or fnmatchcase(name, pattern) for pattern in patterns)


def _read(store: ObjectStore, stored: StoredObject) -> bytes:
    try:
        return store.read_object(stored)
    except OSError as error:  # must not pass for trouble with the cache
        raise StoreUnavailable(f"{store.uri_of(stored.key)} cannot be read.", f"{error}.") from error
