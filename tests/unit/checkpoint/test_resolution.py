from __future__ import annotations

import pytest

from headrace.checkpoint.header import ParsedHeader, parse_header
from headrace.checkpoint.index import WeightIndex
from headrace.checkpoint.resolution import resolve_entries
from headrace.errors import CheckpointError, InvalidIndex

from .memory_store import weights

INDEX = "model.safetensors.index.json"


def header(file: str, *names: str) -> ParsedHeader:
    content = weights(**dict.fromkeys(names, 1))
    return parse_header(content, file, len(content))


def test_without_an_index_all_names_count_in_file_order() -> None:
    entries, notes = resolve_entries([header("2", "d", "c"), header("1", "b", "a")], None, "s3://b/m")
    assert [(entry.name, entry.file) for entry in entries.values()] == [("d", "2"), ("c", "2"), ("b", "1"), ("a", "1")]
    assert list(entries) == ["d", "c", "b", "a"]
    assert notes == ()


def test_without_an_index_a_name_in_two_files_is_an_error_that_names_both() -> None:
    with pytest.raises(CheckpointError) as caught:
        resolve_entries([header("old.safetensors", "a"), header("new.safetensors", "b", "a")], None, "s3://b/m")
    assert caught.value.what == "Tensor 'a' is stored twice: in old.safetensors and in new.safetensors."
    assert "s3://b/m" in caught.value.mend


@pytest.mark.parametrize("order", [("base", "overlay"), ("overlay", "base")])
def test_the_index_decides_per_name_which_copy_counts(order: tuple[str, str]) -> None:
    files = {"base": header("base", "a", "b", "c"), "overlay": header("overlay", "a", "c")}
    index = WeightIndex(INDEX, {"a": "overlay", "b": "base", "c": "base"})
    entries, notes = resolve_entries([files[name] for name in order], index, "s3://b/m")
    assert {name: entry.file for name, entry in entries.items()} == {"a": "overlay", "b": "base", "c": "base"}
    (note,) = notes
    assert "2 stored tensors that lie in another file than" in note
    assert "'a'" in note and "'c'" in note


def test_tensors_that_the_index_does_not_name_are_left_out_with_a_note() -> None:
    index = WeightIndex(INDEX, {"a": "1"})
    entries, notes = resolve_entries([header("1", "a", "extra", "more")], index, "s3://b/m")
    assert list(entries) == ["a"]
    assert notes == (f"Left out: 2 stored tensors that {INDEX} does not name: 'extra', 'more'.",)


def test_tensors_that_their_file_lacks_are_an_error() -> None:
    index = WeightIndex(INDEX, {"a": "1", "gone": "1", "elsewhere": "1"})
    with pytest.raises(InvalidIndex) as caught:
        resolve_entries([header("1", "a"), header("2", "elsewhere")], index, "s3://b/m")
    assert caught.value.what == f"{INDEX} names 2 tensors that the mapped file does not hold, such as 'gone' in 1."
    assert "'gone', 'elsewhere'" in caught.value.why
    assert "s3://b/m" in caught.value.mend
