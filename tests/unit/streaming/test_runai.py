"""Run:ai Model Streamer as the transport, with a stand-in for the library: its calls, its order, its one error, and what is checked around it."""

from __future__ import annotations

import builtins
import gc
import json
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import headrace
from headrace.checkpoint import Checkpoint
from headrace.errors import (
    BudgetExceeded,
    InvalidSetting,
    MissingDependency,
    ObjectChanged,
    ObjectNotFound,
    ReadFailed,
    ReadStalled,
    StreamClosed,
    StreamError,
)
from headrace.settings import Settings
from headrace.streaming.runai import RunaiLibrary, RunaiStream, import_library
from headrace.streaming.runai_environment import EnvironmentLoan
from headrace.streaming.stream import StreamOptions

PATIENCE_S = 20.0
FILES = {
    "model-1.safetensors": {
        "a": torch.arange(6, dtype=torch.float32).view(2, 3),
        "b": torch.tensor(7),
        "e": torch.empty(0, 4),
    },
    "model-2.safetensors": {"c": torch.ones(3, dtype=torch.bfloat16), "d": torch.arange(5, dtype=torch.uint8)},
}
ORDER = ["a", "b", "c", "d", "e"]


class StandIn:
    """Makes streamers that behave as the library's do, in the order of ``shuffle``, and notes what they were asked."""

    def __init__(self, *, shuffle: Callable[[list[Any]], list[Any]] = lambda items: items[::-1]) -> None:
        self.shuffle = shuffle
        self.asked: list[tuple[list[str], dict[str, Any]]] = []
        self.environments: list[dict[str, str]] = []
        self.num_open = 0
        self.threads: set[threading.Thread] = set()
        self.error: Exception | None = None
        self.start_error: Exception | None = None
        self.on_tensor: Callable[[str], object] = lambda name: None
        self.change: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, tensor: tensor

    def library(self, *, filters: bool = True, version: tuple[int, ...] = (0, 17)) -> RunaiLibrary:
        kind = _Filtering if filters else _Streamer
        return RunaiLibrary(new_streamer=lambda: kind(self), new_credentials=SimpleNamespace, version=version)


class _Streamer:
    """A streamer as versions before 0.17 have it: no filter, and one buffer for all tensors."""

    def __init__(self, stand_in: StandIn) -> None:
        self.stand_in = stand_in
        self.files_to_tensors_metadata: dict[int, list[Any]] = {}
        self.paths: list[str] = []

    def __enter__(self) -> _Streamer:
        self.stand_in.num_open += 1
        self.stand_in.threads.add(threading.current_thread())
        return self

    def __exit__(self, *_: object) -> None:
        self.stand_in.num_open -= 1

    def stream_files(
        self, paths: list[str], s3_credentials: Any = None, device: str = "cpu", is_distributed: bool = False
    ) -> None:
        self._note(paths, {"s3_credentials": s3_credentials, "device": device, "is_distributed": is_distributed})
        self._describe(None)

    def _note(self, paths: list[str], options: dict[str, Any]) -> None:
        self.stand_in.asked.append((list(paths), options))
        self.stand_in.environments.append(dict(os.environ))
        self.paths = list(paths)
        if self.stand_in.start_error is not None:
            raise self.stand_in.start_error

    def _describe(self, names: Collection[str] | None) -> None:
        for place, path in enumerate(self.paths):
            with safe_open(path, "pt") as file:
                held = [name for name in file.keys() if names is None or name in names]  # noqa: SIM118
            self.files_to_tensors_metadata[place] = [SimpleNamespace(name=name) for name in held]

    def get_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        items: list[tuple[str, torch.Tensor]] = []
        for place, path in enumerate(self.paths):
            with safe_open(path, "pt") as file:
                names = [one.name for one in self.files_to_tensors_metadata[place]]
                items += [(name, file.get_tensor(name).clone()) for name in names]
        last: torch.Tensor | None = None
        for name, tensor in self.stand_in.shuffle(items):
            if self.stand_in.error is not None:
                raise self.stand_in.error
            self.stand_in.on_tensor(name)
            tensor = self.stand_in.change(name, tensor)
            if last is not None and not isinstance(self, _Filtering):
                last.reshape(-1).view(torch.uint8).fill_(0xEE)  # the buffer is used again
            last = tensor
            yield name, tensor


