from __future__ import annotations

import json
import pickle
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.checkpoint.dtypes import DTYPES
from headrace.checkpoint.header import LONGEST_HEADER_BYTES, parse_header
from headrace.errors import HeadraceError, InvalidHeader, TrailingBytes, TruncatedObject

from .header_files import HEADER_FILES, MORE_FILES, ONE, HeaderFile, file_of, tensor

ALL_FILES = (*HEADER_FILES, *MORE_FILES)
each_file = pytest.mark.parametrize("case", ALL_FILES, ids=lambda case: case.name)


def test_the_reference_table_is_whole() -> None:
    assert len(HEADER_FILES) == 74
    assert len({case.name for case in ALL_FILES}) == len(ALL_FILES)


@each_file
def test_verdict(case: HeaderFile) -> None:
    if case.error is None:
        parsed = parse_header(case.content, "m.safetensors", len(case.content))
        assert tuple(entry.name for entry in parsed.entries) == case.names
        return
    with pytest.raises(HeadraceError) as caught:
        parse_header(case.content, "m.safetensors", len(case.content), uri="s3://bucket/m.safetensors")
    assert type(caught.value) is case.error
    assert case.words in str(caught.value)
    assert "m.safetensors" in caught.value.what
    assert "headrace inspect s3://bucket/m.safetensors" in caught.value.mend
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert len(str(caught.value)) < 1000


@each_file
def test_never_more_lenient_than_the_reference(case: HeaderFile) -> None:
    reference = pytest.importorskip("safetensors")
    accepts = reference_accepts(reference, case.content)
    assert accepts is case.reference_accepts
    assert accepts or case.error is not None


def reference_accepts(reference: object, content: bytes) -> bool:
    try:
        reference.deserialize(content)  # type: ignore[attr-defined]
    except Exception:
        return False
    return True


def test_entries_are_absolute_and_by_offset() -> None:
    header = {"b": tensor([2, 3], 4, 16, "BF16"), "__metadata__": {"format": "pt"}, **ONE}
    content = file_of(header, bytes(16))
    parsed = parse_header(content + b"more, as a first read brings", "sub/m.safetensors", len(content))
    first, second = parsed.entries
    assert parsed.data_start == len(content) - 16
    assert (first.name, first.dtype, first.shape, first.file) == ("a", "F32", (1,), "sub/m.safetensors")
    assert (first.start, first.stop) == (parsed.data_start, parsed.data_start + 4)
    assert (second.name, second.dtype, second.shape) == ("b", "BF16", (2, 3))
    assert (second.start, second.stop, second.size_bytes) == (first.stop, len(content), 12)
    assert parsed.metadata == {"format": "pt"}


def test_entries_beyond_32_bits() -> None:
    size = 3 << 32
    header = file_of({"a": tensor([size], 0, size, "U8"), "b": tensor([1], size, size + 4)})
    parsed = parse_header(header, "m.safetensors", len(header) + size + 4)
    assert [entry.size_bytes for entry in parsed.entries] == [size, 4]
    with pytest.raises(TruncatedObject, match="12,884,902,061"):
        parse_header(header, "m.safetensors", len(header) + size + 3)


def test_sizes_of_a_cut_file_are_named() -> None:
    content = file_of({**ONE, "b": tensor([4], 4, 20)}, bytes(20))
    with pytest.raises(TruncatedObject) as caught:
        parse_header(content, "m.safetensors", len(content) - 7)
    assert f"{len(content) - 7:,} bytes" in caught.value.what
    assert f"its header needs {len(content):,}" in caught.value.what
    assert "7 bytes at the end of it did not arrive" in caught.value.why


def test_extra_bytes_are_counted() -> None:
    content = file_of(ONE, bytes(4))
    with pytest.raises(TrailingBytes, match="has 1,000 bytes after its last tensor"):
        parse_header(content, "m.safetensors", len(content) + 1000)


