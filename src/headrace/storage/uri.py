"""What the user gives: a uri, a path or a hub id, parsed once into its parts. Opens no connection; asks the disk only whether a path exists.

    s3://bucket/prefix    gs://bucket/prefix    az://container/prefix    hf://org/name@revision/folder
    https://host/folder   file:///folder        any local path           org/name (where no such path exists)
    s3://arn:aws:s3:region:account:accesspoint/name/prefix

A container of another account than the configured one is written az://container@account/prefix; abfss:// and wasbs:// uris are read as such ones.

Keys of buckets are taken as they are written (a ``%20`` in an s3 uri is four characters of the key); ``http``, ``https`` and ``file`` are URLs and
are percent-decoded once.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from headrace.errors import InvalidUri

BUCKET_SCHEMES = ("s3", "gs", "az")
"""Schemes whose uris are a bucket (or container) and a key."""

REMOTE_SCHEMES = (*BUCKET_SCHEMES, "hf", "http", "https")
"""Schemes that name something elsewhere: all but files."""

_ALIASES = dict.fromkeys(("abfs", "abfss", "wasb", "wasbs"), "az")

# One slash as well as two: pathlib.Path("s3://bucket/key") has already folded them, and people pass its text on.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(/.*)", re.DOTALL)
_REMOTE = re.compile(rf"(?:{'|'.join((*REMOTE_SCHEMES, *_ALIASES))}):/", re.IGNORECASE)
_BUCKET = re.compile(r"[A-Za-z0-9$][A-Za-z0-9._$-]*")
_AZURE_PLACE = re.compile(r"([a-z0-9$][a-z0-9-]{0,62})@([a-z0-9]{3,24})((?:\.z\d+)?\.(?:blob|dfs)(?:\.[a-z0-9-]+)+)?")
_ARN = re.compile(r"arn:(aws[a-z-]*):([a-z0-9-]+):([a-z0-9-]*):(\d*):([^/:]+)(?:([/:])([^/:]*))?(?:/(.*))?", re.DOTALL)
_ACCESS_POINT = re.compile(r"arn:aws[a-z-]*:s3:([a-z0-9-]+):\d+:accesspoint/[a-z0-9][a-z0-9-]*")
_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*(?:@[A-Za-z0-9][A-Za-z0-9._%-]*)?")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_EXAMPLES = "s3://bucket/folder, https://host/folder or a local path"


@dataclass(frozen=True, slots=True)
class Uri:
    """One parsed uri.

    ``bucket`` is the bucket or container (``container@account`` where Azure's account is named, an access point's ARN in S3), ``org/name`` or
    ``org/name@revision`` for the hub, ``host`` or ``host:port`` for HTTP, empty for files.
    ``key`` never ends with a slash; for files it is the absolute path, for the others it is relative to the bucket. ``text`` is what the user wrote;
    it is left out of the repr and of comparisons, since an HTTP URL may be a signed one. ``str(uri)`` is the canonical form and holds no query.
    """

    scheme: str
    bucket: str
    key: str
    text: str = field(default="", repr=False, compare=False)

    def __str__(self) -> str:
        if self.scheme == "file":
            return self.key
        key = quote(self.key) if self.scheme in ("http", "https") else self.key
        return f"{self.scheme}://{self.bucket}/{key}" if key else f"{self.scheme}://{self.bucket}"

    @property
    def name(self) -> str:
        """The last part of the key; empty at the root of a bucket."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> Uri:
        """The folder that holds this one; the root of a bucket is its own parent."""
        folder = self.key.rpartition("/")[0]
        return Uri(self.scheme, self.bucket, "/" if self.scheme == "file" and not folder else folder, self.text)

    def child(self, key: str) -> Uri:
        """Return the uri of ``key``, which is relative to this one; an empty key gives this uri."""
        if not key:
            return self
        return Uri(self.scheme, self.bucket, f"{self.key.rstrip('/')}/{key}" if self.key else key, self.text)


def is_object_uri(value: object) -> bool:
    """Say whether ``value`` names something in a store rather than on a disk: an ``s3``, ``gs``, ``az``, ``hf``, ``http`` or ``https`` uri.

    It looks at the scheme alone (any letter case; text or a path object), never touches the disk and never raises: a malformed ``s3://`` is still
    one, so that it is refused as such and not looked up on a hub. A bare ``org/name`` is not one.
    """
    if isinstance(value, Uri):
        return value.scheme in REMOTE_SCHEMES
    text = _text_of(value)
    return text is not None and _REMOTE.match(text.strip()) is not None


