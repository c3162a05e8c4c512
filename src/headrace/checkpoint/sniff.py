"""What a file is that is not safetensors. Pure: looks at the first bytes, and only after they failed as a header.

Only after: ``80 04 00 …`` is how a pickle starts, and also how a good file starts whose header has 1,152 bytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Recognised:
    """What the bytes look like (``is a …``) and how to get to the weights: a full sentence."""

    what: str
    mend: str


_CONVERT = "Nothing pickled is ever loaded, since unpickling runs code. Convert it to safetensors where you trust it."
_DOWNLOAD = "Look at its first lines, then upload the real file."
_LFS = re.compile(rb"version https?://(?:git-lfs|hawser)\.")
_LFS_SIZE = re.compile(rb"^size (\d{1,18})\s*$", re.MULTILINE)

_MAGIC = (
    (b"PK\x03\x04", "is a zip archive, as PyTorch writes for .bin, .pt and .ckpt files", _CONVERT),
    (b"PK\x05\x06", "is an empty zip archive", _CONVERT),
    (b"\x1f\x8b", "is gzip-compressed", "Uncompress it and upload it again, without a Content-Encoding."),
    (b"\x28\xb5\x2f\xfd", "is zstd-compressed", "Uncompress it and upload it again."),
    (b"GGUF", "is a GGUF file", "Use the safetensors files of the same model."),
    (b"\x89HDF", "is an HDF5 file", "Use the safetensors files of the same model."),
    (b"\x93NUMPY", "is a NumPy file", "Convert it to safetensors."),
)


def recognise(start: bytes) -> Recognised | None:
    """Return what a file that begins with ``start`` (at least its first 512 bytes, or all) looks like; None if like nothing known."""
    if not start:
        return Recognised("is an empty file", "The upload did not finish; upload it again.")
    if _LFS.match(start):
        return _lfs_pointer(start)
    for magic, what, mend in _MAGIC:
        if start.startswith(magic):
            return Recognised(what, mend)
    if start[0] == 0x80 and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return Recognised("is a Python pickle", _CONVERT)
    return _text(start) or _zeros(start)


def _lfs_pointer(start: bytes) -> Recognised:
    size = _LFS_SIZE.search(start)
    real = f" of {int(size[1]):,} bytes" if size else ""
    return Recognised(
        f"is a Git LFS pointer, a short text that stands for the real file{real}",
        "Fetch the real file with `git lfs pull` and upload that.",
    )


def _text(start: bytes) -> Recognised | None:
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if text.startswith((b"<html", b"<!doctype html")):
        return Recognised("is an HTML page, such as a proxy or a login page answers with", _DOWNLOAD)
    if text.startswith((b"<?xml", b"<error")):
        return Recognised("is an XML document, such as a store's error answer", _DOWNLOAD)
    if text.startswith(b"<"):
        return Recognised("is a page of markup", _DOWNLOAD)
    if text.startswith((b'{"', b"{}", b"{\n", b"{ ", b"[")):
        return Recognised("is a JSON document, such as an error answer or an index", _DOWNLOAD)
    return None


def _zeros(start: bytes) -> Recognised | None:
    if len(start) >= 8 and not any(start):
        return Recognised(
            "begins with zeros, as a file does whose space was reserved and never filled",
            "The download or upload did not finish; do it again.",
        )
    return None
