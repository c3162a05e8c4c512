"""Blobs in Azure storage accounts, with and without a hierarchical namespace. Lists and reads small pieces through the Azure SDK; describes ranged reads."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from azure.core import MatchConditions
from azure.core.exceptions import DecodeError
from azure.storage.blob import BlobPrefix

from headrace.errors import AccessDenied, HeadraceError, ObjectChanged, ObjectNotFound, StorageError
from headrace.settings import TransportSettings
from headrace.storage.answers import Level, check_answer, decode_body, is_strong, quote_etag
from headrace.storage.azure_access import AzureAccess, AzureOptions, connect_azure
from headrace.storage.azure_errors import BROKEN, SDK_EXCEPTIONS, complaint_of, explain_sdk_error, scrub
from headrace.storage.azure_past import changes_of
from headrace.storage.azure_refusal import AZURE, is_expired, is_without_container, read_azure_complaint
from headrace.storage.credentials import CredentialSource
from headrace.storage.past import MOST_CHANGES, past_states, too_many_versions
from headrace.storage.refusal import Complaint, Place, judge_complaint
from headrace.storage.rooted import RootedStore
from headrace.storage.store import HttpRange, Listing, ObjectStore, Refusal, StoredObject, Verdict
from headrace.storage.uri import Uri, check_key

_REFRESH_PAUSE_S = 1.0  # All readers meet an expired token at the same moment; one refresh serves them all.
_MOST_BODIES = 3
_FOLDER_MARK = "hdi_isfolder"


class AzureStore(RootedStore):
    """The blobs below the folder that ``uri`` names. Every method may be called from any thread, and in a forked child."""

    def __init__(
        self,
        uri: Uri,
        *,
        transport: TransportSettings,
        options: AzureOptions | None = None,
        selected_key: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open no connection and ask for no token yet. Raises `InvalidUri`, `InvalidSetting`, `AccessDenied` or `MissingDependency`."""
        super().__init__(uri, selected_key)
        self._transport = transport
        self._options = options or AzureOptions()
        self._clock = clock
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._retired: list[AzureAccess] = []
        self._refreshed_at = float("-inf")
        self._refresh_helped = False
        self._access = connect_azure(uri, self._options, transport)
        prefix = self._access.location.prefix
        self._prefix = f"{prefix}/" if prefix else ""

    @property
    def endpoint(self) -> str:
        """The account's address: ``https://account.blob.core.windows.net`` or ``http://127.0.0.1:10000/account``."""
        return self._access.endpoint

    def list_level(self, folder: str = "") -> Listing:
        """List one level under ``folder``. Raises `ObjectNotFound` without a container, and where the root is an object rather than a folder."""
        prefix = self._prefix + (f"{check_key(folder)}/" if folder else "")
        place = self._place(folder)
        level: Level = self._call(lambda access: _gather(access, prefix, place), place)
        listing = level.listing(folder)
        if not listing.objects and not listing.folders and not folder:
            self._check_root_is_folder()
        return listing

    def open_past(self) -> Iterator[ObjectStore]:
        """Yield the store as it was before, the newest state first; see `headrace.storage.past`. Raises `AccessDenied` without the right to list versions."""
        blobs: list[Any] = self._call(lambda access: _gather_versions(access, self._prefix), self._place(""))
        if len(blobs) > MOST_CHANGES:
            raise too_many_versions(str(self._uri))
        yield from past_states(self, list(changes_of(blobs, self._prefix)))

    def stat(self, key: str) -> StoredObject:
        """Return size and version of one object. Raises `ObjectNotFound`."""
        found = self._properties(self._prefix + check_key(key), self._place(key))
        return StoredObject(key, found.size, quote_etag(found.etag))

    def read_object(self, stored: StoredObject, *, start: int = 0, stop: int | None = None) -> bytes:
        """Read a small object, or a piece of it, at its pinned version, which may be an old one.

        An object that is stored gzip-encoded is decoded when it is read as a whole; a piece of one is refused, since it would be a piece of the
        encoded bytes. Raises `ObjectChanged` where the pinned version is gone.
        """
        name = self._prefix + check_key(stored.key)
        stop = stored.size_bytes if stop is None else stop
        if stop <= start:
            return b""
        place = self._place(stored.key, stored.version)
        arguments: dict[str, Any] = {"offset": start, "length": stop - start, "max_concurrency": 1, "decompress": False}
        if is_strong(stored.version):
            arguments |= {"etag": stored.version, "match_condition": MatchConditions.IfNotModified}

        def download(access: AzureAccess) -> tuple[Any, bytes]:
            client = access.client.get_blob_client(name, version_id=stored.version_id or None)
            stream = client.download_blob(**arguments)
            return stream.properties, stream.readall()

        properties, content = self._call(lambda access: _repeat(download, access), place, stored)
        check_answer(quote_etag(properties.etag), len(content), stored, stop - start, place)
        return decode_body(content, properties.content_settings.content_encoding or "", stored, place)

    def describe_range(self, stored: StoredObject, start: int, stop: int) -> HttpRange:
        """Describe one ranged read, authorised for now. Raises `AccessDenied` where there is no token."""
        access = self._current()
        path = access.target.encode(self._prefix + check_key(stored.key))
        headers = [("x-ms-range", f"bytes={start}-{stop - 1}"), ("Accept-Encoding", "identity")]
        if is_strong(stored.version):
            headers.append(("If-Match", stored.version))
        try:
            target, headers = access.authorise(path, headers, self._clock(), stored.version_id)
        except SDK_EXCEPTIONS as error:
            raise self._name_reading(explain_sdk_error(error, self._place(stored.key))) from scrub(error)
        return HttpRange(
            scheme=access.target.scheme,
            host=access.target.host,
            port=access.target.port,
            target=target,
            headers=tuple(headers),
            start=start,
            stop=stop,
            etag=stored.version or None,
            version_header=("x-ms-version-id", stored.version_id) if stored.version_id else None,
            ca_file=access.ca_file,
            verify_tls=self._options.verify_tls,
        )

    def judge(self, stored: StoredObject, refusal: Refusal) -> Verdict:
        """Say what a refused ranged read means; look up the version that is there now, and fetch new credentials where they have expired."""
        place = self._place(stored.key, stored.version)
        complaint = read_azure_complaint(refusal)
        verdict = self._judge(complaint, place, stored)
        try:
            recovered = verdict.refresh_credentials and self._refresh(is_expired(complaint))
        except HeadraceError as error:
            return Verdict(error)
        if recovered:
            return replace(verdict, retry=True)
        return replace(verdict, retry=verdict.retry and not verdict.refresh_credentials, refresh_credentials=False)

    def describe_credentials(self, environment: Mapping[str, str]) -> CredentialSource:
        """Return what is shown; where that is a token, one is fetched. Raises `AccessDenied` where there is none."""
        try:
            return self._current().describe()
        except SDK_EXCEPTIONS as error:
            raise self._name_reading(explain_sdk_error(error, self._place(""))) from scrub(error)

    def close(self) -> None:
        """Close the SDK's connections. May be called twice."""
        with self._lock:
            retired, self._retired = self._retired, []
        for access in (*retired, self._access):
            access.close()

    def _properties(self, name: str, place: Place) -> Any:
        return self._call(lambda access: access.client.get_blob_client(name).get_blob_properties(), place)

    def _check_root_is_folder(self) -> None:
        """Refuse a uri that names an object, which a listing shows as an empty folder."""
        if not self._prefix:
            return
        try:
            found = self._properties(self._prefix.rstrip("/"), self._place(""))
        except StorageError:
            return
        if found.size and not _is_folder(found.metadata):
            raise ObjectNotFound(
                f"{self._uri} is an object, not a folder.",
                "Only names that end in .safetensors are taken as single files.",
                f"Give the folder that holds it: {self._uri.parent}.",
            )

    def _call(self, ask: Callable[[AzureAccess], Any], place: Place, pinned: StoredObject | None = None) -> Any:
        """Ask the SDK; raise our errors; ask once more where the refusal was about credentials and there are others now."""
        for is_last in (False, True):
            try:
                return ask(self._current())
            except SDK_EXCEPTIONS as error:
                failure = error.with_traceback(None)
            complaint = complaint_of(failure, place.endpoint)
            if complaint is None:
                raise self._name_reading(explain_sdk_error(failure, place)) from scrub(failure)
            verdict = self._judge(complaint, place, pinned)
            if is_last or not verdict.refresh_credentials or not self._refresh(is_expired(complaint)):
                raise verdict.error from scrub(failure)
        raise AssertionError("unreachable")

    def _judge(self, complaint: Complaint, place: Place, pinned: StoredObject | None) -> Verdict:
        verdict = judge_complaint(complaint, place, now=self._clock(), dialect=AZURE)
        if type(verdict.error) is ObjectChanged and pinned is not None:
            return Verdict(self._explain_change(complaint, place, pinned))
        if is_without_container(complaint) or type(verdict.error) is AccessDenied:
            return replace(verdict, error=self._name_reading(verdict.error))
        return verdict

    def _explain_change(self, complaint: Complaint, place: Place, pinned: StoredObject) -> HeadraceError:
        """Return the error for a pinned object that is not what it was, with the version that is there now."""
        try:
            place = replace(place, current=self.stat(pinned.key).version)
        except ObjectNotFound:
            complaint = replace(
                complaint, status=404, code="BlobNotFound"
            )  # Azurite calls this, too, a failed condition.
        except StorageError:
            pass  # Then the version that is there now stays unsaid.
        return judge_complaint(complaint, place, now=self._clock(), dialect=AZURE).error

    def _name_reading(self, error: HeadraceError) -> HeadraceError:
        """Return ``error`` with the words that say how the uri was read, where it could have been read in another way."""
        reading = self._access.location.reading
        return type(error)(error.what, f"{error.why} {reading}", error.mend) if reading else error

    def _refresh(self, expired: bool) -> bool:
        """Take the configuration anew: variables and files may hold others now, and the token's credential is asked again. Say whether that helps."""
        with self._lock:
            if abs(self._clock() - self._refreshed_at) < _REFRESH_PAUSE_S:
                return self._refresh_helped
            old = self._access
            new = self._connect(old)
            self._retired.append(new)
            try:
                changed = new.ask_secret() != old.last_secret()
            except SDK_EXCEPTIONS as error:
                raise explain_sdk_error(error, self._place("")) from scrub(error)
            self._refreshed_at = self._clock()
            self._refresh_helped = changed and new.leads_where(old)
            if self._refresh_helped:
                # The old one may be in use by other threads and is closed at the end.
                self._retired[-1], self._access = old, new
            return self._refresh_helped

    def _connect(self, old: AzureAccess) -> AzureAccess:
        tenant_id = old.tokens.tenant_id if old.tokens is not None else None
        return connect_azure(self._uri, self._options, self._transport, tenant_id=tenant_id)

    def _current(self) -> AzureAccess:
        if os.getpid() != self._process:
            # A forked child: its lock may have been held at the fork, and its sockets are also the parent's.
            self._lock = threading.Lock()
            self._retired = []
            self._access = self._connect(self._access)
            self._process = os.getpid()
        return self._access

    def _place(self, key: str, version: str | None = None) -> Place:
        access = self._access
        return Place(
            self.uri_of(key), access.endpoint, version, self._options.anonymous, credentials=access.credentials
        )


