"""SGLang's names against a real S3 server: the calls that its loader makes, in its order, from a bucket."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

import headrace
from headrace.checkpoint import open_checkpoint
from headrace.compat.sglang import ObjectStorageModel, list_safetensors, runai_safetensors_weights_iterator
from headrace.errors import ObjectChanged, ObjectNotFound
from headrace.settings import Settings, TransportSettings
from headrace.storage import StoredObject
from headrace.storage.s3 import S3Store

TENSOR_BYTES = 128 << 10
FILES = {
    f"model-0000{number}-of-00003.safetensors": [f"layers.{number}.{name}" for name in ("up", "down", "norm", "gate")]
    for number in (1, 2, 3)
}
SIDE_FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "code/modeling.py": b"pass",
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {name: file for file, names in FILES.items() for name in names}}
    ).encode(),
}
OTHER_WEIGHTS = dict.fromkeys(("pytorch_model.bin", "model.pt", "consolidated.00.pth", "x.tensors"), b"\x00" * 1000)


def value(name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randn(TENSOR_BYTES // 2, generator=generator).to(torch.bfloat16)


def content(names: list[str]) -> bytes:
    return save({name: value(name) for name in names})


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    transport = TransportSettings(num_connections=3, read_bytes=TENSOR_BYTES, max_attempts=3, backoff_first_s=0.01)
    return Settings(
        cache_dir=tmp_path / "cache",
        memory_limit_bytes=5 * TENSOR_BYTES,
        debug_poison=True,
        progress=False,
        transport=transport,
    )


@pytest.fixture
def uri(bucket: str, s3_client: Any) -> str:
    """A model in three files with an index, beside a stale copy of everything and weights of other formats."""
    objects = {file: content(names) for file, names in FILES.items()} | SIDE_FILES | OTHER_WEIGHTS
    objects["consolidated.safetensors"] = content([name for names in FILES.values() for name in names])
    for key, body in objects.items():
        s3_client.put_object(Bucket=bucket, Key=f"llama/{key}", Body=body)
    return f"s3://{bucket}/llama"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the objects that are read whole, by key."""
    counted: Counter[str] = Counter()
    original = S3Store.read_object

    def read_object(self: S3Store, stored: StoredObject, **options: Any) -> bytes:
        counted[stored.key] += 1
        return original(self, stored, **options)

    monkeypatch.setattr(S3Store, "read_object", read_object)
    return counted


def names_below(folder: str) -> set[str]:
    return {
        str(path.relative_to(folder))
        for path in Path(folder).rglob("*")
        if path.is_file() and not path.name.startswith(".")
    }


