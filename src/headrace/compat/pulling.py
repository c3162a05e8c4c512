"""Copies objects of a model into a local folder, one by one, each whole or not at all. For code that insists on files; loading needs none."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from headrace.checkpoint.keys import unsafe_reason
from headrace.checkpoint.mirror import check_layout
from headrace.compat.listing import S3Credentials, folder_of, matches, store_for, walk
from headrace.errors import CacheError, InvalidUri, ObjectNotFound
from headrace.settings import Settings
from headrace.storage import ObjectStore, StoredObject, Uri
from headrace.units import MIB, format_bytes

_PIECE_BYTES = 16 * MIB
_RECORD = ".headrace-pulled.json"
"""Says which version of which object each file is. It is written after them."""

Patterns = Sequence[str] | None


def pull_files(
    model_path: str,
    dst: str,
    allow_pattern: Patterns = None,
    ignore_pattern: Patterns = None,
    s3_credentials: S3Credentials | None = None,
) -> None:
    """Copy the objects below ``model_path``, sub-folders included, into the folder ``dst``: those that ``allow_pattern`` matches (default: all) and ``ignore_pattern`` does not.

    Patterns are globs over the whole key, or over the key below ``model_path``; a ``*`` matches slashes, too. Raises `InvalidUri` for a local path, `CacheError` where the files cannot be
    written, and what the store raises; no file is then half written.
    """
    settings = Settings.from_environment()
    uri = _remote(model_path)
    with contextlib.closing(store_for(uri, settings, s3_credentials)) as store:
        chosen = [stored for stored in walk(store) if _is_wanted(uri, stored, allow_pattern, ignore_pattern)]
        _copy(store, chosen, Path(dst), settings)


class ObjectStorageModel:
    """A local folder with copies of a model's objects; a context manager. Several processes may pull into one folder at a time: they take turns.

    Unlike the library of the same name, a folder that is there already is not taken for the model's newest version, nor deleted: an object is copied anew where its version is
    another one, and a copy whose object is gone is removed. Files of others stay.
    """

    def __init__(
        self,
        model_path: str,
        dst: str,
        s3_credentials: S3Credentials | None = None,
        *,
        settings: Settings | None = None,
    ) -> None:
        """Touch nothing yet. Raises `InvalidUri` for a local path."""
        self._uri = _remote(model_path)
        self._credentials = s3_credentials
        self._settings = settings or Settings.from_environment()
        self.dir = dst.rstrip("/") or "/"
        """The folder."""
        self._folder = Path(self.dir)

    def __repr__(self) -> str:
        return f"ObjectStorageModel({self._uri}, dst={self.dir!r})"

    def __enter__(self) -> ObjectStorageModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raise `ObjectNotFound` where a block that was meant to pull something has left the folder empty."""
        if kind is None and not self._recorded():
            raise ObjectNotFound(
                f"No object of {self._uri} was copied to {self.dir}.",
                "There is nothing at this uri, or no pattern matches what there is.",
                "Check uri and patterns.",
            )

    def pull_files(self, allow_pattern: Patterns = None, ignore_pattern: Patterns = None) -> None:
        """Copy what `pull_files` would, unless the folder has the same version of it. Raises as that does."""
        with (
            self._turn(),
            contextlib.closing(store_for(self._uri, self._settings, self._credentials)) as store,
        ):
            there = walk(store)
            record = self._recorded()
            wanted = [one for one in there if _is_wanted(self._uri, one, allow_pattern, ignore_pattern)]
            stale = [
                one for one in wanted if record.get(one.key) != _identity(one) or not self._path(one.key).is_file()
            ]
            _copy(store, stale, self._folder, self._settings)
            gone = record.keys() - {stored.key for stored in there}
            gone = {key for key in gone if unsafe_reason(key) is None}
            for key in gone:
                self._path(key).unlink(missing_ok=True)
            kept = {key: identity for key, identity in record.items() if key not in gone}
            self._note({**kept, **{stored.key: _identity(stored) for stored in stale}})

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        from filelock import FileLock  # Here: who only streams takes no lock, and need not wait for it.

        lock = FileLock(f"{self.dir}.lock")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except OSError as error:
            raise _unwritable(self._folder, error) from error
        try:
            yield
        finally:
            lock.release()

    def _path(self, key: str) -> Path:
        return self._folder / key

    def _recorded(self) -> dict[str, list[str | int]]:
        try:
            record = json.loads((self._folder / _RECORD).read_bytes())
        except (OSError, ValueError):
            return {}
        return record if isinstance(record, dict) else {}

    def _note(self, record: dict[str, list[str | int]]) -> None:
        with _replacing(self._folder / _RECORD) as descriptor:
            os.write(descriptor, json.dumps(record, indent=1).encode())


def _remote(model_path: str) -> Uri:
    uri = folder_of(model_path)
    if uri.scheme == "file":
        raise InvalidUri(
            f"{model_path} is a local path.", "Files are pulled from object storage.", "Use the folder as it is."
        )
    return uri


def _is_wanted(uri: Uri, stored: StoredObject, allow: Patterns, ignore: Patterns) -> bool:
    return matches(uri, stored, allow) and (ignore is None or not matches(uri, stored, ignore))


def _copy(store: ObjectStore, objects: Sequence[StoredObject], folder: Path, settings: Settings) -> None:
    check_layout(objects)
    try:
        for parent in {(folder / stored.key).parent for stored in objects}:
            parent.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(settings.transport.num_connections, "headrace-pull") as pool:
            futures = [pool.submit(_copy_one, store, stored, folder / stored.key) for stored in objects]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
    except OSError as error:
        need = sum(stored.size_bytes for stored in objects)
        raise _unwritable(folder, error, f" {format_bytes(need)} are to be written.") from error


def _copy_one(store: ObjectStore, stored: StoredObject, path: Path) -> None:
    with _replacing(path) as descriptor:
        for start in range(0, stored.size_bytes, _PIECE_BYTES):
            stop = min(start + _PIECE_BYTES, stored.size_bytes)
            piece = memoryview(store.read_object(stored, start=start, stop=stop))
            while piece:
                piece = piece[os.write(descriptor, piece) :]


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[int]:
    """Open a new file for writing that takes the place of ``path`` when the block has ended, and is removed when it fails."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name[:100]}.", suffix=".part", dir=path.parent)
    try:
        try:
            yield descriptor
            os.fchmod(descriptor, 0o644)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(name, path)  # noqa: PTH105
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)  # noqa: PTH108
        raise


def _unwritable(folder: Path, error: OSError, more: str = "") -> CacheError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return CacheError(
        f"{folder} cannot be written to.",
        f"{error.strerror or error}.{more}",
        "Make room, or name a folder on another disk." if full else "Name a folder that can be written to.",
    )


def _identity(stored: StoredObject) -> list[str | int]:
    return [stored.size_bytes, stored.version]
