"""A world without a network: scripted names, connections and clocks, and a store that lists what it is told to."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.doctor.world import World
from headrace.errors import HeadraceError, ObjectNotFound
from headrace.settings import Settings
from headrace.storage import FileRange, HttpRange, Listing, Refusal, StoredObject, Uri, Verdict
from headrace.storage.credentials import CredentialSource
from headrace.transport import Surroundings
from headrace.transport.connection import Origin
from headrace.transport.stopping import StopSwitch

ORIGIN = Origin("https", "bucket.s3.eu-west-1.amazonaws.com", 443, None, True)
NOW = 1_700_000_000.0


class Ticks:
    """A clock that moves by ``step`` each time it is read."""

    def __init__(self, step: float = 0.004) -> None:
        self.now = 100.0
        self.step = step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


class FakeSocket:
    def close(self) -> None:
        pass


def world(
    *,
    addresses: Sequence[str] | OSError = ("203.0.113.7",),
    failures: Mapping[str, OSError] | None = None,
    environment: Mapping[str, str] | None = None,
    **more: Any,
) -> World:
    """Return a world whose names have ``addresses``, and in which connections to some of them fail."""

    def resolve(host: str, port: int) -> tuple[str, ...]:
        if isinstance(addresses, OSError):
            raise addresses
        return tuple(addresses)

    def connect(host: str, port: int, timeout_s: float, switch: StopSwitch) -> socket.socket:
        failure = (failures or {}).get(host)
        if failure is not None:
            raise failure
        return FakeSocket()  # type: ignore[return-value]

    surroundings = Surroundings(clock=Ticks(), connect=connect)
    return World(
        environment=environment or {}, surroundings=surroundings, wall_clock=lambda: NOW, resolve=resolve, **more
    )


class FakeStore:
    """A store whose listing is ``objects``, and whose errors are those it is given, by method."""

    selected_key: str | None = None

    def __init__(
        self,
        objects: Mapping[str, int] | None = None,
        *,
        uri: Uri | None = None,
        folders: Sequence[str] = (),
        contents: Mapping[str, bytes] | None = None,
        errors: Mapping[str, HeadraceError] | None = None,
        version: str = '"v1"',
    ) -> None:
        self.uri = uri or Uri("s3", "bucket", "models/llama")
        self.endpoint = "https://bucket.s3.eu-west-1.amazonaws.com"
        self.objects = {key: StoredObject(key, size, version) for key, size in (objects or {}).items()}
        self.folders = tuple(folders)
        self.contents = dict(contents or {})
        self.errors = dict(errors or {})
        self.is_closed = False

    def uri_of(self, key: str) -> str:
        return str(self.uri.child(key))

    def list_level(self, folder: str = "") -> Listing:
        self._raise("list_level")
        prefix = f"{folder}/" if folder else ""
        inside = [
            stored for key, stored in self.objects.items() if key.startswith(prefix) and "/" not in key[len(prefix) :]
        ]
        return Listing(tuple(inside), () if folder else self.folders)

    def stat(self, key: str) -> StoredObject:
        self._raise("stat")
        if key not in self.objects:
            raise ObjectNotFound(f"{self.uri_of(key)} does not exist.")
        return self.objects[key]

    def read_object(self, stored: StoredObject, *, start: int = 0, stop: int | None = None) -> bytes:
        self._raise("read_object")
        return self.contents[stored.key]

    def describe_range(self, stored: StoredObject, start: int, stop: int) -> FileRange | HttpRange:
        self._raise("describe_range")
        headers = (("Range", f"bytes={start}-{stop - 1}"), ("If-Match", stored.version))
        return HttpRange(
            ORIGIN.scheme, ORIGIN.host, ORIGIN.port, f"/{stored.key}", headers, start, stop, stored.version
        )

    def judge(self, stored: StoredObject, refusal: Refusal) -> Verdict:
        return Verdict(HeadraceError("refused", f"It said {refusal.status}."))

    def close(self) -> None:
        self.is_closed = True

    def _raise(self, method: str) -> None:
        if method in self.errors:
            raise self.errors[method]


def opener(store: FakeStore) -> Callable[[Uri, Settings], Any]:
    """Return what opens ``store``, whatever uri is asked for."""
    return lambda uri, settings: store


KEYS = CredentialSource(kind="access key", source="the variables", identity="access key …MPLE")
