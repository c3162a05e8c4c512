"""An S3 server on 127.0.0.1 with its objects in memory, and the services that give credentials for it, each misbehaving to order.

    with ScriptedS3({"llama/config.json": b"{}"}) as server:
        server.refuse = lambda asked: (403, "AccessDenied") if asked.access_key != "AK1" else None
        ...
        assert [asked.path for asked in server.asked if asked.is_read] == [...]

    with CredentialServer(token_file) as service:
        os.environ.update(service.web_identity())      # or service.container()
        ...
        service.rotate()

It keeps no versions and checks no signature; who signed is read off the request.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import ssl
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self
from urllib.parse import parse_qsl, quote, unquote, urlsplit

BUCKET = "models"

Answer = tuple[int, dict[str, str], bytes]


@dataclass(frozen=True, slots=True)
class Asked:
    """One request; header names are in lower case."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def path(self) -> str:
        return urlsplit(self.target).path

    @property
    def query(self) -> dict[str, str]:
        return dict(parse_qsl(urlsplit(self.target).query, keep_blank_values=True))

    @property
    def access_key(self) -> str:
        """Who signed; empty for an anonymous request."""
        return self.headers.get("authorization", "").partition("Credential=")[2].partition("/")[0]

    @property
    def is_read(self) -> bool:
        """Whether it is a ranged read."""
        return self.method == "GET" and "range" in self.headers


