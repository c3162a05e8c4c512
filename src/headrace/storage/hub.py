"""Files of a model repository on the Hugging Face hub, at one commit. Listed through huggingface_hub; weights are read by ranges and never written to a disk.

The hub redirects a read of a large file to a signed address of another host, and says in that answer which content it is. That is compared with the
listing; the address is used for the ranges that follow, without the hub's token, until it ends or is refused.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from headrace.errors import AccessDenied, ObjectChanged, ObjectNotFound, StorageError
from headrace.settings import TransportSettings
from headrace.storage.address import REDIRECTS, Address, encode_key, parse_address
from headrace.storage.answers import Level, check_answer, decode_body
from headrace.storage.credentials import CredentialSource
from headrace.storage.hub_access import HubAccess, HubTree
from headrace.storage.hub_credentials import describe_hub_login
from headrace.storage.hub_refusal import is_from_hub
from headrace.storage.links import LinkBook
from headrace.storage.refusal import Place
from headrace.storage.rooted import RootedStore
from headrace.storage.store import HttpRange, Listing, ObjectStore, Refusal, StoredObject, Verdict
from headrace.storage.uri import Uri, check_key
from headrace.storage.web import USER_AGENT, WebClient, WebRequest
from headrace.storage.web_connections import Headers

_PLAIN_HEADERS: Headers = (("Accept-Encoding", "identity"), ("User-Agent", USER_AGENT))
_SHA256_DIGITS = 64
MOST_COMMITS = 200
"""How many commits are looked at for a snapshot: each costs a request."""
_REFRESH_PAUSE_S = 1.0  # All readers meet a token that has ended at the same moment; one new one serves them all.


class HubStore(RootedStore):
    """The files below ``uri``'s folder in one commit. Every method may be called from any thread, and in a forked child."""

    def __init__(
        self,
        uri: Uri,
        access: HubAccess,
        tree: HubTree,
        *,
        transport: TransportSettings,
        selected_key: str | None = None,
        ca_file: str | None = None,
        verify_tls: bool = True,
    ) -> None:
        """Open no connection. Raises `InvalidSetting` for a CA file that cannot be used, `AccessDenied` for a login that cannot be."""
        super().__init__(uri, selected_key)
        self._access = access
        self._prefix = f"{uri.key}/" if uri.key else ""
        self._files = {
            stored.key.removeprefix(self._prefix): replace(stored, key=stored.key.removeprefix(self._prefix))
            for stored in tree.files
            if stored.key.startswith(self._prefix)
        }
        self._root_is_file = any(stored.key == uri.key for stored in tree.files)
        self._transport = transport
        self._ca_file = ca_file
        self._verify_tls = verify_tls
        self._resolve = parse_address(f"{access.endpoint}/{access.repository.name}/resolve/{tree.commit}")
        self._links = LinkBook(secure=self._resolve.scheme == "https", clock=access.clock)
        self._client = WebClient(transport, ca_file=ca_file, verify_tls=verify_tls)
        self._lock = threading.Lock()
        self._authorization = access.authorization()
        self._refreshed_at = float("-inf")
        self._refresh_helped = False

    @property
    def endpoint(self) -> str:
        """Where the hub is (``HF_ENDPOINT``)."""
        return self._access.endpoint

    def list_level(self, folder: str = "") -> Listing:
        """List one level under ``folder``, from the listing of the commit. Raises `ObjectNotFound` where the root is a file, or nothing."""
        if not self._files:
            raise self._explain_root()
        prefix = f"{check_key(folder)}/" if folder else ""
        level = Level(prefix)
        for key, stored in self._files.items():
            level.add(key, stored.size_bytes, stored.version)
        return level.listing(folder)

    def open_past(self) -> Iterator[ObjectStore]:
        """Yield the store at this commit and at those before it, at most `MOST_COMMITS`; each is a store of its own, and the caller's to close."""
        for commit in self._access.fetch_commits()[:MOST_COMMITS]:
            access = replace(self._access, repository=replace(self._access.repository, revision=commit))
            yield HubStore(
                self._uri,
                access,
                access.fetch_tree(),
                transport=self._transport,
                selected_key=self._selected_key,
                ca_file=self._ca_file,
                verify_tls=self._verify_tls,
            )

    def stat(self, key: str) -> StoredObject:
        """Return size and version of one file. Raises `ObjectNotFound`."""
        stored = self._files.get(check_key(key))
        if stored is None:
            raise ObjectNotFound(
                f"{self.uri_of(key)} does not exist.",
                f"{self._access.page} has no such file in this revision.",
                "Check the name; upper and lower case differ.",
            )
        return stored

    def read_object(self, stored: StoredObject, *, start: int = 0, stop: int | None = None) -> bytes:
        """Read a small file, or a piece of it. A whole file is checked against the hash that the hub lists. Raises `ObjectChanged` where it differs."""
        address = self._address_of(stored.key)
        stop = stored.size_bytes if stop is None else stop
        if stop <= start:
            return b""
        is_whole = stop - start == stored.size_bytes
        asked: Headers = () if is_whole else (("Range", f"bytes={start}-{stop - 1}"),)
        request = WebRequest(
            address=address,
            uri=self.uri_of(stored.key),
            headers=(*asked, *_PLAIN_HEADERS),
            secrets=self._secrets,
            accepts=frozenset({200 if is_whole else 206}),
            most_bytes=stop - start + 1,
        )
        reply = self._client.ask(request, partial(self._judge, stored))
        place = self._place(stored)
        check_answer("", len(reply.body), stored, stop - start, place)
        content = decode_body(reply.body, reply.headers.get("content-encoding", ""), stored, place)
        if is_whole and not _has_hash(content, stored.version):
            raise _another_content(place)
        return content

    def describe_range(self, stored: StoredObject, start: int, stop: int) -> HttpRange:
        """Describe one ranged read: at the signed address that the hub gave for this file, or of the hub, where there is none or it has ended."""
        own = self._address_of(stored.key)
        address = self._links.find(stored.key) or own
        secrets = self._secrets() if address.origin == own.origin else ()
        return HttpRange(
            scheme=address.scheme,
            host=address.host,
            port=address.port,
            target=address.target,
            headers=(("Range", f"bytes={start}-{stop - 1}"), *_PLAIN_HEADERS, *secrets),
            start=start,
            stop=stop,
            etag=None,  # The other host's ETag is its own; the content was compared at the redirect.
            ca_file=self._ca_file if address.scheme == "https" else None,
            verify_tls=self._verify_tls,
        )

    def judge(self, stored: StoredObject, refusal: Refusal) -> Verdict:
        """Say what a refused ranged read means; remember where a redirect leads, forget an address that refuses, and fetch a new token for an old one.

        Raises `ObjectChanged` where a redirect leads to another content than the listing names.
        """
        location = refusal.headers.get("location")
        if refusal.status in REDIRECTS and location is not None:
            self._check_linked(stored, refusal)
            self._links.learn(stored.key, location)
            return self._access.judge(refusal, self._place(stored))
        if not is_from_hub(refusal) and refusal.status in (401, 403, 404, 410) and self._links.forget(stored.key):
            return replace(self._access.judge(refusal, self._place(stored)), retry=True)
        return self._judge(stored, refusal)

    def describe_credentials(self, environment: Mapping[str, str]) -> CredentialSource:
        """Return where the login that is shown comes from; ``environment`` tells which variable. It is not shown where the hub redirects to."""
        return describe_hub_login(self._authorization, environment)

    def close(self) -> None:
        """Close the connections that small reads hold open. May be called twice."""
        self._client.close()

    def _judge(self, stored: StoredObject, refusal: Refusal) -> Verdict:
        verdict = self._access.judge(refusal, self._place(stored))
        if refusal.status == 401 and self._refresh():
            return replace(verdict, retry=True, wait_s=0.0, refresh_credentials=True)
        return verdict

    def _check_linked(self, stored: StoredObject, refusal: Refusal) -> None:
        """Compare what the hub says of the content that it redirects to: its hash and its size (``X-Linked-ETag``, ``X-Linked-Size``)."""
        etag = refusal.headers.get("x-linked-etag", "").removeprefix("W/").strip('"')
        size = refusal.headers.get("x-linked-size", "").strip()
        if (etag and etag != stored.version) or (size and size != str(stored.size_bytes)):
            raise _another_content(self._place(stored))

    def _refresh(self) -> bool:
        """Ask for the login anew; say whether there is another one now."""
        with self._lock:
            now = self._access.clock()
            if abs(now - self._refreshed_at) < _REFRESH_PAUSE_S:
                return self._refresh_helped
            old = self._authorization
            try:
                self._authorization = self._access.authorization()
            except AccessDenied:
                self._authorization = old
            self._refresh_helped = self._authorization != old
            self._refreshed_at = now
            return self._refresh_helped

    def _secrets(self) -> Headers:
        authorization = self._authorization
        return () if authorization is None else (("Authorization", authorization),)

    def _address_of(self, key: str) -> Address:
        return replace(self._resolve, target=f"{self._resolve.target}/{encode_key(self._prefix + check_key(key))}")

    def _place(self, stored: StoredObject) -> Place:
        return Place(self.uri_of(stored.key), self.endpoint, stored.version)

    def _explain_root(self) -> StorageError:
        if self._root_is_file:
            return ObjectNotFound(
                f"{self._uri} is a file, not a folder.",
                "Only names that end in .safetensors or .safetensors.index.json are taken as single files.",
                f"Give the folder that holds it: {self._uri.parent}.",
            )
        return ObjectNotFound(
            f"{self._uri} does not exist.",
            f"{self._access.page} has no such folder in this revision.",
            "Check the folder after the repository's name.",
        )


def _has_hash(content: bytes, version: str) -> bool:
    """Say whether ``content`` is what the hub lists as ``version``: the SHA-256 of a large file, or the id of a git blob."""
    if len(version) == _SHA256_DIGITS:
        return hashlib.sha256(content).hexdigest() == version
    blob = hashlib.sha1(b"blob %d\0" % len(content), usedforsecurity=False)
    blob.update(content)
    return blob.hexdigest() == version


def _another_content(place: Place) -> ObjectChanged:
    return ObjectChanged(
        f"{place.uri} is not the version that was opened.",
        f"{place.endpoint} gives another content than the one that it lists ({place.version}).",
        "Open the checkpoint again; a mirror of the hub (HF_ENDPOINT) may be out of step.",
    )
