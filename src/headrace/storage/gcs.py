"""Objects in Google Cloud Storage. Lists and reads small pieces through Google's SDK; describes ranged reads of the JSON API, pinned to a generation."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar
from urllib.parse import quote

from headrace.errors import HeadraceError, ObjectChanged, ObjectNotFound, StorageError
from headrace.settings import TransportSettings
from headrace.storage.answers import Level, check_answer, decode_body
from headrace.storage.credentials import CredentialSource
from headrace.storage.gcs_access import GcsAccess, GcsOptions, connect_gcs
from headrace.storage.gcs_credentials import describe_google_credentials
from headrace.storage.gcs_errors import SDK_EXCEPTIONS, judge_sdk_error
from headrace.storage.gcs_past import LISTED_VERSIONS, changes_of
from headrace.storage.gcs_refusal import GCS, GCS_LISTING, read_gcs_complaint
from headrace.storage.past import MOST_CHANGES, past_states, too_many_versions
from headrace.storage.refusal import Dialect, Place, judge_complaint
from headrace.storage.rooted import RootedStore
from headrace.storage.store import HttpRange, Listing, ObjectStore, Refusal, StoredObject, Verdict
from headrace.storage.uri import Uri, check_key

_MOST_ATTEMPTS = 4
_MOST_RECOVERIES = 1  # New credentials, within one call of the SDK.
_REFRESH_PAUSE_S = 1.0  # All readers meet an expired token at the same moment; one refresh serves them all.
_LISTED = "kind,nextPageToken,prefixes,items(name,size,generation)"
_GENERATION = "x-goog-generation"

_Answer = TypeVar("_Answer")


class GcsStore(RootedStore):
    """The objects below ``uri``'s key in one bucket. Every method may be called from any thread, and in a forked child."""

    def __init__(
        self,
        uri: Uri,
        *,
        transport: TransportSettings,
        options: GcsOptions | None = None,
        selected_key: str | None = None,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """Ask nothing of the store yet, though the credential chain may ask the metadata service. Raises `InvalidSetting` or `AccessDenied`."""
        super().__init__(uri, selected_key)
        self._prefix = f"{uri.key}/" if uri.key else ""
        self._transport = transport
        self._timeout = (transport.connect_timeout_s, transport.idle_timeout_s)
        self._options = options or GcsOptions()
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._retired: list[GcsAccess] = []
        self._refreshed_at = float("-inf")
        self._refresh_helped = False
        self._access = connect_gcs(str(uri), self._options, transport)

    @property
    def endpoint(self) -> str:
        """Where requests go: ``https://storage.googleapis.com`` or ``http://127.0.0.1:4443``."""
        return self._access.endpoint

    def list_level(self, folder: str = "") -> Listing:
        """List one level under ``folder``. Raises `ObjectNotFound` without a bucket, and where the root is an object rather than a folder."""
        prefix = self._prefix + (f"{check_key(folder)}/" if folder else "")
        level = Level(prefix)
        for page in self._pages(prefix, self._place(folder)):
            for blob in page:
                level.add(blob.name, blob.size or 0, _version_of(blob))
            for found in page.prefixes:
                level.add_folder(found)
        listing = level.listing(folder)
        if not listing.objects and not listing.folders and not folder:
            self._check_root_is_folder()
        return listing

    def open_past(self) -> Iterator[ObjectStore]:
        """Yield the store as it was before, the newest state first; see `headrace.storage.past`."""
        blobs: list[Any] = []
        for page in self._pages(self._prefix, self._place(""), versions=True):
            blobs.extend(page)
            if len(blobs) > MOST_CHANGES:
                raise too_many_versions(str(self._uri))
        yield from past_states(self, list(changes_of(blobs, self._prefix)))

    def stat(self, key: str) -> StoredObject:
        """Return size and generation of one object. Raises `ObjectNotFound`."""
        size_bytes, version = self._stat(self._prefix + check_key(key), self._place(key))
        return StoredObject(key, size_bytes, version)

    def read_object(self, stored: StoredObject, *, start: int = 0, stop: int | None = None) -> bytes:
        """Read a small object, or a piece of it, at its pinned generation. The SDK checks the checksum of a whole one.

        An object that is stored gzip-encoded is decoded when it is read as a whole; a piece of one is refused, since it would be a piece of the
        encoded bytes. Raises `ObjectChanged` where the pinned generation is gone.
        """
        name = self._prefix + check_key(stored.key)
        stop = stored.size_bytes if stop is None else stop
        if stop <= start:
            return b""
        place = self._place(stored.key, stored.version)
        is_whole = stop - start == stored.size_bytes
        arguments = {} if is_whole else {"start": start, "end": stop - 1}

        def read(access: GcsAccess) -> tuple[bytes, Any]:
            blob = self._bucket(access).blob(name, generation=stored.version)
            # Raw: the SDK would decode what is stored encoded, and the server where it is not asked for the encoded bytes.
            content = blob.download_as_bytes(
                raw_download=True, if_generation_match=stored.version, timeout=self._timeout, retry=None, **arguments
            )
            if len(content) < stop - start:
                raise ConnectionError(f"{len(content)} of {stop - start} bytes came")
            return content, blob

        try:
            content, blob = self._call(read, place)
        except ObjectChanged as error:
            raise self._name_both(stored, error) from error.__cause__
        check_answer(_version_of(blob), len(content), stored, stop - start, place)
        return decode_body(content, blob.content_encoding or "", stored, place)

    def describe_range(self, stored: StoredObject, start: int, stop: int) -> HttpRange:
        """Describe one ranged read, with the token of this moment. Raises `AccessDenied` where there is none any more."""
        name, version = quote(self._prefix + check_key(stored.key), safe=""), quote(stored.version, safe="")
        access = self._current()
        base, bucket = access.address.target.rstrip("/"), quote(self._uri.bucket, safe="")
        query = f"alt=media&generation={version}&ifGenerationMatch={version}"
        if self._options.user_project:
            query += f"&userProject={quote(self._options.user_project, safe='')}"
        try:
            authorization = access.tokens.headers()
        except SDK_EXCEPTIONS as error:
            raise judge_sdk_error(error, self._place(stored.key), now=self._clock()).error from error
        return HttpRange(
            scheme=access.address.scheme,
            host=access.address.host,
            port=access.address.port,
            target=f"{base}/download/storage/v1/b/{bucket}/o/{name}?{query}",
            # To a client that does not take gzip, the store unpacks what is stored so, and then ranges mean nothing.
            headers=(("Range", f"bytes={start}-{stop - 1}"), ("Accept-Encoding", "gzip"), *authorization.items()),
            start=start,
            stop=stop,
            # Emulators look at no condition.
            version_header=(_GENERATION, stored.version),
            ca_file=access.ca_file,
            verify_tls=self._options.verify_tls,
        )

    def judge(self, stored: StoredObject, refusal: Refusal) -> Verdict:
        """Say what a refused ranged read means; fetch new credentials where the token was refused, the new generation where the pinned one is gone."""
        place = self._place(stored.key, stored.version)
        verdict = judge_complaint(read_gcs_complaint(refusal), place, now=self._clock(), dialect=GCS)
        if isinstance(verdict.error, ObjectChanged):
            return replace(verdict, error=self._name_both(stored, verdict.error))
        if not verdict.refresh_credentials:
            return verdict
        try:
            helped = self._refresh()
        except HeadraceError as error:
            return Verdict(error)
        return replace(verdict, retry=helped, refresh_credentials=helped)

    def describe_credentials(self, environment: Mapping[str, str]) -> CredentialSource:
        """Return what is shown, after a token has been fetched; ``environment`` tells which variable it came from. Raises `AccessDenied` without one."""
        access = self._current()
        if access.is_anonymous:
            if self._options.anonymous:
                return CredentialSource(kind="", source="anonymous access is asked for (HEADRACE_GCS_ANONYMOUS)")
            return CredentialSource(kind="", source="an endpoint over plain HTTP, as an emulator's, gets no token")
        try:
            access.tokens.headers()
        except SDK_EXCEPTIONS as error:
            raise judge_sdk_error(error, self._place(""), now=self._clock()).error from error
        return describe_google_credentials(access.tokens.credentials, self._options, environment)

    def close(self) -> None:
        """Close the SDK's connections. May be called twice."""
        with self._lock:
            retired, self._retired = self._retired, []
        for access in (*retired, self._access):
            access.close()

    def _pages(self, prefix: str, place: Place, *, versions: bool = False) -> Iterator[Any]:
        """Yield the pages of one level; with ``versions`` those of every generation on every level."""
        one_level = {"delimiter": "/", "fields": _LISTED}
        wanted = {"versions": True, "fields": LISTED_VERSIONS} if versions else one_level
        token = None
        while True:

            def ask(access: GcsAccess, token: str | None = token) -> tuple[Any, str | None]:
                found = access.client.list_blobs(
                    self._bucket(access),
                    prefix=prefix or None,
                    page_token=token,
                    timeout=self._timeout,
                    retry=None,
                    **wanted,
                )
                return next(found.pages), found.next_page_token

            page, next_token = self._call(ask, place, GCS_LISTING)
            if page.raw_page.get("kind") != "storage#objects":  # Any JSON object looks like an empty listing otherwise.
                raise _unlisted(place, "does not answer as Google Cloud Storage does")
            yield page
            if not next_token:
                return
            if next_token == token:
                raise _unlisted(place, "gives the same page again and again")
            token = next_token

    def _check_root_is_folder(self) -> None:
        """Refuse a uri that names an object, which a listing shows as an empty folder."""
        if not self._uri.key:
            return
        try:
            size_bytes, _ = self._stat(self._uri.key, self._place(""))
        except StorageError:
            return
        if size_bytes:
            raise ObjectNotFound(
                f"{self._uri} is an object, not a folder.",
                "Only names that end in .safetensors are taken as single files.",
                f"Give the folder that holds it: {self._uri.parent}.",
            )

    def _stat(self, name: str, place: Place) -> tuple[int, str]:
        """Return size and generation of an object, which ``name`` names from the bucket on."""

        def ask(access: GcsAccess) -> tuple[int, str]:
            blob = self._bucket(access).blob(name)
            blob.reload(timeout=self._timeout, retry=None)
            return blob.size or 0, _version_of(blob)

        return self._call(ask, place)

    def _bucket(self, access: GcsAccess) -> Any:
        """Return the SDK's object for the bucket, about which it asks nothing."""
        return access.client.bucket(self._uri.bucket, user_project=self._options.user_project)

    def _call(self, ask: Callable[[GcsAccess], _Answer], place: Place, dialect: Dialect = GCS) -> _Answer:
        """Call the SDK; raise our errors; try again where that may help, and with new credentials where the token was refused."""
        num_attempts = num_recoveries = 0
        while True:
            access = self._current()
            try:
                return ask(access)
            except SDK_EXCEPTIONS as error:
                verdict = judge_sdk_error(error, place, now=self._clock(), dialect=dialect)
                if verdict.refresh_credentials:
                    num_recoveries += 1
                    if num_recoveries > _MOST_RECOVERIES or not self._refresh():
                        raise verdict.error from error
                    continue
                num_attempts += 1
                if not verdict.retry or num_attempts >= min(self._transport.max_attempts, _MOST_ATTEMPTS):
                    raise verdict.error from error
            self._sleep(self._wait_s(num_attempts, verdict.wait_s))

    def _wait_s(self, num_attempts: int, asked_s: float | None) -> float:
        """Return how long to wait before the next attempt: what the store asked for, or a backoff with full jitter."""
        most = self._transport.backoff_most_s
        if asked_s is not None:
            return min(asked_s, most)
        return random.random() * min(most, self._transport.backoff_first_s * 2.0 ** (num_attempts - 1))

    def _name_both(self, stored: StoredObject, error: HeadraceError) -> HeadraceError:
        """Return an error that names the generation which is there now, too; ``error`` where there is none, or it cannot be asked for."""
        try:
            current = self.stat(stored.key).version
        except HeadraceError:
            return error
        if current == stored.version:
            return error
        return ObjectChanged(
            f"{self.uri_of(stored.key)} is not the version that was opened.",
            f"It was generation {stored.version} and is generation {current} now.",
            error.mend,
        )

    def _refresh(self) -> bool:
        """Run the credential chain anew, since files and services may have others now; say whether there is a new token."""
        with self._lock:
            if self._access.is_anonymous:
                return False
            if abs(self._clock() - self._refreshed_at) < _REFRESH_PAUSE_S:
                return self._refresh_helped
            old = self._access
            new = connect_gcs(str(self._uri), self._options, self._transport)
            try:
                new.tokens.headers()
            except SDK_EXCEPTIONS as error:
                new.close()
                raise judge_sdk_error(error, self._place(""), now=self._clock()).error from error
            self._refresh_helped = new.tokens.current != old.tokens.current
            # The old one may be in use by other threads and is closed at the end.
            self._retired.append(old)
            self._access = new
            self._refreshed_at = self._clock()
            return self._refresh_helped

    def _current(self) -> GcsAccess:
        if os.getpid() != self._process:
            # A forked child: its lock may have been held at the fork, and its sockets are also the parent's.
            self._lock = threading.Lock()
            self._retired = []
            self._access = connect_gcs(str(self._uri), self._options, self._transport)
            self._process = os.getpid()
        return self._access

    def _place(self, key: str, version: str | None = None) -> Place:
        return Place(self.uri_of(key), self.endpoint, version, self._access.is_anonymous)


def _version_of(blob: Any) -> str:
    """Return the generation; empty where the server gives none."""
    return "" if blob.generation is None else str(blob.generation)


def _unlisted(place: Place, why: str) -> StorageError:
    return StorageError(f"{place.uri} cannot be listed.", f"{place.endpoint} {why}.", "Check the endpoint.")
