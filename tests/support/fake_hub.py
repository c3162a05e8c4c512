"""A Hugging Face hub on 127.0.0.1, as far as it is asked: the API for revisions and trees, resolving of files, and a second server as its CDN.

    with FakeHub() as hub:
        commit = hub.publish("org/name", {"config.json": b"{}", "model.safetensors": payload})
        ...
        assert [sent.status for sent in hub.cdn.log] == [206, 206]

Small files come from the hub itself, behind a redirect to itself; large ones (safetensors, tokenizer.json) from signed addresses of the CDN, which end after
``lifetime_s`` or when `FakeHub.expire_links` is called, and whose ETags are not the hub's. Everything that was asked is in the two logs.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

import huggingface_hub
import pytest
from huggingface_hub import constants

_LARGE = (".safetensors", "tokenizer.json")
_API = re.compile(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree|commits)/([^/?]+))?")
_RESOLVE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_RESOLVE_CACHE = re.compile(r"/api/resolve-cache/models/([^/]+/[^/]+)/([^/]+)/(.+)")


@dataclass(slots=True)
class Sent:
    """One request and what was sent in answer to it; ``start`` and ``stop`` are the range that was asked for."""

    method: str
    path: str
    headers: dict[str, str]
    """The request's, with lower-case names."""
    start: int | None = None
    stop: int | None = None
    status: int = 0
    bytes_sent: int = 0


@dataclass
class Repository:
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    references: dict[str, str] = field(default_factory=dict)
    histories: dict[str, list[str]] = field(default_factory=dict)
    """Commits of each branch, the oldest first."""
    is_private: bool = False
    is_gated: bool = False


