"""Objects in a folder of this machine, or of a mounted file system. Links are followed: the hub's cache is made of them."""

from __future__ import annotations

import os
import stat as modes
from pathlib import Path

from headrace.errors import AccessDenied, ObjectChanged, ObjectNotFound, StorageError, StoreUnavailable
from headrace.storage.rooted import RootedStore
from headrace.storage.store import FileRange, Listing, Refusal, StoredObject, Verdict
from headrace.storage.uri import Uri, check_key


class LocalStore(RootedStore):
    """The files below one folder. Holds nothing open; every method may be called from any thread.

    A key cannot leave the root by its text; a link below the root may lead anywhere, since whoever can place links there can place files, too.
    """

    def __init__(self, uri: Uri, *, selected_key: str | None = None) -> None:
        super().__init__(uri, selected_key)
        self._root = Path(uri.key)

    @property
    def endpoint(self) -> str:
        """Where files are read."""
        return "this machine"

    def list_level(self, folder: str = "") -> Listing:
        """List one level under ``folder``: regular files and folders, also through links; hidden ones and broken links are left out.

        Raises `ObjectNotFound` where the root does not exist or is a file; an absent ``folder`` below it gives an empty listing.
        """
        path = self._root / check_key(folder) if folder else self._root
        parent = f"{folder}/" if folder else ""
        objects: list[StoredObject] = []
        folders: list[str] = []
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    try:
                        status = entry.stat()
                    except (FileNotFoundError, NotADirectoryError):
                        continue
                    if modes.S_ISDIR(status.st_mode):
                        folders.append(parent + entry.name)
                    elif modes.S_ISREG(status.st_mode):
                        objects.append(StoredObject(parent + entry.name, status.st_size, file_version(status)))
        except (FileNotFoundError, NotADirectoryError) as error:
            if folder and self._root.is_dir():
                return Listing((), ())
            raise self._explain_root(path, error) from error
        except OSError as error:
            raise _explain(path, error) from error
        return Listing(tuple(sorted(objects, key=lambda item: item.key)), tuple(sorted(folders)))

    def stat(self, key: str) -> StoredObject:
        """Return size and version of one regular file. Raises `ObjectNotFound`."""
        path = self._root / check_key(key)
        try:
            status = path.stat()
        except OSError as error:
            raise _explain(path, error) from error
        _check_regular(path, status)
        return StoredObject(key, status.st_size, file_version(status))

    def read_object(self, stored: StoredObject, *, start: int = 0, stop: int | None = None) -> bytes:
        """Read a small file, or a piece of it, at its pinned version. Raises `ObjectChanged` where that is gone."""
        path = self._root / check_key(stored.key)
        stop = stored.size_bytes if stop is None else stop
        try:
            # Non-blocking: opening a pipe that nobody writes would wait for ever. It changes nothing for files.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError as error:
            raise _changed(path, stored, "It was there when the checkpoint was opened, and is gone.") from error
        except OSError as error:
            raise _explain(path, error) from error
        try:
            status = os.fstat(descriptor)
            _check_regular(path, status)
            if file_version(status) != stored.version:
                raise _changed(path, stored, f"It has version {file_version(status)} now.")
            return _read_all(descriptor, path, start, stop)
        finally:
            os.close(descriptor)

    def describe_range(self, stored: StoredObject, start: int, stop: int) -> FileRange:
        """Describe one ranged read, which its reader must check against the version once the file is open."""
        return FileRange(str(self._root / check_key(stored.key)), start, stop, stored.version)

    def judge(self, stored: StoredObject, refusal: Refusal) -> Verdict:
        """Never called: files do not answer with refusals."""
        raise AssertionError(f"a local file was judged: {stored.key}")

    def close(self) -> None:
        """Do nothing: nothing is held open."""

    def _explain_root(self, path: Path, error: OSError) -> StorageError:
        if self._root.exists():
            return ObjectNotFound(
                f"{self._root} is a file, not a folder.",
                "Only names that end in .safetensors or .safetensors.index.json are taken as single files.",
                f"Give the folder that holds it: {self._root.parent}.",
            )
        return _explain(path, error)


def file_version(status: os.stat_result) -> str:
    """Return what pins a file: inode, time of the last write in nanoseconds, size. A file that replaces another has another inode."""
    return f"{status.st_ino}-{status.st_mtime_ns}-{status.st_size}"


def _read_all(descriptor: int, path: Path, start: int, stop: int) -> bytes:
    """Read until ``stop``: one call may give less (Linux: at most about 2 GiB), and a file that is cut meanwhile gives nothing."""
    pieces = []
    while start < stop:
        try:
            piece = os.pread(descriptor, stop - start, start)
        except OSError as error:
            raise _explain(path, error) from error
        if not piece:
            raise ObjectChanged(
                f"{path} is not the version that was opened.",
                "It ends earlier than when it was opened.",
                "Open the checkpoint again.",
            )
        pieces.append(piece)
        start += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _check_regular(path: Path, status: os.stat_result) -> None:
    if not modes.S_ISREG(status.st_mode):
        kind = "a folder" if modes.S_ISDIR(status.st_mode) else "a device, pipe or socket"
        raise ObjectNotFound(f"{path} is {kind}, not a file.", mend="Give the path of a file.")


def _changed(path: Path, stored: StoredObject, why: str) -> ObjectChanged:
    return ObjectChanged(
        f"{path} is not the version that was opened.",
        f"It was {stored.version}. {why}",
        "Open the checkpoint again; give each new version a folder of its own.",
    )


def _explain(path: Path, error: OSError) -> StorageError:
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        if path.is_symlink():
            return ObjectNotFound(
                f"{path} is a link to {os.readlink(path)}, which does not exist.",  # noqa: PTH115 (Path.readlink drops a leading ./)
                "A cache that was cleaned or copied without its files leaves such links.",
                "Fetch the model again.",
            )
        return ObjectNotFound(
            f"{path} does not exist.", "There is no such file or folder on this machine.", "Check the path."
        )
    if isinstance(error, PermissionError):
        return AccessDenied(
            f"{path} cannot be read.", "This user may not read it.", "Change the permissions, or the user."
        )
    return StoreUnavailable(f"{path} cannot be read.", f"{error.strerror or error}.", "Check the disk or the mount.")
