"""Run:ai Model Streamer's names beside that library itself: one script, both modules, the same results, from a folder and from a real S3 server."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save

from headrace.cli.seaweed import SeaweedServer
from headrace.compat import runai as ours
from headrace.errors import CacheError, ObjectNotFound
from headrace.settings import Settings
from headrace.storage import StoredObject
from headrace.storage.s3 import S3Store
from tests.support.rank_processes import RankProcesses


def weights() -> dict[str, bytes]:
    generator = torch.Generator().manual_seed(3)
    files = {}
    for number in range(2):
        tensors = {
            f"{number}.weight": torch.randn(50, 33, generator=generator).to(torch.bfloat16),
            f"{number}.packed": torch.randn(7, 5, generator=generator).to(torch.float8_e5m2),
            f"{number}.scale": torch.tensor(0.5 + number),
            f"{number}.empty": torch.empty(3, 0),
            "both": torch.full((3,), number),
        }
        files[f"model-{number}.safetensors"] = save(tensors)
    return files


WEIGHTS = weights()
SIDE = {"config.json": b'{"model_type": "llama"}', "code/modeling.py": b"pass", "code/empty.py": b""}


@pytest.fixture
def theirs() -> SimpleNamespace:
    """The library's own names, in one place as ours are."""
    pytest.importorskip("runai_model_streamer_s3")
    library = pytest.importorskip("runai_model_streamer")
    from runai_model_streamer.s3_utils.s3_utils import S3Credentials
    from runai_model_streamer.safetensors_streamer import safetensors_pytorch

    return SimpleNamespace(
        **{name: getattr(library, name) for name in library.__all__},
        S3Credentials=S3Credentials,
        prepare_request=safetensors_pytorch.prepare_request,
        create_torch_tensor=safetensors_pytorch.create_torch_tensor,
    )


