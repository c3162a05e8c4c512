from __future__ import annotations

import pytest

from headrace.checkpoint.index import WeightIndex
from headrace.checkpoint.selection import choose_index, select_named, select_unindexed
from headrace.errors import MissingFiles, NoWeights

INDEX = "model.safetensors.index.json"
FP16_INDEX = "model.fp16.safetensors.index.json"
CONSOLIDATED_INDEX = "consolidated.safetensors.index.json"


def named(*files: str) -> WeightIndex:
    return WeightIndex(INDEX, {f"tensor.{place}": file for place, file in enumerate(files)})


def unindexed(*keys: str, folders: tuple[str, ...] = (), selected: str | None = None) -> tuple[str, ...]:
    return select_unindexed(keys, folders, "s3://b/m", selected).files


@pytest.mark.parametrize(
    ("keys", "index", "words"),
    [
        ((), None, ""),
        (("config.json", "pytorch_model.bin.index.json"), None, ""),
        ((INDEX, "model.safetensors"), INDEX, ""),
        ((INDEX, FP16_INDEX), INDEX, f"{INDEX} is followed, not '{FP16_INDEX}'"),
        ((INDEX, CONSOLIDATED_INDEX), INDEX, f"not '{CONSOLIDATED_INDEX}'"),
        (("a.x.safetensors.index.json", "b.safetensors.index.json"), "b.safetensors.index.json", "is followed"),
        (("b.safetensors.index.json", "a.safetensors.index.json"), "a.safetensors.index.json", "is followed"),
        ((FP16_INDEX, "model.fp16-1-of-1.safetensors"), FP16_INDEX, ""),
        ((FP16_INDEX, "model.fp16-1-of-1.safetensors", "model.safetensors"), None, "since model.safetensors is there"),
        ((CONSOLIDATED_INDEX, "consolidated-1-of-1.safetensors"), CONSOLIDATED_INDEX, ""),
        ((CONSOLIDATED_INDEX, "consolidated-1-of-1.safetensors", "model.safetensors"), None, "not consolidated"),
        (("adapter_model.safetensors.index.json",), None, ""),
    ],
)
def test_which_index_is_followed(keys: tuple[str, ...], index: str | None, words: str) -> None:
    for order in (keys, keys[::-1]):
        chosen, notes = choose_index(order)
        assert chosen == index
        assert len(notes) == (1 if words else 0)
        assert words in "".join(notes)


def test_an_index_that_the_user_named_is_followed() -> None:
    assert choose_index([INDEX, FP16_INDEX], FP16_INDEX) == (FP16_INDEX, ())


def test_a_file_that_the_user_named_needs_no_index() -> None:
    assert choose_index([INDEX, "model.safetensors"], "model.safetensors") == (None, ())


def test_exactly_the_named_files_are_taken() -> None:
    present = [
        "m-1.safetensors",
        "m-2.safetensors",
        "sub/x.safetensors",
        "consolidated.safetensors",
        "model.safetensors",
    ]
    selection = select_named(named("m-2.safetensors", "sub/x.safetensors", "m-1.safetensors"), present)
    assert selection.files == ("m-1.safetensors", "m-2.safetensors", "sub/x.safetensors")
    assert selection.notes == (
        f"Ignored: 'consolidated.safetensors', 'model.safetensors', which {INDEX} does not name.",
    )


def test_all_missing_files_are_listed() -> None:
    files = [f"m-{number}.safetensors" for number in range(40)]
    with pytest.raises(MissingFiles) as caught:
        select_named(named(*files), ["m-7.safetensors"])
    assert f"39 files of the 40 that {INDEX} names" in caught.value.what
    assert all((f"'{file}'" in caught.value.what) == (file != "m-7.safetensors") for file in files)


def test_files_of_the_same_numbered_family_that_are_not_named_are_warned_about() -> None:
    present = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "other.safetensors"]
    selection = select_named(named("model-00001-of-00002.safetensors"), present)
    assert selection.files == ("model-00001-of-00002.safetensors",)
    family, stranger = selection.notes
    assert "Not loaded: 'model-00002-of-00002.safetensors', of the same numbered family" in family
    assert "other.safetensors" in stranger


