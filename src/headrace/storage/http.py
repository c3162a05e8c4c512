"""Files below a folder of a web server that serves byte ranges. HTTP has no listing, so what is there is found by the names that models' files have.

Every file is asked for its first byte: the answer gives size and version, says whether the server honours ranges, and goes through where HEAD is refused
(signed addresses are good for one method). Pages that list a folder are not read, since every server writes them its own way.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from headrace.errors import InvalidSetting, ObjectNotFound
from headrace.settings import TransportSettings
from headrace.storage.address import REDIRECTS
from headrace.storage.answers import check_answer, decode_body
from headrace.storage.credentials import CredentialSource
from headrace.storage.http_answers import (
    FIRST_BYTE,
    FIRST_BYTE_ANSWERS,
    conditions,
    date_of,
    etag_of,
    no_ranges,
    starts_at,
    stored_of,
    version_like,
)
from headrace.storage.http_refusal import HTTP
from headrace.storage.http_root import HttpRoot
from headrace.storage.http_search import Found, NameSearch
from headrace.storage.links import LinkBook, end_of_address
from headrace.storage.model_files import INDEX, SIDE_FILES, SINGLE, is_index, is_weights
from headrace.storage.refusal import Place, judge_complaint, read_complaint
from headrace.storage.rooted import RootedStore
from headrace.storage.store import HttpRange, Listing, Refusal, StoredObject, Verdict
from headrace.storage.uri import Uri, check_key
from headrace.storage.web import USER_AGENT, WebClient, WebRequest
from headrace.storage.web_connections import Headers

_LOG = logging.getLogger("headrace")

_MOST_UNSTATED_BYTES = 64_000_000
_HUB_HOSTS = ("huggingface.co", "hf.co")
_TOKEN = re.compile(r"[\x21-\x7e]+")
_PLAIN_HEADERS: Headers = (("Accept-Encoding", "identity"), ("User-Agent", USER_AGENT))


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """How web servers are asked."""

    token: str | None = field(default=None, repr=False)
    """Sent as ``Authorization: Bearer`` to the server that the uri names, and to no other."""
    ca_file: str | None = None
    """Certificates to trust, in PEM form; None means ``SSL_CERT_FILE`` or the system's."""
    verify_tls: bool = True
    """Check the server's certificate."""

    def __post_init__(self) -> None:
        if self.token is not None and not _TOKEN.fullmatch(self.token):
            raise InvalidSetting(
                "http_token (HEADRACE_HTTP_TOKEN) holds a character that no token has.",
                "A blank or a line end at its end is the common cause.",
                "Give the token alone.",
            )