@pytest.fixture
def bucket_uri(bucket: str, s3_client: Any, seaweed: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> str:
    for key, body in {**WEIGHTS, **SIDE}.items():
        s3_client.put_object(Bucket=bucket, Key=f"models/llama/{key}", Body=body)
    s3_client.put_object(Bucket=bucket, Key="models/llama-2/config.json", Body=b"another model")
    monkeypatch.setenv("AWS_ENDPOINT_URL", seaweed.endpoint)  # the library knows no other
    monkeypatch.setenv("RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING", "0")
    return f"s3://{bucket}/models/llama"


@pytest.fixture(params=["folder", "bucket", "bucket and slash"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param != "folder":
        uri: str = request.getfixturevalue("bucket_uri")
        return uri if request.param == "bucket" else f"{uri}/"
    path = tmp_path / "llama"
    path.mkdir()
    for name, body in WEIGHTS.items():
        (path / name).write_bytes(body)
    return str(path)


def as_bytes(tensor: torch.Tensor) -> list[int]:
    return tensor.reshape(-1).view(torch.uint8).tolist()


def described(one: Any) -> tuple[Any, ...]:
    return (
        one.name,
        one.dtype,
        list(one.shape),
        (one.offsets.start, one.offsets.end, one.offsets.get_diff()),
        one.get_bytesize(),
        one.get_torch_dtype(),
        list(one.get_storage_shape()),
        one.get_item_count(),
        one.get_element_size(),
    )


def load(library: Any, folder: str) -> dict[str, Any]:
    """What an engine does: list, stream, count, keep."""
    files = sorted(library.list_safetensors(path=folder))
    with library.SafetensorsStreamer() as streamer:
        streamer.stream_files(files, device="cpu", is_distributed=False)
        total = sum(len(metadata) for metadata in streamer.files_to_tensors_metadata.values())
        metadata = {at: [described(one) for one in file] for at, file in streamer.files_to_tensors_metadata.items()}
        size = streamer.total_size
        tensors = sorted(
            (name, str(one.dtype), tuple(one.shape), as_bytes(one)) for name, one in streamer.get_tensors()
        )
    with library.SafetensorsStreamer() as streamer:
        streamer.stream_file(files[1], tensor_names={"1.weight", "both"})
        some = sorted((name, as_bytes(tensor)) for name, tensor in streamer.get_tensors())
    return {"files": files, "total": total, "metadata": metadata, "size": size, "tensors": tensors, "some": some}


def read_ranges(library: Any, folder: str) -> list[tuple[str, str, list[int]]]:
    """What a program does that chooses ranges itself."""
    files = sorted(library.list_safetensors(folder))
    with library.DistributedStreamer() as streamer:
        prepared = library.prepare_request(streamer, files, None)
        requests = [
            library.FileChunks.contiguous(at, files[at], offset, sizes)
            for at, (offset, _, sizes) in enumerate(prepared)
        ]
        streamer.stream_files(requests, None, "cpu", False)
        found = []
        for at, index, chunk in streamer.get_chunks():
            one = prepared[at][1][index]
            tensor = library.create_torch_tensor(chunk, one)
            found.append((one.name, str(tensor.dtype), as_bytes(tensor)))
    return sorted(found)


def files_below(folder: Path) -> dict[str, bytes]:
    """Return the files, without those that either module keeps for itself."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".")
    }


# -- both modules


@pytest.mark.parametrize("script", [load, read_ranges])
def test_both_give_the_same(theirs: SimpleNamespace, folder: str, script: Any) -> None:
    assert script(ours, folder) == script(theirs, folder)


@pytest.mark.parametrize(
    ("allow", "ignore"),
    [
        (None, None),
        (None, ["*.safetensors"]),
        (["*.json", "*.py"], None),
        (["*"], ["*.json"]),
        (["models/llama/config.json"], None),
        (["*/code/*"], None),
        (["*.absent"], None),
    ],
)
def test_both_pull_the_same(
    theirs: SimpleNamespace, bucket_uri: str, tmp_path: Path, allow: list[str] | None, ignore: list[str] | None
) -> None:
    for library, name in ((ours, "ours"), (theirs, "theirs")):
        library.pull_files(bucket_uri, str(tmp_path / name), allow, ignore)
    assert files_below(tmp_path / "ours") == files_below(tmp_path / "theirs")


def test_both_keep_a_model(theirs: SimpleNamespace, bucket_uri: str, tmp_path: Path) -> None:
    found = []
    for library, name in ((ours, "ours"), (theirs, "theirs")):
        with library.ObjectStorageModel(model_path=bucket_uri, dst=f"{tmp_path / name}/") as model:
            model.pull_files(allow_pattern=["*.safetensors"])
            model.pull_files(ignore_pattern=["*.safetensors"])
        assert model.dir == str(tmp_path / name)
        found.append(files_below(tmp_path / name))
    assert found[0] == found[1] == {**WEIGHTS, **SIDE}


def test_keys_can_be_given(
    theirs: SimpleNamespace, bucket_uri: str, seaweed: SeaweedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "wrong")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    found = []
    for library in (ours, theirs):
        keys = library.S3Credentials(
            access_key_id=seaweed.access_key,
            secret_access_key=seaweed.secret_key,
            region_name="us-east-1",
            endpoint=seaweed.endpoint,
        )
        with library.SafetensorsStreamer() as streamer:
            streamer.stream_file(f"{bucket_uri}/model-0.safetensors", s3_credentials=keys)
            found.append(sorted((name, as_bytes(tensor)) for name, tensor in streamer.get_tensors()))
    assert found[0] == found[1]
    assert len(found[0]) == 5


# -- ours alone


def test_a_pulled_model_is_brought_up_to_date(bucket_uri: str, bucket: str, s3_client: Any, tmp_path: Path) -> None:
    """The other library takes a folder that it has filled once for the model's newest version, for ever."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "mine.txt").write_text("not the model's")
    with ours.ObjectStorageModel(bucket_uri, str(folder)) as model:
        model.pull_files(ignore_pattern=["*.safetensors"])
    before = {path.name: path.stat().st_mtime_ns for path in folder.rglob("*.py")}
    s3_client.put_object(Bucket=bucket, Key="models/llama/config.json", Body=b'{"model_type": "gemma"}')
    s3_client.delete_object(Bucket=bucket, Key="models/llama/code/empty.py")
    with ours.ObjectStorageModel(bucket_uri, str(folder)) as model:
        model.pull_files(ignore_pattern=["*.safetensors"])
    assert files_below(folder) == {
        "config.json": b'{"model_type": "gemma"}',
        "code/modeling.py": b"pass",
        "mine.txt": b"not the model's",
    }
    assert (folder / "code/modeling.py").stat().st_mtime_ns == before["modeling.py"]


def test_a_lost_copy_is_made_again(bucket_uri: str, tmp_path: Path) -> None:
    model = ours.ObjectStorageModel(bucket_uri, str(tmp_path / "model"))
    model.pull_files(["*.json"])
    (tmp_path / "model/config.json").unlink()
    model.pull_files(["*.json"])
    assert files_below(tmp_path / "model") == {"config.json": SIDE["config.json"]}


def test_a_model_of_which_nothing_came_is_an_error(bucket_uri: str, tmp_path: Path) -> None:
    with (
        pytest.raises(ObjectNotFound, match="No object of"),
        ours.ObjectStorageModel(bucket_uri, str(tmp_path / "model")) as model,
    ):
        model.pull_files(["*.absent"])
    with (
        pytest.raises(ObjectNotFound, match="No object of"),
        ours.ObjectStorageModel(f"{bucket_uri}-3", str(tmp_path / "other")) as model,
    ):
        model.pull_files()


def test_an_error_leaves_whole_files_only(bucket_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = S3Store.read_object

    def read_object(self: S3Store, stored: StoredObject, **options: Any) -> bytes:
        if stored.key == "model-1.safetensors":
            raise ObjectNotFound("It is gone.")
        return original(self, stored, **options)

    monkeypatch.setattr(S3Store, "read_object", read_object)
    with (
        pytest.raises(ObjectNotFound, match="It is gone"),
        ours.ObjectStorageModel(bucket_uri, str(tmp_path / "model"), settings=Settings(progress=False)) as model,
    ):
        model.pull_files()
    everything = {**WEIGHTS, **SIDE}
    assert all(body == everything[name] for name, body in files_below(tmp_path / "model").items())
    assert not list((tmp_path / "model").rglob("*.part"))
    monkeypatch.undo()


def test_large_objects_are_copied_in_pieces(
    bucket: str, s3_client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.compat.pulling._PIECE_BYTES", 1000)
    body = os.urandom(4321)
    s3_client.put_object(Bucket=bucket, Key="m/blob.bin", Body=body)
    ours.pull_files(f"s3://{bucket}/m", str(tmp_path / "m"))
    assert files_below(tmp_path / "m") == {"blob.bin": body}


def test_a_folder_that_cannot_be_written_is_named(bucket_uri: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="file/model cannot be written"):
        ours.ObjectStorageModel(bucket_uri, str(tmp_path / "file/model")).pull_files()
    with pytest.raises(CacheError, match="file cannot be written"):
        ours.pull_files(bucket_uri, str(tmp_path / "file"))


PULL = """
import sys
from headrace.compat.runai import ObjectStorageModel
with ObjectStorageModel(sys.argv[1], sys.argv[2]) as model:
    model.pull_files()
"""


def test_processes_take_turns(bucket_uri: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PULL, bucket_uri, str(tmp_path / "model")]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    for process in running:
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said
    assert files_below(tmp_path / "model") == {**WEIGHTS, **SIDE}


def test_no_thread_is_left(bucket_uri: str) -> None:
    with ours.SafetensorsStreamer() as streamer:
        streamer.stream_files(ours.list_safetensors(bucket_uri))
        next(streamer.get_tensors())
    assert not [one.name for one in threading.enumerate() if one.name.startswith(("headrace-stat", "headrace-pull"))]


class Got(NamedTuple):
    tensors: list[tuple[str, list[int]]]
    chunks: list[tuple[int, int, list[int]]]
    shares: list[int]
    """Bytes of the tensors that each rank read, where they shared the reading."""


def stream_as_rank(rank: int, paths: list[str]) -> Got:
    with ours.SafetensorsStreamer(settings=Settings(progress=False)) as streamer:
        streamer.stream_files(paths, is_distributed=True)
        tensors = [(name, as_bytes(tensor)) for name, tensor in streamer.get_tensors()]
        assert streamer._stream is not None
        shares = [one.bytes_read for one in streamer._stream.report.ranks]
    with ours.DistributedStreamer(settings=Settings(progress=False)) as chunks:
        chunks.stream_files([ours.FileChunks.contiguous(5, paths[0], 8, [100, 20])], is_distributed=True)
        return Got(tensors, [(at, index, as_bytes(chunk)) for at, index, chunk in chunks.get_chunks()], shares)


@pytest.mark.parametrize("is_shared", [True, False])
def test_ranks_share_the_reading_and_get_the_same(
    is_shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless that library's own variable says that they must not."""
    if not is_shared:
        monkeypatch.setenv("RUNAI_STREAMER_DIST", "0")
    for name, body in WEIGHTS.items():
        (tmp_path / name).write_bytes(body)
    paths = [str(tmp_path / name) for name in WEIGHTS]
    alone = stream_as_rank(0, paths)
    with RankProcesses(2, tmp_path) as ranks:
        outcomes = ranks.run(stream_as_rank, paths)
    assert [outcome.error for outcome in outcomes] == [None, None]
    found = [outcome.value for outcome in outcomes]
    assert [one[:2] for one in found] == [alone[:2], alone[:2]]
    num_bytes = sum(len(content) for _, content in alone.tensors)
    assert [sum(one.shares) for one in found] == ([num_bytes, num_bytes] if is_shared else [0, 0])
    assert alone.chunks == [
        (5, 0, list(WEIGHTS["model-0.safetensors"][8:108])),
        (5, 1, list(WEIGHTS["model-0.safetensors"][108:128])),
    ]
