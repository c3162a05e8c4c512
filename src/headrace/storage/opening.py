"""Picks the store for a uri. The only module that knows all of them; each is imported when it is needed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from headrace.errors import MissingDependency
from headrace.settings import AzureSettings, Settings
from headrace.storage.azure_location import is_azure_url
from headrace.storage.local import LocalStore
from headrace.storage.store import KeepsPast, ObjectStore
from headrace.storage.uri import Uri, parse_uri

if TYPE_CHECKING:
    from headrace.storage.s3_access import S3Options


def open_store(uri: str | os.PathLike[str] | Uri, *, settings: Settings, s3: S3Options | None = None) -> ObjectStore:
    """Return the store that ``uri`` points into, rooted at the folder it names; close it after use.

    A name that ends in ``.safetensors`` or ``.safetensors.index.json`` is a single file: the store is then rooted at its folder and has a
    ``selected_key``. Only the kind of a local path is looked up; no connection is opened, except that the hub is asked for a repository's files, and
    credential chains may ask whom they need. ``s3`` takes the place of what ``settings`` say of S3.

    Raises `InvalidUri`, `MissingDependency`, `InvalidSetting`, and `AccessDenied` where the credential chain fails.
    """
    root, selected_key = _split_file(parse_uri(uri))
    if root.scheme == "file":
        return LocalStore(root, selected_key=selected_key)
    if root.scheme == "s3":
        try:
            from headrace.storage.s3 import S3Store
        except ImportError as error:
            raise MissingDependency(
                f"{root} cannot be opened: the AWS SDK cannot be imported.",
                f"{error}.",
                'Install it with: pip install "headrace[s3]".',
            ) from error
        from headrace.storage.s3_access import S3Options

        options = s3 or S3Options(
            anonymous=settings.s3_anonymous,
            addressing_style=settings.s3_addressing_style,
            endpoint=settings.s3_endpoint,
            request_payer=settings.s3_request_payer,
            verify_tls=settings.verify_tls,
        )
        return S3Store(root, transport=settings.transport, options=options, selected_key=selected_key)
    if root.scheme == "gs":
        return _open_gcs(root, selected_key, settings)
    if root.scheme == "hf":
        return _open_hub(root, selected_key, settings)
    if root.scheme == "az" or is_azure_url(root, settings.azure or AzureSettings.from_environment()):
        return _open_azure(root, selected_key, settings)
    return _open_http(root, selected_key, settings)


def open_past(uri: Uri, store: ObjectStore, settings: Settings) -> Iterator[ObjectStore]:
    """Yield ``store`` as it was before, the newest state first; nothing for a store that keeps no past. ``uri`` is what it was opened by.

    Those that are not made over ``store`` (`headrace.storage.past.PastStore`) are the caller's to close. Raises what `KeepsPast.open_past` raises.
    """
    if isinstance(store, KeepsPast):
        yield from store.open_past()
        return
    root, selected_key = _split_file(uri)
    if root.scheme != "hf":
        return
    # The model is whole in the hub's cache on this machine, where files have other versions than on the hub.
    hub = _open_hub(root, selected_key, settings, use_cache=False)
    try:
        if isinstance(hub, KeepsPast):
            yield from hub.open_past()
    finally:
        hub.close()


def _open_gcs(root: Uri, selected_key: str | None, settings: Settings) -> ObjectStore:
    try:
        from headrace.storage.gcs import GcsStore
    except ImportError as error:
        raise MissingDependency(
            f"{root} cannot be opened: Google's SDK cannot be imported.",
            f"{error}.",
            'Install it with: pip install "headrace[gcs]".',
        ) from error
    from headrace.storage.gcs_access import GcsOptions

    options = GcsOptions(
        anonymous=settings.gcs_anonymous,
        credentials_file=settings.gcs_credentials_file,
        endpoint=settings.gcs_endpoint,
        user_project=settings.gcs_user_project,
        ca_file=settings.ca_file,
        verify_tls=settings.verify_tls,
    )
    return GcsStore(root, transport=settings.transport, options=options, selected_key=selected_key)


def _open_azure(root: Uri, selected_key: str | None, settings: Settings) -> ObjectStore:
    try:
        from headrace.storage.azure import AzureStore
    except ImportError as error:
        raise MissingDependency(
            f"{root} cannot be opened: the Azure SDK cannot be imported.",
            f"{error}.",
            'Install it with: pip install "headrace[azure]".',
        ) from error
    from headrace.storage.azure_access import AzureOptions

    given = settings.azure
    options = AzureOptions(
        anonymous=settings.azure_anonymous,
        verify_tls=settings.verify_tls,
        ca_file=settings.ca_file,
        read_settings=AzureSettings.from_environment if given is None else lambda: given,
    )
    return AzureStore(root, transport=settings.transport, options=options, selected_key=selected_key)


def _open_hub(root: Uri, selected_key: str | None, settings: Settings, *, use_cache: bool = True) -> ObjectStore:
    try:
        from headrace.storage.hub_opening import open_hub
    except ImportError as error:
        is_plain = ":" not in root.text
        raise MissingDependency(
            f"There is no local path {root.text}." if is_plain else f"{root} cannot be opened.",
            f"{'It may be the name of a hub repository, but ' if is_plain else ''}huggingface_hub cannot be imported: {error}.",
            'Install it with: pip install "headrace[hub]".',
        ) from error
    return open_hub(root, settings=settings, selected_key=selected_key, use_cache=use_cache)


def _open_http(root: Uri, selected_key: str | None, settings: Settings) -> ObjectStore:
    from headrace.storage.http import HttpOptions, HttpStore

    options = HttpOptions(token=settings.http_token, ca_file=settings.ca_file, verify_tls=settings.verify_tls)
    return HttpStore(root, transport=settings.transport, options=options, selected_key=selected_key)


def _split_file(uri: Uri) -> tuple[Uri, str | None]:
    # A signature in the query of a URL may end with a slash, too.
    text = uri.text.partition("#")[0].partition("?")[0] if uri.scheme in ("http", "https") else uri.text
    if not uri.name.lower().endswith((".safetensors", ".safetensors.index.json")) or text.rstrip().endswith("/"):
        return uri, None
    if uri.scheme == "file" and os.path.isdir(uri.key):  # noqa: PTH112 (Path.is_dir raises for names that are too long)
        return uri, None
    return uri.parent, uri.name