@pytest.mark.parametrize(
    ("keys", "files"),
    [
        (("model.safetensors", "config.json", "model.bin"), ("model.safetensors",)),
        (("consolidated.safetensors",), ("consolidated.safetensors",)),
        (("consolidated.safetensors", "model.safetensors"), ("model.safetensors",)),
        (("consolidated.00.safetensors", "a-1-of-1.safetensors"), ("a-1-of-1.safetensors",)),
        (("adapter_model.safetensors", "model.safetensors"), ("model.safetensors",)),
        (("adapter_model.safetensors", "consolidated.safetensors"), ("consolidated.safetensors",)),
        (("model.fp16.safetensors", "model.safetensors"), ("model.safetensors",)),
        (("model.fp16.safetensors",), ("model.fp16.safetensors",)),
        (("model.fp16-1-of-1.safetensors", "model-1-of-1.safetensors"), ("model-1-of-1.safetensors",)),
        # A dot in a name is not yet a variant: these may hold tensors of their own.
        (("model.mtp.safetensors", "model.safetensors"), ("model.mtp.safetensors", "model.safetensors")),
        (("layer.10.safetensors", "layer.9.safetensors"), ("layer.9.safetensors", "layer.10.safetensors")),
        (
            ("model-00002-of-000002.safetensors", "model-00001-of-000002.safetensors"),
            ("model-00001-of-000002.safetensors", "model-00002-of-000002.safetensors"),
        ),
        (("m-0-of-2.safetensors", "m-1-of-2.safetensors"), ("m-0-of-2.safetensors", "m-1-of-2.safetensors")),
    ],
)
def test_which_files_are_taken_without_an_index(keys: tuple[str, ...], files: tuple[str, ...]) -> None:
    for order in (keys, keys[::-1]):
        selection = select_unindexed(order, (), "s3://b/m")
        assert selection.files == files
        ignored = [key for key in keys if key.endswith(".safetensors") and key not in files]
        assert all(f"'{key}'" in "".join(selection.notes) for key in ignored)
        assert bool(selection.notes) == bool(ignored)


def test_an_incomplete_family_is_refused_with_what_is_missing() -> None:
    with pytest.raises(MissingFiles) as caught:
        unindexed("model-00002-of-00004.safetensors", "model-00003-of-00004.safetensors")
    assert "2 of the 4 files model-…-of-00004.safetensors" in caught.value.what
    assert "'model-00001-of-00004.safetensors', 'model-00004-of-00004.safetensors'." in caught.value.what


def test_a_family_member_beyond_the_total_fills_no_gap() -> None:
    with pytest.raises(MissingFiles, match=r"'m-2-of-2\.safetensors'\."):
        unindexed("m-1-of-2.safetensors", "m-7-of-2.safetensors")


def test_an_absurd_family_is_refused_at_once() -> None:
    with pytest.raises(MissingFiles, match=r"999,999,999,999,998 more\.|and 999,999,999,998,999 more\."):
        unindexed("m-1-of-1000000000000000.safetensors")


@pytest.mark.parametrize(
    ("keys", "folders", "words"),
    [
        (("pytorch_model.bin", "config.json"), (), "never loaded, since unpickling runs code: 'pytorch_model.bin'"),
        (("a.pt", "b.pth", "c.ckpt"), (), "'a.pt', 'b.pth', 'c.ckpt'"),
        (("adapter_model.safetensors", "adapter_config.json"), (), "An adapter is not a model"),
        (("adapter_model.safetensors", "adapter_model.bin"), (), "An adapter is not a model"),
        (("model.gguf",), (), "another format: 'model.gguf'"),
        (("config.json",), ("original", "talker"), "sub-folders 'original', 'talker'"),
        (("config.json",), (), "It holds 'config.json'"),
        ((), (), "It is empty"),
    ],
)
def test_no_weights(keys: tuple[str, ...], folders: tuple[str, ...], words: str) -> None:
    with pytest.raises(NoWeights) as caught:
        unindexed(*keys, folders=folders)
    assert caught.value.what == "There are no safetensors weights at s3://b/m."
    assert words in caught.value.why
    assert caught.value.mend


def test_only_the_selected_file_is_taken() -> None:
    keys = ("model-00001-of-00004.safetensors", "model-00002-of-00004.safetensors", "adapter_model.safetensors")
    for key in keys:
        assert unindexed(*keys, selected=key) == (key,)


def test_a_selected_file_of_another_format_is_refused() -> None:
    with pytest.raises(NoWeights, match="unpickling runs code"):
        unindexed("model.bin", "model.safetensors", selected="model.bin")
