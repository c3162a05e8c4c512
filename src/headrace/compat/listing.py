"""Which files lie in a folder, and the keys that may be given for reading them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from headrace.errors import InvalidSetting, ObjectNotFound
from headrace.settings import Settings
from headrace.storage import ObjectStore, StoredObject, Uri, is_object_uri, open_store, parse_uri

_PATTERN = "*.safetensors"


@dataclass(slots=True)
class S3Credentials:
    """Keys and whereabouts of an S3 server, each optional: what is None comes from where `headrace.open` has it."""

    access_key_id: str | None = None
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    region_name: str | None = None
    endpoint: str | None = None


def list_safetensors(path: str, s3_credentials: S3Credentials | None = None) -> list[str]:
    """Return the safetensors files directly in the folder ``path``, as uris or as paths that start with ``path``, in the order of their names.

    No index is looked at: `headrace.open` knows which of them are the checkpoint. A folder that holds none, or a local one that is absent, gives an empty list.
    """
    return list_folder(path, [_PATTERN], s3_credentials)


def list_folder(
    path: str, allow_pattern: Sequence[str] | None = None, s3_credentials: S3Credentials | None = None
) -> list[str]:
    """Return the files directly in the folder ``path`` that ``allow_pattern`` matches (default: all), as `list_safetensors` does; patterns are as in `matches`."""
    uri = folder_of(path)
    with contextlib.closing(store_for(uri, Settings.from_environment(), s3_credentials)) as store:
        try:
            found = [stored.key for stored in store.list_level().objects if matches(uri, stored, allow_pattern)]
        except ObjectNotFound:
            if uri.scheme != "file":
                raise
            return []
        return [_spelled(store, path, key) for key in found]


def list_files(
    prefix: str,
    is_recursive: bool = True,
    allow_patterns: Sequence[str] | None = None,
    ignore_patterns: Sequence[str] | None = None,
) -> list[tuple[str, int]]:
    """Return path and size in bytes of the files in the folder ``prefix``, with ``is_recursive`` those below it too, in the order of keys; hidden local ones are left out.

    ``prefix`` is a folder with or without a slash at its end. (Run:ai Model Streamer takes one in a bucket, without the slash, for the beginning of keys, and lists its neighbours too.) Patterns are globs over the whole path, where a ``*`` matches slashes, too; no patterns, or an empty list, leave nothing out. Raises what the store raises.
    """
    uri = folder_of(prefix)
    with contextlib.closing(store_for(uri, Settings.from_environment(), None)) as store:
        objects = walk(store) if is_recursive else sorted(store.list_level().objects, key=lambda stored: stored.key)
        found = [(_spelled(store, prefix, stored.key), stored.size_bytes) for stored in objects]
    return [
        (path, size)
        for path, size in found
        if (not allow_patterns or any(fnmatchcase(path, pattern) for pattern in allow_patterns))
        and not any(fnmatchcase(path, pattern) for pattern in ignore_patterns or ())
    ]


def walk(store: ObjectStore) -> list[StoredObject]:
    """Return every object below the root of ``store``, in the order of keys."""
    found: list[StoredObject] = []
    folders = [""]
    while folders:
        listing = store.list_level(folders.pop())
        found.extend(listing.objects)
        folders.extend(listing.folders)
    return sorted(found, key=lambda stored: stored.key)


def matches(folder: Uri, stored: StoredObject, patterns: Sequence[str] | None) -> bool:
    """Say whether one of ``patterns``, globs in which a ``*`` matches slashes, fits the whole key of ``stored``, or its key below ``folder``. None fits everything."""
    spellings = (folder.child(stored.key).key, stored.key)
    return patterns is None or any(fnmatchcase(spelling, pattern) for pattern in patterns for spelling in spellings)


def folder_of(path: str | os.PathLike[str]) -> Uri:
    """Return the uri of ``path``, with the slash that says that it is a folder, whatever its name."""
    uri = parse_uri(path)
    return Uri(uri.scheme, uri.bucket, uri.key, f"{uri.text}/")


def is_s3_path(path: str) -> bool:
    """Say whether ``path`` is a uri of S3."""
    return _is_of("s3", path)


def is_gs_path(path: str) -> bool:
    """Say whether ``path`` is a uri of Google Cloud Storage."""
    return _is_of("gs", path)


def is_azure_path(path: str) -> bool:
    """Say whether ``path`` is a uri of Azure Blob Storage."""
    return _is_of("az", path)


def _is_of(scheme: str, path: str) -> bool:
    return is_object_uri(path) and parse_uri(path).scheme == scheme


def _spelled(store: ObjectStore, folder: str, key: str) -> str:
    """Return where ``key`` of ``store`` is, with a local ``folder`` as the caller spells it."""
    if store.uri.scheme == "file":
        return os.path.join(folder, key)  # noqa: PTH118
    return store.uri_of(key)


def store_for(uri: Uri, settings: Settings, credentials: S3Credentials | None) -> ObjectStore:
    """Return the store at ``uri``, with ``credentials`` in place of what would be found."""
    if credentials is None or credentials == S3Credentials():
        return open_store(uri, settings=settings)
    if uri.scheme != "s3":
        raise InvalidSetting(f"S3 credentials were given for {uri}.", mend="Leave them out.")
    from headrace.storage.s3_access import S3Options
    from headrace.storage.s3_keys import GivenSession, S3Keys

    keys = S3Keys(
        access_key_id=credentials.access_key_id,
        secret_access_key=credentials.secret_access_key,
        session_token=credentials.session_token,
        region_name=credentials.region_name,
        endpoint=credentials.endpoint,
    )
    options = S3Options(
        addressing_style=settings.s3_addressing_style,
        endpoint=credentials.endpoint or settings.s3_endpoint,
        request_payer=settings.s3_request_payer,
        verify_tls=settings.verify_tls,
        new_session=lambda: GivenSession(keys),
    )
    return open_store(uri, settings=settings, s3=options)