def parse_uri(value: str | os.PathLike[str] | Uri) -> Uri:
    """Return the parts of ``value``. Raises `InvalidUri`, which says what a good one looks like.

    A text without a scheme is a path, unless no such path exists and it looks like ``org/name``: then it is a hub id. A path object never is.
    """
    if isinstance(value, Uri):
        return value
    text = _text_of(value)
    if text is None:
        raise InvalidUri(f"A {type(value).__name__} is not a uri.", mend=f"Give text or a path object: {_EXAMPLES}.")
    if not text.strip():
        raise InvalidUri("The uri is empty.", mend=f"Give {_EXAMPLES}.")
    match = _SCHEME.fullmatch(text.strip())
    if match is None:
        return _parse_plain(text, may_be_hub=isinstance(value, str))
    scheme, rest = match[1].lower(), match[2]
    scheme = _ALIASES.get(scheme, scheme)
    if scheme in BUCKET_SCHEMES:
        return _parse_bucket(scheme, rest, text)
    if scheme == "hf":
        return _parse_hub(rest, text)
    if scheme in ("http", "https"):
        return _parse_http(scheme, rest, text)
    if scheme == "file":
        return _parse_file(rest, text)
    raise InvalidUri(
        f"The uri scheme {match[1]!r} is not known.",
        f"Known are {', '.join((*REMOTE_SCHEMES, 'file'))}, and paths.",
        f"Give {_EXAMPLES}.",
    )


def check_key(key: str) -> str:
    """Return ``key`` if it may name an object or folder below a store's root: relative, without empty, ``.`` or ``..`` parts, without a NUL.

    Raises `InvalidUri`. Backslashes and spaces are letters like any others here.
    """
    if "\0" in key or any(part in ("", ".", "..") for part in key.split("/")):
        raise InvalidUri(
            f"The key {key!r} does not name anything below the root.",
            "A key is relative, with single slashes between its parts and without '.' and '..'.",
            "Give the key as the listing shows it.",
        )
    return key


def _text_of(value: Any) -> str | None:
    """Return the text of a text or path object; None for anything else, bytes paths included."""
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    return text if isinstance(text, str) else None


def _after_slashes(rest: str) -> str:
    """Return what follows the slashes after the scheme: two, or one of a folded path. A third one is an empty name, not to be folded away."""
    return rest[2:] if rest.startswith("//") else rest[1:]


def _parse_bucket(scheme: str, rest: str, text: str) -> Uri:
    if scheme == "s3" and _after_slashes(rest).startswith("arn:"):
        return _parse_arn(_after_slashes(rest), text)
    bucket, _, key = _after_slashes(rest).partition("/")
    container = "container" if scheme == "az" else "bucket"
    if not bucket:
        raise InvalidUri(f"The uri {scheme}: names no {container}.", mend=f"Write {scheme}://{container}/folder.")
    place = _AZURE_PLACE.fullmatch(bucket) if scheme == "az" else None
    if place is not None:
        return Uri(scheme, _azure_place(place), _checked_key(key.rstrip("/")), text)
    if "@" in bucket or ":" in bucket:
        # Not echoed: what stands before an @ is a secret more often than not.
        raise InvalidUri(
            f"The {container} of this {scheme} uri holds '@' or ':'.",
            f"Keys, endpoints and ports do not belong into a uri; a {container} name has neither sign.",
            f"Write {scheme}://{container}/folder, and set keys and endpoint in the environment or the cloud's own configuration.",
        )
    if not _BUCKET.fullmatch(bucket):
        raise InvalidUri(
            f"{bucket!r} is not a {container} name.",
            "Such names have letters, digits, dots and dashes only.",
            f"Write {scheme}://{container}/folder.",
        )
    return Uri(scheme, bucket, _checked_key(key.rstrip("/")), text)


def _parse_arn(rest: str, text: str) -> Uri:
    """Return the uri of a bucket's or an access point's ARN; what follows it is the key. Source of the forms: Amazon S3 User Guide, "Access points" and "Policy resources"."""
    match = _ARN.fullmatch(rest)
    partition, service, region, account, kind, sign, name, key = match.groups() if match else ("",) * 8
    if service == "s3" and not region and not account and sign != ":" and _BUCKET.fullmatch(kind):
        # arn:aws:s3:::bucket/prefix; its first part of a key was taken for a name.
        below = "/".join(part for part in (name, key) if part is not None)
        return Uri("s3", kind, _checked_key(below.rstrip("/")), text)
    bucket = f"arn:{partition}:{service}:{region}:{account}:{kind}/{name}"
    if not _ACCESS_POINT.fullmatch(bucket):
        raise InvalidUri(
            f"{rest.partition('/')[0]!r} is not the ARN of a bucket or of an access point in one region.",
            "Object Lambda, Outposts and multi-region access points have protocols of their own, which are not supported.",
            "Write s3://arn:aws:s3:region:account:accesspoint/name/folder, or use a bucket or an access point's alias.",
        )
    return Uri("s3", bucket, _checked_key((key or "").rstrip("/")), text)


