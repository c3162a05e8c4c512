"""Local files mapped by the safetensors library: values, checks, and which streams the other load formats give."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import headrace
from headrace.checkpoint import Checkpoint
from headrace.errors import InvalidSetting, MissingDependency, ObjectChanged, StreamClosed, UnsupportedDtype
from headrace.settings import Settings
from headrace.streaming import open_source
from headrace.streaming.mapped import MappedStream
from headrace.streaming.runai import RunaiStream
from headrace.streaming.stream import StreamOptions, TensorStream

TENSORS = {
    "model-1.safetensors": {
        "a": torch.randn(4, 5),
        "b": torch.tensor(2.5, dtype=torch.bfloat16),
        "e": torch.empty(0, 3),
    },
    "model-2.safetensors": {"c": torch.randn(33).to(torch.float8_e4m3fn), "d": torch.arange(5)},
}
SETTINGS = Settings(progress=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, tensors in TENSORS.items():
        save_file(tensors, tmp_path / name)
    return tmp_path


@pytest.fixture
def checkpoint(folder: Path) -> Iterator[Checkpoint]:
    with headrace.open(folder, settings=SETTINGS) as opened:
        yield opened


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(
        one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
    )


def test_values_are_those_of_our_own_stream(checkpoint: Checkpoint) -> None:
    ours = headrace.load_state_dict(checkpoint, settings=SETTINGS)
    with MappedStream(checkpoint) as stream:
        mapped = dict(stream)
    assert list(mapped) == list(ours)
    assert all(same(mapped[name], ours[name]) for name in ours)
    report = stream.report
    assert (report.load_format, report.num_tensors) == ("safetensors", 5)
    assert report.bytes_read == 0


def test_tensors_outlive_stream_and_file(checkpoint: Checkpoint, folder: Path) -> None:
    with MappedStream(checkpoint) as stream:
        d, a = stream.take("d"), stream.take("a")
    for name in TENSORS:
        (folder / name).unlink()
    assert torch.equal(a, TENSORS["model-1.safetensors"]["a"])
    d.fill_(9)
    assert d.tolist() == [9] * 5


def test_writing_to_a_tensor_changes_no_file(checkpoint: Checkpoint, folder: Path) -> None:
    before = (folder / "model-2.safetensors").read_bytes()
    with MappedStream(checkpoint) as stream:
        stream.take("d").fill_(9)
    assert (folder / "model-2.safetensors").read_bytes() == before


def test_raw_tensors_are_their_bytes(checkpoint: Checkpoint) -> None:
    with MappedStream(checkpoint, options=StreamOptions(raw=True)) as stream:
        assert stream.take("d").tolist() == TENSORS["model-2.safetensors"]["d"].view(torch.uint8).tolist()


def test_a_replaced_file_is_refused(checkpoint: Checkpoint, folder: Path) -> None:
    with MappedStream(checkpoint) as stream:
        stream.take("a")
        (folder / "model-2.safetensors").rename(folder / "old")
        save_file(TENSORS["model-2.safetensors"], folder / "model-2.safetensors")
        with pytest.raises(ObjectChanged, match="model-2"):
            stream.take("c")
    with pytest.raises(StreamClosed):
        stream.take("d")


def test_what_the_library_cannot_give_is_an_error(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> Any:
        def get_tensor(name: str) -> torch.Tensor:
            if name == "a":
                raise AttributeError("module 'torch' has no attribute 'float1'")
            return torch.zeros(1)

        return SimpleNamespace(get_tensor=get_tensor)

    monkeypatch.setattr("safetensors.safe_open", refuse)
    with MappedStream(checkpoint) as stream:
        for name, why in (("a", "float1"), ("c", r"gives torch.float32 \(1,\)")):
            with pytest.raises(UnsupportedDtype, match=why):
                stream.take(name)


def test_only_local_files_are_mapped() -> None:
    bucket: Any = SimpleNamespace(store=SimpleNamespace(uri=SimpleNamespace(scheme="s3")), uri="s3://b/m", entries={})
    with pytest.raises(InvalidSetting, match=r"cannot read s3://b/m.*only local files"):
        MappedStream(bucket)


def test_a_missing_library_is_named(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name == "safetensors":
            raise ImportError("No module named 'safetensors'")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingDependency, match="No module named 'safetensors'"):
        MappedStream(checkpoint)


# -- the choice


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("auto", TensorStream),
        ("headrace", TensorStream),
        ("safetensors", MappedStream),
        ("runai_streamer", RunaiStream),
    ],
)
def test_each_format_has_its_stream(checkpoint: Checkpoint, name: str, kind: type) -> None:
    if name == "runai_streamer":
        pytest.importorskip("runai_model_streamer")
    with open_source(name, checkpoint, [checkpoint.entries["a"]], settings=SETTINGS) as source:
        assert type(source) is kind
        assert source.names_left == ["a"]


@pytest.mark.parametrize("name", ["modelopt", "dummy"])
def test_what_streams_nothing_is_refused(checkpoint: Checkpoint, name: str) -> None:
    with pytest.raises(InvalidSetting, match=f"{name} streams no tensors"):
        open_source(name, checkpoint)


def test_the_public_functions_take_a_format(folder: Path) -> None:
    reports = []
    loaded = headrace.load_state_dict(
        folder, load_format="safetensors", include="[ab]", settings=SETTINGS, on_report=reports.append
    )
    assert list(loaded) == ["a", "b"]
    assert reports[0].load_format == "safetensors"
    with headrace.stream(folder, load_format="safetensors", settings=SETTINGS) as tensors:
        assert {name for name, _ in tensors} == {"a", "b", "c", "d", "e"}


def test_the_extra_config_takes_the_place_of_settings(folder: Path) -> None:
    with headrace.stream(folder, extra_config='{"concurrency": 2, "memory_limit": 4096}', settings=SETTINGS) as tensors:
        assert tensors.report.num_connections == 2
    with pytest.raises(InvalidSetting, match="Unknown in the extra config: 'threads'"):
        headrace.stream(folder, extra_config={"threads": 2}, settings=SETTINGS)
    with pytest.raises(InvalidSetting, match="not a load format"):
        headrace.load_state_dict(folder, load_format="pt", settings=SETTINGS)


def test_other_transports_share_no_reading(folder: Path) -> None:
    with pytest.raises(InvalidSetting, match="Only Headrace's own transport shares"):
        headrace.stream(folder, load_format="safetensors", distributed=True, settings=SETTINGS)