def test_side_files_are_pulled_once_and_found_without_the_store(
    uri: str, settings: Settings, reads: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = ObjectStorageModel.download_and_get_path(uri, settings=settings)
    assert names_below(path) == set(SIDE_FILES)
    assert reads == dict.fromkeys(SIDE_FILES, 1)
    assert ObjectStorageModel.download_and_get_path(f"{uri}/", settings=settings) == path
    with headrace.open(uri, settings=settings) as checkpoint:
        reads.clear()
        assert checkpoint.side_files.folder().resolve() == Path(path).resolve()
        assert str(checkpoint.side_files.link) == path and not reads
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    assert ObjectStorageModel.get_path(uri, settings=settings) == path
    assert json.loads((Path(path) / "config.json").read_bytes()) == {"model_type": "llama"}


def test_selections_pulled_one_after_the_other_add_up(uri: str, settings: Settings, reads: Counter[str]) -> None:
    with ObjectStorageModel(uri, settings=settings) as model:
        model.pull_files(allow_pattern=["*.model", "*.py", "*.json"])
        model.pull_files(ignore_pattern=["*.pt", "*.safetensors", "*.bin", "*.tensors", "*.pth"])
    assert names_below(model.dir) == set(SIDE_FILES)
    assert set(reads) == set(SIDE_FILES)


_DOWNLOAD = """
import sys
from headrace.compat.sglang import ObjectStorageModel
from headrace.storage.s3 import S3Store
counted, original = [], S3Store.read_object
S3Store.read_object = lambda self, stored, **options: counted.append(stored.key) or original(self, stored, **options)
print("ready", flush=True)
sys.stdin.readline()
print(ObjectStorageModel.download_and_get_path(sys.argv[1]), len(counted), flush=True)
"""


def test_processes_that_start_together_fill_the_cache_once(
    uri: str, s3_environment: dict[str, str], tmp_path: Path
) -> None:
    environment = {**os.environ, **s3_environment, "HEADRACE_CACHE_DIR": str(tmp_path / "shared")}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _DOWNLOAD, uri],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    try:
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        answers = [process.communicate(timeout=120)[0].split() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    settings = Settings(cache_dir=tmp_path / "shared")
    assert {path for path, _ in answers} == {ObjectStorageModel.get_path(uri, settings=settings)}
    assert sum(int(num_reads) for _, num_reads in answers) == len(SIDE_FILES)
    assert names_below(answers[0][0]) == set(SIDE_FILES)


def test_the_list_is_what_a_filter_by_the_index_would_leave(uri: str, settings: Settings) -> None:
    path = ObjectStorageModel.download_and_get_path(uri, settings=settings)
    weight_map = json.loads((Path(path) / "model.safetensors.index.json").read_bytes())["weight_map"]
    for spelling in (uri, f"{uri}/", uri.replace("s3:", "S3:")):
        listed = list_safetensors(spelling, settings=settings)
        assert set(listed) == {os.path.join(spelling, file) for file in weight_map.values()}
        assert listed == sorted(listed)
    assert list_safetensors(f"{uri}/consolidated.safetensors") == [f"{uri}/consolidated.safetensors"]


def test_weights_stream_in_bounded_memory(
    uri: str, settings: Settings, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    seen, addresses = {}, set()
    for name, tensor in runai_safetensors_weights_iterator(
        list_safetensors(uri, settings=settings), True, "cpu", settings=settings
    ):
        assert tensor._sglang_runai_streamer_tensor and tensor.untyped_storage()._sglang_runai_streamer_tensor
        seen[name] = torch.equal(tensor, value(name))
        addresses.add(tensor.data_ptr())
        del tensor
    assert list(seen) == [name for names in FILES.values() for name in sorted(names)] and all(seen.values())
    assert len(addresses) <= 5 and "keeps tensors" not in caplog.text
    assert not (tmp_path / "cache").exists(), "weights leave nothing on the disk"


def test_a_model_at_the_root_of_a_bucket(bucket: str, s3_client: Any, settings: Settings) -> None:
    for file, names in FILES.items():
        s3_client.put_object(Bucket=bucket, Key=file, Body=content(names))
    s3_client.put_object(Bucket=bucket, Key="config.json", Body=b"{}")
    for root in (f"s3://{bucket}", f"s3://{bucket}/"):
        listed = list_safetensors(root, settings=settings)
        assert listed == [f"s3://{bucket}/{file}" for file in FILES]
        assert names_below(ObjectStorageModel.download_and_get_path(root, settings=settings)) == {"config.json"}
    kept = list(runai_safetensors_weights_iterator(listed, settings=settings))
    assert len(kept) == 12 and all(torch.equal(tensor, value(name)) for name, tensor in kept)


def test_a_file_that_is_replaced_meanwhile_ends_the_stream(
    uri: str, bucket: str, s3_client: Any, settings: Settings
) -> None:
    files = list_safetensors(uri, settings=settings)
    weights = runai_safetensors_weights_iterator(files, settings=settings)
    name, first = next(weights)
    last = list(FILES)[-1]
    replaced = save({name: torch.zeros(TENSOR_BYTES // 2, dtype=torch.bfloat16) for name in FILES[last]})
    s3_client.put_object(Bucket=bucket, Key=f"llama/{last}", Body=replaced)
    got = [name]
    with pytest.raises(ObjectChanged, match=last):
        for name, _ in weights:
            got.append(name)
    assert not set(got) & set(FILES[last])
    assert torch.equal(first, value(got[0]))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("headrace")]


def test_what_is_not_there_is_an_error_that_names_it(uri: str, settings: Settings) -> None:
    absent = f"{uri}-v2"
    with pytest.raises(ObjectNotFound, match=f"nothing at {absent}"):
        ObjectStorageModel.download_and_get_path(absent, settings=settings)
    assert not os.path.lexists(ObjectStorageModel.get_path(absent, settings=settings))
    with pytest.raises(headrace.HeadraceError, match=absent):
        list_safetensors(absent, settings=settings)
    with pytest.raises(ObjectNotFound, match="no-such-bucket"):
        ObjectStorageModel.download_and_get_path("s3://no-such-bucket-here/llama", settings=settings)
    with open_checkpoint(uri, settings=settings) as checkpoint:
        assert len(checkpoint.files) == 3, "and the model beside it is as it was"