def arn_region(bucket: str) -> str | None:
    """Return the region of an S3 uri's ``bucket`` where it is an access point's ARN; None for a name."""
    match = _ACCESS_POINT.fullmatch(bucket)
    return match[1] if match else None


def _azure_place(match: re.Match[str]) -> str:
    """Return ``container@account`` and, where it is not the usual one, the host. Each account has two, for one and the same content."""
    host = (match[3] or "").replace(".dfs.", ".blob.", 1)
    return f"{match[1]}@{match[2]}{host.removesuffix('.blob.core.windows.net')}"


def _parse_hub(rest: str, text: str) -> Uri:
    parts = _after_slashes(rest).rstrip("/").split("/", 2)
    bucket = "/".join(parts[:2])
    if not _HUB_NAME.fullmatch(bucket):
        raise InvalidUri(
            f"{bucket!r} is not the name of a hub repository.", mend="Write hf://org/name or hf://org/name@revision."
        )
    return Uri("hf", bucket, _checked_key(parts[2]) if len(parts) == 3 else "", text)


def _parse_http(scheme: str, rest: str, text: str) -> Uri:
    try:
        parts = urlsplit(f"{scheme}://{_after_slashes(rest)}")
        host, port = parts.hostname, parts.port
    except ValueError:
        # From None: the parser quotes what it could not read, which may be a piece of a password.
        raise InvalidUri("Host or port of the URL cannot be read.", mend=f"Write {scheme}://host/folder.") from None
    if not host:
        raise InvalidUri(f"The {scheme} uri names no host.", mend=f"Write {scheme}://host/folder.")
    if parts.username is not None or parts.password is not None:
        raise InvalidUri(
            "The URL holds a user name or a password.",
            "URLs end up in logs, so credentials in them are refused.",
            f"Write {scheme}://host/folder.",
        )
    host = f"[{host}]" if ":" in host else host
    key = _checked_key(unquote(parts.path).strip("/"))
    return Uri(scheme, host if port is None else f"{host}:{port}", key, text)


def _parse_file(rest: str, text: str) -> Uri:
    if rest.startswith("//"):
        host, slash, path = rest[2:].partition("/")
        if host.lower() not in ("", "localhost") or not slash:
            raise InvalidUri(
                f"The file uri names the host {host!r}.",
                "A file uri has three slashes before its path.",
                "Write file:///folder.",
            )
        rest = "/" + path
    return _file_uri(unquote(rest), text)


def _parse_plain(text: str, *, may_be_hub: bool) -> Uri:
    if os.path.lexists(text):  # A broken link is a path, too.
        return _file_uri(text, text)
    path = text.strip() if may_be_hub else text
    if may_be_hub and _HUB_NAME.fullmatch(path):
        return Uri("hf", path, "", text)
    return _file_uri(os.path.expanduser(path), text)  # noqa: PTH111 (Path.expanduser raises for an unknown user)


def _file_uri(path: str, text: str) -> Uri:
    if "\0" in path:
        raise InvalidUri("The path holds a NUL.", "No file can be named so.", "Give another path.")
    # Neither resolved nor normalised: a link stays a link in messages, and what .. after a link means is for the system to say.
    return Uri("file", "", str(Path(path).absolute()), text)


def _checked_key(key: str) -> str:
    """Return ``key`` if it may be the key of a remote object, as the user gave it."""
    if "\\" in key:
        raise InvalidUri(
            f"The uri's key {key!r} holds a backslash.", "Keys are divided by slashes.", "Write / instead of \\."
        )
    if _CONTROL.search(key):
        raise InvalidUri(f"The uri's key {key!r} holds a NUL or another control character.", mend="Take it out.")
    if any(part in (".", "..") for part in key.split("/")):
        raise InvalidUri(
            f"The uri's key {key!r} holds a '.' or '..' part.",
            "A store has no parent folders.",
            "Write the key in full, without such parts.",
        )
    return key