class _Filtering(_Streamer):
    """A streamer as 0.17 has it: it reads what is named, and tensors may be kept."""

    def stream_files(  # type: ignore[override]
        self,
        paths: list[str],
        s3_credentials: Any = None,
        device: str = "cpu",
        is_distributed: bool = False,
        tensor_names: Collection[str] | None = None,
        owned: bool = True,
    ) -> None:
        self._note(paths, {"tensor_names": tensor_names, "owned": owned})
        self._describe(tensor_names)
        held = [one.name for file in self.files_to_tensors_metadata.values() for one in file]
        if len(held) != len(set(held)):
            raise ValueError("tensor_names requested tensors that appear in more than one file")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    for name, tensors in FILES.items():
        save_file(tensors, path / name)
    return path


@pytest.fixture
def settings() -> Settings:
    return Settings.from_environment(progress=False, num_connections=3, memory_limit_bytes=1 << 20)


@pytest.fixture
def checkpoint(folder: Path, settings: Settings) -> Iterator[Checkpoint]:
    with headrace.open(folder, settings=settings) as opened:
        yield opened


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    made = StandIn()
    before = variables()
    yield made
    assert made.num_open == 0
    assert variables() == before
    for thread in made.threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def names_of(checkpoint: Checkpoint) -> list[str]:
    return list(checkpoint.entries)


def expected(name: str) -> torch.Tensor:
    return next(tensors[name] for tensors in FILES.values() if name in tensors)


def assert_same(name: str, tensor: torch.Tensor) -> None:
    assert (tensor.dtype, tensor.shape) == (expected(name).dtype, expected(name).shape)
    assert torch.equal(tensor, expected(name))


# -- what comes out


@pytest.mark.parametrize("filters", [True, False])
def test_all_come_in_our_order_and_may_be_kept(
    checkpoint: Checkpoint, settings: Settings, stand_in: StandIn, filters: bool
) -> None:
    with RunaiStream(checkpoint, settings=settings, library=stand_in.library(filters=filters)) as stream:
        got = list(stream)
    assert [name for name, _ in got] == names_of(checkpoint)
    for name, tensor in got:
        assert_same(name, tensor)
        assert tensor._headrace_streamed  # type: ignore[attr-defined]


def test_any_order_of_taking_works(checkpoint: Checkpoint, settings: Settings, stand_in: StandIn) -> None:
    with RunaiStream(checkpoint, settings=settings, library=stand_in.library()) as stream:
        for name in ("d", "a", "e"):
            assert_same(name, stream.take(name))
        assert set(stream.names_left) == {"b", "c"}
        for name, tensor in stream:
            assert_same(name, tensor)
        assert stream.names_left == []


@pytest.mark.parametrize("filters", [True, False])
def test_only_what_is_wanted_is_asked_for_and_handed_out(
    checkpoint: Checkpoint, settings: Settings, stand_in: StandIn, filters: bool
) -> None:
    entries = [checkpoint.entries["d"]]
    with RunaiStream(checkpoint, entries, settings=settings, library=stand_in.library(filters=filters)) as stream:
        assert [name for name, _ in stream] == ["d"]
    (paths, options) = stand_in.asked[0]
    assert [Path(path).name for path in paths] == ["model-2.safetensors"]
    assert options.get("tensor_names", ["d"]) == ["d"]
    assert stream.report.bytes_wanted == stream.report.bytes_read == 5


def test_raw_tensors_are_their_bytes(checkpoint: Checkpoint, settings: Settings, stand_in: StandIn) -> None:
    options = StreamOptions(raw=True)
    with RunaiStream(checkpoint, options=options, settings=settings, library=stand_in.library()) as stream:
        for name, tensor in stream:
            assert tensor.dtype == torch.uint8
            assert torch.equal(tensor, expected(name).reshape(-1).view(torch.uint8))