class HttpStore(RootedStore):
    """The files below ``uri``. Every method may be called from any thread, and in a forked child.

    A query in the uri goes with every request, and appears in no message: it may be a signature.
    """

    def __init__(
        self,
        uri: Uri,
        *,
        transport: TransportSettings,
        options: HttpOptions | None = None,
        selected_key: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open no connection yet. Raises `InvalidSetting` for a token or a CA file that cannot be used."""
        super().__init__(uri, selected_key)
        self._options = options or HttpOptions()
        self._clock = clock
        self._root = HttpRoot.of(uri, selected_key)
        self._links = LinkBook(secure=uri.scheme == "https", clock=clock)
        self._client = WebClient(transport, ca_file=self._options.ca_file, verify_tls=self._options.verify_tls)
        self._search = NameSearch(self.stat, self.read_object, num_threads=transport.num_connections)
        self._indexed: tuple[str, ...] | None = None
        self._warned = threading.Event()

    @property
    def endpoint(self) -> str:
        """Where requests go: ``https://host``."""
        return self._root.endpoint

    def list_level(self, folder: str = "") -> Listing:
        """Return what is found under ``folder`` by its name.

        At the root: the weights (those that ``model.safetensors.index.json`` names, or ``model.safetensors``, or the file that the uri named), side files
        under their usual names, and the model's own code where its configuration names it. In a sub-folder: the weights there that the index names.

        Raises `ObjectNotFound` where nothing is found, `AccessDenied` where weights are refused.
        """
        if folder:
            return self._list_indexed(f"{check_key(folder)}/")
        named = (INDEX, SINGLE) if self._selected_key is None else (self._selected_key,)
        found = self._search.find((*named, *SIDE_FILES))
        if not found.objects:
            raise found.refusal or self._nothing(found)
        objects = found.objects
        index = next((key for key in named if is_index(key) and key in objects), None)
        self._indexed = ()
        if index is not None:
            self._indexed = self._search.read_index(objects[index])
            objects.pop(SINGLE, None)  # Looked for in case that there is no index.
            objects |= self._find_weights([key for key in self._indexed if "/" not in key])
        objects |= self._search.find_code(objects)
        return _listing(objects)

    def stat(self, key: str) -> StoredObject:
        """Return size and version of one file. Raises `ObjectNotFound`, and `WrongRange` for weights on a server that does not serve ranges."""
        request = self._request(check_key(key), FIRST_BYTE, most_bytes=1)
        reply = self._client.ask(replace(request, accepts=FIRST_BYTE_ANSWERS), partial(self._judge, key, None))
        if reply.status == 200 and "content-length" not in reply.headers and not is_weights(key):
            # Made as it is sent. A small file may be: how long it is shows at its end.
            whole = self._client.ask(
                self._request(key, (), most_bytes=_MOST_UNSTATED_BYTES), partial(self._judge, key, None)
            )
            reply = replace(whole, headers={**whole.headers, "content-length": str(len(whole.body))})
        stored = stored_of(key, reply, self._place(key))
        if not stored.version and not self._warned.is_set():
            self._warned.set()
            _LOG.warning(
                "%s gives neither ETag nor Last-Modified: a file that is replaced is noticed only where its size differs.",
                self.endpoint,
            )
        return stored

    def read_object(self, stored: StoredObject, *, start: int = 0, stop: int | None = None) -> bytes:
        """Read a small file, or a piece of it, at its pinned version. Raises `ObjectChanged` where that is gone.

        A file that is sent gzip-encoded is decoded when it is read as a whole; a piece of one is refused.
        """
        check_key(stored.key)
        stop = stored.size_bytes if stop is None else stop
        if stop <= start:
            return b""
        is_whole = stop - start == stored.size_bytes
        asked: Headers = () if is_whole else (("Range", f"bytes={start}-{stop - 1}"),)
        # One byte more than there should be: a file that has grown is to be noticed.
        request = self._request(stored.key, (*asked, *conditions(stored)), most_bytes=stop - start + 1)
        reply = self._client.ask(request, partial(self._judge, stored.key, stored.version))
        place = self._place(stored.key, stored.version)
        if not is_whole and not starts_at(reply, start):
            raise no_ranges(place)
        check_answer(version_like(stored.version, reply), len(reply.body), stored, stop - start, place)
        return decode_body(reply.body, reply.headers.get("content-encoding", ""), stored, place)

    def describe_range(self, stored: StoredObject, start: int, stop: int) -> HttpRange:
        """Describe one ranged read: at the address that the server redirected to before, for as long as that is good."""
        own = self._root.address_of(check_key(stored.key))
        address = self._links.find(stored.key) or own
        secrets = self._secrets() if address.origin == own.origin else ()
        return HttpRange(
            scheme=address.scheme,
            host=address.host,
            port=address.port,
            target=address.target,
            headers=(("Range", f"bytes={start}-{stop - 1}"), *_PLAIN_HEADERS, *conditions(stored), *secrets),
            start=start,
            stop=stop,
            etag=etag_of(stored),
            version_header=date_of(stored),
            ca_file=self._options.ca_file if address.scheme == "https" else None,
            verify_tls=self._options.verify_tls,
        )

    def judge(self, stored: StoredObject, refusal: Refusal) -> Verdict:
        """Say what a refused ranged read means; remember where a redirect leads, and forget an address that refuses."""
        location = refusal.headers.get("location")
        if refusal.status in REDIRECTS and location is not None:
            self._links.learn(stored.key, location)
        verdict = self._judge(stored.key, stored.version, refusal)
        if refusal.status in (401, 403, 404, 410) and self._links.forget(stored.key):
            return replace(verdict, retry=True)
        return verdict

    def describe_credentials(self, environment: Mapping[str, str]) -> CredentialSource:
        """Return what is shown: a token, or the address itself where it is a signed one."""
        end = end_of_address(self._root.address_of(self._selected_key or ""))
        if end is not None:
            return CredentialSource(kind="signed address", source="the query of the uri", expires_s=end)
        if self._options.token is not None:
            return CredentialSource(kind="token", source="HEADRACE_HTTP_TOKEN, or http_token in the settings")
        if self._root.query:
            return CredentialSource(kind="query", source="the uri and goes with every request")
        return CredentialSource(kind="", source="HEADRACE_HTTP_TOKEN is not set")

    def close(self) -> None:
        """Close the connections that small reads hold open. May be called twice."""
        self._client.close()

    def _list_indexed(self, prefix: str) -> Listing:
        """Return the weights directly below ``prefix`` that the index names."""
        if self._indexed is None:
            selected = self._selected_key
            self._indexed = self._search.find_indexed(selected if selected and is_index(selected) else INDEX)
        keys = [key for key in self._indexed if key.startswith(prefix) and "/" not in key.removeprefix(prefix)]
        return _listing(self._find_weights(keys))

    def _find_weights(self, keys: list[str]) -> dict[str, StoredObject]:
        """Return those files of the index that are there; which are not is for the index's reader to say."""
        found = self._search.find(keys)
        if found.refusal is not None:
            raise found.refusal
        return found.objects

    def _nothing(self, found: Found) -> ObjectNotFound:
        error = found.errors.get(self._selected_key or "")
        if isinstance(error, ObjectNotFound):
            return error
        if self._root.base.host in _HUB_HOSTS:
            where = f"For a repository of the hub write hf://{'/'.join(self._uri.key.split('/')[:2])}."
            return ObjectNotFound(f"There is no model at {self._uri}.", "This is the page of a repository.", where)
        return ObjectNotFound(
            f"There is no model at {self._uri}.",
            f"HTTP has no listing, and neither {INDEX} nor {SINGLE} nor {SIDE_FILES[0]} is there ({self.endpoint}).",
            f"Check the address, or name the file or the index itself: {self.uri_of('name.safetensors')}.",
        )

    def _request(self, key: str, headers: Headers, *, most_bytes: int) -> WebRequest:
        return WebRequest(
            address=self._root.address_of(key),
            uri=self.uri_of(key),
            headers=(*headers, *_PLAIN_HEADERS),
            secrets=self._secrets,
            most_bytes=most_bytes,
        )

    def _secrets(self) -> Headers:
        return () if self._options.token is None else (("Authorization", f"Bearer {self._options.token}"),)

    def _judge(self, key: str, version: str | None, refusal: Refusal) -> Verdict:
        return judge_complaint(read_complaint(refusal), self._place(key, version), now=self._clock(), dialect=HTTP)

    def _place(self, key: str, version: str | None = None) -> Place:
        return Place(self.uri_of(key), self.endpoint, version)


def _listing(objects: dict[str, StoredObject]) -> Listing:
    return Listing(tuple(objects[key] for key in sorted(objects)), ())
