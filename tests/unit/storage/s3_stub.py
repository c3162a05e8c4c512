"""A scripted stand-in for an S3 server on loopback, which also checks signatures by itself, from the specification."""

from __future__ import annotations

import hashlib
import hmac
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self
from urllib.parse import parse_qsl, quote


@dataclass(frozen=True)
class Asked:
    """One request as it arrived; header names in lower case."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes = b""

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def query(self) -> dict[str, str]:
        return dict(parse_qsl(self.target.partition("?")[2], keep_blank_values=True))

    @property
    def access_key(self) -> str:
        return self.headers.get("authorization", "").partition("Credential=")[2].partition("/")[0]

    @property
    def region(self) -> str:
        return self.headers.get("authorization", "").partition("Credential=")[2].split("/")[2]


@dataclass(frozen=True)
class Answer:
    """One answer. ``cut`` sends only so many bytes of the body and hangs up; ``silent`` hangs up at once."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: int | None = None
    silent: bool = False


class S3Stub:
    """``answer`` is called for every request, in the thread of its connection."""

    def __init__(self, answer: Callable[[Asked], Answer]) -> None:
        self.asked: list[Asked] = []
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                headers = {name.lower(): value for name, value in self.headers.items()}
                asked = Asked(self.command, self.path, headers, body)
                stub.asked.append(asked)
                given = answer(asked)
                if given.silent:
                    return
                self.send_response_only(given.status)
                for name, value in {"Content-Length": str(len(given.body)), **given.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(given.body[: given.cut])

            do_HEAD = do_GET
            do_POST = do_GET
            do_PUT = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def error(status: int, code: str, message: str = "It is so.", **headers: str) -> Answer:
    """An S3 error with its XML body."""
    body = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
    return Answer(status, body, {name.replace("_", "-"): value for name, value in headers.items()})


def listing(
    keys: Mapping[str, int], *, folders: tuple[str, ...] = (), token: str = "", quotes: str = "&quot;"
) -> Answer:
    """A page of ListObjectsV2, url-encoded as it was asked for; ``token`` says that there is more."""
    contents = "".join(
        f"<Contents><Key>{quote(key)}</Key><ETag>{quotes}e-{number}{quotes}</ETag><Size>{size}</Size></Contents>"
        for number, (key, size) in enumerate(keys.items())
    )
    prefixes = "".join(f"<CommonPrefixes><Prefix>{quote(folder)}</Prefix></CommonPrefixes>" for folder in folders)
    more = f"<NextContinuationToken>{token}</NextContinuationToken>" if token else ""
    text = (
        f"<ListBucketResult><EncodingType>url</EncodingType><IsTruncated>{'true' if token else 'false'}</IsTruncated>"
        f"{more}{contents}{prefixes}</ListBucketResult>"
    )
    return Answer(200, text.encode())


def signature_is_right(asked: Asked, secret_key: str) -> bool:
    """Check a Signature Version 4 from what arrived (AWS General Reference, "Create a signed AWS API request")."""
    _, _, rest = asked.headers["authorization"].partition(" ")
    parts = dict(part.strip().split("=", 1) for part in rest.split(","))
    _, date, region, service, end = parts["Credential"].split("/")
    names = parts["SignedHeaders"].split(";")
    query = "&".join(sorted(asked.target.partition("?")[2].split("&")))
    signed = "".join(f"{name}:{asked.headers[name].strip()}\n" for name in names)
    canonical = "\n".join(
        (asked.method, asked.path, query, signed, parts["SignedHeaders"], asked.headers["x-amz-content-sha256"])
    )
    scope = f"{date}/{region}/{service}/{end}"
    hashed = hashlib.sha256(canonical.encode()).hexdigest()
    text = f"AWS4-HMAC-SHA256\n{asked.headers['x-amz-date']}\n{scope}\n{hashed}"
    key = f"AWS4{secret_key}".encode()
    for piece in (date, region, service, end, text):
        key = hmac.new(key, piece.encode(), hashlib.sha256).digest()
    return hmac.compare_digest(key.hex(), parts["Signature"])
