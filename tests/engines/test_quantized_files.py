"""The stored checkpoints are what the tools wrote, bit for bit, and what takes files apart puts them together again."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

from tests.data.quantized.store import CHOSEN, reduced
from tests.support.file_pool import FilePool, write_pool
from tests.support.quantized import (
    FOLDER,
    STORED,
    VARIABLE,
    QuantizedCheckpoints,
    WeightFacts,
    files_beside,
    names_in,
    sha256_of,
)
from tests.support.weight_files import (
    INDEX,
    StoredTensor,
    WeightFile,
    add_tensor,
    change_tensor,
    read_tensors,
    remove_tensor,
)

HEADER = b'{"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]},"e":{"dtype":"U8","shape":[0],"data_offsets":[12,12]},"a":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}}   '
UNORDERED = len(HEADER).to_bytes(8, "little") + HEADER + bytes(range(12))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A folder of two weight files with their index."""
    first = {"a": torch.arange(4.0), "b": torch.zeros(2, dtype=torch.bfloat16)}
    (tmp_path / "model-1.safetensors").write_bytes(save(first, metadata={"format": "pt"}))
    (tmp_path / "model-2.safetensors").write_bytes(save({"c": torch.ones(3, dtype=torch.uint8)}))
    weight_map = {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return tmp_path


@pytest.fixture(scope="module")
def pool() -> FilePool:
    return FilePool(STORED)


@pytest.fixture(scope="module")
def assembled(tmp_path_factory: pytest.TempPathFactory) -> QuantizedCheckpoints:
    """The stored checkpoints, whatever this run is about."""
    return QuantizedCheckpoints(tmp_path_factory.mktemp("stored"), folder=None)


def weight_map(folder: Path) -> dict[str, str]:
    return dict(json.loads((folder / INDEX).read_text())["weight_map"])


def test_a_pool_gives_back_every_file_and_keeps_equal_tensors_once(tmp_path: Path) -> None:
    shared = torch.randn(100) / 3
    coarse = torch.randn(50, dtype=torch.bfloat16)
    files = {
        "one/model.safetensors": save({"x": shared, "y": torch.ones(5, dtype=torch.uint8)}, metadata={"k": "v"}),
        "two/model.safetensors": save({"other name": shared, "wide": coarse.float(), "narrow": coarse}),
        "unordered.safetensors": UNORDERED,
        "one/config.json": b"{}",
        "empty.txt": b"",
    }
    write_pool(tmp_path, files)
    pool = FilePool(tmp_path)
    assert pool.names() == list(files)
    assert {name: pool.read(name) for name in files} == files
    streams = json.loads((tmp_path / "index.json").read_text())["streams"]
    assert streams["F32"] == 400 + 8
    assert streams["BF16"] == 4 + 100
    assert streams["U8"] == 5
    pool.extract("two/model.safetensors", tmp_path / "out")
    assert (tmp_path / "out" / "two" / "model.safetensors").read_bytes() == files["two/model.safetensors"]


def test_a_pool_that_was_changed_is_noticed(tmp_path: Path) -> None:
    write_pool(tmp_path, {"a.txt": b"some text"})
    (tmp_path / "text.xz").write_bytes(lzma.compress(b"some next"))
    with pytest.raises(ValueError, match=r"a\.txt of the pool in .* is not what was stored"):
        FilePool(tmp_path).read("a.txt")
    (tmp_path / "text.xz").write_bytes(lzma.compress(b"some"))
    with pytest.raises(ValueError, match="another length"):
        FilePool(tmp_path).read("a.txt")


def test_a_pool_refuses_files_with_bytes_that_no_tensor_covers(tmp_path: Path) -> None:
    content = save({"x": torch.zeros(2)})
    with pytest.raises(AssertionError, match="after its last tensor"):
        write_pool(tmp_path, {"x.safetensors": content + b"\0"})


def test_a_weight_file_is_taken_apart_and_put_together() -> None:
    content = save({"x": torch.arange(6.0).reshape(2, 3), "s": torch.tensor(2.0)}, metadata={"format": "pt"})
    file = WeightFile.parse(content)
    assert WeightFile.parse(file.encode()) == file
    again = load(file.encode())
    assert torch.equal(again["x"], torch.arange(6.0).reshape(2, 3))
    assert again["s"].shape == ()
    assert torch.equal(file.tensors["x"].tensor(), again["x"])
    unordered = WeightFile.parse(UNORDERED)
    assert list(unordered.tensors) == ["b", "e", "a"]
    assert unordered.tensors["a"] == StoredTensor("BF16", (2,), bytes(range(4)))
    assert unordered.tensors["e"].tensor().shape == (0,)


def test_a_tensor_can_be_removed(sharded: Path) -> None:
    remove_tensor(sharded, "b")
    assert list(read_tensors(sharded)) == ["a", "c"]
    assert weight_map(sharded) == {"a": "model-1.safetensors", "c": "model-2.safetensors"}
    assert WeightFile.parse((sharded / "model-1.safetensors").read_bytes()).metadata == {"format": "pt"}
    with pytest.raises(KeyError, match="holds b"):
        remove_tensor(sharded, "b")


def test_a_tensor_can_be_changed_in_its_place(sharded: Path) -> None:
    change_tensor(sharded, "a", lambda stored: stored.tensor().to(torch.float16)[:3])
    assert list(read_tensors(sharded)) == ["a", "b", "c"]
    assert torch.equal(load((sharded / "model-1.safetensors").read_bytes())["a"], torch.arange(3, dtype=torch.float16))


def test_a_tensor_can_be_added(sharded: Path) -> None:
    add_tensor(sharded, "d", torch.tensor([1, 2]))
    assert weight_map(sharded)["d"] == "model-2.safetensors"
    assert torch.equal(load((sharded / "model-2.safetensors").read_bytes())["d"], torch.tensor([1, 2]))


@pytest.mark.parametrize("name", CHOSEN)
def test_every_stored_checkpoint_is_complete(name: str, assembled: QuantizedCheckpoints, tmp_path: Path) -> None:
    """Reading a file from the pool checks it against the SHA-256 of what the tool wrote."""
    checkpoint = assembled[name]
    assert name in names_in(checkpoint.root)
    stored = read_tensors(checkpoint.folder)
    assert stored
    if (checkpoint.folder / INDEX).exists():
        assert set(weight_map(checkpoint.folder)) == set(stored)
    assert checkpoint.config()["architectures"]
    assert all(facts.shape[0] and len(facts.sha256) == 64 for facts in checkpoint.weights().values())
    references = checkpoint.references()
    assert references.input_ids.shape == (2, 48)
    assert references.plain.shape[:2] == (2, 1)
    assert references.rounded is None or references.rounded.shape == (2, 8, references.plain.shape[2])
    copy = checkpoint.copied(tmp_path / "copies")
    assert sorted(path.name for path in copy.iterdir()) == sorted(path.name for path in checkpoint.folder.iterdir())
    remove_tensor(copy, next(iter(stored)))


def test_the_pool_holds_what_was_chosen(pool: FilePool) -> None:
    names = pool.names()
    assert sorted({name.partition("/")[0] for name in names if "/" in name}) == sorted(CHOSEN)
    assert {name for name in names if "/" not in name} == {file for name in CHOSEN for file in files_beside(name)}


@pytest.mark.skipif(FOLDER is None, reason=f"{VARIABLE} is not set")
@pytest.mark.parametrize("name", CHOSEN)
def test_what_is_stored_is_what_the_folder_holds(name: str, pool: FilePool) -> None:
    originals = Path(str(FOLDER))
    if not (originals / name).exists():
        pytest.skip("the folder has no such checkpoint")
    stored = {path.partition("/")[2] for path in pool.names() if path.startswith(f"{name}/")}
    assert stored == {path.name for path in (originals / name).iterdir()}
    for file in stored:
        assert pool.read(f"{name}/{file}") == (originals / name / file).read_bytes(), file
    weights, references = files_beside(name)
    assert pool.read(weights) == (originals / weights).read_bytes()
    assert pool.read(references) == reduced(WeightFile.parse((originals / references).read_bytes())).encode()


def test_facts_tell_a_wrong_weight_from_a_right_one() -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    facts = WeightFacts(shape=(2, 3), sha256=sha256_of(weight), first=(0.0, 1.0, 2.0, 3.0))
    facts.check(weight, name="w")
    with pytest.raises(AssertionError, match=r"must begin with \[0\.0, 1\.0, 2\.0, 3\.0\]"):
        facts.check(weight + torch.tensor([0, 0, 1e-6]), name="w")
    with pytest.raises(AssertionError):
        facts.check(weight.t(), name="w")
