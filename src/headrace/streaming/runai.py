"""Run:ai Model Streamer as the transport: the same checks, order and errors as our own stream, with that library's threads moving the bytes.

What it cannot do, this module does around it: it cannot pin versions, so they are looked up before the first and after the last tensor; its tensors come in an order of its
own; its one error, "File access error", names no object. The only module that imports ``runai_model_streamer`` (extra ``runai``); tried with 0.15.7, 0.16.1 and 0.17.1.
"""

from __future__ import annotations

import inspect
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch

from headrace.checkpoint import Checkpoint, Entry
from headrace.errors import BudgetExceeded, HeadraceError, InvalidSetting, MissingDependency, ObjectChanged, ReadFailed
from headrace.progress import LoadProgress
from headrace.settings import Settings
from headrace.streaming.arrivals import Arrivals, Bringer
from headrace.streaming.formats import LoadFormat
from headrace.streaming.handout import HandOutStream
from headrace.streaming.runai_environment import (
    CONCURRENCY,
    ENVIRONMENT,
    MEMORY_LIMIT,
    EnvironmentLoan,
    client_variables,
    start_variables,
)
from headrace.streaming.stream import StreamOptions
from headrace.streaming.tensors import torch_dtype, torch_shape
from headrace.units import UNLIMITED

if TYPE_CHECKING:
    from headrace.storage.s3_keys import LentAccess

_SCHEMES = ("file", "s3")
_FIRST_WITH_KEYS = (0, 16)
_LONGEST_CLOSE_S = 10.0
_MOST_NAMED = 3
_NEWEST = (0, 17)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunaiLibrary:
    """What is used of the library."""

    new_streamer: Callable[[], Any]
    """``SafetensorsStreamer``, a context manager."""
    new_credentials: Callable[..., Any]
    """``S3Credentials``, of keywords."""
    version: tuple[int, ...]
    """Major and minor."""


def import_library(*, needs_s3: bool) -> RunaiLibrary:
    """Return the installed library. Raises `MissingDependency` where it is absent or does not import, with the reason, and `InvalidSetting` where Headrace itself stands in for it."""
    try:
        from runai_model_streamer import SafetensorsStreamer
        from runai_model_streamer.s3_utils.s3_utils import S3Credentials

        _check_whose(SafetensorsStreamer)
        if needs_s3:
            # Without it the library drops the keys that it is given, and every read fails.
            import runai_model_streamer_s3.credentials.credentials  # noqa: F401
    except (ImportError, OSError) as error:  # OSError: its shared library does not load
        raise MissingDependency(
            "Run:ai Model Streamer cannot be imported.",
            f"{error}.",
            'Install it with: pip install "headrace[runai]", or use load_format headrace, which needs no other library.',
        ) from error
    return RunaiLibrary(new_streamer=SafetensorsStreamer, new_credentials=S3Credentials, version=_installed_version())


def _check_whose(streamer: type) -> None:
    if streamer.__module__.startswith("headrace."):
        raise InvalidSetting(
            "Run:ai Model Streamer cannot move the bytes here.",
            "HEADRACE_AS_RUNAI is set: Headrace stands in for that library in this process.",
            "Unset HEADRACE_AS_RUNAI, or use load_format headrace.",
        )


class RunaiStream(HandOutStream):
    """Streams ``entries`` of ``checkpoint`` through Run:ai Model Streamer; used as `headrace.streaming.TensorStream` is.

    Tensors are handed out in the order of ``entries``, with the dtype and shape that the checkpoint's headers say. Each stays valid for as long as anything refers to its storage,
    whatever ``options`` say of ownership; from version 0.17 on one that is kept keeps the library's buffer that it came in, a part of the memory limit. Before that each is copied.
    What comes before its turn is held beyond the memory limit. Raises `ObjectChanged` before the last tensor is handed out where an object is not the version that was pinned.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        entries: Sequence[Entry] | None = None,
        *,
        options: StreamOptions | None = None,
        settings: Settings | None = None,
        progress: LoadProgress | None = None,
        owns_checkpoint: bool = False,
        library: RunaiLibrary | None = None,
        environment: EnvironmentLoan = ENVIRONMENT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises `MissingDependency`, and `InvalidSetting` for a store that the library is not used with. Nothing is read yet."""
        scheme = checkpoint.store.uri.scheme
        if scheme not in _SCHEMES:
            raise InvalidSetting(
                f"Run:ai Model Streamer is not used with {scheme} uris here.",
                f"They are: {', '.join(_SCHEMES)}.",
                "Use load_format headrace.",
            )
        if any(stored.version_id for stored in checkpoint.snapshot.weights):
            raise InvalidSetting(
                f"Snapshot {checkpoint.snapshot.id} of {checkpoint.uri} is made of old versions.",
                "Run:ai Model Streamer reads only what is there now.",
                "Use load_format headrace.",
            )
        chosen = tuple(checkpoint.entries.values()) if entries is None else tuple(entries)
        progress = progress or LoadProgress()
        settings = settings or Settings.from_environment()
        feed = _RunaiFeed(
            checkpoint=checkpoint,
            entries=chosen,
            settings=settings,
            progress=progress,
            library=library or import_library(needs_s3=scheme == "s3"),
            environment=environment,
            clock=clock,
        )
        super().__init__(
            checkpoint,
            chosen,
            feed,
            load_format=LoadFormat.RUNAI_STREAMER,
            options=options or StreamOptions(),
            progress=progress,
            owns_checkpoint=owns_checkpoint,
            sources=settings.sources,
            clock=clock,
        )


