"""An S3 server in a process of its own, fast enough to measure loads with, which misbehaves by chance and whose session tokens expire.

    with FaultyS3(folder, Faults(cut=0.02, throttled=0.02, stalled=0.01), token_s=20.0) as server:
        os.environ.update(server.environment())
        server.misbehave(True)
        ... load s3://models/... ...
        print(server.account())

The files of ``folder`` are the objects of the one bucket. Every request must be signed (Signature Version 4 is checked in full, payloads apart), with the keys and the session token that
``/credentials`` hands out, as a container's credentials endpoint does. While the server misbehaves, a token is good for ``token_s`` seconds, although the endpoint
says an hour: so the client's SDK does not renew it beforehand, and what is late by a moment meets 400 ExpiredToken, as from S3. Which GET of an object meets which
fault a seeded generator decides. Bodies go from the file to the socket by ``sendfile``.

Both sides are in this module: `FaultyS3` starts it as a program, which needs nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import random
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qsl, quote, unquote
from xml.sax.saxutils import escape

BUCKET = "models"
REGION = "us-east-1"
CLAIMED_LIFE_S = 3600
"""How long a token is good, if the credentials endpoint is to be believed. Botocore renews by itself what has less than 15 minutes left."""

_LONGEST_STALL_S = 600.0
_LONGEST_HEAD = 64 << 10
_REASONS = {200: "OK", 206: "Partial Content", 400: "Bad Request", 403: "Forbidden", 404: "Not Found"}
_REASONS |= {412: "Precondition Failed", 416: "Range Not Satisfiable", 503: "Slow Down"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """How often a read meets which fault: shares of all GETs of objects, from 0 to 1."""

    cut: float = 0.0
    """Closed after a random part of the body; every second one with a reset."""
    throttled: float = 0.0
    """Refused with 503 SlowDown; every fourth one with Retry-After, which Amazon's do not have and other stores' do."""
    stalled: float = 0.0
    """Silent after a random part of the body, every fourth one before the first byte of the answer, for as long as the client listens."""
    retry_after_s: int = 1
    """What Retry-After asks for, in seconds."""
    seed: int = 0


class FaultyS3:
    """The server's process; a context manager. It ends with the process that started it. One thread at a time may use it."""

    def __init__(self, folder: Path, faults: Faults, *, token_s: float) -> None:
        """Start nothing yet. ``token_s`` is how long a token is good while the server misbehaves, in seconds."""
        self._options = json.dumps({"folder": str(folder), "faults": asdict(faults), "token_s": token_s})
        self._process: subprocess.Popen[str] | None = None
        self.port = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def environment(self) -> dict[str, str]:
        """Return the variables with which the AWS SDK finds the server and its credentials; variables with keys must not be set."""
        return {
            "AWS_ENDPOINT_URL_S3": self.endpoint,
            "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{self.endpoint}/credentials",
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }

    def misbehave(self, on: bool) -> None:
        """Begin or stop to misbehave. Without faults, every token that was ever handed out is good."""
        self._ask("on" if on else "off")

    def account(self) -> dict[str, int]:
        """Return how many reads there were while the server misbehaved, how many met each fault, and how many connections are open."""
        return {name: int(value) for name, value in self._ask("account").items()}

    def wait_until_idle(self, timeout_s: float = 10.0) -> bool:
        """Wait until the server has seen the end of every connection; say whether it has."""
        deadline = time.monotonic() + timeout_s
        while self.account()["open"] and time.monotonic() < deadline:
            time.sleep(0.02)
        return not self.account()["open"]

    def _ask(self, what: str) -> dict[str, Any]:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        process.stdin.write(what + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the server has ended with status {process.wait()}")
        found: dict[str, Any] = json.loads(answer)
        return found

    def __enter__(self) -> Self:
        command = [sys.executable, "-I", str(Path(__file__).resolve()), self._options]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.port = int(self._ask("account")["port"])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            with self._process as process:  # Its input ends, and so does it.
                assert process.stdin is not None
                process.stdin.close()
                process.wait(10)


# -- the program


@dataclass(frozen=True, slots=True)
class _Stored:
    path: str
    size_bytes: int
    etag: str


@dataclass(slots=True)
class _Request:
    method: str
    path: str
    query: str
    headers: dict[str, str]

    @property
    def is_read(self) -> bool:
        return self.method == "GET" and self.path.startswith(f"/{BUCKET}/") and len(self.path) > len(BUCKET) + 2


class _Hangup(Exception):
    """The connection is to be closed now."""


class _Server:
    """The objects, the tokens and the dice. Everything that changes is guarded by one lock."""

    def __init__(self, folder: Path, faults: Faults, token_s: float) -> None:
        self._faults = faults
        self._token_s = token_s
        self._random = random.Random(faults.seed)
        self._started = time.monotonic()
        self._secret = os.urandom(32)
        self._lock = threading.Lock()
        self.is_misbehaving = False
        self.counts: Counter[str] = Counter()
        self.num_open = 0
        self._objects = {}
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                with path.open("rb") as file:
                    etag = hashlib.file_digest(file, "md5").hexdigest()
                self._objects[path.relative_to(folder).as_posix()] = _Stored(
                    str(path), path.stat().st_size, f'"{etag}"'
                )

    def accept(self, listener: socket.socket) -> None:
        while True:
            sock, _ = listener.accept()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        self._count_open(1)
        descriptors: dict[str, int] = {}
        try:
            with sock.makefile("rb") as reader:
                while (request := _read_request(reader)) is not None:
                    self._answer(sock, request, descriptors)
        except (OSError, ValueError, _Hangup):
            pass  # The client went away, which is its right, or is sent away.
        finally:
            sock.close()
            for descriptor in descriptors.values():
                os.close(descriptor)
            self._count_open(-1)

    def _count_open(self, change: int) -> None:
        with self._lock:
            self.num_open += change

    def _count(self, *names: str) -> None:
        with self._lock:
            if self.is_misbehaving:
                self.counts.update(names)

    # -- one request

    def _answer(self, sock: socket.socket, request: _Request, descriptors: dict[str, int]) -> None:
        if request.path == "/credentials":
            _send(sock, 200, {"Content-Type": "application/json"}, json.dumps(self._hand_out()).encode())
            return
        refusal = self._refuse_keys(request)
        if refusal is not None:
            if refusal[1] == "ExpiredToken":
                self._count("expired")
            _refuse(sock, request, *refusal)
        elif request.path.rstrip("/") == f"/{BUCKET}":
            _send(sock, 200, {"Content-Type": "application/xml"}, self._list(request))
        else:
            self._answer_object(sock, request, descriptors)

    def _answer_object(self, sock: socket.socket, request: _Request, descriptors: dict[str, int]) -> None:
        stored = self._objects.get(unquote(request.path.removeprefix(f"/{BUCKET}/")))
        fault, part, number = self._draw(request)
        if fault == "throttled":
            wait = {"Retry-After": str(self._faults.retry_after_s)} if number % 4 == 0 else {}
            if wait:
                self._count("throttled with Retry-After")
            _refuse(sock, request, 503, "SlowDown", "Please reduce your request rate.", **wait)
            return
        if stored is None:
            _refuse(sock, request, 404, "NoSuchKey", "The specified key does not exist.")
            return
        if request.headers.get("if-match", stored.etag) != stored.etag:
            _refuse(sock, request, 412, "PreconditionFailed", "At least one of the pre-conditions did not hold.")
            return
        if fault == "stalled" and number % 4 == 0:
            _stall(sock)
        start, stop, status = _range_of(request.headers.get("range"), stored.size_bytes)
        if start >= stop and stored.size_bytes:
            _refuse(sock, request, 416, "InvalidRange", "The requested range is not satisfiable.")
            return
        about = {"ETag": stored.etag, "Accept-Ranges": "bytes", "Content-Type": "binary/octet-stream"}
        if status == 206:
            about["Content-Range"] = f"bytes {start}-{stop - 1}/{stored.size_bytes}"
        _send_head(sock, status, {**about, "Content-Length": str(stop - start)})
        if request.method == "HEAD":
            return
        if fault:
            stop = start + int(part * (stop - start))
        if stored.path not in descriptors:
            descriptors[stored.path] = os.open(stored.path, os.O_RDONLY)
        while start < stop:
            start += os.sendfile(sock.fileno(), descriptors[stored.path], start, stop - start)
        if fault == "stalled":
            _stall(sock)
        if fault == "cut":
            if number % 2:  # Lingering for no time turns the close into a reset.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            raise _Hangup

    def _draw(self, request: _Request) -> tuple[str, float, int]:
        """Return the fault that a request meets ("" for none), which part of the body is sent before it, and the how manieth of its kind it is."""
        with self._lock:
            if not self.is_misbehaving or not request.is_read:
                return "", 1.0, 0
            self.counts["reads"] += 1
            dice, part = self._random.random(), self._random.random()
            for fault in ("cut", "throttled", "stalled"):
                dice -= float(getattr(self._faults, fault))
                if dice < 0:
                    self.counts[fault] += 1
                    return fault, part, self.counts[fault]
            return "", 1.0, 0

    def _list(self, request: _Request) -> bytes:
        asked = dict(parse_qsl(request.query, keep_blank_values=True))
        prefix, delimiter = asked.get("prefix", ""), asked.get("delimiter", "")
        found, folders = [], set()
        for key, stored in self._objects.items():
            if not key.startswith(prefix):
                continue
            head, separator, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            if separator:
                folders.add(prefix + head + separator)
            else:
                found.append(
                    f"<Contents><Key>{escape(key)}</Key><Size>{stored.size_bytes}</Size><ETag>{escape(stored.etag)}</ETag></Contents>"
                )
        found += [f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>" for folder in sorted(folders)]
        return f"<ListBucketResult><Name>{BUCKET}</Name><IsTruncated>false</IsTruncated>{''.join(found)}</ListBucketResult>".encode()

    # -- keys and tokens

    def _generation(self) -> int:
        return int((time.monotonic() - self._started) / self._token_s)

    def _keys_of(self, generation: int) -> tuple[str, str, str]:
        def derive(purpose: str) -> str:
            return hmac.new(self._secret, f"{purpose} {generation}".encode(), hashlib.sha256).hexdigest()

        return f"ASIA{generation:016d}", derive("secret")[:40], f"{generation}.{derive('token')}"

    def _hand_out(self) -> dict[str, str]:
        self._count("tokens")
        access_key, secret_key, token = self._keys_of(self._generation())
        ends = datetime.now(UTC) + timedelta(seconds=CLAIMED_LIFE_S)
        return {
            "AccessKeyId": access_key,
            "SecretAccessKey": secret_key,
            "Token": token,
            "Expiration": f"{ends:%Y-%m-%dT%H:%M:%SZ}",
        }

    def _refuse_keys(self, request: _Request) -> tuple[int, str, str] | None:
        """Return status, code and message for a request whose keys, token or signature are not good; None for one that is."""
        authorization = request.headers.get("authorization", "")
        match = re.fullmatch(
            r"AWS4-HMAC-SHA256 Credential=ASIA(\d{16})/([^,]+), ?SignedHeaders=([^,]+), ?Signature=([0-9a-f]{64})",
            authorization,
        )
        if match is None:
            return 403, "AccessDenied", "Access Denied."
        generation, now = int(match[1]), self._generation()
        _, secret_key, token = self._keys_of(generation)
        if request.headers.get("x-amz-security-token") != token or generation > now:
            return 403, "InvalidToken", "The provided token is malformed or otherwise invalid."
        if not hmac.compare_digest(_sign(request, secret_key, match[2], match[3].split(";")), match[4]):
            return 403, "SignatureDoesNotMatch", "The request signature does not match."
        if generation < now and self.is_misbehaving:
            return 400, "ExpiredToken", "The provided token has expired."
        return None


def _sign(request: _Request, secret_key: str, scope: str, signed: list[str]) -> str:
    """Return the signature that the request ought to have (Amazon S3 API Reference, "Signature Calculations for the Authorization Header")."""
    query = sorted((quote(name, safe="-_.~"), quote(value, safe="-_.~")) for name, value in _pairs(request.query))
    canonical = [
        request.method,
        quote(unquote(request.path), safe="/-_.~"),
        "&".join(f"{name}={value}" for name, value in query),
        *(f"{name}:{' '.join(request.headers.get(name, '').split())}" for name in signed),
        "",
        ";".join(signed),
        request.headers.get("x-amz-content-sha256", ""),
    ]
    digest = hashlib.sha256("\n".join(canonical).encode()).hexdigest()
    text = "\n".join(["AWS4-HMAC-SHA256", request.headers.get("x-amz-date", ""), scope, digest])
    key = f"AWS4{secret_key}".encode()
    for part in scope.split("/"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _pairs(query: str) -> list[tuple[str, str]]:
    return parse_qsl(query, keep_blank_values=True)


def _read_request(reader: Any) -> _Request | None:
    """Return the next request without its body, which none has; None at the end of the connection."""
    lines: list[str] = []
    while line := reader.readline(_LONGEST_HEAD):
        text = line.decode("latin-1").rstrip("\r\n")
        if text:
            lines.append(text)
        elif lines:
            method, target, _ = lines[0].split(" ")
            path, _, query = target.partition("?")
            pairs = (line.partition(":") for line in lines[1:])
            return _Request(method, path, query, {name.lower(): value.strip() for name, _, value in pairs})
    return None


def _range_of(text: str | None, size_bytes: int) -> tuple[int, int, int]:
    """Return start and stop of what is asked for, and the status that says so."""
    if text is None:
        return 0, size_bytes, 200
    first, _, last = text.removeprefix("bytes=").partition("-")
    return int(first), min(int(last) + 1 if last else size_bytes, size_bytes), 206


def _send_head(sock: socket.socket, status: int, headers: dict[str, str]) -> None:
    lines = [
        f"HTTP/1.1 {status} {_REASONS[status]}",
        *(f"{name}: {value}" for name, value in headers.items()),
        "",
        "",
    ]
    sock.sendall("\r\n".join(lines).encode("latin-1"))


def _send(sock: socket.socket, status: int, headers: dict[str, str], body: bytes) -> None:
    _send_head(sock, status, {**headers, "Content-Length": str(len(body))})
    sock.sendall(body)


def _refuse(sock: socket.socket, request: _Request, status: int, code: str, message: str, **headers: str) -> None:
    body = f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{code}</Code><Message>{message}</Message></Error>"
    about = {"Content-Type": "application/xml", **headers}
    if request.method == "HEAD":
        _send_head(sock, status, {**about, "Content-Length": str(len(body))})
    else:
        _send(sock, status, about, body.encode())


def _stall(sock: socket.socket) -> None:
    """Send nothing, until the client has closed the connection."""
    sock.settimeout(_LONGEST_STALL_S)
    with contextlib.suppress(OSError):
        sock.recv(1)  # Between two answers a client has nothing to say: this is its end.
    raise _Hangup


def main() -> None:
    """Serve until the standard input ends; answer each of its lines with one line of JSON."""
    options = json.loads(sys.argv[1])
    server = _Server(Path(options["folder"]), Faults(**options["faults"]), options["token_s"])
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    threading.Thread(target=server.accept, args=(listener,), daemon=True).start()
    for line in sys.stdin:
        if line.strip() in ("on", "off"):
            server.is_misbehaving = line.strip() == "on"
        account = {**server.counts, "open": server.num_open, "port": listener.getsockname()[1]}
        print(json.dumps(account), flush=True)
    os._exit(0)  # Its threads wait for clients.


if __name__ == "__main__":
    main()
