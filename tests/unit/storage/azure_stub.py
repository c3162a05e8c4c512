"""What tests need to play an Azure storage account and the service that gives tokens for it; `S3Stub` is the server."""

from __future__ import annotations

import base64
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from xml.sax.saxutils import escape

from azure.core.credentials import AccessToken
from azure.core.exceptions import ClientAuthenticationError

from headrace.settings import AzureSettings, TransportSettings
from headrace.storage import parse_uri
from headrace.storage.azure import AzureStore
from headrace.storage.azure_access import AzureOptions

from .s3_stub import Answer

KEY = base64.b64encode(b"k" * 64).decode()
SAS = "sv=2024-11-04&sp=rl&se=2999-01-01T00:00:00Z&sig=c2lnbmF0dXJl"
TRANSPORT = TransportSettings(max_attempts=1, connect_timeout_s=5, idle_timeout_s=5)


class FakeCredential:
    """A credential whose service gives ``names`` as tokens, one after the other and the last one for ever, each for ``lives_s``."""

    def __init__(self, *names: str, lives_s: float = 3600, clock: Callable[[], float] = time.time) -> None:
        self.names = list(names) or ["TOKEN"]
        self.lives_s = lives_s
        self.fails = False
        self.asked: list[Mapping[str, Any]] = []
        self.is_closed = False
        self._clock = clock

    def get_token(self, *scopes: str, **options: Any) -> AccessToken:
        self.asked.append({"scopes": scopes, **options})
        if self.fails:
            raise ClientAuthenticationError("the service says no")
        name = self.names.pop(0) if len(self.names) > 1 else self.names[0]
        return AccessToken(name, int(self._clock() + self.lives_s))

    def close(self) -> None:
        self.is_closed = True


@contextlib.contextmanager
def opened(
    endpoint: str, uri: str = "az://container/m", *, clock: Callable[[], float] | None = None, **given: Any
) -> Iterator[AzureStore]:
    """Open ``uri`` in the account ``acct`` at ``endpoint``, with a key unless ``given`` says otherwise."""
    options = {
        name: given.pop(name) for name in ("anonymous", "new_credential", "read_settings", "ca_file") if name in given
    }
    if not {"account_key", "sas_token"} & set(given):
        given["account_key"] = KEY
    settings = AzureSettings(account="acct", endpoint=f"{endpoint}/acct", **given)
    options.setdefault("read_settings", lambda: settings)
    more = {} if clock is None else {"clock": clock}
    store = AzureStore(parse_uri(uri), transport=TRANSPORT, options=AzureOptions(**options), **more)
    with contextlib.closing(store):
        yield store


def error(status: int, code: str, message: str = "It is so.", detail: str = "", **headers: str) -> Answer:
    """An error as Azure sends it: the code in a header, and all of it in XML."""
    more = f"<AuthenticationErrorDetail>{escape(detail)}</AuthenticationErrorDetail>" if detail else ""
    text = f'<?xml version="1.0" encoding="utf-8"?><Error><Code>{code}</Code><Message>{escape(message)}</Message>{more}</Error>'
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer(status, text.encode(), {"x-ms-error-code": code, "Content-Type": "application/xml", **named})


def blob(content: bytes, *, etag: str = '"v"', start: int = 0, total: int | None = None, **headers: str) -> Answer:
    """A piece of a blob, as a ranged GET is answered; a HEAD request shows its total."""
    total = len(content) if total is None else total
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    shown = {
        "ETag": etag,
        "x-ms-blob-type": "BlockBlob",
        "Content-Range": f"bytes {start}-{start + len(content) - 1}/{total}",
    }
    return Answer(206, content, {**shown, **named})


def properties(num_bytes: int, etag: str = '"v"', **headers: str) -> Answer:
    """The answer to a HEAD of a blob."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer(200, b"", {"Content-Length": str(num_bytes), "ETag": etag, "x-ms-blob-type": "BlockBlob", **named})


def listing(
    keys: Mapping[str, int], *, folders: tuple[str, ...] = (), marked: Mapping[str, str] | None = None, token: str = ""
) -> Answer:
    """A page of List Blobs. ``marked`` has blobs without content that have metadata, as XML; ``token`` says that there is more."""
    items = [_item(key, size, f"e-{number}", "") for number, (key, size) in enumerate(keys.items())]
    items += [_item(key, 0, "e", f"<Metadata>{metadata}</Metadata>") for key, metadata in (marked or {}).items()]
    items += [f"<BlobPrefix><Name>{escape(folder)}</Name></BlobPrefix>" for folder in folders]
    text = (
        '<?xml version="1.0" encoding="utf-8"?><EnumerationResults ServiceEndpoint="http://x/" ContainerName="container">'
        f"<Delimiter>/</Delimiter><Blobs>{''.join(items)}</Blobs><NextMarker>{escape(token)}</NextMarker></EnumerationResults>"
    )
    return Answer(200, text.encode(), {"Content-Type": "application/xml"})


def _item(key: str, size: int, etag: str, more: str) -> str:
    return (
        f"<Blob><Name>{escape(key)}</Name><Properties><Etag>{etag}</Etag><Content-Length>{size}</Content-Length>"
        f"<BlobType>BlockBlob</BlobType></Properties>{more}</Blob>"
    )
