"""A pool of files in which equal tensors are kept once, compressed: many checkpoints of the same model in the space of one or two.

A pool is a folder with ``index.json`` and some ``NAME.xz``. Each ``NAME.xz`` is a stream: pieces of files one after the other, as LZMA2 in the xz container. The tensors of one
dtype share a stream; ``text`` is for everything else. ``index.json`` says of each stream how long it is, and of each file its SHA-256 and the pieces that it is made of:
``[stream, start, stop, …]``, in bytes of the stream. A safetensors file is its header (length and padding included) and then its tensors in the order in which they lie.
Some tools write float32 that came from bfloat16: the pieces of such a tensor are of ``BF16>F32``, which is the stream ``BF16`` with two zero bytes before every two.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

INDEX = "index.json"
TEXT = "text"
WIDENED = "BF16>F32"

_WIDTH_BITS = {"F16": 1, "BF16": 1, "F32": 2, "I32": 2, "I64": 3}
"""Of the dtypes that have more than one byte: log2 of their size. LZMA then expects a pattern that repeats with it."""


class FilePool:
    """A pool that was written. Streams are decompressed when they are first needed, and stay."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._index: dict[str, Any] = json.loads((folder / INDEX).read_text())
        self._streams: dict[str, bytes] = {}

    def names(self) -> list[str]:
        """Return the paths of all files, in order."""
        return list(self._index["files"])

    def read(self, name: str) -> bytes:
        """Return the content of one file, after checking it against its SHA-256. Raises KeyError where there is none of that name."""
        sha256, pieces = self._index["files"][name]
        content = b"".join(self._piece(stream, start, stop) for stream, start, stop in _triples(pieces))
        if hashlib.sha256(content).hexdigest() != sha256:
            raise ValueError(f"{name} of the pool in {self._folder} is not what was stored")
        return content

    def extract(self, name: str, folder: Path) -> None:
        """Write one file to its place under ``folder``."""
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.read(name))

    def _piece(self, stream: str, start: int, stop: int) -> bytes:
        if stream == WIDENED:
            return _widened(self._stream("BF16")[start:stop])
        return self._stream(stream)[start:stop]

    def _stream(self, name: str) -> bytes:
        if name not in self._streams:
            content = lzma.decompress((self._folder / f"{name}.xz").read_bytes())
            if len(content) != self._index["streams"][name]:
                raise ValueError(f"{name}.xz of the pool in {self._folder} has another length than its index says")
            self._streams[name] = content
        return self._streams[name]


def write_pool(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write ``files`` (paths with ``/`` to contents) as a pool into ``folder``. The same files give the same bytes with the same version of liblzma."""
    streams: dict[str, bytearray] = {}
    places: dict[tuple[str, str], tuple[int, int]] = {}
    lines = {}
    for name, content in files.items():
        assert not PurePosixPath(name).is_absolute()
        pieces: list[Any] = []
        for kind, piece in _cut(name, content):
            stream = "BF16" if kind == WIDENED else kind
            target = streams.setdefault(stream, bytearray())
            key = (stream, hashlib.sha256(piece).hexdigest())
            if key not in places:
                places[key] = (len(target), len(target) + len(piece))
                target += piece
            _append(pieces, kind, *places[key])
        lines[name] = [hashlib.sha256(content).hexdigest(), pieces]
    folder.mkdir(parents=True, exist_ok=True)
    for stream, joined in streams.items():
        (folder / f"{stream}.xz").write_bytes(lzma.compress(bytes(joined), filters=[_filter(stream)]))
    _write_index(folder / INDEX, {stream: len(joined) for stream, joined in streams.items()}, lines)


def _cut(name: str, content: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the pieces of a file, each with the stream that it belongs to."""
    if not name.endswith(".safetensors"):
        yield TEXT, content
        return
    body = 8 + int.from_bytes(content[:8], "little")
    yield TEXT, content[:body]
    header = json.loads(content[8:body])
    header.pop("__metadata__", None)
    at = 0
    for entry in sorted(header.values(), key=lambda entry: entry["data_offsets"]):
        start, stop = entry["data_offsets"]
        assert start == at, f"{name} has a hole or an overlap at byte {at} of its body"
        piece = content[body + start : body + stop]
        is_widened = entry["dtype"] == "F32" and stop > start and _widened(_narrowed(piece)) == piece
        yield (WIDENED, _narrowed(piece)) if is_widened else (entry["dtype"], piece)
        at = stop
    assert body + at == len(content), f"{name} has bytes after its last tensor"


def _widened(bfloat16: bytes) -> bytes:
    """Return bfloat16 values, little-endian, as float32."""
    content = bytearray(2 * len(bfloat16))
    content[2::4], content[3::4] = bfloat16[::2], bfloat16[1::2]
    return bytes(content)


def _narrowed(float32: bytes) -> bytes:
    """Return the upper halves of float32 values, little-endian."""
    content = bytearray(len(float32) // 2)
    content[::2], content[1::2] = float32[2::4], float32[3::4]
    return bytes(content)


def _append(pieces: list[Any], stream: str, start: int, stop: int) -> None:
    if start == stop:
        return
    if pieces and pieces[-3] == stream and pieces[-1] == start:
        pieces[-1] = stop
    else:
        pieces += (stream, start, stop)


def _triples(pieces: list[Any]) -> Iterator[tuple[str, int, int]]:
    return zip(pieces[::3], pieces[1::3], pieces[2::3], strict=True)


def _filter(stream: str) -> dict[str, int]:
    bits = _WIDTH_BITS.get(stream, 0)
    # The defaults (lc 3) suit text and bytes. lc + lp may be 4 at most.
    context = 0 if bits else 3
    dictionary_bytes = 1 << 25  # longer than every stream so far, so that a tensor finds its likes in all checkpoints
    return {
        "id": lzma.FILTER_LZMA2,
        "preset": 9 | lzma.PRESET_EXTREME,
        "dict_size": dictionary_bytes,
        "lc": context,
        "lp": bits,
        "pb": bits,
    }


def _write_index(path: Path, streams: Mapping[str, int], files: Mapping[str, Any]) -> None:
    """Write it with one line for each file: what changed can then be read in a diff."""
    lines = ",\n".join(f"{json.dumps(name)}:{json.dumps(line, separators=(',', ':'))}" for name, line in files.items())
    path.write_text(f'{{"streams":{json.dumps(dict(streams))},\n"files":{{\n{lines}\n}}}}\n')
