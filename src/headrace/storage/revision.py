"""A revision that is given beside a uri rather than in it. Pure."""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import quote

from headrace.errors import InvalidSetting
from headrace.storage.uri import Uri


def with_revision(uri: Uri, revision: str | None) -> Uri:
    """Return ``uri`` at ``revision`` (branch, tag, pull request or commit); None leaves it as it is.

    Raises `InvalidSetting` where the uri is not one of the hub, or names another revision itself.
    """
    if revision is None:
        return uri
    if uri.scheme != "hf":
        raise InvalidSetting(
            f"The revision {revision!r} cannot be used with this uri.",
            "Only hub repositories have revisions; elsewhere objects are pinned as they are when they are opened.",
            "Leave it out, or give the folder of the version.",
        )
    name, at, own = uri.bucket.partition("@")
    encoded = quote(revision, safe="._-")
    if not revision or (at and own != encoded):
        raise InvalidSetting(
            f"The revision is given twice, as {own!r} and as {revision!r}." if at else "The revision is empty.",
            "The uri may name one after an @, and the setting is for uris that do not.",
            "Give it once.",
        )
    bucket = f"{name}@{encoded}"
    return replace(uri, bucket=bucket, text=f"hf://{bucket}/{uri.key}".rstrip("/"))