class _QuietServer(ThreadingHTTPServer):
    """Does not print what a client's refusal of its certificate looks like from this side."""

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class LoopbackServer:
    """An HTTP server whose `answer` is called for each request, in the thread of its connection; a context manager."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        """With ``tls`` (a server-side context) it speaks HTTPS."""
        self.asked: list[Asked] = []
        self._scheme = "http" if tls is None else "https"
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 30

            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                headers = {name.lower(): value for name, value in self.headers.items()}
                asked = Asked(self.command, self.path, headers, body)
                server.asked.append(asked)
                status, about, content = server.answer(asked)
                self.send_response_only(status)
                for name, value in {**about, "Content-Length": about.get("Content-Length", str(len(content)))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    with contextlib.suppress(OSError):
                        self.wfile.write(content)

            do_HEAD = do_POST = do_PUT = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self._server = _QuietServer(("127.0.0.1", 0), Handler)
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self._server.server_port}"

    def answer(self, asked: Asked) -> Answer:
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class ScriptedS3(LoopbackServer):
    """One bucket, `BUCKET`, addressed by path. ``page_keys`` is how many keys a page of a listing has."""

    def __init__(self, objects: Mapping[str, bytes], *, page_keys: int = 1000) -> None:
        super().__init__()
        self.objects = dict(objects)
        self.page_keys = page_keys
        self.knows_new_listing = True
        """Whether ListObjectsV2 is known; without, its parameters are ignored, as servers do that know none."""
        self.refuse: Callable[[Asked], tuple[int, str] | None] = lambda asked: None
        """Status and code of a refusal; None lets the request through."""
        self.before_read: Callable[[int], None] = lambda number: None
        """Called before each ranged read is answered, with its number, from 1."""

    @property
    def reads(self) -> list[Asked]:
        return [asked for asked in self.asked if asked.is_read]

    def environment(self) -> dict[str, str]:
        """Return the variables with which the server is found; no credentials."""
        hosts = "127.0.0.1,localhost"
        return {
            "AWS_ENDPOINT_URL_S3": self.url,
            "AWS_DEFAULT_REGION": "us-east-1",
            "NO_PROXY": hosts,
            "no_proxy": hosts,
        }

    def answer(self, asked: Asked) -> Answer:
        if asked.is_read:
            self.before_read(len(self.reads))
        refused = self.refuse(asked)
        if refused is not None:
            return _error(*refused)
        bucket, _, key = unquote(asked.path).lstrip("/").partition("/")
        if bucket != BUCKET:
            return _error(404, "NoSuchBucket")
        return self._object(asked, key) if key else self._listing(asked.query)

    def _object(self, asked: Asked, key: str) -> Answer:
        body = self.objects.get(key)
        if body is None:
            return _error(404, "NoSuchKey")
        etag = _etag(body)
        if asked.headers.get("if-match", etag) != etag:
            return _error(412, "PreconditionFailed")
        about = {"ETag": etag, "Accept-Ranges": "bytes"}
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", asked.headers.get("range", ""))
        if match is None:
            return 200, {**about, "Content-Length": str(len(body))}, body
        start, stop = int(match[1]), min(int(match[2]) + 1, len(body))
        return 206, {**about, "Content-Range": f"bytes {start}-{stop - 1}/{len(body)}"}, body[start:stop]

    def _listing(self, query: Mapping[str, str]) -> Answer:
        is_new = query.get("list-type") == "2" and self.knows_new_listing
        prefix, after = query.get("prefix", ""), query.get("continuation-token" if is_new else "marker", "")
        names = sorted({_name(key, prefix) for key in self.objects if key.startswith(prefix)})
        rest = [name for name in names if name > after]
        page, is_cut = rest[: self.page_keys], len(rest) > self.page_keys
        parts = [f"<EncodingType>url</EncodingType><IsTruncated>{str(is_cut).lower()}</IsTruncated>"]
        if is_new:
            parts.append(f"<KeyCount>{len(page)}</KeyCount>")
        if is_cut:
            tag = "NextContinuationToken" if is_new else "NextMarker"
            parts.append(f"<{tag}>{quote(page[-1])}</{tag}>")
        for name in page:
            if name.endswith("/"):
                parts.append(f"<CommonPrefixes><Prefix>{quote(name)}</Prefix></CommonPrefixes>")
            else:
                body = self.objects[name]
                about = f"<ETag>{_etag(body).replace(chr(34), '&quot;')}</ETag><Size>{len(body)}</Size>"
                parts.append(f"<Contents><Key>{quote(name)}</Key>{about}</Contents>")
        text = f"<ListBucketResult>{''.join(parts)}</ListBucketResult>"
        return 200, {"Content-Type": "application/xml"}, text.encode()


class CredentialServer(LoopbackServer):
    """Gives keys that last ``life_s`` seconds to whoever shows what is in ``token_file``: as STS does for web identities, and as a container's endpoint does.

    Only the keys that were given for the token of now are good (`is_good`), and only until they end.
    """

    def __init__(self, token_file: Path, *, life_s: float = 10.0, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(tls)
        self.token_file = token_file
        self.life_s = life_s
        self.num_rotations = 0
        self._ends: dict[str, tuple[str, float]] = {}
        self._lock = threading.Lock()
        token_file.write_text("token-0")

    def rotate(self) -> None:
        """Write another token into the file; the old one, and the keys that were given for it, are good no more."""
        with self._lock:
            self.num_rotations += 1
            self.token_file.write_text(f"token-{self.num_rotations}")

    def is_good(self, access_key: str) -> bool:
        with self._lock:
            token, ends = self._ends.get(access_key, ("", 0.0))
            return token == f"token-{self.num_rotations}" and time.monotonic() < ends

    def web_identity(self) -> dict[str, str]:
        """Return the variables of a pod whose service account has a role."""
        return {
            "AWS_WEB_IDENTITY_TOKEN_FILE": str(self.token_file),
            "AWS_ROLE_ARN": "arn:aws:iam::123456789012:role/models",
            "AWS_ROLE_SESSION_NAME": "test",
            "AWS_ENDPOINT_URL_STS": self.url,
        }

    def container(self) -> dict[str, str]:
        """Return the variables of a pod with an identity agent beside it."""
        return {
            "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{self.url}/v1/credentials",
            "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(self.token_file),
        }

    def answer(self, asked: Asked) -> Answer:
        by_sts = asked.method == "POST"
        form = dict(parse_qsl(asked.body.decode()))
        token = form.get("WebIdentityToken", "") if by_sts else asked.headers.get("authorization", "")
        with self._lock:
            if token != f"token-{self.num_rotations}":
                return _error(400, "ExpiredTokenException", root="ErrorResponse")
            access_key = f"AK{len(self._ends)}"
            self._ends[access_key] = (token, time.monotonic() + self.life_s)
        end = (datetime.now(UTC) + timedelta(seconds=self.life_s)).strftime("%Y-%m-%dT%H:%M:%SZ")
        if not by_sts:
            keys = {"AccessKeyId": access_key, "SecretAccessKey": "secret", "Token": f"of-{token}", "Expiration": end}
            return 200, {"Content-Type": "application/json"}, json.dumps(keys).encode()
        text = (
            f"<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>{access_key}</AccessKeyId>"
            f"<SecretAccessKey>secret</SecretAccessKey><SessionToken>of-{token}</SessionToken><Expiration>{end}</Expiration></Credentials>"
            "</AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"
        )
        return 200, {"Content-Type": "text/xml"}, text.encode()


class SilentService(LoopbackServer):
    """Answers 404 to everything, and is there to see whether anybody asks: a metadata service."""

    def answer(self, asked: Asked) -> Answer:
        return 404, {}, b""


def _name(key: str, prefix: str) -> str:
    """Return what a listing of one level shows for ``key``: itself, or the folder that it lies in."""
    first, slash, _ = key.removeprefix(prefix).partition("/")
    return prefix + first + slash


def _etag(body: bytes) -> str:
    return f'"{hashlib.md5(body, usedforsecurity=False).hexdigest()}"'


def _error(status: int, code: str, root: str = "") -> Answer:
    text = f"<Error><Code>{code}</Code><Message>It is so.</Message></Error>"
    return status, {"Content-Type": "application/xml"}, (f"<{root}>{text}</{root}>" if root else text).encode()