def test_each_is_handed_out_once(checkpoint: Checkpoint, settings: Settings, stand_in: StandIn) -> None:
    with RunaiStream(checkpoint, settings=settings, library=stand_in.library()) as stream:
        stream.take("a")
        with pytest.raises(StreamError, match="'a' was handed out already"):
            stream.take("a")
        with pytest.raises(StreamError, match="'z' is not part of this stream"):
            stream.take("z")
    with pytest.raises(StreamClosed, match="'b' was asked for after"):
        stream.take("b")


def test_a_tensor_asked_for_twice_is_refused(checkpoint: Checkpoint, settings: Settings, stand_in: StandIn) -> None:
    entries = [checkpoint.entries["a"], checkpoint.entries["a"]]
    with pytest.raises(StreamError, match="asked for twice"):
        RunaiStream(checkpoint, entries, settings=settings, library=stand_in.library())
    assert stand_in.asked == []


def test_report_says_what_is_known(checkpoint: Checkpoint, settings: Settings, stand_in: StandIn) -> None:
    with RunaiStream(checkpoint, settings=settings, library=stand_in.library()) as stream:
        for _ in stream:
            pass
    report = stream.report
    assert report.load_format == "runai_streamer"
    assert (report.num_tensors, report.num_files, report.num_connections) == (5, 2, 3)
    assert report.bytes_wanted == report.bytes_read == report.bytes_checkpoint == checkpoint.total_bytes
    assert report.to_dict()["num_requests"] is None
    assert ("read", "43 B by runai_streamer") in report.rows()
    assert stream.progress.bytes_done == stream.progress.bytes_wanted == checkpoint.total_bytes


