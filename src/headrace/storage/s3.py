"""Objects in S3 and in stores that speak its protocol. Lists and reads small pieces through botocore; describes ranged reads, signed one by one."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from headrace.errors import (
    HeadraceError,
    InvalidSetting,
    InvalidUri,
    ObjectNotFound,
    StorageError,
    StoreUnavailable,
)
from headrace.settings import TransportSettings
from headrace.storage.answers import Level, check_answer, decode_body, is_strong, quote_etag
from headrace.storage.past import past_states
from headrace.storage.refusal import Complaint, Place, is_elsewhere, is_expired, judge_complaint, read_complaint
from headrace.storage.rooted import RootedStore
from headrace.storage.s3_access import S3Access, S3Options, connect_s3
from headrace.storage.s3_keys import LentAccess, lend_access
from headrace.storage.s3_listing import S3Lister
from headrace.storage.sdk_errors import SDK_EXCEPTIONS, complaint_of, explain_sdk_error, is_own_refusal, no_credentials
from headrace.storage.signing import sign_headers
from headrace.storage.store import HttpRange, Listing, ObjectStore, Refusal, StoredObject, Verdict
from headrace.storage.uri import Uri, arn_region, check_key

_MOST_RECOVERIES = 2  # A new region and new credentials, within one call of the SDK.
_MOST_BODIES = 3  # The SDK repeats requests, but not bodies that break off.
_REFRESH_PAUSE_S = 1.0  # All readers meet an expired token at the same moment; one refresh serves them all.
_PAYER = "requester"  # The header's only value.


class S3Store(RootedStore):
    """The objects below ``uri``'s key in one bucket. Every method may be called from any thread, and in a forked child."""

    def __init__(
        self,
        uri: Uri,
        *,
        transport: TransportSettings,
        options: S3Options | None = None,
        selected_key: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open no connection yet, though the credential chain may. Raises `InvalidSetting`, `AccessDenied` or `InvalidUri`."""
        _check_bucket(uri)
        super().__init__(uri, selected_key)
        self._prefix = f"{uri.key}/" if uri.key else ""
        self._transport = transport
        self._options = options or S3Options()
        self._clock = clock
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._retired: list[S3Access] = []
        self._refreshed_at = float("-inf")
        self._refresh_helped = False
        self._lister = S3Lister(self._call)
        self._access = connect_s3(uri.bucket, self._options, transport)

    @property
    def endpoint(self) -> str:
        """Where requests go, without the bucket's name in a path: ``https://s3.eu-west-1.amazonaws.com`` or ``http://127.0.0.1:8333``."""
        return self._access.endpoint

    def list_level(self, folder: str = "") -> Listing:
        """List one level under ``folder``. Raises `ObjectNotFound` without a bucket, and where the root is an object rather than a folder."""
        prefix = self._prefix + (f"{check_key(folder)}/" if folder else "")
        level = Level(prefix)
        for page in self._lister.level(prefix, self._place(folder)):
            for item in page.get("Contents", ()):
                level.add(item["Key"], item["Size"], quote_etag(item.get("ETag")))
            for item in page.get("CommonPrefixes", ()):
                level.add_folder(item["Prefix"])
        listing = level.listing(folder)
        if not listing.objects and not listing.folders and not folder:
            self._check_root_is_folder()
        return listing

    def open_past(self) -> Iterator[ObjectStore]:
        """Yield the store as it was before, the newest state first; see `headrace.storage.past`. Raises `AccessDenied` without the right to list versions."""
        yield from past_states(self, self._lister.changes(self._prefix, self._place("")))

    def stat(self, key: str) -> StoredObject:
        """Return size and version of one object. Raises `ObjectNotFound`."""
        answer = self._call("head_object", self._place(key), Key=self._prefix + check_key(key))
        return StoredObject(key, answer["ContentLength"], quote_etag(answer.get("ETag")))

    def read_object(self, stored: StoredObject, *, start: int = 0, stop: int | None = None) -> bytes:
        """Read a small object, or a piece of it, at its pinned version, which may be an old one.

        An object that is stored gzip-encoded is decoded when it is read as a whole; a piece of one is refused, since it would be a piece of the
        encoded bytes. Raises `ObjectChanged` where the pinned version is gone.
        """
        arguments = {"Key": self._prefix + check_key(stored.key)}
        stop = stored.size_bytes if stop is None else stop
        if stop <= start:
            return b""
        place = self._place(stored.key, stored.version)
        if stored.size_bytes > stop - start:
            arguments["Range"] = f"bytes={start}-{stop - 1}"
        if is_strong(stored.version):
            arguments["IfMatch"] = stored.version
        if stored.version_id:
            arguments["VersionId"] = stored.version_id
        failure: Exception | None = None
        for _ in range(_MOST_BODIES):
            answer = self._call("get_object", place, **arguments)
            try:
                with contextlib.closing(answer["Body"]) as body:
                    check_answer(
                        quote_etag(answer.get("ETag")), answer.get("ContentLength"), stored, stop - start, place
                    )
                    content = body.read()
            except SDK_EXCEPTIONS as error:
                failure = error
                continue
            if len(content) != stop - start:
                failure = StorageError(f"{len(content)} of {stop - start} bytes came.")
                continue
            return decode_body(content, answer.get("ContentEncoding", ""), stored, place)
        raise StoreUnavailable(
            f"{place.uri} cannot be read.",
            f"{_MOST_BODIES} answers of {place.endpoint} broke off in the middle.",
            "Try again; check the network.",
        ) from failure

    def describe_range(self, stored: StoredObject, start: int, stop: int) -> HttpRange:
        """Describe one ranged read, signed for now. Raises `AccessDenied` where there are no credentials, or none any more."""
        access = self._current()
        path = access.target.encode(self._prefix + check_key(stored.key), stored.version_id)
        headers = [("Range", f"bytes={start}-{stop - 1}"), ("Accept-Encoding", "identity")]
        if is_strong(stored.version):
            headers.append(("If-Match", stored.version))
        if not self._options.anonymous:
            headers.extend(self._sign(access, path, stored))
        return HttpRange(
            scheme=access.target.scheme,
            host=access.target.host,
            port=access.target.port,
            target=path,
            headers=tuple(headers),
            start=start,
            stop=stop,
            etag=stored.version or None,
            ca_file=access.ca_file,
            verify_tls=self._options.verify_tls,
            version_header=("x-amz-version-id", stored.version_id) if stored.version_id else None,
        )

    def judge(self, stored: StoredObject, refusal: Refusal) -> Verdict:
        """Say what a refused ranged read means; learn the bucket's region from it, and fetch new credentials where they have expired."""
        place = self._place(stored.key, stored.version)
        complaint = read_complaint(refusal)
        verdict = judge_complaint(complaint, place, now=self._clock())
        try:
            recovered = self._recover(complaint, verdict)
        except HeadraceError as error:
            return Verdict(error)
        if recovered:
            return replace(verdict, retry=True, wait_s=0.0 if is_elsewhere(complaint) else verdict.wait_s)
        return replace(verdict, retry=verdict.retry and not verdict.refresh_credentials, refresh_credentials=False)

    def lend(self) -> LentAccess:
        """Return what a client of another library needs to read this bucket now. It holds the secret key. Raises `AccessDenied` without credentials."""
        if arn_region(self._uri.bucket) is not None:
            raise InvalidSetting(
                f"{self._uri} is behind an access point.",
                "Clients of other libraries are not handed over to access points.",
                "Use load_format headrace, or the access point's alias in place of its ARN.",
            )
        access = self._current()
        credentials = None if self._options.anonymous else self._freeze_credentials(access, self._place(""))
        return lend_access(self._uri.bucket, access, credentials, verify_tls=self._options.verify_tls)

    def close(self) -> None:
        """Close the SDK's connections. May be called twice."""
        with self._lock:
            retired, self._retired = self._retired, []
        for access in (*retired, self._access):
            access.client.close()

    def _check_root_is_folder(self) -> None:
        """Refuse a uri that names an object, which a listing shows as an empty folder."""
        if not self._uri.key:
            return
        place = Place(str(self._uri), self.endpoint)
        try:
            answer = self._call("head_object", place, Key=self._uri.key)
        except StorageError:
            return
        if answer["ContentLength"]:
            raise ObjectNotFound(
                f"{self._uri} is an object, not a folder.",
                "Only names that end in .safetensors are taken as single files.",
                f"Give the folder that holds it: {self._uri.parent}.",
            )

    def _call(self, operation: str, place: Place, /, **arguments: Any) -> dict[str, Any]:
        """Call the SDK; raise our errors; try again where the refusal told how."""
        arguments["Bucket"] = self._uri.bucket
        if self._options.request_payer:
            arguments["RequestPayer"] = _PAYER
        for num_recoveries in range(_MOST_RECOVERIES + 1):
            access = self._current()
            try:
                answer: dict[str, Any] = getattr(access.client, operation)(**arguments)
                return answer
            except SDK_EXCEPTIONS as error:
                if not is_own_refusal(error):
                    raise explain_sdk_error(error, place) from error
                complaint = complaint_of(error)
                verdict = judge_complaint(complaint, place, now=self._clock())
                if num_recoveries == _MOST_RECOVERIES or not self._recover(complaint, verdict):
                    raise verdict.error from error
        raise AssertionError("unreachable")

    def _sign(self, access: S3Access, path: str, stored: StoredObject) -> tuple[tuple[str, str], ...]:
        headers = {"x-amz-request-payer": _PAYER} if self._options.request_payer else None
        return sign_headers(access.target, path, self._freeze_credentials(access, self._place(stored.key)), headers)

    def _freeze_credentials(self, access: S3Access, place: Place) -> Any:
        try:
            credentials = access.freeze_credentials()
        except SDK_EXCEPTIONS as error:
            raise explain_sdk_error(error, place) from error
        if credentials is None:
            raise no_credentials(place)
        return credentials

    def _recover(self, complaint: Complaint, verdict: Verdict) -> bool:
        """Do what the refusal asks for; say whether the next attempt will be another than the last."""
        region = complaint.region if is_elsewhere(complaint) else None
        # A bare 400 may be about the region or about the credentials; where the region is right, it is the latter.
        if region is not None and (complaint.code or complaint.status != 400 or region != self._access.target.region):
            return self._move(region)
        return verdict.refresh_credentials and not self._options.anonymous and self._refresh(is_expired(complaint))

    def _move(self, region: str) -> bool:
        with self._lock:
            # Another reader may have moved since the refused request was signed, so the same region again is worth an attempt.
            if region != self._access.target.region:
                self._replace_access(region)
            return True

    def _refresh(self, expired: bool) -> bool:
        """Run the credential chain anew: files, variables and services may have others now."""
        with self._lock:
            if abs(self._clock() - self._refreshed_at) < _REFRESH_PAUSE_S:
                return self._refresh_helped
            old = self._access
            place = Place(str(self._uri), old.endpoint)
            self._replace_access(old.target.region)
            try:
                changed = old.freeze_credentials() != self._access.freeze_credentials()
            except SDK_EXCEPTIONS as error:
                raise explain_sdk_error(error, place) from error
            self._refresh_helped = changed or (expired and not self._access.has_fixed_credentials)
            self._refreshed_at = self._clock()
            return self._refresh_helped

    def _replace_access(self, region: str) -> None:
        """Take everything from a new session. The old one may be in use by other threads and is closed at the end."""
        new = connect_s3(self._uri.bucket, self._options, self._transport, region)
        self._retired.append(self._access)
        self._access = new

    def _current(self) -> S3Access:
        if os.getpid() != self._process:
            # A forked child: its lock may have been held at the fork, and its sockets are also the parent's.
            self._lock = threading.Lock()
            self._retired = []
            self._access = connect_s3(self._uri.bucket, self._options, self._transport, self._access.target.region)
            self._process = os.getpid()
        return self._access

    def _place(self, key: str, version: str | None = None) -> Place:
        return Place(self.uri_of(key), self.endpoint, version, self._options.anonymous)


def _check_bucket(uri: Uri) -> None:
    """Raise `InvalidUri` for buckets behind another protocol than S3's own."""
    if uri.bucket.endswith("--x-s3"):
        raise InvalidUri(
            f"{uri} is in a directory bucket.",
            "S3 Express One Zone has a sign-in of its own, which is not supported.",
            "Copy the model into a general purpose bucket.",
        )
    if uri.bucket.endswith(("--op-s3", "--ol-s3", ".mrap")):
        raise InvalidUri(
            f"{uri} is behind an Outposts, Object Lambda or multi-region access point.",
            "These have signatures or protocols of their own, which are not supported.",
            "Use the bucket itself, or an access point in one region.",
        )
