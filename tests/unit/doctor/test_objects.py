"""The listing and what of it would be loaded; one object looked up by its name."""

from __future__ import annotations

import json
from typing import Any

from headrace.doctor.finding import State
from headrace.doctor.objects import examine_listing, examine_stat, find_without_listing
from headrace.errors import AccessDenied, ObjectNotFound
from headrace.storage import StoredObject, Uri

from .fakes import FakeStore

WEIGHTS = {"model-00001-of-00002.safetensors": 6_000_000, "model-00002-of-00002.safetensors": 4_000_000}
INDEX = "model.safetensors.index.json"
INDEX_TEXT = json.dumps({"weight_map": dict(zip("ab", WEIGHTS, strict=True))}).encode()
DENIED = AccessDenied("cannot be read.", "No right.", "Ask.")


def listing(store: FakeStore, parent: FakeStore | None = None) -> Any:
    return examine_listing(store, lambda uri: parent or FakeStore(uri=uri))  # type: ignore[arg-type,return-value]


def test_files_without_an_index() -> None:
    finding, inventory = listing(FakeStore({**WEIGHTS, "config.json": 20, "a.bin": 5}, folders=("sub",)))
    assert (finding.state, finding.what) == (State.OK, "2 files, 10 MB of weights would be loaded.")
    assert finding.details[0] == ("found", "4 objects, 10 MB, 1 folder")
    assert inventory.weight_bytes == 10_000_000
    assert inventory.side_bytes == 25
    assert inventory.probe.key == "model-00001-of-00002.safetensors"


def test_an_index_chooses_and_what_it_leaves_out_is_noted() -> None:
    objects = {**WEIGHTS, "other.safetensors": 99_000_000, INDEX: len(INDEX_TEXT)}
    finding, inventory = listing(FakeStore(objects, contents={INDEX: INDEX_TEXT}))
    assert finding.state is State.OK
    assert ("loaded would be", f"2 files, 10 MB, as {INDEX} says") in finding.details
    assert any(label == "note" and "other.safetensors" in value for label, value in finding.details)
    assert inventory.probe.size_bytes == 6_000_000, "what would be loaded, not what is largest"


def test_files_that_the_index_names_and_that_are_absent() -> None:
    objects = {"model-00001-of-00002.safetensors": 6_000_000, INDEX: len(INDEX_TEXT)}
    finding, inventory = listing(FakeStore(objects, contents={INDEX: INDEX_TEXT}))
    assert finding.state is State.FAILED
    assert "model-00002-of-00002.safetensors" in finding.what
    assert inventory.probe is not None, "the other checks go on with what is there"


def test_an_index_in_sub_folders() -> None:
    text = json.dumps({"weight_map": {"a": "sub/one.safetensors"}}).encode()
    store = FakeStore({"sub/one.safetensors": 7, INDEX: len(text)}, contents={INDEX: text})
    finding, inventory = listing(store)
    assert finding.state is State.OK
    assert [stored.key for stored in inventory.weights] == ["sub/one.safetensors"]


def test_a_right_to_list_and_none_to_read() -> None:
    store = FakeStore({**WEIGHTS, INDEX: 5}, errors={"read_object": DENIED})
    finding, inventory = listing(store)
    assert finding.why == "The folder can be listed, and the index cannot be read. No right."
    assert inventory is not None


def test_a_folder_that_was_mistyped() -> None:
    parent = FakeStore(uri=Uri("s3", "bucket", "models"), folders=("llama-3", "llama3-chat", "qwen"))
    store = FakeStore(uri=Uri("s3", "bucket", "models/llama3"))
    finding, _ = listing(store, parent)
    assert finding.state is State.FAILED
    assert finding.mend.startswith("Did you mean s3://bucket/models/llama-3?")
    assert ("similar", "s3://bucket/models/llama-3") in finding.details
    assert parent.is_closed


def test_a_folder_that_is_like_nothing_there() -> None:
    parent = FakeStore(uri=Uri("s3", "bucket", ""), folders=tuple("abcdefghij"))
    finding, _ = listing(FakeStore(uri=Uri("s3", "bucket", "zebra")), parent)
    assert ("beside it", "a, b, c, d, e, f, g, h and 2 more") in finding.details


def test_a_bucket_that_does_not_exist() -> None:
    store = FakeStore(errors={"list_level": ObjectNotFound("is in no bucket.", "None.", "Check.")})
    finding, inventory = listing(store, store)
    assert (finding.state, finding.what, inventory) == (State.FAILED, "is in no bucket.", None)


def test_what_cannot_be_listed_is_found_by_its_name() -> None:
    store = FakeStore({"model.safetensors": 7}, errors={"list_level": DENIED})
    finding, inventory = listing(store)
    assert (finding.state, inventory) == (State.FAILED, None)
    found = find_without_listing(store)  # type: ignore[arg-type]
    assert found is not None
    stat = examine_stat(store, found, was_listed=False)  # type: ignore[arg-type]
    assert stat.what == "model.safetensors can be looked up by its name, although the folder cannot be listed."
    assert find_without_listing(FakeStore(errors={"stat": DENIED})) is None  # type: ignore[arg-type]


def test_a_selected_file() -> None:
    store = FakeStore({"one.safetensors": 7, "two.safetensors": 9})
    store.selected_key = "one.safetensors"
    _, inventory = listing(store)
    assert [stored.key for stored in inventory.weights] == ["one.safetensors"]


def stat(store: FakeStore) -> Any:
    _, inventory = listing(store)
    return examine_stat(store, inventory, was_listed=True)  # type: ignore[arg-type]


def test_an_object_is_what_the_listing_says() -> None:
    finding = stat(FakeStore(WEIGHTS))
    assert (finding.state, finding.what) == (
        State.OK,
        "model-00001-of-00002.safetensors has 6,000,000 bytes.",
    )


def test_an_object_that_is_being_written() -> None:
    store = FakeStore({"model.safetensors": 7})
    _, inventory = listing(store)
    store.objects["model.safetensors"] = StoredObject("model.safetensors", 9, '"v2"')
    finding = examine_stat(store, inventory, was_listed=True)  # type: ignore[arg-type]
    assert finding.state is State.WARNING
    assert 'The listing says 7 bytes, version "v1".' in finding.why


def test_an_object_without_a_version() -> None:
    finding = stat(FakeStore(WEIGHTS, version=""))
    assert finding.state is State.WARNING
    assert "gives no version" in finding.what


def test_an_object_that_cannot_be_looked_up() -> None:
    store = FakeStore(WEIGHTS)
    _, inventory = listing(store)
    store.errors["stat"] = DENIED
    assert examine_stat(store, inventory, was_listed=True).state is State.FAILED  # type: ignore[arg-type]