@dataclass(slots=True, kw_only=True)
class _RunaiFeed:
    """Runs the library. All but `fetch` and `close` happens in the thread of its arrivals."""

    checkpoint: Checkpoint
    entries: Sequence[Entry]
    settings: Settings
    progress: LoadProgress
    library: RunaiLibrary
    environment: EnvironmentLoan
    clock: Callable[[], float]
    arrivals: Arrivals = field(init=False)
    files: tuple[str, ...] = field(init=False)
    """The files that hold ``entries``, in the order of their first use."""
    num_connections: int = field(init=False)
    buffer_bytes: int = 0
    """What the library allocates to read into."""

    def __post_init__(self) -> None:
        self.files = tuple(dict.fromkeys(entry.file for entry in self.entries))
        self.num_connections = self.settings.rank_transport.num_connections
        transport = self.settings.transport
        self.arrivals = Arrivals(
            self._bring,
            num_expected=len(self.entries),
            longest_wait_s=transport.total_timeout_s * transport.max_attempts,
            describe=self.describe_holdup,
            clock=self.clock,
        )

    @property
    def bytes_read(self) -> int:
        return self.arrivals.bytes_come

    @property
    def peak_bytes(self) -> int:
        return self.buffer_bytes + self.arrivals.peak_bytes

    def describe_holdup(self) -> str:
        return f"Run:ai Model Streamer reads {self._named(self.files)} from {self.checkpoint.store.endpoint}"

    def fetch(self, entry: Entry) -> torch.Tensor:
        return self.arrivals.fetch(entry.name)

    def close(self) -> None:
        self.arrivals.close(patience_s=_LONGEST_CLOSE_S)

    # -- in the arrivals' thread

    def _bring(self) -> Bringer:
        try:
            yield from self._checked()
        except HeadraceError:
            raise
        except Exception as error:
            raise self._explained(error) from error

    def _checked(self) -> Bringer:
        """Yield what the library brings, with every object's version checked before the first and before the last tensor."""
        self._check_versions()
        num_left = len(self.entries)
        for entry, tensor in self._brought():
            if (tensor.dtype, tuple(tensor.shape)) != (torch_dtype(entry), torch_shape(entry)):
                raise ValueError(
                    f"{entry.name} came as {tensor.dtype} {tuple(tensor.shape)}, and is {entry.dtype} {entry.shape}"
                )
            num_left -= 1
            if not num_left:
                self._check_versions()
            self.progress.arrived(entry.size_bytes)
            yield entry.name, tensor
            del tensor

    def _brought(self) -> Iterator[tuple[Entry, torch.Tensor]]:
        access = self._access()
        keys_too = self.library.version < _FIRST_WITH_KEYS
        batches = deque([self.files])
        with self.environment.held(client_variables(self.settings, os.environ, access, keys_too=keys_too)):
            while batches:
                files = batches.popleft()
                wanted = {entry.name: entry for entry in self.entries if entry.file in files}
                with ExitStack() as stack:
                    streamer = self._started(stack, files, wanted, access)
                    if streamer is None:  # names that several files hold; one by one there are none
                        batches.extendleft((file,) for file in reversed(files))
                        continue
                    owned = "owned" in inspect.signature(streamer.stream_files).parameters
                    # The name outlives the block: closed after the streamer, it need not read all that was asked for to its end.
                    tensors = streamer.get_tensors()
                    for name, tensor in tensors:
                        if name in wanted:
                            yield wanted[name], tensor if owned else tensor.clone()
                        del tensor

    def _started(
        self, stack: ExitStack, files: Sequence[str], wanted: dict[str, Entry], access: LentAccess | None
    ) -> Any:
        """Return a streamer, on ``stack``, that reads ``files``; None where the library cannot tell which file's tensor of a name it hands out."""
        store = self.checkpoint.store
        paths = [store.uri_of(file) for file in files]
        largest = max(entry.size_bytes for entry in self.entries)
        with self.environment.briefly(start_variables(self.settings, os.environ, largest_bytes=largest)):
            self._note_environment(wanted, largest)
            streamer = stack.enter_context(self.library.new_streamer())
            options: dict[str, Any] = {"s3_credentials": self._credentials(access), "device": "cpu"}
            if "tensor_names" in inspect.signature(streamer.stream_files).parameters:
                options["tensor_names"] = list(wanted)
            try:
                streamer.stream_files(paths, **options)
            except ValueError:
                if len(files) == 1 or not _has_doubles(streamer, wanted):
                    raise
                return None
        return None if _has_doubles(streamer, wanted) else streamer

    def _note_environment(self, wanted: dict[str, Entry], largest_bytes: int) -> None:
        """Take note of what the library is about to find, for the account; the user's own variables may be part of it."""
        limit, wanted_bytes = int(os.environ[MEMORY_LIMIT]), sum(entry.size_bytes for entry in wanted.values())
        self.num_connections = int(os.environ[CONCURRENCY])
        self.buffer_bytes = wanted_bytes if limit == UNLIMITED else min(limit or largest_bytes, wanted_bytes)

    def _access(self) -> LentAccess | None:
        if self.checkpoint.store.uri.scheme != "s3":
            return None
        from headrace.storage.s3 import S3Store

        store = self.checkpoint.store
        assert isinstance(store, S3Store)
        return store.lend()

    def _credentials(self, access: LentAccess | None) -> Any:
        if access is None:
            return None
        keys = access.keys
        return self.library.new_credentials(
            access_key_id=keys.access_key_id,
            secret_access_key=keys.secret_access_key,
            session_token=keys.session_token,
            region_name=keys.region_name,
            endpoint=keys.endpoint,
        )

    def _check_versions(self) -> None:
        """Raise `ObjectChanged` where an object is not what was pinned, and what the store raises."""
        store = self.checkpoint.store
        with ThreadPoolExecutor(self.settings.rank_transport.num_connections, "headrace-versions") as pool:
            for file, now in zip(self.files, pool.map(store.stat, self.files), strict=True):
                pinned = self.checkpoint.stored(file)
                if now != pinned:
                    raise ObjectChanged(
                        f"{store.uri_of(file)} is not the version that was opened.",
                        f"It was {pinned.version} of {pinned.size_bytes} bytes and is {now.version} of {now.size_bytes}.",
                        "Open the checkpoint again; give each new version a folder of its own.",
                    )

    def _explained(self, error: Exception) -> HeadraceError:
        """Return our error for one of the library's: the store's own word where it has one, since the library gives no reason."""
        try:
            self._check_versions()
        except HeadraceError as better:
            return better
        said = re.sub(r"\s+", " ", str(error)).rstrip(".") or type(error).__name__
        if type(error).__name__ == "RunaiStreamerMemoryLimitException":
            return BudgetExceeded(
                "Run:ai Model Streamer has too little memory.", f"It says: {said}.", f"Raise {MEMORY_LIMIT}."
            )
        return ReadFailed(
            f"Run:ai Model Streamer could not read {self._named(self.files)} from {self.checkpoint.store.endpoint}.",
            f"It says: {said}.",
            "RUNAI_STREAMER_LOG_TO_STDERR=1 with RUNAI_STREAMER_LOG_LEVEL=DEBUG lets it say more; load_format headrace names object and cause.",
        )

    def _named(self, files: Sequence[str]) -> str:
        named = ", ".join(self.checkpoint.store.uri_of(file) for file in files[:_MOST_NAMED])
        more = len(files) - _MOST_NAMED
        return f"{named} and {more} more" if more > 0 else named


def _has_doubles(streamer: Any, wanted: dict[str, Entry]) -> bool:
    """Whether more than one of the files holds a wanted name."""
    held = [
        described.name
        for file in streamer.files_to_tensors_metadata.values()
        for described in file
        if described.name in wanted
    ]
    return len(held) != len(set(held))


def _installed_version() -> tuple[int, ...]:
    try:
        parts = re.findall(r"\d+", version("runai-model-streamer"))
    except PackageNotFoundError:
        return _NEWEST
    return tuple(int(part) for part in parts[:2])
