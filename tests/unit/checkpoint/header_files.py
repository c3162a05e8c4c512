"""Small files that each bend one rule of the safetensors format, and what we and the reference reader say to each.

Verdicts of the reference are those of safetensors 0.8.0; `test_header` asks the installed one again.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any

from headrace.errors import HeadraceError, InvalidHeader, TrailingBytes, TruncatedObject


@dataclass(frozen=True)
class HeaderFile:
    """One file. ``error`` and ``words`` are what we must say (None: must accept, with these tensor ``names``)."""

    name: str
    content: bytes
    error: type[HeadraceError] | None
    words: str
    names: tuple[str, ...]
    reference_accepts: bool


def tensor(shape: list[Any], start: int, stop: int, dtype: str = "F32") -> dict[str, Any]:
    """Describe one tensor as a header does."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def file_of(header: bytes | dict[str, Any] | list[Any], data: bytes = b"", *, length: int | None = None) -> bytes:
    """Build a file from a header (as JSON, or as the bytes themselves) and the tensors' bytes; ``length`` lies about the header's."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


ONE = {"a": tensor([1], 0, 4)}
_ONE_TEXT = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
_SECOND_TEXT = b'"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}'


def _good(name: str, content: bytes, *names: str) -> HeaderFile:
    return HeaderFile(name, content, None, "", names, True)


def _bad(
    name: str,
    content: bytes,
    words: str,
    error: type[HeadraceError] = InvalidHeader,
    *,
    reference_accepts: bool = False,
) -> HeaderFile:
    return HeaderFile(name, content, error, words, (), reference_accepts)


def _not_safetensors() -> list[HeaderFile]:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 123456\n"
    page = b"<html><body>AccessDenied</body></html>" * 4
    return [
        _bad("empty file", b"", "empty file"),
        _bad("seven bytes", bytes(7), "file of 7 bytes"),
        _bad(
            "git lfs pointer", pointer, "Git LFS pointer, a short text that stands for the real file of 123,456 bytes"
        ),
        _bad("zip archive", b"PK\x03\x04" + bytes(200), "zip archive"),
        _bad("html page", page, "HTML page"),
    ]


def _lengths() -> list[HeaderFile]:
    return [
        _bad("length of 2^63", struct.pack("<Q", 2**63) + b"{}", "9,223,372,036,854,775,808 bytes"),
        _bad(
            "length past the end",
            file_of(ONE, bytes(4), length=5000),
            "its length and header need 5,008.",
            TruncatedObject,
        ),
        _bad("one byte after the last tensor", file_of(ONE, bytes(5)), "1 byte after its last tensor", TrailingBytes),
        _bad("one byte short", file_of(ONE, bytes(3)), "1 byte at the end of it did not arrive", TruncatedObject),
        _good("odd header length", file_of(_ONE_TEXT + b" ", bytes(4)), "a"),
        _good("spaces after the header", file_of(_ONE_TEXT + b" " * 9, bytes(4)), "a"),
        _good("space before the header", file_of(b" " + _ONE_TEXT, bytes(4)), "a"),
    ]


def _metadata() -> list[HeaderFile]:
    return [
        _good("no tensors", file_of({})),
        _good("metadata only", file_of({"__metadata__": {"k": "v"}})),
        _good("empty metadata", file_of({"__metadata__": {}, **ONE}, bytes(4)), "a"),
        _good("null metadata", file_of({"__metadata__": None, **ONE}, bytes(4)), "a"),
        _bad("number in metadata", file_of({"__metadata__": {"n": 1}, **ONE}, bytes(4)), "'n' is a whole number"),
        _good("no metadata", file_of(ONE, bytes(4)), "a"),
    ]


def _cover() -> list[HeaderFile]:
    twice = _ONE_TEXT[:-1] + b","
    same_again = twice + _ONE_TEXT[1:]
    return [
        _bad("hole", file_of({**ONE, "b": tensor([1], 8, 12)}, bytes(12)), "4 bytes before tensor 'b'"),
        _bad("leading hole", file_of({"a": tensor([1], 4, 8)}, bytes(8)), "4 bytes before tensor 'a'"),
        _bad("overlap", file_of({"a": tensor([2], 0, 8), "b": tensor([1], 4, 8)}, bytes(8)), "'a' and 'b' overlap"),
        _bad("two names on one range", file_of({**ONE, "b": tensor([1], 0, 4)}, bytes(4)), "'a' and 'b' overlap"),
        _bad("duplicate key", file_of(twice + _SECOND_TEXT, bytes(8)), "duplicate key: 'a'"),
        _bad("duplicate key, same", file_of(same_again, bytes(4)), "duplicate key: 'a'", reference_accepts=True),
        _good("unordered header", file_of({"b": tensor([1], 4, 8), **ONE}, bytes(8)), "a", "b"),
        _good("unaligned", file_of({"a": tensor([1], 0, 1, "U8"), "b": tensor([1], 1, 5)}, bytes(5)), "a", "b"),
        _good("empty tensor first", file_of({"a": tensor([0, 4], 0, 0), "b": tensor([1], 0, 4)}, bytes(4)), "a", "b"),
        _good("empty tensor last", file_of({"b": tensor([1], 0, 4), "a": tensor([2, 0], 4, 4)}, bytes(4)), "b", "a"),
        _good("empty tensors only", file_of({"a": tensor([0], 0, 0), "b": tensor([0], 0, 0)}), "a", "b"),
        _good("scalar", file_of({"a": tensor([], 0, 4)}, bytes(4)), "a"),
    ]


def _sizes() -> list[HeaderFile]:
    return [
        _bad("shape beyond bytes", file_of({"a": tensor([1000, 1000], 0, 4)}, bytes(4)), "needs 4,000,000 bytes"),
        _bad("product overflows", file_of({"a": tensor([2**62, 4], 0, 0)}), "more values than 64 bits can count"),
        _bad("product wraps to 0", file_of({"a": tensor([2**32, 2**32], 0, 0, "U8")}), "more values than 64 bits"),
        _bad("negative offset", file_of({"a": tensor([1], -4, 0)}, bytes(4)), "negative number"),
        _bad("end before begin", file_of({"a": tensor([1], 4, 0)}, bytes(4)), "ends at 0, before it begins at 4"),
        _bad("negative dimension", file_of({"a": tensor([-1], 0, 4)}, bytes(4)), "negative number"),
        _bad("fraction as dimension", file_of({"a": tensor([1.0], 0, 4)}, bytes(4)), "a number with a fraction"),
        _bad("unknown dtype", file_of({"a": tensor([1], 0, 1, "F7_X")}, bytes(1)), "unknown dtype 'F7_X'"),
        _good("unknown field", file_of({"a": {**ONE["a"], "comment": "x"}}, bytes(4)), "a"),
        _bad("no shape", file_of({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, bytes(4)), "lacks the field shape"),
    ]


def _texts() -> list[HeaderFile]:
    nul = file_of({"a\0b": tensor([1], 0, 4)}, bytes(4))
    strange = "重み.😀/../x y%2F"
    return [
        _bad("byte order mark", file_of(b"\xef\xbb\xbf" + _ONE_TEXT, bytes(4)), "byte order mark"),
        _bad("nuls after the header", file_of(_ONE_TEXT + bytes(10), bytes(4)), "Extra data"),
        _bad("not UTF-8", file_of(_ONE_TEXT.replace(b'"a"', b'"\xff"'), bytes(4)), "not UTF-8: byte 2 of it is 0xff"),
        _bad("array as header", file_of([]), "a list, not an object"),
        _bad("nul in a name", nul, r"'a\x00b' holds a NUL", reference_accepts=True),
        _good("any script in a name", file_of({strange: tensor([1], 0, 4)}, bytes(4)), strange),
        _good("empty name", file_of({"": tensor([1], 0, 4)}, bytes(4)), ""),
        _bad("NaN", file_of(_ONE_TEXT.replace(b"[1]", b"[NaN]"), bytes(4)), "NaN, which is not JSON"),
    ]


def _dtypes() -> list[HeaderFile]:
    sizes = {
        "BOOL U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ": 1,
        "I16 U16 F16 BF16": 2,
        "I32 U32 F32": 4,
        "C64 F64 I64 U64": 8,
    }
    files = [
        _good(f"dtype {name}", file_of({"a": tensor([1], 0, size, name)}, bytes(size)), "a")
        for names, size in sizes.items()
        for name in names.split()
    ]
    files += [
        _bad(f"dtype {name}", file_of({"a": tensor([1], 0, size, name)}, bytes(size)), f"unknown dtype '{name}'")
        for name, size in (("C128", 16), ("I4", 1), ("U4", 1))
    ]
    return [
        *files,
        _good("F4, one pair", file_of({"a": tensor([2], 0, 1, "F4")}, bytes(1)), "a"),
        _bad("F4, three values", file_of({"a": tensor([3], 0, 2, "F4")}, bytes(2)), "does not fill whole bytes"),
        _good("F6, four values", file_of({"a": tensor([4], 0, 3, "F6_E2M3")}, bytes(3)), "a"),
        _good("boolean 2", file_of({"a": tensor([1], 0, 1, "BOOL")}, b"\x02"), "a"),
    ]


HEADER_FILES = (
    *_not_safetensors(),
    *_lengths(),
    *_metadata(),
    *_cover(),
    *_sizes(),
    *_texts(),
    *_dtypes(),
)
"""The 74 files that the reference reader's verdict is known for."""


