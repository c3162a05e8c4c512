"""The local folder that stands for a model in a store, where an engine insists on a path: the side files, under a name that says which snapshot they are of.

    <cache>/engines/<uri hash>-<snapshot>         a link to the side files, which the cache of side files keeps
    <cache>/engines/<uri hash>-<snapshot>.json    the uri and the snapshot, for whoever has only the path

The path is the same on every machine with the same cache folder and at every start, as long as no object of the model changes; so an engine that caches by path finds what it
has compiled, and a worker process finds the snapshot that the first process pinned. Knows no engine.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import tempfile
from dataclasses import dataclass
from pathlib import Path

from headrace.checkpoint.snapshot import check_snapshot_id
from headrace.errors import InvalidSetting, InvalidUri
from headrace.storage import Uri, parse_uri

_FOLDER = "engines"
_NAME = re.compile(r"([0-9a-f]{16})-([0-9a-f]{12})")
_TEMPORARY = ".tmp-"


@dataclass(frozen=True, slots=True)
class PinnedSource:
    """Where a folder's weights are: the uri, without what may be secret in it, and the id of the snapshot."""

    uri: Uri
    snapshot_id: str

    @property
    def name(self) -> str:
        """The name of the folder."""
        return f"{hashlib.sha256(str(self.uri).encode('utf-8', 'surrogatepass')).hexdigest()[:16]}-{self.snapshot_id}"


@dataclass(frozen=True, slots=True)
class Place:
    """A folder that was made, and what must be kept for as long as it is used: None for one in the cache."""

    folder: Path
    keeper: tempfile.TemporaryDirectory[str] | None = None


def make_place(side_files: Path, source: PinnedSource, cache_dir: Path) -> Place:
    """Return the folder for ``source``, made unless it is there: a link to the folder ``side_files``, and the record beside it.

    Any number of processes may do so at once. Where the cache cannot be written, the folder is a temporary one of this process.
    """
    root = cache_dir.absolute() / _FOLDER
    folder = root / source.name
    if _leads_to(folder, side_files) and read_source(folder) == source:
        return Place(folder)
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        _fill(root, source, side_files)
    except OSError:
        keeper = tempfile.TemporaryDirectory(prefix="headrace-engine-")
        _fill(Path(keeper.name), source, side_files)
        return Place(Path(keeper.name) / source.name, keeper)
    _collect_garbage(root)
    return Place(folder)


def read_source(folder: str | os.PathLike[str]) -> PinnedSource | None:
    """Return whose folder this is; None where it is not one of those that `make_place` makes."""
    path = Path(folder)
    if not _NAME.fullmatch(path.name):
        return None
    try:
        record = json.loads(path.with_name(f"{path.name}.json").read_bytes())
        source = PinnedSource(parse_uri(record["uri"]), check_snapshot_id(record["snapshot"]))
    except (OSError, ValueError, KeyError, TypeError, InvalidSetting, InvalidUri):
        return None
    return source if source.name == path.name else None


def _leads_to(folder: Path, side_files: Path) -> bool:
    try:
        return folder.is_symlink() and folder.resolve(strict=True) == side_files.resolve(strict=True)
    except OSError:
        return False


def _fill(root: Path, source: PinnedSource, side_files: Path) -> None:
    """Write the record and the link into ``root``, each in one step, the link last."""
    record = json.dumps({"uri": str(source.uri), "snapshot": source.snapshot_id}).encode()
    fresh = root / f"{_TEMPORARY}{source.name}-{secrets.token_hex(8)}"
    try:
        fresh.write_bytes(record)
        fresh.replace(root / f"{source.name}.json")
        fresh.symlink_to(
            os.path.relpath(side_files.resolve(), root.resolve())
        )  # relative, so that the cache may be moved
        fresh.replace(root / source.name)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


def _collect_garbage(root: Path) -> None:
    """Remove what leads nowhere any more: the cache of side files removes what nobody has used for long."""
    with contextlib.suppress(OSError):
        for link in root.iterdir():
            if _NAME.fullmatch(link.name) and link.is_symlink() and not link.exists():
                link.unlink(missing_ok=True)
                link.with_name(f"{link.name}.json").unlink(missing_ok=True)
