"""Whether side files can be kept on this machine: the folder's rights, its owner, its file system and the room in it. Leaves nothing behind."""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from headrace.checkpoint.sidecache import SideFileCache
from headrace.doctor.finding import Finding, failed, failed_with, ok, warning
from headrace.doctor.world import World
from headrace.errors import CacheError
from headrace.units import MIB, format_bytes

STEP = "cache"

_SLACK_BYTES = MIB
_ESCAPE = re.compile(r"\\([0-7]{3})")
_NETWORKED = ("nfs", "nfs4", "cifs", "smb3", "lustre", "beegfs", "gpfs", "ceph", "glusterfs", "9p", "virtiofs", "efs")


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted file system: its type and where it is mounted."""

    kind: str
    point: str


def examine_cache(folder: Path, source: str, needed_bytes: int, world: World) -> Finding:
    """Look at the cache's folder, or the nearest one above it that exists; ``needed_bytes`` is what a load would keep in it."""
    folder = folder.absolute()
    existing = next((one for one in (folder, *folder.parents) if os.path.lexists(one)), folder)
    details = [("folder", f"{folder} ({source})")]
    mount = mount_of(existing, world.mounts())
    if mount is not None:
        details.append(("file system", _words_for(mount)))
    try:
        SideFileCache(folder).find(
            "headrace doctor", ()
        )  # Changes nothing; refuses a cache that others could have filled.
    except CacheError as error:
        return failed_with(STEP, error, details)
    try:
        free = world.free_bytes(existing)
        details.append(("free", format_bytes(free)))
        _try_to_write(existing)
    except OSError as error:
        return _unwritable(folder, existing, error, details)
    if free < needed_bytes + _SLACK_BYTES:
        return failed(
            STEP,
            f"There is too little room for the side files in {folder}.",
            f"They need {format_bytes(needed_bytes)}, and {format_bytes(free)} are free.",
            "Make room, or set HEADRACE_CACHE_DIR to a folder on another disk.",
            details,
        )
    absent = "" if existing == folder else " (it will be made)"
    return ok(STEP, f"{folder} can be written{absent}, and {format_bytes(free)} are free.", details)


def mount_of(folder: Path, mounts: str) -> Mount | None:
    """Return the file system that holds ``folder``, from the text of ``/proc/self/mountinfo`` (proc(5)); None where it does not say."""
    best: Mount | None = None
    wanted = os.path.realpath(folder)
    for line in mounts.splitlines():
        before, dash, after = line.partition(" - ")
        fields = before.split(" ")
        if not dash or len(fields) < 5 or not after:
            continue
        point = _ESCAPE.sub(lambda match: chr(int(match[1], 8)), fields[4])
        inside = wanted == point or wanted.startswith(point.rstrip("/") + "/")
        # Of two on one point the later hides the earlier.
        if inside and (best is None or len(point) >= len(best.point)):
            best = Mount(after.split(" ")[0], point)
    return best


def _words_for(mount: Mount) -> str:
    text = f"{mount.kind}, mounted at {mount.point}"
    if mount.kind == "tmpfs":
        return f"{text}: it is memory, and counts against a container's memory limit"
    if mount.kind == "overlay":
        return f"{text}: it is the container's own, and is lost with it"
    if mount.kind in _NETWORKED or mount.kind.startswith("fuse"):
        return f"{text}: it is shared through the network, where locks may do nothing; that costs work, not safety"
    return text


def _try_to_write(folder: Path) -> None:
    """Write a small file and remove it. Raises OSError."""
    with tempfile.TemporaryFile(prefix=".headrace-doctor-", dir=folder) as file:
        file.write(b"1")
        file.flush()


def _unwritable(folder: Path, existing: Path, error: OSError, details: list[tuple[str, str]]) -> Finding:
    reason = error.strerror or type(error).__name__
    where = f"{folder} cannot be written."
    said = f"{existing} says: {reason}."
    mend = "Set HEADRACE_CACHE_DIR to a folder that this user may write to; in Kubernetes an emptyDir will do."
    try:
        with tempfile.TemporaryFile():
            pass
    except OSError:
        return failed(STEP, where, f"{said} There is no temporary folder that can be written, either.", mend, details)
    return warning(
        STEP,
        where,
        f"{said} A load goes on with a temporary folder of its own, and every process fetches the side files anew.",
        mend,
        details,
    )