class _Server:
    """An HTTP server whose ``answer`` is called for each request, in the thread of its connection."""

    def __init__(self, answer: Any) -> None:
        self.log: list[Sent] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 30

            def do_GET(self) -> None:
                headers = {name.lower(): value for name, value in self.headers.items()}
                sent = Sent(self.command, self.path, headers)
                match = re.fullmatch(r"bytes=(\d+)-(\d+)", headers.get("range", ""))
                if match:
                    sent.start, sent.stop = int(match[1]), int(match[2]) + 1
                server.log.append(sent)
                status, about, body = answer(sent)
                sent.status, sent.bytes_sent = status, len(body)
                self.send_response_only(status)
                for name, value in {**about, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    with contextlib.suppress(OSError):
                        self.wfile.write(body)

            do_HEAD = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class FakeHub:
    """The hub; a context manager. ``tokens`` are those that private and gated repositories accept."""

    def __init__(self, *, lifetime_s: int = 3600, tokens: tuple[str, ...] = ()) -> None:
        self.lifetime_s = lifetime_s
        self.tokens = set(tokens)
        self.known_tokens = set(tokens)
        """Tokens of users, who may see less than everything."""
        self.repositories: dict[str, Repository] = {}
        self.linked_etag: str | None = None
        """What the hub says of the content that it redirects to, in place of the truth."""
        self.spoiled: dict[str, bytes] = {}
        """What is sent for a path of a small file, in place of the truth."""
        self.lists_sizes = True
        """Whether the API's answer for a revision has sizes; some mirrors' has not."""
        self.troubles: deque[tuple[int, Mapping[str, str]]] = deque()
        """Answers to the next requests of the API, in place of the true ones."""
        self.before_cdn: Callable[[int], None] = lambda number: None
        """Called before the CDN answers, with the number of the request, from 1."""
        self._key = secrets.token_bytes(16)
        self.hub = _Server(self._answer_hub)
        self.cdn = _Server(self._answer_cdn)

    @property
    def url(self) -> str:
        return self.hub.url

    def __enter__(self) -> FakeHub:
        self.hub.start()
        self.cdn.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.hub.stop()
        self.cdn.stop()

    # -- what a test says

    def publish(
        self,
        name: str,
        files: Mapping[str, bytes],
        *,
        branch: str = "main",
        is_private: bool = False,
        is_gated: bool = False,
    ) -> str:
        """Make a commit of exactly these files, point ``branch`` to it and return its id."""
        repository = self.repositories.setdefault(name, Repository())
        repository.is_private, repository.is_gated = is_private, is_gated
        content = json.dumps([(path, hashlib.sha256(body).hexdigest()) for path, body in sorted(files.items())])
        commit = hashlib.sha1(content.encode()).hexdigest()
        repository.commits[commit] = dict(files)
        repository.references[branch] = commit
        repository.histories.setdefault(branch, []).append(commit)
        return commit

    def expire_links(self) -> None:
        """Refuse all signed addresses that were given so far, as if their time were over."""
        self._key = secrets.token_bytes(16)

    def weight_bytes(self) -> int:
        """Return how many bytes the CDN has sent."""
        return sum(sent.bytes_sent for sent in self.cdn.log if sent.status == 206)

    # -- the hub

    def _answer_hub(self, sent: Sent) -> tuple[int, dict[str, str], bytes]:
        path, query = urlsplit(sent.path).path, parse_qs(urlsplit(sent.path).query)
        if match := _RESOLVE_CACHE.fullmatch(path):
            return self._send_small(sent, match[1], match[2], unquote(match[3]))
        if match := _API.fullmatch(path):
            if self.troubles:
                status, headers = self.troubles.popleft()
                return status, dict(headers), b"{}"
            return self._answer_api(sent, match[1], match[2], unquote(match[3] or "main"), query)
        if match := _RESOLVE.fullmatch(path):
            return self._resolve(sent, match[1], unquote(match[2]), unquote(match[3]))
        return 404, {}, b"not found"

    def _check_access(self, sent: Sent, name: str, *, to_files: bool) -> tuple[int, dict[str, str], bytes] | None:
        token = sent.headers.get("authorization", "").removeprefix("Bearer ")
        repository = self.repositories.get(name)
        if token and token not in self.known_tokens:
            return _error(401, "", "Invalid credentials in Authorization header")
        if repository is None or (repository.is_private and token not in self.tokens):
            return _error(404 if token else 401, "RepoNotFound", "Repository not found")
        if repository.is_gated and to_files and token not in self.tokens:
            why = f"Access to model {name} is restricted. You must have access to it and be authenticated to access it."
            return _error(403 if token else 401, "GatedRepo", why)
        return None

    def _find(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        repository = self.repositories[name]
        commit = repository.references.get(revision, revision)
        files = repository.commits.get(commit)
        return None if files is None else (commit, files)

    def _ancestors(self, name: str, revision: str) -> list[str]:
        """Return the commits up to ``revision``, the newest first."""
        for branch, commits in self.repositories[name].histories.items():
            if branch == revision:
                return commits[::-1]
            if revision in commits:
                return commits[commits.index(revision) :: -1]
        return []

    def _answer_api(
        self, sent: Sent, name: str, kind: str | None, revision: str, query: dict[str, list[str]]
    ) -> tuple[int, dict[str, str], bytes]:
        refused = self._check_access(sent, name, to_files=False)
        if refused is not None:
            return refused
        found = self._find(name, revision)
        if found is None:
            return _error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        commit, files = found
        if kind == "tree":
            return _json([_tree_entry(path, body) for path, body in sorted(files.items())])
        if kind == "commits":
            return _json([_commit_entry(id) for id in self._ancestors(name, revision)])
        with_sizes = self.lists_sizes and query.get("blobs", ["false"])[0].lower() == "true"
        siblings = [_sibling(path, body, with_sizes) for path, body in sorted(files.items())]
        about = {"_id": "1", "id": name, "modelId": name, "sha": commit, "tags": [], "siblings": siblings}
        return _json(
            {**about, "private": self.repositories[name].is_private, "gated": self.repositories[name].is_gated}
        )

    def _resolve(self, sent: Sent, name: str, revision: str, path: str) -> tuple[int, dict[str, str], bytes]:
        refused = self._check_access(sent, name, to_files=True)
        if refused is not None:
            return refused
        found = self._find(name, revision)
        if found is None:
            return _error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        commit, files = found
        if path not in files:
            return _error(404, "EntryNotFound", "Entry not found")
        if not path.endswith(_LARGE):
            where = f"/api/resolve-cache/models/{name}/{commit}/{quote(path)}?etag=%22{_blob_id(files[path])}%22"
            return 307, {"Location": where, "X-Repo-Commit": commit}, b"Temporary Redirect. Redirecting"
        digest = hashlib.sha256(files[path]).hexdigest()
        linked = {
            "X-Linked-ETag": f'"{self.linked_etag or digest}"',
            "X-Linked-Size": str(len(files[path])),
            "X-Xet-Hash": hashlib.sha256(digest.encode()).hexdigest(),
            "X-Repo-Commit": commit,
        }
        return 302, {**linked, "Location": self._sign(f"/xet-bridge-us/{digest}")}, b"Found. Redirecting"

    def _send_small(self, sent: Sent, name: str, commit: str, path: str) -> tuple[int, dict[str, str], bytes]:
        body = self.repositories[name].commits[commit][path]
        about = {"ETag": f'"{_blob_id(body)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        return _ranged(sent, about, self.spoiled.get(path, body))

    # -- the CDN

    def _sign(self, path: str) -> str:
        date = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        text = f"{path}:{date}:{self.lifetime_s}"
        signature = hmac.new(self._key, text.encode(), hashlib.sha256).hexdigest()
        query = f"X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Date={date}&X-Amz-Expires={self.lifetime_s}&X-Amz-SignedHeaders=host"
        return f"{self.cdn.url}{path}?{query}&X-Amz-Signature={signature}&x-id=GetObject"

    def _answer_cdn(self, sent: Sent) -> tuple[int, dict[str, str], bytes]:
        self.before_cdn(len(self.cdn.log))
        path, query = urlsplit(sent.path).path, parse_qs(urlsplit(sent.path).query)
        date, lifetime, signature = (query[f"X-Amz-{name}"][0] for name in ("Date", "Expires", "Signature"))
        expected = hmac.new(self._key, f"{path}:{date}:{lifetime}".encode(), hashlib.sha256).hexdigest()
        if "authorization" in sent.headers:
            return (
                400,
                {},
                b"<Error><Code>InvalidArgument</Code><Message>Only one auth mechanism allowed</Message></Error>",
            )
        if signature != expected:
            return 403, {}, b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>"
        digest = path.rpartition("/")[2]
        body = next(body for body in self._bodies() if hashlib.sha256(body).hexdigest() == digest)
        return _ranged(sent, {"ETag": f'"cdn-{digest[:16]}"', "Accept-Ranges": "bytes"}, body)

    def _bodies(self) -> Iterator[bytes]:
        for repository in self.repositories.values():
            for files in repository.commits.values():
                yield from files.values()


def point_huggingface_hub(patch: pytest.MonkeyPatch, hub: FakeHub, home: Path) -> None:
    """Make huggingface_hub ask ``hub``, with an empty cache and without a login of this machine."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE"):
        patch.delenv(name, raising=False)
    patch.setattr(constants, "ENDPOINT", hub.url)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}")
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    patch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    patch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    patch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    patch.setattr(constants, "HF_STORED_TOKENS_PATH", str(home / "stored_tokens"))


@contextlib.contextmanager
def fake_hub(patch: pytest.MonkeyPatch, home: Path, **options: Any) -> Iterator[FakeHub]:
    """Run a hub that huggingface_hub asks for the length of a block."""
    with FakeHub(**options) as hub:
        point_huggingface_hub(patch, hub, home)
        try:
            yield hub
        finally:
            huggingface_hub.close_session()


def fill_cache(home: Path, name: str, commit: str, files: Mapping[str, bytes], *, branch: str | None = "main") -> Path:
    """Lay out a snapshot as huggingface_hub does, and return its folder."""
    folder = home / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    for path, body in files.items():
        blob = folder / "blobs" / hashlib.sha256(body).hexdigest()
        link = snapshot / path
        blob.parent.mkdir(parents=True, exist_ok=True)
        link.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(body)
        link.symlink_to(blob)
    if branch is not None:
        (folder / "refs").mkdir(parents=True, exist_ok=True)
        (folder / "refs" / branch).write_text(commit)
    return snapshot


def _blob_id(body: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()


def _large(path: str, body: bytes) -> dict[str, Any]:
    if not path.endswith(_LARGE):
        return {}
    return {"lfs": {"sha256": hashlib.sha256(body).hexdigest(), "size": len(body), "pointerSize": 134}}


def _sibling(path: str, body: bytes, with_sizes: bool) -> dict[str, Any]:
    if not with_sizes:
        return {"rfilename": path}
    return {"rfilename": path, "size": len(body), "blobId": _blob_id(body), **_large(path, body)}


def _commit_entry(commit: str) -> dict[str, Any]:
    return {"id": commit, "authors": [], "date": "2026-01-01T00:00:00.000Z", "title": "Upload", "message": ""}


def _tree_entry(path: str, body: bytes) -> dict[str, Any]:
    entry = {"type": "file", "oid": _blob_id(body), "size": len(body), "path": path}
    large = _large(path, body)
    return {**entry, "lfs": {**large["lfs"], "oid": large["lfs"]["sha256"]}} if large else entry


def _ranged(sent: Sent, about: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
    if sent.start is None or sent.stop is None:
        return 200, about, body
    stop = min(sent.stop, len(body))
    return 206, {**about, "Content-Range": f"bytes {sent.start}-{stop - 1}/{len(body)}"}, body[sent.start : stop]


def _json(value: Any) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()


def _error(status: int, code: str, message: str) -> tuple[int, dict[str, str], bytes]:
    about = {"X-Error-Message": message, "Content-Type": "application/json"}
    return status, {**about, **({"X-Error-Code": code} if code else {})}, json.dumps({"error": message}).encode()