def _described(text: bytes, data: bytes = bytes(4)) -> bytes:
    """A file with one tensor ``a`` that is described by ``text``."""
    return file_of(b'{"a":' + text + b"}", data)


def _nested(depth: int) -> bytes:
    return b'{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":' + b"[" * depth + b"]" * depth + b"}"


MORE_FILES = (
    _bad("pickle", b"\x80\x04\x95" + bytes(20) + b"builtins", "Python pickle"),
    _bad("gzip", b"\x1f\x8b\x08\x00" + b"\x11" * 40, "gzip-compressed"),
    _bad("xml answer", b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "XML document"),
    _bad("gguf", b"GGUF\x03\x00\x00\x00" + bytes(64), "GGUF"),
    _bad("json answer", b'{"error": "not found", "status": 404}', "JSON document"),
    _bad("zeros", bytes(4096), "begins with zeros"),
    _bad("short zip", b"PK\x03\x04", "zip archive"),
    _bad("header of one byte", file_of(b"{"), "not valid JSON"),
    _bad("header of no bytes", file_of(b""), "begins with zeros"),
    _bad("cut in the header", file_of(ONE, bytes(4))[:30], "its length and header need", TruncatedObject),
    _bad("cut in the second tensor", file_of({**ONE, "b": tensor([2], 4, 12)}, bytes(9)), "3 bytes at the end", TruncatedObject),
    _bad("bool as dimension", file_of({"a": tensor([True], 0, 4)}, bytes(4)), "true where a whole number"),
    _bad("minus zero", _described(b'{"dtype":"F32","shape":[1],"data_offsets":[-0,4]}'), "a whole number is due"),
    _bad("exponent", _described(b'{"dtype":"F32","shape":[1e0],"data_offsets":[0,4]}'), "a whole number is due"),
    _bad("three offsets", _described(b'{"dtype":"F32","shape":[1],"data_offsets":[0,4,4]}'), "3 numbers"),
    _bad("one offset", _described(b'{"dtype":"F32","shape":[1],"data_offsets":[4]}'), "1 numbers"),
    _bad("shape is a number", _described(b'{"dtype":"F32","shape":1,"data_offsets":[0,4]}'), "a list of whole numbers"),
    _bad("offsets are null", _described(b'{"dtype":"F32","shape":[1],"data_offsets":null}'), "null where a list"),
    _bad("dtype is a number", _described(b'{"dtype":32,"shape":[1],"data_offsets":[0,4]}'), "dtype a whole number"),
    _bad("lower-case dtype", _described(b'{"dtype":"f32","shape":[1],"data_offsets":[0,4]}'), "unknown dtype 'f32'"),
    _bad("tensor is null", _described(b"null"), "described by null"),
    _bad("tensor is a list", _described(b'["F32",[1],[0,4]]'), "described by a list", reference_accepts=True),
    _bad(
        "duplicate field",
        _described(b'{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}'),
        "duplicate key: 'dtype'",
    ),
    _bad("duplicate metadata", file_of(b'{"__metadata__":{},"__metadata__":{}}'), "duplicate key: '__metadata__'"),
    _bad("metadata is a list", file_of({"__metadata__": ["x"], **ONE}, bytes(4)), "__metadata__ is a list"),
    _bad("metadata value is null", file_of({"__metadata__": {"k": None}, **ONE}, bytes(4)), "'k' is null"),
    _bad("metadata is empty text", file_of({"__metadata__": "", **ONE}, bytes(4)), "__metadata__ is text"),
    _bad("metadata is false", file_of({"__metadata__": False, **ONE}, bytes(4)), "__metadata__ is false"),
    _bad("half a pair in a name", file_of(_ONE_TEXT.replace(b'"a"', b'"\\ud800"'), bytes(4)), "half a surrogate pair"),
    _bad("overflow before a 0", file_of({"a": tensor([2**62, 4, 0], 0, 0)}), "more values than 64 bits can count"),
    _bad("bits overflow", file_of({"a": tensor([2**62], 0, 0)}), "more values than 64 bits can count"),
    _bad(
        "dimension beyond 63 bits", file_of({"a": tensor([0, 2**63], 0, 0)}), "beyond 63 bits", reference_accepts=True
    ),
    _bad("dimension of a hundred digits", file_of({"a": tensor([10**99], 0, 0)}), "beyond 63 bits"),
    _bad("dimension of 5,000 digits", _described(b'{"shape":[' + b"9" * 5000 + b"]}"), "5,000 digits"),
    _bad("offsets of 2^60", file_of({"a": tensor([2**58], 0, 2**60, "F32")}), "did not arrive", TruncatedObject),
    _bad("empty tensor within another", file_of({"a": tensor([2], 0, 8), "b": tensor([0], 4, 4)}, bytes(8)), "overlap"),
    _bad("deeply nested header", file_of(b"[" * 200_000), "nested too deeply"),
    _bad("deeply nested field", _described(_nested(200)), "nested too deeply"),
    _good("nested field", _described(_nested(20)), "a"),
    _bad("huge fraction", _described(b'{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1e999}'), "too large"),
    _bad("delete in a name", file_of({"a\x7f": ONE["a"]}, bytes(4)), "control character", reference_accepts=True),
    _bad("next line in a name", file_of({"a\x85": ONE["a"]}, bytes(4)), "control character", reference_accepts=True),
    _bad("raw newline in a name", file_of(_ONE_TEXT.replace(b'"a"', b'"a\n"'), bytes(4)), "not valid JSON"),
    _bad("comment", file_of(b"/**/" + _ONE_TEXT, bytes(4)), "not valid JSON"),
    _bad("two documents", file_of(_ONE_TEXT + b"{}", bytes(4)), "Extra data"),
    _bad("F4 rows that share a byte", file_of({"a": tensor([2, 3], 0, 3, "F4")}, bytes(3)), "odd last dimension", reference_accepts=True),
    _bad("F4 scalar", file_of({"a": tensor([], 0, 1, "F4")}, bytes(1)), "does not fill whole bytes"),
    _good("F4 matrix", file_of({"a": tensor([2, 8], 0, 8, "F4")}, bytes(8)), "a"),
    _good("line breaks around", file_of(b"\n\t\r " + _ONE_TEXT + b"\n\t\r ", bytes(4)), "a"),
    # The first bytes of these good files are those of a pickle and of a gzip stream: only a failed header may be taken for one.
    _good("length that looks like a pickle", file_of(_ONE_TEXT.ljust(0x0480), bytes(4)), "a"),
    _good("length that looks like gzip", file_of(_ONE_TEXT.ljust(0x8B1F), bytes(4)), "a"),
    _good("length that looks like markup", file_of(_ONE_TEXT.ljust(0x3C), bytes(4)), "a"),
)  # fmt: skip
"""More of the same kinds."""
