"""Run:ai Model Streamer's names over our objects, on local files: signatures, values, tensors that may be kept, errors."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from headrace.compat import runai
from headrace.compat.listing import is_azure_path, is_gs_path, is_s3_path
from headrace.compat.runai import (
    DistributedStreamer,
    FileChunks,
    FileStreamer,
    ObjectStorageModel,
    S3Credentials,
    SafetensorsStreamer,
    create_torch_tensor,
    list_safetensors,
    prepare_request,
    pull_files,
)
from headrace.errors import (
    InvalidSetting,
    InvalidUri,
    ObjectNotFound,
    StreamClosed,
    StreamError,
    TruncatedObject,
)
from headrace.settings import Settings

TENSORS = {
    "model-1.safetensors": {
        "a": torch.arange(12, dtype=torch.float32).view(3, 4),
        "b": torch.tensor(5, dtype=torch.int16),
        "both": torch.zeros(4),
    },
    "model-2.safetensors": {
        "c": torch.linspace(0, 1, 9).to(torch.float8_e4m3fn),
        "e": torch.empty(0, 2),
        "both": torch.ones(4),
    },
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, tensors in TENSORS.items():
        save_file(tensors, tmp_path / name)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / ".hidden.safetensors").write_text("")
    return tmp_path


@pytest.fixture
def paths(folder: Path) -> list[str]:
    return [str(folder / name) for name in TENSORS]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(
        one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
    )


# -- listing


def test_files_are_listed_as_the_folder_is_spelled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list_safetensors(str(folder)) == [str(folder / name) for name in TENSORS]
    monkeypatch.chdir(folder.parent)
    assert list_safetensors(folder.name) == [os.path.join(folder.name, name) for name in TENSORS]
    assert list_safetensors(path=f"{folder}/") == [str(folder / name) for name in TENSORS]


def test_a_folder_may_be_called_like_a_file(folder: Path) -> None:
    odd = folder / "x.safetensors"
    odd.mkdir()
    save_file({"a": torch.zeros(1)}, odd / "model.safetensors")
    assert list_safetensors(str(odd)) == [str(odd / "model.safetensors")]


def test_what_is_not_there_is_an_empty_list(tmp_path: Path) -> None:
    assert list_safetensors(str(tmp_path)) == []
    assert list_safetensors(str(tmp_path / "absent")) == []


def test_keys_are_for_s3(folder: Path) -> None:
    with pytest.raises(InvalidSetting, match="S3 credentials were given"):
        list_safetensors(str(folder), S3Credentials("key", "secret"))
    assert "secret" not in repr(S3Credentials("key", "secret", "token"))


# -- tensors


def test_an_engines_loop(paths: list[str]) -> None:
    """What vLLM and SGLang do with the library."""
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(paths, device="cpu", is_distributed=False)
        total = sum(len(metadata) for metadata in streamer.files_to_tensors_metadata.values())
        got = list(streamer.get_tensors())
    assert total == len(got) == 6
    expected = [
        (name, TENSORS[file][name])
        for file in TENSORS
        for name in ("a", "b", "both", "c", "e")
        if name in TENSORS[file]
    ]
    assert sorted(name for name, _ in got) == sorted(name for name, _ in expected)
    for name, tensor in got:
        assert any(same(tensor, other) for known, other in expected if known == name)
    assert [tensor[0].item() for name, tensor in got if name == "both"] == [0, 1]
    assert streamer.total_size == 48 + 2 + 16 + 9 + 0 + 16


def test_one_file(paths: list[str]) -> None:
    with SafetensorsStreamer() as streamer:
        streamer.stream_file(paths[0])
        assert {name for name, _ in streamer.get_tensors()} == {"a", "b", "both"}
    assert list(streamer.files_to_tensors_metadata) == [0]


def test_metadata_says_what_comes(paths: list[str]) -> None:
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(paths)
        described = {one.name: one for file in streamer.files_to_tensors_metadata.values() for one in file}
        got = dict(streamer.get_tensors())
    for name in ("a", "b", "c", "e"):
        one, tensor = described[name], got[name]
        assert one.get_torch_dtype() == tensor.dtype
        assert one.get_storage_shape() == list(tensor.shape) == one.shape
        assert one.get_bytesize() == one.offsets.get_diff() == tensor.nbytes
        assert (one.get_item_count(), one.get_element_size()) == (tensor.numel(), tensor.dtype.itemsize)
    assert described["a"].dtype == "F32"
    assert min(one.offsets.start for one in described.values()) == 0


@pytest.mark.parametrize("owned", [True, False])
def test_tensors_may_be_kept_however_small_the_memory(paths: list[str], owned: bool) -> None:
    streamer = SafetensorsStreamer(settings=Settings(memory_limit_bytes=64, debug_poison=True, progress=False))
    with streamer:
        streamer.stream_files(paths, owned=owned)
        kept = list(streamer.get_tensors())
    values = dict(kept)
    assert same(values["a"], TENSORS["model-1.safetensors"]["a"])
    assert same(values["c"], TENSORS["model-2.safetensors"]["c"])


def test_names_choose(paths: list[str]) -> None:
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(paths, tensor_names=["b", "c"])
        assert [name for name, _ in streamer.get_tensors()] == ["b", "c"]
        assert streamer.total_size == 2 + 9
        assert [[one.name for one in file] for file in streamer.files_to_tensors_metadata.values()] == [["b"], ["c"]]


@pytest.mark.parametrize(
    ("names", "what"),
    [
        ("a", "must be a collection"),
        ([], "must be a collection"),
        (["a", "zz"], "none of the files: 'zz'"),
        (["both"], "more than one of the files: 'both'"),
    ],
)
def test_names_that_cannot_be_chosen(paths: list[str], names: Any, what: str) -> None:
    with SafetensorsStreamer() as streamer, pytest.raises(InvalidSetting, match=what):
        streamer.stream_files(paths, tensor_names=names)


def test_a_streamer_can_be_used_again_and_drops_what_was_left(paths: list[str]) -> None:
    with SafetensorsStreamer() as streamer:
        streamer.stream_file(paths[0])
        next(streamer.get_tensors())
        streamer.stream_file(paths[1])
        assert {name for name, _ in streamer.get_tensors()} == {"c", "e", "both"}


def test_out_of_order_use_is_an_error(paths: list[str]) -> None:
    with SafetensorsStreamer() as streamer:
        with pytest.raises(StreamError, match="Nothing was asked for"):
            next(streamer.get_tensors())
        streamer.stream_files(paths)
    with pytest.raises(StreamClosed):
        next(streamer.get_tensors())


@pytest.mark.parametrize("device", ["cpu", None, torch.device("cpu")])
def test_the_cpu_has_several_names(paths: list[str], device: Any) -> None:
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(paths, None, device)
        assert all(tensor.device.type == "cpu" for _, tensor in streamer.get_tensors())


def test_another_device_gets_copies(paths: list[str]) -> None:
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(paths, device="meta")
        assert all(tensor.device.type == "meta" for _, tensor in streamer.get_tensors())


def test_a_file_that_is_cut_is_an_error_before_any_tensor(paths: list[str]) -> None:
    Path(paths[1]).write_bytes(Path(paths[1]).read_bytes()[:-1])
    with SafetensorsStreamer() as streamer, pytest.raises(TruncatedObject, match="model-2"):
        streamer.stream_files(paths)


def test_files_of_several_stores_are_refused(paths: list[str]) -> None:
    with SafetensorsStreamer() as streamer:
        with pytest.raises(InvalidSetting, match="several stores"):
            streamer.stream_files([paths[0], "s3://bucket/model.safetensors"])
        with pytest.raises(InvalidSetting, match="No file is named"):
            streamer.stream_files([])
        with pytest.raises(ObjectNotFound):
            streamer.stream_file(f"{paths[0]}.absent.safetensors")


def test_paths_may_be_relative_and_lead_through_parents(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "sub").mkdir()
    monkeypatch.chdir(folder / "sub")
    with SafetensorsStreamer() as streamer:
        streamer.stream_file("../model-1.safetensors")
        assert len(list(streamer.get_tensors())) == 3


# -- ranges


def test_ranges_of_any_file(folder: Path) -> None:
    (folder / "bytes").write_bytes(bytes(range(200)))
    asked = [
        FileChunks(7, str(folder / "bytes"), [150, 0, 10], [50, 5, 0]),
        FileChunks.contiguous(3, str(folder / "bytes"), 100, [2, 3]),
    ]
    with DistributedStreamer() as streamer:
        streamer.stream_files(asked, None, "cpu", False)
        got = {(file, index): chunk for file, index, chunk in streamer.get_chunks()}
    assert {place: chunk.flatten().tolist() for place, chunk in got.items()} == {
        (7, 0): list(range(150, 200)),
        (7, 1): list(range(5)),
        (7, 2): [],
        (3, 0): [100, 101],
        (3, 1): [102, 103, 104],
    }
    assert all(chunk.shape[0] == 1 and chunk.dtype == torch.uint8 for chunk in got.values())
    assert (asked[0].total_size(), asked[0].max_chunk_size()) == (55, 50)


def test_a_call_may_have_a_memory_limit_of_its_own(folder: Path) -> None:
    size = 64 << 10
    (folder / "bytes").write_bytes(b"".join(bytes([place]) * size for place in range(64)))
    asked = [FileChunks.contiguous(1, str(folder / "bytes"), 0, [size] * 64)]
    peaks = []
    with FileStreamer(settings=Settings(memory_limit_bytes=16 * size, progress=False)) as streamer:
        for limit in (4 * size, None):
            streamer.stream_files(asked, None, None, limit, False)
            assert [int(chunk[0, -1]) for *_, chunk in streamer.get_chunks()] == list(range(64))
            assert streamer._stream is not None
            peaks.append(streamer._stream.report.peak_staging_bytes)
    assert peaks[0] <= 4 * size < peaks[1] <= 16 * size


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["config.json", "model-1.safetensors", "model-2.safetensors", "sub/a.json"]),
        ({"is_recursive": False}, ["config.json", "model-1.safetensors", "model-2.safetensors"]),
        ({"allow_patterns": ["*.json"]}, ["config.json", "sub/a.json"]),
        ({"allow_patterns": ["a.json", "sub/*"]}, []),
        ({"allow_patterns": [], "ignore_patterns": ["*/model-?.*"]}, ["config.json", "sub/a.json"]),
    ],
)
@pytest.mark.parametrize("slash", ["", "/"])
def test_files_are_listed_with_their_sizes(
    folder: Path, slash: str, options: dict[str, Any], expected: list[str]
) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "a.json").write_text("[]")
    found = FileStreamer().list_files(f"{folder}{slash}", **options)
    assert found == [(str(folder / name), (folder / name).stat().st_size) for name in expected]


def test_a_load_is_one_line_of_the_log(paths: list[str], caplog: pytest.LogCaptureFixture) -> None:
    with SafetensorsStreamer() as streamer, caplog.at_level("INFO", "headrace"):
        streamer.stream_files(paths)
        assert len(list(streamer.get_tensors())) == 6
        assert list(streamer.get_tensors()) == []
    (said,) = [one.getMessage() for one in caplog.records if one.getMessage().startswith("Headrace: ")]
    assert "tensors 6 handed out" in said


@pytest.mark.parametrize(
    ("path", "kind"), [("s3://b/k", "s3"), ("GS://b", "gs"), ("az://c/k", "azure"), ("/a", ""), ("https://h/x", "")]
)
def test_paths_tell_their_cloud(path: str, kind: str) -> None:
    found = {"s3": is_s3_path(path), "gs": is_gs_path(path), "azure": is_azure_path(path)}
    assert [name for name, is_one in found.items() if is_one] == [kind] * bool(kind)


def test_requests_are_prepared_and_read(paths: list[str]) -> None:
    """What a program does that reads the headers itself and then chooses ranges."""
    with DistributedStreamer() as streamer:
        prepared = prepare_request(streamer, paths, None)
        requests = [FileChunks(at, paths[at], offset, sizes) for at, (offset, _, sizes) in enumerate(prepared)]
        streamer.stream_files(requests, None, "cpu", False)
        got = {
            (at, prepared[at][1][index].name): create_torch_tensor(chunk, prepared[at][1][index])
            for at, index, chunk in streamer.get_chunks()
        }
    assert len(got) == 6
    for (at, name), tensor in got.items():
        assert same(tensor, TENSORS[list(TENSORS)[at]][name])


@pytest.mark.parametrize(("start", "size"), [(199, 2), (-1, 1), (201, 0)])
def test_ranges_that_leave_the_file_are_refused(folder: Path, start: int, size: int) -> None:
    (folder / "bytes").write_bytes(bytes(200))
    with DistributedStreamer() as streamer, pytest.raises(InvalidSetting, match="has 200 bytes"):
        streamer.stream_files([FileChunks(0, str(folder / "bytes"), [start], [size])])


def test_offsets_and_sizes_belong_together() -> None:
    with pytest.raises(InvalidSetting, match="2 offsets and 1 sizes"):
        FileChunks(0, "x", [0, 1], [1])
    assert FileChunks(0, "x", 5, []).offsets == []


# -- files


@pytest.mark.parametrize("use", [lambda path: pull_files(path, "x"), lambda path: ObjectStorageModel(path, "x")])
def test_local_folders_are_not_pulled(folder: Path, use: Callable[[str], object]) -> None:
    with pytest.raises(InvalidUri, match="is a local path"):
        use(str(folder))


def test_names_are_those_that_programs_import() -> None:
    assert runai.__all__ == sorted(runai.__all__)
    assert {"SafetensorsStreamer", "DistributedStreamer", "ObjectStorageModel", "list_safetensors"} < set(runai.__all__)
    for name in runai.__all__:
        assert getattr(runai, name)
