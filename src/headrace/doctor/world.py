"""What the checks need of the world: clocks, a resolver, connections, the environment's names. Tests put their own in their place."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headrace.settings import Settings
from headrace.storage import ObjectStore, Uri, open_store
from headrace.storage.credentials import CredentialSource, describe_credentials
from headrace.transport import Surroundings

_MOUNTS = Path("/proc/self/mountinfo")


def resolve(host: str, port: int) -> tuple[str, ...]:
    """Return the addresses of ``host``, each once, in the order in which they are tried. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(address[0]) for *_, address in found))


def open_as_configured(uri: Uri, settings: Settings) -> ObjectStore:
    """Return the store for ``uri``."""
    return open_store(uri, settings=settings)


def describe_hub(uri: Uri, settings: Settings, environment: Mapping[str, str]) -> CredentialSource:
    """Return where the login for the hub comes from, without asking the hub. Raises `AccessDenied` for one that cannot be used."""
    from headrace.storage.hub_credentials import find_hub_login

    return find_hub_login(uri, settings.transport, environment)


def ignore(error: Exception) -> None:
    """Do nothing with an exception that no check expects."""


def read_mounts() -> str:
    """Return what is mounted where, in the form of ``/proc/self/mountinfo``; empty where the system does not say."""
    try:
        return _MOUNTS.read_text(errors="replace")
    except OSError:
        return ""


def free_bytes(folder: Path) -> int:
    """Return the bytes that this user may still write below ``folder``. Raises OSError."""
    return shutil.disk_usage(folder).free


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The world as the checks see it."""

    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables, looked at to say where a setting comes from and what is missing. They may hold secrets."""
    surroundings: Surroundings = field(default_factory=Surroundings)
    """Clock, connections and TLS contexts, as reads have them."""
    wall_clock: Callable[[], float] = time.time
    """Seconds since 1970, as this machine believes."""
    resolve: Callable[[str, int], tuple[str, ...]] = resolve
    open_store: Callable[[Uri, Settings], ObjectStore] = open_as_configured
    describe_credentials: Callable[[ObjectStore, Mapping[str, str]], CredentialSource] = describe_credentials
    describe_hub: Callable[[Uri, Settings, Mapping[str, str]], CredentialSource] = describe_hub
    on_unexpected: Callable[[Exception], object] = ignore
    """Told of an exception that a check did not expect, which is a bug of ours."""
    mounts: Callable[[], str] = read_mounts
    free_bytes: Callable[[Path], int] = free_bytes
