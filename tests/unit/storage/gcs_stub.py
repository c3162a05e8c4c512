"""What tests need to play Google Cloud Storage and the services that give tokens for it; `S3Stub` is the server."""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from google.auth.credentials import Credentials
from google.auth.exceptions import RefreshError

from headrace.settings import TransportSettings
from headrace.storage import parse_uri
from headrace.storage.gcs import GcsStore
from headrace.storage.gcs_access import GcsOptions

from .s3_stub import Answer

TRANSPORT = TransportSettings(
    max_attempts=1, connect_timeout_s=5, idle_timeout_s=5, backoff_first_s=0, backoff_most_s=7
)


class FakeCredentials(Credentials):
    """Credentials of google-auth whose service gives ``names`` as tokens, one after the other and the last one for ever, each for ``lives_s``."""

    def __init__(self, *names: str, lives_s: float = 3600) -> None:
        super().__init__()
        self.names = list(names) or ["TOKEN"]
        self.lives_s = lives_s
        self.fails = False
        self.num_refreshes = 0

    def refresh(self, request: Any) -> None:
        self.num_refreshes += 1
        if self.fails:
            raise RefreshError("invalid_grant: Bad Request", {"id_token": "SECRET"})
        self.token = self.names.pop(0) if len(self.names) > 1 else self.names[0]
        self.expiry = datetime.datetime.now(datetime.UTC).replace(tzinfo=None) + datetime.timedelta(
            seconds=self.lives_s
        )


@contextlib.contextmanager
def opened(
    endpoint: str | None = "http://127.0.0.1:9",
    uri: str = "gs://bucket/m",
    *,
    credentials: Callable[[], Any] | None = FakeCredentials,
    transport: TransportSettings = TRANSPORT,
    clock: Callable[[], float] | None = None,
    sleep: Callable[[float], object] | None = None,
    **options: Any,
) -> Iterator[GcsStore]:
    """Open ``uri`` with the given credentials at ``endpoint``, and close it in the end."""
    given = GcsOptions(endpoint=endpoint, find_credentials=credentials, **options)
    more: dict[str, Any] = {"clock": clock} if clock else {}
    more |= {"sleep": sleep} if sleep else {}
    with contextlib.closing(GcsStore(parse_uri(uri), transport=transport, options=given, **more)) as store:
        yield store


def document(content: Mapping[str, Any], status: int = 200, **headers: str) -> Answer:
    """An answer in JSON."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer(status, json.dumps(content).encode(), {"Content-Type": "application/json", **named})


def refusal(status: int, reason: str, message: str = "It is so.", **headers: str) -> Answer:
    """An error of the JSON API."""
    errors = [{"domain": "global", "reason": reason, "message": message}]
    return document({"error": {"code": status, "message": message, "errors": errors}}, status, **headers)


def listing(keys: Mapping[str, int], *, folders: tuple[str, ...] = (), token: str = "") -> Answer:
    """A page of a listing, whose objects have the generations 1, 2, …; ``token`` says that there is more."""
    items = [
        {"name": key, "size": str(size), "generation": str(number)}
        for number, (key, size) in enumerate(keys.items(), 1)
    ]
    content: dict[str, Any] = {"kind": "storage#objects", "items": items, "prefixes": list(folders)}
    return document({**content, "nextPageToken": token} if token else content)


def metadata(name: str = "m/a", size: int = 10, generation: int = 7) -> Answer:
    """The description of one object."""
    content = {"kind": "storage#object", "name": name, "size": str(size), "generation": str(generation)}
    return document(content)


def media(content: bytes, status: int = 200, **headers: str) -> Answer:
    """The bytes of an object of generation 7, or some of them."""
    named = {"x-goog-generation": "7"} | {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer(status, content, named)