@pytest.mark.parametrize("filters", [True, False])
def test_the_index_decides_between_two_files(
    folder: Path, settings: Settings, stand_in: StandIn, filters: bool
) -> None:
    save_file(
        {"c": torch.full((3,), -1.0, dtype=torch.bfloat16), "a": torch.zeros(2, 3)}, folder / "model-3.safetensors"
    )
    weight_map = {name: file for file, tensors in FILES.items() for name in tensors} | {"a": "model-3.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    library = stand_in.library(filters=filters)
    with (
        headrace.open(folder, settings=settings) as doubled,
        RunaiStream(doubled, settings=settings, library=library) as stream,
    ):
        got = dict(stream)
    assert torch.equal(got.pop("a"), torch.zeros(2, 3))
    assert got.keys() == {"b", "c", "d", "e"}
    for name, tensor in got.items():
        assert_same(name, tensor)
    assert [len(paths) for paths, _ in stand_in.asked] == [3, 1, 1, 1]


# -- how the library is set up


def test_variables_are_set_while_it_works_and_gone_afterwards(
    checkpoint: Checkpoint, settings: Settings, stand_in: StandIn
) -> None:
    with RunaiStream(checkpoint, settings=settings, library=stand_in.library()) as stream:
        list(stream)
    seen = stand_in.environments[0]
    assert seen["RUNAI_STREAMER_CONCURRENCY"] == "3"
    assert seen["RUNAI_STREAMER_MEMORY_LIMIT"] == str(1 << 20)
    assert "RUNAI_STREAMER_CONCURRENCY" not in os.environ


def test_the_users_own_variables_reach_it_and_the_report(
    checkpoint: Checkpoint, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNAI_STREAMER_CONCURRENCY", "40")
    with RunaiStream(checkpoint, settings=Settings(progress=False), library=stand_in.library()) as stream:
        list(stream)
    assert stand_in.environments[0]["RUNAI_STREAMER_CONCURRENCY"] == "40"
    assert stream.report.num_connections == 40
    monkeypatch.undo()


def test_streams_with_other_settings_cannot_run_at_once(
    checkpoint: Checkpoint, settings: Settings, stand_in: StandIn
) -> None:
    loan = EnvironmentLoan()
    with (
        loan.held({"HEADRACE_TEST_OTHER": "1"}),
        RunaiStream(checkpoint, settings=settings, library=stand_in.library(), environment=loan) as stream,
        pytest.raises(StreamError, match="Another stream of Run:ai"),
    ):
        stream.take("a")
    assert stand_in.asked == []


def test_two_streams_with_the_same_settings_run_side_by_side(
    checkpoint: Checkpoint, settings: Settings, stand_in: StandIn
) -> None:
    library = stand_in.library()
    first = RunaiStream(checkpoint, settings=settings, library=library)
    second = RunaiStream(checkpoint, settings=settings, library=library)
    with first, second:
        for name in ORDER:
            assert_same(name, first.take(name))
            assert_same(name, second.take(name))


@pytest.mark.parametrize(
    "error", [ImportError("No module named 'runai_model_streamer'"), OSError("libz.so.1: cannot open")]
)
def test_a_library_that_does_not_import_is_named_with_the_reason(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name.startswith("runai_model_streamer"):
            raise error
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingDependency) as raised:
        import_library(needs_s3=False)
    assert str(error) in raised.value.why
    assert 'pip install "headrace[runai]"' in raised.value.mend
    assert raised.value.__cause__ is error


def test_keys_cannot_be_lost_for_want_of_the_s3_part(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("runai_model_streamer")
    real = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name.startswith("runai_model_streamer_s3"):
            raise ImportError("No module named 'runai_model_streamer_s3'")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    assert import_library(needs_s3=False).version >= (0, 15)
    with pytest.raises(MissingDependency, match="runai_model_streamer_s3"):
        import_library(needs_s3=True)


def test_other_stores_are_refused(checkpoint: Checkpoint, settings: Settings, stand_in: StandIn) -> None:
    elsewhere: Any = SimpleNamespace(store=SimpleNamespace(uri=SimpleNamespace(scheme="https")), entries={})
    with pytest.raises(InvalidSetting, match="not used with https uris"):
        RunaiStream(elsewhere, settings=settings, library=stand_in.library())


# -- what goes wrong


def test_its_error_becomes_ours_with_the_objects_names(
    checkpoint: Checkpoint, settings: Settings, stand_in: StandIn, folder: Path
) -> None:
    stand_in.error = ValueError("Could not receive response from libstreamer due to: b'File access error'")
    with RunaiStream(checkpoint, settings=settings, library=stand_in.library()) as stream:
        for name in ("a", "b"):
            with pytest.raises(ReadFailed) as raised:
                stream.take(name)
            assert str(folder / "model-1.safetensors") in raised.value.what
            assert "File access error" in raised.value.why
            assert raised.value.__cause__ is stand_in.error


def test_an_error_at_the_start_becomes_ours(checkpoint: Checkpoint, settings: Settings, stand_in: StandIn) -> None:
    stand_in.start_error = RuntimeError("Corrupted File")
    with (
        RunaiStream(checkpoint, settings=settings, library=stand_in.library()) as stream,
        pytest.raises(ReadFailed, match="Corrupted File"),
    ):
        list(stream)


def test_too_small_a_limit_says_so(checkpoint: Checkpoint, settings: Settings, stand_in: StandIn) -> None:
    kind = type("RunaiStreamerMemoryLimitException", (Exception,), {})
    stand_in.start_error = kind("Memory limit supplied: 1 cannot be smaller than: 24")
    with (
        RunaiStream(checkpoint, settings=settings, library=stand_in.library()) as stream,
        pytest.raises(BudgetExceeded, match="RUNAI_STREAMER_MEMORY_LIMIT"),
    ):
        list(stream)


def rewrite(path: Path) -> None:
    """Put another file of the same length in place."""
    content = path.read_bytes()
    other = path.with_suffix(".new")
    other.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    other.replace(path)


def test_a_file_that_was_replaced_before_is_not_read(
    checkpoint: Checkpoint, settings: Settings, stand_in: StandIn, folder: Path
) -> None:
    rewrite(folder / "model-2.safetensors")
    with (
        RunaiStream(checkpoint, settings=settings, library=stand_in.library()) as stream,
        pytest.raises(ObjectChanged, match=r"model-2.safetensors is not the version that was opened"),
    ):
        list(stream)
    assert stand_in.asked == []


def test_a_file_that_is_replaced_meanwhile_is_noticed_before_the_last_tensor(
    checkpoint: Checkpoint, settings: Settings, stand_in: StandIn, folder: Path
) -> None:
    stand_in.on_tensor = lambda name: rewrite(folder / "model-1.safetensors") if name == "c" else None
    got = []
    with (
        RunaiStream(checkpoint, settings=settings, library=stand_in.library()) as stream,
        pytest.raises(ObjectChanged, match="model-1"),
    ):
        for name, _ in stream:
            got.append(name)
    assert len(got) < len(ORDER)


def test_the_stores_word_explains_the_librarys_error(
    checkpoint: Checkpoint, settings: Settings, stand_in: StandIn, folder: Path
) -> None:
    stand_in.error = ValueError("b'File access error'")
    stand_in.shuffle = lambda items: [(folder / "model-2.safetensors").unlink(), items][1]
    with (
        RunaiStream(checkpoint, settings=settings, library=stand_in.library()) as stream,
        pytest.raises(ObjectNotFound, match="model-2") as raised,
    ):
        list(stream)
    assert raised.value.__cause__ is stand_in.error


def test_a_tensor_of_another_type_is_an_error(checkpoint: Checkpoint, settings: Settings, stand_in: StandIn) -> None:
    stand_in.change = lambda name, tensor: tensor.view(torch.int32) if name == "a" else tensor
    with (
        RunaiStream(checkpoint, settings=settings, library=stand_in.library()) as stream,
        pytest.raises(ReadFailed, match=r"a came as torch\.int32"),
    ):
        list(stream)


def test_a_library_that_hangs_does_not_hold_the_consumer(
    checkpoint: Checkpoint, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    stand_in.on_tensor = lambda name: release.wait(PATIENCE_S)
    monkeypatch.setattr("headrace.streaming.runai._LONGEST_CLOSE_S", 0.05)
    settings = Settings.from_environment(progress=False, total_timeout_s=0.05, max_attempts=1)
    with (
        RunaiStream(checkpoint, settings=settings, library=stand_in.library()) as stream,
        pytest.raises(ReadStalled, match="Run:ai Model Streamer reads"),
    ):
        stream.take("a")
    release.set()
    for thread in stand_in.threads:
        thread.join(PATIENCE_S)


# -- how it ends


def test_leaving_early_ends_the_library(checkpoint: Checkpoint, settings: Settings, stand_in: StandIn) -> None:
    with RunaiStream(checkpoint, settings=settings, library=stand_in.library()) as stream:
        stream.take("e")
        assert stand_in.num_open == 1
    assert stand_in.num_open == 0
    assert stream.report.num_tensors == 1


def test_the_end_of_the_iterator_closes_the_checkpoint_that_it_owns(
    folder: Path, settings: Settings, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = []
    opened = headrace.open(folder, settings=settings)
    monkeypatch.setattr(opened, "close", lambda: closed.append(True))
    stream = RunaiStream(opened, settings=settings, library=stand_in.library(), owns_checkpoint=True)
    list(stream)
    stream.close()
    assert closed == [True]


def test_a_forgotten_stream_ends_its_thread(checkpoint: Checkpoint, settings: Settings, stand_in: StandIn) -> None:
    stream = RunaiStream(checkpoint, settings=settings, library=stand_in.library())
    stream.take("e")
    gone = weakref.ref(stream)
    del stream
    gc.collect()
    assert gone() is None
    assert stand_in.num_open == 0


def test_nothing_happens_before_the_first_tensor_is_asked_for(
    checkpoint: Checkpoint, settings: Settings, stand_in: StandIn
) -> None:
    num_threads = threading.active_count()
    stream = RunaiStream(checkpoint, settings=settings, library=stand_in.library())
    assert threading.active_count() == num_threads
    assert stream.names_left == names_of(checkpoint)
    stream.close()
    assert stand_in.asked == []
