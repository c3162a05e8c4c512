from __future__ import annotations

import gzip
import io
import pickle
import zipfile

import pytest

from headrace.checkpoint.sniff import recognise


def zipped() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", "x")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (b"", "empty file"),
        (zipped(), "zip archive"),
        *[(pickle.dumps({"a": 1}, protocol=protocol), "Python pickle") for protocol in (2, 3, 4, 5)],
        (gzip.compress(b"x"), "gzip-compressed"),
        (b"\x28\xb5\x2f\xfd\x00", "zstd-compressed"),
        (b"GGUF\x03\0\0\0", "GGUF"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "Git LFS pointer"),
        (b"version https://hawser.github.com/spec/v1\n", "Git LFS pointer"),
        (b"  <!DOCTYPE HTML><html>", "HTML page"),
        (b"\xef\xbb\xbf<html>", "HTML page"),
        (b"<?xml version='1.0'?>", "XML document"),
        (b"<Error><Code>NoSuchKey</Code></Error>", "XML document"),
        (b"<svg>", "markup"),
        (b'{"error": 1}', "JSON document"),
        (b"[1]", "JSON document"),
        (bytes(512), "zeros"),
    ],
)
def test_recognised(start: bytes, words: str) -> None:
    recognised = recognise(start)
    assert recognised is not None
    assert words in recognised.what
    assert recognised.what.startswith(("is ", "begins "))
    assert recognised.mend.endswith(".")


@pytest.mark.parametrize(
    "start", [b"\x08\0\0\0\0\0\0\0{}      ", bytes(7), b"version 5 of a text", b"\x80\x01\x02", b"P"]
)
def test_not_recognised(start: bytes) -> None:
    assert recognise(start) is None


def test_the_size_that_a_pointer_stands_for_is_named() -> None:
    recognised = recognise(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4976698672\n")
    assert recognised is not None
    assert "4,976,698,672 bytes" in recognised.what
