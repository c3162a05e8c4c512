from __future__ import annotations

import pytest

from headrace.checkpoint.sidelisting import SideLimits, SideListing, is_side_file, list_side_files
from headrace.errors import AccessDenied
from headrace.storage import Listing

from .memory_store import MemoryStore


def listing_of(store: MemoryStore, **limits: int) -> SideListing:
    return list_side_files(store, store.list_level(), SideLimits(**limits))


def keys(listing: SideListing) -> list[str]:
    return [stored.key for stored in listing.objects]


@pytest.mark.parametrize(
    "key",
    [
        "config.json", "tokenizer.json", "model.safetensors.index.json", "chat_template.jinja", "merges.txt", "vocab.txt", "tokenizer.model",
        "tiktoken.model", "qwen.tiktoken", "configuration_kimi.py", "README.md", "LICENSE", "LICENSE.txt", "Notice", "USE_POLICY.md",
        "sub/folder/modeling.py", "recipe.yaml", "bpe.vocab", "CONFIG.JSON",
    ],
)  # fmt: skip
def test_side_files(key: str) -> None:
    assert is_side_file(key)


@pytest.mark.parametrize(
    "key",
    [
        "model.safetensors", "pytorch_model.bin", "model.pt", "model.pth", "model.tensors", "model.gguf", "model.onnx", "tf_model.h5",
        "flax_model.msgpack", "last.ckpt", "weights.npz", "weights.npy", "optimizer.pkl", "archive.zip", "a.tar.gz", "picture.png", ".gitattributes",
        ".hidden.json", "sub/.env", "model", "model.safetensors.tmp", "config.json.bin", "license_plates.bin", "model.SAFETENSORS",
    ],
)  # fmt: skip
def test_not_side_files(key: str) -> None:
    assert not is_side_file(key)


def test_files_of_all_levels_are_found_and_weights_are_not() -> None:
    store = MemoryStore(
        {
            "config.json": b"{}",
            "model.safetensors": b"w",
            "1_Pooling/config.json": b"{}",
            "a/b/deep.txt": b"x",
            "a/b/weights.bin": b"w",
        }
    )
    found = listing_of(store)
    assert keys(found) == ["1_Pooling/config.json", "a/b/deep.txt", "config.json"]
    assert found.notes == ()
    assert not store.reads


def test_hidden_folders_and_training_states_are_not_listed() -> None:
    names = [".cache/a.json", "checkpoint-500/a.json", "__pycache__/a.py", "sub/.git/a.txt"]
    store = MemoryStore(dict.fromkeys(names, b"x"))
    assert keys(listing_of(store)) == []
    assert set(store.listings) == {"", "sub"}


def test_recursion_has_a_depth() -> None:
    store = MemoryStore({"a/1.txt": b"x", "a/b/2.txt": b"x", "a/b/c/3.txt": b"x"})
    assert keys(listing_of(store, depth=2)) == ["a/1.txt", "a/b/2.txt"]
    assert "a/b/c" not in store.listings


def test_the_number_of_listed_folders_is_bounded_and_noted() -> None:
    store = MemoryStore({f"{number:03}/x.txt": b"x" for number in range(100)})
    found = listing_of(store, num_folders=3)
    assert keys(found) == ["000/x.txt", "001/x.txt", "002/x.txt"]
    assert store.listings.total() == 4
    assert "Not looked into for side files: '003'," in found.notes[0]


def test_the_number_of_files_is_bounded_and_noted() -> None:
    store = MemoryStore({f"{number:03}.txt": b"x" for number in range(100)} | {"sub/y.txt": b"x"})
    found = listing_of(store, num_objects=60)
    assert len(found.objects) == 60
    assert store.listings["sub"] == 0
    assert "'sub'" in found.notes[0]
    assert "60 files in all: '060.txt'" in found.notes[1]


def test_large_files_are_left_out_and_named() -> None:
    store = MemoryStore({"config.json": b"{}", "vocab.txt": bytes(1001)})
    found = listing_of(store, file_bytes=1000)
    assert keys(found) == ["config.json"]
    assert found.notes == ("Left out of the side files, since larger than 1 kB: 'vocab.txt'.",)


def test_beyond_the_total_the_index_and_deep_files_go_first() -> None:
    store = MemoryStore(
        {
            "model.safetensors.index.json": bytes(400),
            "sub/other.json": bytes(400),
            "tokenizer.json": bytes(500),
            "config.json": bytes(100),
        }
    )
    assert keys(listing_of(store, total_bytes=1100)) == ["config.json", "sub/other.json", "tokenizer.json"]
    found = listing_of(store, total_bytes=900)
    assert keys(found) == ["config.json", "tokenizer.json"]
    assert "more than 900 B" in found.notes[0]
    assert "'sub/other.json', 'model.safetensors.index.json'" in found.notes[0]


def test_a_folder_that_may_not_be_listed_is_noted() -> None:
    class Guarded(MemoryStore):
        def list_level(self, folder: str = "") -> Listing:
            if folder == "secret":
                raise AccessDenied("Listing secret/ is not allowed.")
            return super().list_level(folder)

    store = Guarded({"config.json": b"{}", "secret/a.json": b"{}", "sub/b.json": b"{}"})
    found = list_side_files(store, store.list_level())
    assert keys(found) == ["config.json", "sub/b.json"]
    assert found.notes == ("Not looked into for side files: 'secret'. Listing secret/ is not allowed.",)
