"""Picks the store for a uri. The only module that knows all of them; each is imported when it is needed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from headrace.errors import InvalidUri, MissingDependency
from headrace.settings import Settings
from headrace.storage.local import LocalStore
from headrace.storage.store import ObjectStore
from headrace.storage.uri import Uri, parse_uri

if TYPE_CHECKING:
    from headrace.storage.s3_access import S3Options


def open_store(uri: str | os.PathLike[str] | Uri, *, settings: Settings, s3: S3Options | None = None) -> ObjectStore:
    """Return the store that ``uri`` points into, rooted at the folder it names; close it after use.

    A name that ends in ``.safetensors`` or ``.safetensors.index.json`` is a single file: the store is then rooted at its folder and has a
    ``selected_key``. Only the kind of a local path is looked up; no connection is opened. ``s3`` takes the place of what ``settings`` say of S3.

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
            verify_tls=settings.verify_tls,
        )
        return S3Store(root, transport=settings.transport, options=options, selected_key=selected_key)
    raise _unsupported(root)


def _split_file(uri: Uri) -> tuple[Uri, str | None]:
    if not uri.name.lower().endswith((".safetensors", ".safetensors.index.json")) or uri.text.rstrip().endswith("/"):
        return uri, None
    if uri.scheme == "file" and os.path.isdir(uri.key):  # noqa: PTH112 (Path.is_dir raises for names that are too long)
        return uri, None
    return uri.parent, uri.name


def _unsupported(uri: Uri) -> InvalidUri:
    if uri.scheme == "hf" and ":" not in uri.text:
        return InvalidUri(
            f"There is no local path {uri.text}.",
            "It looks like the name of a hub repository, and the hub cannot be streamed from yet.",
            "Give the path of a folder that exists, or an s3:// uri; hf download fetches a repository into a folder.",
        )
    return InvalidUri(
        f"{uri} cannot be opened.",
        f"The scheme {uri.scheme} is known, but not supported yet; s3 and local paths are.",
        "Copy the model to an S3 store or to a local folder.",
    )
