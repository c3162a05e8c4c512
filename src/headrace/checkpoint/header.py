"""The header of one safetensors file: from bytes to entries. Pure; reads nothing itself.

A file is 8 bytes (little endian, N), N bytes of JSON, and the tensors' bytes one after the other without a hole. Rules and limits are those of the
safetensors 0.8 reader, so that nothing loads here that it would refuse. Stricter than it are: two equal keys are refused even if they agree; control
characters in names, entries that are not objects, dimensions beyond 63 bits, and an F4 tensor whose last dimension is odd.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.checkpoint.dtypes import DTYPES, StoredDtype
from headrace.checkpoint.entry import Entry
from headrace.checkpoint.sniff import recognise
from headrace.checkpoint.strictjson import parse_strictly
from headrace.checkpoint.wording import counted, quoted
from headrace.errors import InvalidHeader, TrailingBytes, TruncatedObject

LENGTH_BYTES = 8
"""Size of the number at the start of a file."""

LONGEST_HEADER_BYTES = 100_000_000
"""The reference reader's limit on N."""

METADATA_KEY = "__metadata__"
"""The reserved key; no tensor can be named so."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_WORD = 1 << 64
_LONGEST_DIMENSION = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class ParsedHeader:
    """What a header says: entries by offset, which cover ``data_start`` to the end of the file exactly once, and free text."""

    file: str
    data_start: int
    entries: tuple[Entry, ...]
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Source:
    """Which file is being read, for messages."""

    file: str
    size_bytes: int
    uri: str

    @property
    def inspect(self) -> str:
        return f"Upload it again, or check it with: headrace inspect {self.uri}"

    def invalid(self, why: str) -> InvalidHeader:
        return InvalidHeader(f"The header of {self.file} is not valid.", why, self.inspect)


def header_stop(raw: bytes, file: str, file_size: int, *, uri: str | None = None) -> int:
    """Return where the header ends and the tensors' bytes begin. ``raw`` is the file's start, 512 bytes of it or all.

    Raises `InvalidHeader` where the file is empty, something else than safetensors or has an impossible length, and `TruncatedObject` where it ends
    within its header. ``uri`` (default: ``file``) is what messages tell the user to inspect.
    """
    source = _Source(file, file_size, uri or file)
    if file_size < LENGTH_BYTES or len(raw) < LENGTH_BYTES:
        _refuse_other_formats(raw, source)
        why = "A safetensors file has at least 8 bytes and its header; the upload did not finish."
        raise InvalidHeader(f"{file} is a file of {file_size:,} bytes.", why, source.inspect)
    length = int.from_bytes(raw[:LENGTH_BYTES], "little")
    plausible = _begins_like_a_header(raw)
    if length > LONGEST_HEADER_BYTES or length < 2 or not plausible:
        _refuse_other_formats(raw, source)
    if length > LONGEST_HEADER_BYTES:
        raise source.invalid(f"Its length says {length:,} bytes; the format allows {LONGEST_HEADER_BYTES:,} at most.")
    if LENGTH_BYTES + length > file_size:
        # Text and archives give any number; what starts like a header is one that was cut.
        if not plausible:
            raise source.invalid(f"Its length says {length:,} bytes, the file has {file_size:,}, and it is not JSON.")
        raise _truncated(source, LENGTH_BYTES + length, "its length and header need")
    return LENGTH_BYTES + length


def parse_header(raw: bytes, file: str, file_size: int, *, uri: str | None = None) -> ParsedHeader:
    """Return what the header in ``raw`` says; ``raw`` starts with the file's first byte and reaches to the header's end or beyond.

    ``file`` is the object's key and becomes `Entry.file`; ``file_size`` is the whole object's size in bytes. Raises `InvalidHeader` for a broken
    rule, `TruncatedObject` where the file is shorter than its header needs, and `TrailingBytes` where it is longer.
    """
    source = _Source(file, file_size, uri or file)
    data_start = header_stop(raw, file, file_size, uri=uri)
    if len(raw) < data_start:
        raise _truncated(source, data_start, "its length and header need", have=len(raw))
    try:
        content = parse_strictly(raw[LENGTH_BYTES:data_start])
    except ValueError as error:
        raise source.invalid(str(error)) from error
    if not isinstance(content, dict):
        raise source.invalid(f"It is {_kind(content)}, not an object.")
    metadata = _metadata(content.pop(METADATA_KEY, None), source)
    entries = [_entry(name, described, data_start, source) for name, described in content.items()]
    # Sorting is stable: empty tensors at one place keep the header's order, and come before the one that has bytes there.
    entries.sort(key=lambda entry: (entry.start, entry.stop))
    _check_cover(entries, data_start, source)
    return ParsedHeader(file, data_start, tuple(entries), metadata)


def _begins_like_a_header(raw: bytes) -> bool:
    return raw[LENGTH_BYTES : LENGTH_BYTES + 64].lstrip(b" \t\r\n")[:1] in (b"{", b"")


def _refuse_other_formats(raw: bytes, source: _Source) -> None:
    recognised = recognise(raw)
    if recognised is not None:
        what = f"{source.file} is not a safetensors file: it {recognised.what}."
        raise InvalidHeader(what, mend=f"{recognised.mend} Check with: headrace inspect {source.uri}")


def _truncated(source: _Source, want: int, needs: str, *, have: int | None = None) -> TruncatedObject:
    have = source.size_bytes if have is None else have
    return TruncatedObject(
        f"{source.file} is {have:,} bytes; {needs} {want:,}.",
        f"The upload was cut: {counted(want - have, 'byte')} at the end of it did not arrive.",
        source.inspect,
    )


def _metadata(value: Any, source: _Source) -> Mapping[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise source.invalid(f"{METADATA_KEY} is {_kind(value)}, not an object.")
    for key, text in value.items():
        if not isinstance(text, str):
            raise source.invalid(f"{METADATA_KEY} may hold text only; {quoted(key)} is {_kind(text)}.")
    return value


def _entry(name: str, described: Any, data_start: int, source: _Source) -> Entry:
    if _CONTROL.search(name):
        raise source.invalid(f"The tensor name {quoted(name)} holds a NUL or another control character.")
    if not isinstance(described, dict):
        raise source.invalid(f"Tensor {quoted(name)} is described by {_kind(described)}, not by an object.")
    missing = [field for field in ("dtype", "shape", "data_offsets") if field not in described]
    if missing:
        raise source.invalid(f"Tensor {quoted(name)} lacks the field {', '.join(missing)}.")
    dtype = described["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        shown = quoted(dtype) if isinstance(dtype, str) else _kind(dtype)
        raise source.invalid(f"Tensor {quoted(name)} has the unknown dtype {shown}. Known are {', '.join(DTYPES)}.")
    shape = _whole_numbers(described["shape"], f"The shape of tensor {quoted(name)}", source)
    offsets = _whole_numbers(described["data_offsets"], f"data_offsets of tensor {quoted(name)}", source)
    if len(offsets) != 2:
        raise source.invalid(f"data_offsets of tensor {quoted(name)} are {len(offsets)} numbers, not begin and end.")
    start, stop = offsets
    if stop < start:
        raise source.invalid(f"Tensor {quoted(name)} ends at {stop:,}, before it begins at {start:,}.")
    _check_size(name, DTYPES[dtype], shape, stop - start, source)
    return Entry(name, dtype, shape, source.file, data_start + start, data_start + stop)


def _whole_numbers(value: Any, what: str, source: _Source) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise source.invalid(f"{what}: {_kind(value)} where a list of whole numbers is due.")
    for number in value:
        if type(number) is not int:  # bool is a kind of int, and no number here
            raise source.invalid(f"{what}: {_kind(number)} where a whole number is due.")
        if number < 0:
            raise source.invalid(f"{what}: a negative number.")
        if number > _LONGEST_DIMENSION:
            raise source.invalid(f"{what}: a number beyond 63 bits.")
    return tuple(value)


def _check_size(name: str, dtype: StoredDtype, shape: tuple[int, ...], have: int, source: _Source) -> None:
    # The reference multiplies in 64 bits from the left and refuses on overflow, even where a later dimension is 0. An earlier 0 does not help either:
    # torch multiplies the others for its strides.
    product = 1
    for dimension in shape:
        product *= dimension or 1
        if product >= _WORD:
            break
    if product * dtype.bits >= _WORD:
        raise source.invalid(f"The shape of tensor {quoted(name)} has more values than 64 bits can count.")
    want = dtype.size_bytes(shape)
    if want is None or (dtype.packed > 1 and dtype.torch_shape(shape) is None):
        why = (
            "does not fill whole bytes" if want is None else "has an odd last dimension, so a byte would span two rows"
        )
        raise source.invalid(f"Tensor {quoted(name)} of dtype {dtype.name} and shape {_shape(shape)} {why}.")
    if want != have:
        raise source.invalid(
            f"Tensor {quoted(name)} of dtype {dtype.name} and shape {_shape(shape)} needs {want:,} bytes; its data_offsets span {have:,}."
        )


def _check_cover(entries: list[Entry], data_start: int, source: _Source) -> None:
    """Every byte after the header belongs to exactly one tensor, to the last byte of the file."""
    position, last = data_start, ""
    for entry in entries:
        if entry.start > position:
            hole = f"{entry.start - position:,} bytes before tensor {quoted(entry.name)} belong to no tensor"
            raise source.invalid(f"There is a hole: {hole}.")
        if entry.start < position:
            raise source.invalid(f"Tensors {quoted(last)} and {quoted(entry.name)} overlap.")
        position, last = entry.stop, entry.name
    if position > source.size_bytes:
        raise _truncated(source, position, "its header needs")
    if position < source.size_bytes:
        extra = source.size_bytes - position
        raise TrailingBytes(
            f"{source.file} has {counted(extra, 'byte')} after its last tensor.",
            f"Its header needs {position:,} bytes, the file is {source.size_bytes:,}; what follows could be anything.",
            source.inspect,
        )


def _shape(shape: tuple[int, ...]) -> str:
    shown = ", ".join(str(dimension) for dimension in shape[:8])
    return f"[{shown}, …]" if len(shape) > 8 else f"[{shown}]"


def _kind(value: Any) -> str:
    """Name the JSON kind of ``value`` without repeating it: it may be huge."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return "a whole number"
    if isinstance(value, float):
        return "a number with a fraction or exponent"
    return {"str": "text", "list": "a list"}.get(type(value).__name__, "an object")
