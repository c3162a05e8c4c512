"""Which safetensors files lie in a folder, and the keys that may be given for reading them."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from headrace.errors import InvalidSetting, ObjectNotFound
from headrace.settings import Settings
from headrace.storage import ObjectStore, Uri, open_store, parse_uri

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
    uri = parse_uri(path)
    folder = Uri(
        uri.scheme, uri.bucket, uri.key, f"{uri.text}/"
    )  # the slash says that it is a folder, whatever its name
    with contextlib.closing(store_for(folder, Settings.from_environment(), s3_credentials)) as store:
        try:
            found = [stored.key for stored in store.list_level().objects if fnmatchcase(stored.key, _PATTERN)]
        except ObjectNotFound:
            if uri.scheme != "file":
                raise
            return []
        if uri.scheme == "file":
            return [os.path.join(path, key) for key in found]  # noqa: PTH118  Spelled as the caller does.
        return [store.uri_of(key) for key in found]


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