def test_header_length_limit_is_the_reference_s() -> None:
    start = struct.pack("<Q", LONGEST_HEADER_BYTES + 1) + b"{" + b" " * 600
    with pytest.raises(InvalidHeader, match="100,000,001 bytes; the format allows 100,000,000"):
        parse_header(start, "m.safetensors", 1 << 40)
    start = struct.pack("<Q", LONGEST_HEADER_BYTES) + b"{" + b" " * 600
    with pytest.raises(TruncatedObject):
        parse_header(start, "m.safetensors", LONGEST_HEADER_BYTES)


def test_names_in_messages_are_escaped_and_cut() -> None:
    with pytest.raises(InvalidHeader) as caught:
        parse_header(content := file_of({"\x1b[31m\0" + "n" * 5000: ONE["a"]}, bytes(4)), "m.safetensors", len(content))
    assert "\x1b" not in str(caught.value)
    assert r"\x1b[31m\x00" in str(caught.value)
    assert len(str(caught.value)) < 500


@st.composite
def good_files(draw: st.DrawFn) -> tuple[bytes, int]:
    """A valid file, with its header in any order, and how many tensor bytes it has."""
    described = {}
    position = 0
    for name in draw(st.lists(st.text("abc.é😀", max_size=4), max_size=6, unique=True)):
        dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
        # Four values fill whole bytes in every type.
        shape = [*draw(st.lists(st.integers(0, 3), max_size=3)), 4] if dtype.bits < 8 or draw(st.booleans()) else []
        size = dtype.size_bytes(shape)
        assert size is not None
        described[name] = tensor(shape, position, position + size, dtype.name)
        position += size
    names = draw(st.permutations(sorted(described)))
    header = json.dumps({name: described[name] for name in names}, ensure_ascii=draw(st.booleans()))
    return file_of(header.encode() + b" " * draw(st.integers(0, 9)), bytes(position)), position


@settings(deadline=None)
@given(good_files())
def test_every_byte_of_a_good_file_is_covered_once(made: tuple[bytes, int]) -> None:
    content, num_bytes = made
    parsed = parse_header(content, "m.safetensors", len(content))
    position = parsed.data_start
    for entry in parsed.entries:
        assert entry.start == position
        position = entry.stop
    assert position == len(content) == parsed.data_start + num_bytes


@settings(max_examples=400, deadline=None)
@given(good_files(), st.data())
def test_a_changed_file_is_refused_or_agreed_on(made: tuple[bytes, int], data: st.DataObject) -> None:
    reference = pytest.importorskip("safetensors")
    content = bytearray(made[0])
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place : place + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
        if not content:
            break
    changed = bytes(content)
    try:
        parse_header(changed, "m.safetensors", len(changed))
    except HeadraceError:
        return
    assert reference_accepts(reference, changed)


TOKENS = [
    b"{", b"}", b"[", b"]", b",", b":", b'"a"', b'"dtype"', b'"shape"', b'"data_offsets"', b'"F32"', b'"U8"', b"0", b"1", b"4",
    b"-1", b"-0", b"1.0", b"1e400", b"true", b"null", b"NaN", b'"\\ud800"', b'"\\u0000"', b"\xff", b" ", b'"__metadata__"',
    b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}', b'"b":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}',
]  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(TOKENS), max_size=12), st.binary(max_size=3))
def test_any_header_is_refused_or_agreed_on(tokens: list[bytes], data: bytes) -> None:
    reference = pytest.importorskip("safetensors")
    content = file_of(b"{" + b"".join(tokens) + b"}", data)
    try:
        parse_header(content, "m.safetensors", len(content))
    except HeadraceError:
        return
    assert reference_accepts(reference, content)


@settings(deadline=None)
@given(st.binary(max_size=80), st.integers(0, 200))
def test_any_bytes_raise_nothing_else(content: bytes, file_size: int) -> None:
    try:
        parsed = parse_header(content, "m.safetensors", file_size)
    except HeadraceError as error:
        assert "m.safetensors" in error.what
    else:
        assert parsed.data_start <= file_size
