from __future__ import annotations

import json
import pickle

import pytest

from headrace.checkpoint.index import parse_index
from headrace.checkpoint.keys import natural_order, unsafe_reason
from headrace.errors import InvalidIndex

KEY = "model.safetensors.index.json"


def index_of(weight_map: object) -> bytes:
    return json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}).encode()


def test_names_and_files() -> None:
    weight_map = {"b": "m-10.safetensors", "a": "m-9.safetensors", "c": "sub/x.safetensors", "d": "m-9.safetensors"}
    parsed = parse_index(index_of(weight_map), KEY)
    assert dict(parsed.weight_map) == weight_map
    assert parsed.files == ("m-9.safetensors", "m-10.safetensors", "sub/x.safetensors")
    assert parsed.folders == ("sub",)


def test_files_are_relative_to_the_folder_of_the_index() -> None:
    parsed = parse_index(index_of({"a": "x.safetensors"}), f"talker/{KEY}")
    assert parsed.files == ("talker/x.safetensors",)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("../../x.safetensors", "'..' part"),
        ("a/../x.safetensors", "'..' part"),
        ("./x.safetensors", "'.' part"),
        ("/etc/x.safetensors", "absolute path"),
        ("a//x.safetensors", "empty part"),
        ("s3://other/x.safetensors", "empty part"),
        ("x\0.safetensors", "NUL"),
        ("x\n.safetensors", "control character"),
        ("..\\x.safetensors", "backslash"),
        ("", "is empty"),
        ("x.bin", "not a .safetensors file"),
        ("x.safetensors/", "empty part"),
        (5, "not text"),
        (None, "not text"),
        (["x.safetensors"], "not text"),
    ],
)
def test_files_outside_the_checkpoint_are_refused(file: object, words: str) -> None:
    with pytest.raises(InvalidIndex) as caught:
        parse_index(index_of({"good": "x.safetensors", "bad": file}), KEY, uri=f"s3://b/m/{KEY}")
    assert words in caught.value.why
    assert "'bad'" in caught.value.why
    assert f"headrace inspect s3://b/m/{KEY}" in caught.value.mend
    assert "\0" not in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "empty file"),
        (b"not json", "not valid JSON"),
        (b"[]", "object named weight_map"),
        (b"{}", "object named weight_map"),
        (b'{"weight_map": []}', "object named weight_map"),
        (b'{"weight_map": null}', "object named weight_map"),
        (b'{"weight_map": {}}', "names no tensor"),
        (b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "duplicate key: 'a'"),
        (b'{"weight_map": {}, "weight_map": {"a": "x.safetensors"}}', "duplicate key: 'weight_map'"),
        (b'{"metadata": {"total_size": NaN}, "weight_map": {"a": "x.safetensors"}}', "NaN"),
        (b'\xef\xbb\xbf{"weight_map": {"a": "x.safetensors"}}', "byte order mark"),
        (b'{"weight_map": {"\xff": "x.safetensors"}}', "not UTF-8"),
        (b'{"weight_map": {"a": "\\ud800.safetensors"}}', "half a surrogate pair"),
        (b"[" * 200_000, "nested too deeply"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    ],
)
def test_what_is_no_index_is_refused(raw: bytes, words: str) -> None:
    with pytest.raises(InvalidIndex) as caught:
        parse_index(raw, KEY)
    assert words in caught.value.why
    assert KEY in caught.value.what


@pytest.mark.parametrize("key", ["a", "a b", "a+b", "a%20b", "重", "a=b", "..a", "a..b/c", "a/b/c.json", "😀"])
def test_keys_that_stay_inside(key: str) -> None:
    assert unsafe_reason(key) is None


def test_half_a_pair_cannot_be_a_path() -> None:
    assert unsafe_reason("a\ud800") == "cannot be written as UTF-8"


def test_natural_order() -> None:
    keys = ["m-10", "m", "10", "m-9", "a", "2", "m-009", "m" + "9" * 5000]
    assert sorted(keys, key=natural_order) == ["2", "10", "a", "m", "m" + "9" * 5000, "m-009", "m-9", "m-10"]
