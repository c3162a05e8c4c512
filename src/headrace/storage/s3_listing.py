"""The pages of S3's three listings: of one level, by the newer or the older operation, and of all versions. Pure but for the call that it is given.

Sources: Amazon S3 API Reference, ListObjectsV2, ListObjects and ListObjectVersions. Servers that know only the older operation either refuse the newer one or take it
for the older: then the answer is cut after its first page and names no way to the next, which must not pass for the end.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Protocol

from botocore.exceptions import ClientError

from headrace.errors import StorageError
from headrace.storage.answers import quote_etag
from headrace.storage.past import MOST_CHANGES, too_many_versions
from headrace.storage.refusal import Place, refuses_operation
from headrace.storage.sdk_errors import complaint_of
from headrace.storage.store import Change, StoredObject

_LOG = logging.getLogger("headrace")

_PAGE_PARTS = {"IsTruncated", "KeyCount", "Contents", "CommonPrefixes"}
_NO_VERSION = "null"  # Amazon S3: the version id of what was written while versioning was off.

Page = dict[str, Any]


class S3Call(Protocol):
    """Calls one operation of the SDK and returns its answer. Raises our errors, each from the SDK's."""

    def __call__(self, operation: str, place: Place, /, **arguments: Any) -> Page: ...


class S3Lister:
    """Lists through ``call``. Any thread; remembers a server that knows only the older operation."""

    def __init__(self, call: S3Call) -> None:
        self._call = call
        self._is_old = False

    def level(self, prefix: str, place: Place) -> Iterator[Page]:
        """Yield the pages of one level: ``Contents`` and ``CommonPrefixes``. What one page said another may say again. Raises `StorageError`."""
        if self._is_old:
            yield from self._old_pages(prefix, place)
            return
        arguments = {"Prefix": prefix, "Delimiter": "/"}
        while True:
            try:
                page = self._call("list_objects_v2", place, **arguments)
            except StorageError as error:
                if "ContinuationToken" in arguments or not _is_refused_operation(error):
                    raise
                yield from self._old_instead(prefix, place, error)
                return
            _check_page(page, place)
            yield page
            if not page.get("IsTruncated"):
                return
            token = page.get("NextContinuationToken")
            if not token or token == arguments.get("ContinuationToken"):
                yield from self._old_instead(prefix, place, None)
                return
            arguments["ContinuationToken"] = token

    def changes(self, prefix: str, place: Place) -> list[Change]:
        """Return what became of every key below ``prefix``, those of one key oldest first; nothing where the server knows no versions.

        Keys are without ``prefix``. Raises `StorageError` for more than `MOST_CHANGES`.
        """
        newest_first: list[Change] = []
        for page in self._version_pages(prefix, place):
            newest_first.extend(_changes_on(page, prefix))
            if len(newest_first) > MOST_CHANGES:
                raise too_many_versions(place.uri)
        newest_first.reverse()
        return sorted(newest_first, key=lambda change: change.key)  # which leaves those of one key in their order

    def _old_instead(self, prefix: str, place: Place, refused: StorageError | None) -> Iterator[Page]:
        """Yield the older operation's pages, from the first; where that is refused as well, raise ``refused``, which says more."""
        pages = self._old_pages(prefix, place)
        try:
            first = next(pages)
        except StorageError:
            if refused is None:
                raise
            raise refused from refused.__cause__
        if not self._is_old:
            self._is_old = True
            _LOG.info("%s does not know ListObjectsV2; ListObjects is used.", place.endpoint)
        yield first
        yield from pages

    def _old_pages(self, prefix: str, place: Place) -> Iterator[Page]:
        arguments = {"Prefix": prefix, "Delimiter": "/"}
        while True:
            page = self._call("list_objects", place, **arguments)
            _check_page(page, place)
            yield page
            if not page.get("IsTruncated"):
                return
            # Without a delimiter's effect on the page some servers leave NextMarker out: the last key is meant then.
            marker = page.get("NextMarker") or _last_name(page)
            if not marker or marker == arguments.get("Marker"):
                raise _unlisted(place, "gives the same page again and again")
            arguments["Marker"] = marker

    def _version_pages(self, prefix: str, place: Place) -> Iterator[Page]:
        arguments = {"Prefix": prefix}
        while True:
            try:
                page = self._call("list_object_versions", place, **arguments)
            except StorageError as error:
                if "KeyMarker" in arguments or not _is_refused_operation(error):
                    raise
                return
            yield page
            if not page.get("IsTruncated") or not page.keys() & {"Versions", "DeleteMarkers", "NextKeyMarker"}:
                return  # The end, or the answer of a server that took the question for one about what is there now.
            markers = {
                name: page[f"Next{name}"] for name in ("KeyMarker", "VersionIdMarker") if page.get(f"Next{name}")
            }
            if "KeyMarker" not in markers or markers == {name: arguments.get(name) for name in markers}:
                raise _unlisted(place, "gives the same page of versions again and again")
            arguments = {"Prefix": prefix, **markers}


def _changes_on(page: Page, prefix: str) -> Iterator[Change]:
    """Yield the changes on one page of versions, those of one key newest first."""
    by_key: dict[str, list[tuple[bool, float, int, Change]]] = {}
    for place, item in enumerate((*page.get("Versions", ()), *page.get("DeleteMarkers", ()))):
        key = item["Key"]
        if not key.startswith(prefix):
            continue
        stored = None
        name = key.removeprefix(prefix)
        is_latest = bool(item.get("IsLatest"))
        if "Size" in item:
            version_id = str(item.get("VersionId") or _NO_VERSION)
            # Servers without versioning list what is there under no version, and need not be able to serve it by that.
            needed = "" if is_latest and version_id == _NO_VERSION else version_id
            stored = StoredObject(name, item["Size"], quote_etag(item.get("ETag")), needed)
        when_s = item["LastModified"].timestamp()
        by_key.setdefault(name, []).append((is_latest, when_s, -place, Change(name, when_s, stored)))
    for changes in by_key.values():
        # The SDK lists versions and removals apart; each list is newest first.
        for *_, change in sorted(changes, key=lambda ranked: ranked[:3], reverse=True):
            yield change


def _is_refused_operation(error: StorageError) -> bool:
    """Say whether the server refused because it does not know the operation, rather than for what was asked of it."""
    cause = error.__cause__
    return isinstance(cause, ClientError) and refuses_operation(complaint_of(cause))


def _check_page(page: Page, place: Place) -> None:
    if not page.keys() & _PAGE_PARTS:  # The SDK takes any XML, a web page for instance, for an empty listing.
        raise _unlisted(place, "does not answer as an S3 server does", "Check the endpoint.")


def _last_name(page: Page) -> str:
    keys = [item["Key"] for item in page.get("Contents", ())]
    prefixes = [item["Prefix"] for item in page.get("CommonPrefixes", ())]
    return max((*keys, *prefixes), default="")


def _unlisted(place: Place, why: str, mend: str = "Check that the endpoint is an S3 server.") -> StorageError:
    return StorageError(f"{place.uri} cannot be listed.", f"{place.endpoint} {why}.", mend)