def _repeat(ask: Callable[[AzureAccess], Any], access: AzureAccess) -> Any:
    """Ask again where the answer broke off; the older SDKs repeat requests, but not bodies."""
    for _ in range(_MOST_BODIES - 1):
        with contextlib.suppress(*BROKEN):
            return ask(access)
    return ask(access)


def _gather(access: AzureAccess, prefix: str, place: Place) -> Level:
    """Return what lies below ``prefix``. With their metadata, since that tells the folders of a hierarchical namespace from empty blobs."""
    level = Level(prefix)
    pages: Any = access.client.walk_blobs(name_starts_with=prefix, include=["metadata"], delimiter="/").by_page()
    last_token = None
    while (page := _next_page(pages)) is not None:
        for item in page:
            if isinstance(item, BlobPrefix) or _is_folder(item.metadata):
                level.add_folder(item.name)
            else:
                level.add(item.name, item.size, quote_etag(item.etag))
        token = pages.continuation_token
        if token and token == last_token:
            raise StorageError(
                f"{place.uri} cannot be listed.",
                f"{place.endpoint} gives the same page again and again.",
                "Check that the endpoint is that of an Azure storage account.",
            )
        last_token = token
    return level


def _gather_versions(access: AzureAccess, prefix: str) -> list[Any]:
    """Return all versions of all blobs below ``prefix``, folders left out; a few more than `MOST_CHANGES` at most."""
    found: list[Any] = []
    for page in access.client.list_blobs(name_starts_with=prefix, include=["versions", "metadata"]).by_page():
        found.extend(blob for blob in page if not _is_folder(blob.metadata))
        if len(found) > MOST_CHANGES:
            break
    return found


def _next_page(pages: Any) -> Any:
    """Return the next page of a listing, None at its end. Raises the SDK's `DecodeError` for XML that is no listing, which the SDK stumbles over."""
    try:
        return next(pages, None)
    except AttributeError as error:
        raise DecodeError("The answer is not a listing.") from error


def _is_folder(metadata: Mapping[str, str] | None) -> bool:
    """Say whether metadata marks a folder, in whatever letter case a tool wrote it."""
    return any(name.lower() == _FOLDER_MARK and value.lower() == "true" for name, value in (metadata or {}).items())
