"""The cache of side files on this node: one folder per version, shared by all processes of one user.

    <cache>/side_files/<version>         what `headrace.checkpoint.mirror` writes; never changed once it has this name
    <cache>/model_streamer/<uri hash>    a link to the version that was opened last, swapped in one step
    <cache>/locks/                       locks that save work; nothing depends on them

Any number of processes may fill the cache at once: each writes into a folder of its own and renames it when it is complete, so where locks do nothing
(some network file systems) the only loss is a second download. A folder that another process may use is never changed or moved: one that turns out
incomplete is left alone, and a new one gets another name. Versions that no link points to are removed when no process has opened them for 30 days, so
a process that lives longer and still reads side files should be the one that opened them last, or copy them.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from headrace.checkpoint import mirror
from headrace.checkpoint.snapshot import digest_of
from headrace.errors import CacheError
from headrace.storage import StoredObject

_LOG = logging.getLogger("headrace")

_LOCK_TIMEOUT_S = 60.0
_UNUSED_S = 30 * 86400
"""Age at which a version that no link points to is removed."""
_ABANDONED_S = 6 * 3600
"""Age at which a folder that never became complete is removed: no download of 100 MB takes as long."""
_TEMPORARY = ".tmp-"


class SideFileCache:
    """The cache below ``cache_dir``. Any thread, any process.

    Every method raises `CacheError` where the cache is not this user's own: another user's, or writable for others. Root's counts as one's own, so
    that an image may bring a filled cache along.
    """

    def __init__(self, cache_dir: Path) -> None:
        self._root = cache_dir.absolute()
        self._versions = self._root / "side_files"
        self._links = self._root / "model_streamer"
        self._locks = self._root / "locks"

    def link_of(self, uri: str) -> Path:
        """Return where the link for ``uri`` is, made or not."""
        return self._links / hashlib.sha256(uri.encode("utf-8", "surrogatepass")).hexdigest()[:16]

    def find(self, uri: str, objects: Sequence[StoredObject], endpoint: str = "") -> Path | None:
        """Return the complete folder of exactly these objects, if there is one. Changes nothing but the time of its last use."""
        self._check_owners(uri)
        version = _version(uri, objects, endpoint)
        # The plain name first; others exist only where it was taken by something incomplete.
        for folder in (self._versions / version, *sorted(_matching(self._versions, f"{version}-*"))):
            if not folder.is_dir():
                continue
            _check_owner(folder)
            with contextlib.suppress(OSError):
                os.utime(folder / mirror.MARKER)
            if mirror.is_complete(folder, objects):
                return folder
        return None

    def folder(
        self, uri: str, objects: Sequence[StoredObject], read: Callable[[StoredObject], bytes], endpoint: str = ""
    ) -> Path:
        """Return a folder that holds exactly these objects, filled through ``read`` if need be, and point the link for ``uri`` to it.

        Raises `OSError` where the cache cannot be written to. Nothing partial stays behind when it raises.
        """
        mirror.check_layout(objects)
        folder = self.find(uri, objects, endpoint)
        if folder is None:
            self._make_folders()
            with self._lock(uri):
                folder = self.find(uri, objects, endpoint)
                if folder is None:
                    folder = self._fill(_version(uri, objects, endpoint), objects, read)
            self._point(uri, folder)
            self._collect_garbage()
        else:
            try:
                self._point(uri, folder)
            except OSError as error:  # a cache that may only be read is still good for reading
                _LOG.debug("The link for %s stays as it is: %s", uri, error.strerror)
        return folder

    def _check_owners(self, uri: str) -> None:
        for folder in (self._root, self._versions, self._links):
            _check_owner(folder)
        link = self.link_of(uri)
        if link.is_symlink():
            _check_owner(link)
        elif os.path.lexists(link):
            raise CacheError(
                f"{link} is not a link.",
                "Something else than Headrace has made it.",
                "Remove it, or set HEADRACE_CACHE_DIR.",
            )

    def _make_folders(self) -> None:
        self._root.parent.mkdir(parents=True, exist_ok=True)
        for folder in (self._root, self._versions, self._links, self._locks):
            folder.mkdir(mode=0o700, exist_ok=True)
            _check_owner(folder)

    @contextlib.contextmanager
    def _lock(self, uri: str) -> Iterator[None]:
        import filelock  # Here: who only reads headers takes no lock, and need not wait for it.

        lock = filelock.FileLock(self._locks / f"{self.link_of(uri).name}.lock", timeout=_LOCK_TIMEOUT_S)
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(lock)
            except (OSError, NotImplementedError) as error:  # filelock.Timeout is an OSError, too
                _LOG.debug("Going on without the lock: %s", error)
            yield

    def _fill(self, version: str, objects: Sequence[StoredObject], read: Callable[[StoredObject], bytes]) -> Path:
        partial = self._versions / f"{_TEMPORARY}{version}-{os.getpid()}-{secrets.token_hex(8)}"
        partial.mkdir(mode=0o700)
        try:
            mirror.fill(partial, objects, read)
            folder = self._name(partial, version, objects)
        except BaseException:
            mirror.remove([partial])
            raise
        mirror.sync_folder(self._versions)
        return folder

    def _name(self, partial: Path, version: str, objects: Sequence[StoredObject]) -> Path:
        """Give the complete folder its name; if another process was first, keep what it has made."""
        folder = self._versions / version
        try:
            partial.rename(folder)
        except OSError:
            # A folder that is not empty cannot be replaced. Whether it is there is what tells this from other errors.
            if not folder.exists():
                raise
            if folder.is_dir() and mirror.is_complete(folder, objects):
                mirror.remove([partial])
            else:
                folder = self._versions / f"{version}-{secrets.token_hex(8)}"
                partial.rename(folder)
        return folder

    def _point(self, uri: str, folder: Path) -> None:
        link = self.link_of(uri)
        target = Path("..", self._versions.name, folder.name)  # relative, so that the cache may be moved
        with contextlib.suppress(OSError):
            if link.readlink() == target:
                return
        fresh = link.with_name(f"{_TEMPORARY}{link.name}-{secrets.token_hex(8)}")
        fresh.symlink_to(target)
        try:
            fresh.replace(link)
        except OSError:
            fresh.unlink(missing_ok=True)
            raise

    def _collect_garbage(self) -> None:
        """Remove what nobody needs any more. It may fail at any point: the next one goes on."""
        with contextlib.suppress(OSError):
            now = time.time()
            pointed = {link.resolve().name for link in self._links.iterdir() if link.is_symlink()}
            for folder in self._versions.iterdir():
                if folder.name in pointed or not _is_old(folder, now):
                    continue
                # Renamed first: in one step it stops to be a version, so nobody finds it half removed.
                doomed = folder.with_name(f"{_TEMPORARY}{secrets.token_hex(8)}")
                folder.rename(doomed)
                mirror.remove([doomed])
            for link in _matching(self._links, f"{_TEMPORARY}*"):
                if now - link.lstat().st_mtime > _ABANDONED_S:
                    link.unlink(missing_ok=True)


def _version(uri: str, objects: Sequence[StoredObject], endpoint: str) -> str:
    return digest_of(objects, uri, endpoint)[:32]


def _matching(folder: Path, pattern: str) -> list[Path]:
    try:
        return list(folder.glob(pattern))
    except OSError:
        return []


def _is_old(folder: Path, now: float) -> bool:
    marker = folder / mirror.MARKER
    if folder.name.startswith(_TEMPORARY) or not marker.exists():
        return now - folder.lstat().st_mtime > _ABANDONED_S
    return now - marker.lstat().st_mtime > _UNUSED_S


def _check_owner(path: Path) -> None:
    """Raise `CacheError` where others may have put something at ``path``; for a link, at what it points to as well."""
    for place, status in _statuses(path):
        if status.st_uid not in (0, os.geteuid()):
            raise CacheError(
                f"The cache of side files is not used: {place} belongs to user {status.st_uid}, not to {os.geteuid()}.",
                "Configuration and code in it would be taken as the model's own.",
                "Set HEADRACE_CACHE_DIR to a folder of your own.",
            )
        shared = stat.S_ISDIR(status.st_mode) and status.st_mode & 0o022
        if shared and not status.st_mode & stat.S_ISVTX:
            raise CacheError(
                f"The cache of side files is not used: other users may write to {place}.",
                "Configuration and code in it would be taken as the model's own.",
                f"Run `chmod go-w {place}` if it is yours alone, or set HEADRACE_CACHE_DIR to a folder of your own.",
            )


def _statuses(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """The path itself and what it leads to; nothing where it does not exist or cannot be looked at."""
    with contextlib.suppress(OSError):
        yield path, path.lstat()
        yield path.resolve(), path.stat()
