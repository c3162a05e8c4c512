"""The simplest store over a `FaultServer`: a plain dialect of HTTP, with a token in place of a signature."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

from headrace.errors import AccessDenied, HeadraceError, ObjectChanged, ObjectNotFound, StoreUnavailable
from headrace.storage import FileRange, HttpRange, Listing, Refusal, StoredObject, Uri, Verdict
from tests.support.fault_server import FaultServer


class StubStore:
    """An `ObjectStore` over ``server``. ``tokens`` are sent as Authorization, the next one each time the store is told that one has expired."""

    def __init__(
        self, server: FaultServer, *, tokens: Sequence[str] = (), ca_file: str | None = None, checks_etag: bool = True
    ) -> None:
        self.server = server
        self.num_refreshes = 0
        self.refusals: list[Refusal] = []
        """Every refusal that `judge` was asked about."""
        self.sends_condition = True
        """Whether requests hold If-Match."""
        self.ca_file = ca_file
        self._tokens = tuple(tokens)
        self._checks_etag = checks_etag

    @property
    def uri(self) -> Uri:
        return Uri("http", f"127.0.0.1:{self.server.port}", "")

    @property
    def selected_key(self) -> str | None:
        return None

    @property
    def endpoint(self) -> str:
        return self.server.url

    def uri_of(self, key: str) -> str:
        return f"{self.server.url}/{key}"

    def list_level(self, folder: str = "") -> Listing:
        prefix = f"{folder}/" if folder else ""
        inside = sorted(key for key in self.server.objects() if key.startswith(prefix))
        objects = tuple(self.stat(key) for key in inside if "/" not in key[len(prefix) :])
        folders = {prefix + key[len(prefix) :].partition("/")[0] for key in inside if "/" in key[len(prefix) :]}
        return Listing(objects, tuple(sorted(folders)))

    def stat(self, key: str) -> StoredObject:
        payload = self.server.objects().get(key)
        if payload is None:
            raise ObjectNotFound(f"{self.uri_of(key)} does not exist.")
        return StoredObject(key, len(payload), self.server.etag(key))

    def read_object(self, stored: StoredObject, *, start: int = 0, stop: int | None = None) -> bytes:
        if self.server.etag(stored.key) != stored.version:
            raise ObjectChanged(f"{self.uri_of(stored.key)} was replaced.")
        return self.server.objects()[stored.key][start:stop]

    def describe_range(self, stored: StoredObject, start: int, stop: int) -> FileRange | HttpRange:
        headers = [("Range", f"bytes={start}-{stop - 1}"), ("Accept-Encoding", "identity")]
        if self.sends_condition:
            headers.append(("If-Match", stored.version))
        if self._tokens:
            headers.append(("Authorization", f"Bearer {self._tokens[min(self.num_refreshes, len(self._tokens) - 1)]}"))
        return HttpRange(
            scheme=self.server.url.partition(":")[0],
            host="127.0.0.1",
            port=self.server.port,
            target=quote(f"/{stored.key}"),
            headers=tuple(headers),
            start=start,
            stop=stop,
            etag=stored.version if self._checks_etag else None,
            ca_file=self.ca_file,
        )

    def judge(self, stored: StoredObject, refusal: Refusal) -> Verdict:
        self.refusals.append(refusal)
        uri, status = self.uri_of(stored.key), refusal.status
        if status == 403 and b"ExpiredToken" in refusal.body:
            self.num_refreshes += 1
            return Verdict(self._error(AccessDenied, uri, status), retry=True, refresh_credentials=True)
        if status in (401, 403):
            return Verdict(self._error(AccessDenied, uri, status))
        if status == 404:
            return Verdict(self._error(ObjectNotFound, uri, status))
        if status in (412, 416):
            return Verdict(self._error(ObjectChanged, uri, status))
        wait = refusal.headers.get("retry-after")
        retry = status == 429 or status >= 500
        return Verdict(self._error(StoreUnavailable, uri, status), retry=retry, wait_s=float(wait) if wait else None)

    def close(self) -> None:
        pass

    @staticmethod
    def _error(kind: type[HeadraceError], uri: str, status: int) -> HeadraceError:
        return kind(f"{uri} cannot be read.", f"The server answered {status}.", "Look at the server.")
