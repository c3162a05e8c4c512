"""SGLang's names over our objects: paths without I/O, side files by pattern, tensors that may be kept although their memory is used again."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.unit.checkpoint.memory_store import MemoryStore

import headrace
from headrace.checkpoint.sidecache import SideFileCache
from headrace.compat import sglang
from headrace.compat.sglang import (
    ObjectStorageModel,
    is_runai_obj_uri,
    list_safetensors,
    runai_safetensors_weights_iterator,
)
from headrace.errors import (
    CacheError,
    InvalidSetting,
    InvalidUri,
    MissingFiles,
    NoWeights,
    ObjectNotFound,
    StoreUnavailable,
    TruncatedObject,
)
from headrace.settings import Settings, TransportSettings
from headrace.storage import StoredObject

URI = "s3://bucket/model"
SIDE_FILES = {
    "config.json": b"{}",
    "tokenizer.model": b"pieces",
    "chat_template.jinja": b"{{ messages }}",
    "code/modeling.py": b"pass",
    "model.safetensors.index.json": b"{}",
}
WEIGHTS = dict.fromkeys(("model.safetensors", "a.bin", "b.pt", "c.pth", "d.tensors", "code/x.bin"), b"w" * 64)


# -- uris


@pytest.mark.parametrize(
    "value",
    [
        "s3://bucket/model",
        "S3://bucket/model",
        "gs://bucket/model",
        "Gs://b",
        "az://container/model",
        "AZ://c/m",
        Path("s3://bucket/model"),
        " s3://bucket/model",
        "s3://",
    ],
)
def test_bucket_uris_are_recognised(value: str | Path) -> None:
    assert is_runai_obj_uri(value) is True


@pytest.mark.parametrize(
    "value",
    [
        "org/name",
        "/models/s3",
        "s3/model",
        "s3:model",
        "https://host/model",
        "hf://org/name",
        "file:///model",
        "",
        Path("gs"),
    ],
)
def test_other_names_are_not_bucket_uris(value: str | Path) -> None:
    assert is_runai_obj_uri(value) is False


# -- side files


class Bucket:
    """A store in memory behind ``URI``, and a cache."""

    def __init__(self, cache_dir: Path) -> None:
        self.settings = Settings(cache_dir=cache_dir, progress=False)
        self.store = MemoryStore({**SIDE_FILES, **WEIGHTS}, URI)

    @property
    def path(self) -> Path:
        return Path(ObjectStorageModel.get_path(URI, settings=self.settings))

    @property
    def names(self) -> set[str]:
        """What the path shows, our own marker left out."""
        return {
            str(path.relative_to(self.path))
            for path in self.path.rglob("*")
            if path.is_file() and not path.name.startswith(".")
        }

    def pull(self, *patterns: Any, **named: Any) -> None:
        with ObjectStorageModel(URI, settings=self.settings) as model:
            model.pull_files(*patterns, **named)

    def download(self) -> str:
        return ObjectStorageModel.download_and_get_path(URI, settings=self.settings)


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    bucket = Bucket(tmp_path / "cache")
    monkeypatch.setattr(sglang, "open_store", lambda uri, *, settings: bucket.store)
    return bucket


def test_the_path_is_made_of_the_uris_hash(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = hashlib.sha256(URI.encode()).hexdigest()[:16]
    path = ObjectStorageModel.get_path(URI, settings=bucket.settings)
    assert path == str(tmp_path / "cache" / "model_streamer" / digest)
    for same in ("S3://bucket/model/", Path("s3://bucket/model"), f" {URI}"):
        assert ObjectStorageModel.get_path(same, settings=bucket.settings) == path
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "cache"))
    assert ObjectStorageModel.get_path(URI) == ObjectStorageModel(URI).dir == path
    assert ObjectStorageModel.get_path("s3://bucket/model2") != path


def test_asking_for_the_path_asks_no_store_and_makes_nothing(bucket: Bucket, tmp_path: Path) -> None:
    assert not os.path.lexists(ObjectStorageModel.get_path(URI, settings=bucket.settings))
    assert not bucket.store.listings and not bucket.store.reads
    assert list(tmp_path.iterdir()) == []


def test_a_local_folder_is_its_own_path(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    settings = Settings(cache_dir=tmp_path / "cache")
    assert ObjectStorageModel.get_path(tmp_path, settings=settings) == str(tmp_path)
    assert ObjectStorageModel.download_and_get_path(str(tmp_path), settings=settings) == str(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json"]


def test_a_download_brings_side_files_once_and_no_weights(bucket: Bucket) -> None:
    assert bucket.download() == str(bucket.path)
    assert bucket.names == set(SIDE_FILES)
    assert {key: (bucket.path / key).read_bytes() for key in SIDE_FILES} == SIDE_FILES
    assert bucket.store.reads == dict.fromkeys(SIDE_FILES, 1)
    assert bucket.download() == str(bucket.path)
    assert bucket.store.reads == dict.fromkeys(SIDE_FILES, 1), "an unchanged model is not read again"
    assert bucket.store.num_closed == 2


def test_the_download_is_the_checkpoints_own_mirror(bucket: Bucket) -> None:
    bucket.download()
    # `stored` as opening a checkpoint would find them: same uri, same objects, so the same folder and no second download.
    objects = [bucket.store.stat(key) for key in SIDE_FILES]
    files = headrace.checkpoint.SideFiles(bucket.store, objects, cache_dir=bucket.settings.cache_dir)
    assert files.link == bucket.path
    assert files.folder().resolve() == bucket.path.resolve()
    assert bucket.store.reads == dict.fromkeys(SIDE_FILES, 1)


@pytest.mark.parametrize(
    ("allow", "ignore", "names"),
    [
        (["*.json"], None, {"config.json", "model.safetensors.index.json"}),
        (["*.json", "*.py"], ["*.index.json"], {"config.json", "code/modeling.py"}),
        (["code/*"], None, {"code/modeling.py"}),
        (["modeling.py"], None, {"code/modeling.py"}),
        (None, ["*.json", "code/*"], {"tokenizer.model", "chat_template.jinja"}),
        (None, ["*.safetensors", "*.bin", "*.pt", "*.pth", "*.tensors"], set(SIDE_FILES)),
        (["*"], None, set(SIDE_FILES)),
        (["*"], [], set(SIDE_FILES)),
        ("*.json", "model*", {"config.json"}),
        (["*.nothing"], None, set()),
        ([], None, set()),
        (["CONFIG.JSON"], None, set()),
    ],
)
def test_patterns_choose_among_side_files(allow: Any, ignore: Any, names: set[str], bucket: Bucket) -> None:
    bucket.pull(allow, ignore)
    assert bucket.path.is_dir()
    assert bucket.names == names
    assert set(bucket.store.reads) == names


def test_a_pull_adds_to_what_was_there(bucket: Bucket) -> None:
    with ObjectStorageModel(URI, settings=bucket.settings) as model:
        model.pull_files(allow_pattern=["*.json"])
        model.pull_files(allow_pattern=["*.model"])
    assert bucket.names == {"config.json", "model.safetensors.index.json", "tokenizer.model"}
    bucket.download()
    bucket.pull(allow_pattern=["config.json"])
    assert bucket.names == set(SIDE_FILES)


def test_a_pull_after_an_upload_shows_one_version_only(bucket: Bucket) -> None:
    bucket.download()
    before = bucket.path.resolve()
    bucket.store.objects |= {"config.json": b'{"new": 1}', "tokenizer.model": b"new pieces"}
    del bucket.store.objects["chat_template.jinja"]
    bucket.pull(allow_pattern=["config.json"])
    assert bucket.path.resolve() != before
    assert bucket.names == set(SIDE_FILES) - {"chat_template.jinja"}
    assert (bucket.path / "tokenizer.model").read_bytes() == b"new pieces"
    assert (before / "tokenizer.model").read_bytes() == b"pieces", "who reads the old version may finish"


@pytest.mark.parametrize("allow", [["*.safetensors"], ["model*.safetensors", "*.bin"], "*.pt"])
def test_to_ask_for_weights_alone_is_refused(allow: Any, bucket: Bucket) -> None:
    with pytest.raises(InvalidSetting, match="never copied to the disk"):
        bucket.pull(allow)
    assert not os.path.lexists(bucket.path) and not bucket.store.reads
    assert bucket.store.num_closed == 1


def test_an_empty_place_is_an_error(bucket: Bucket) -> None:
    bucket.store.objects.clear()
    with pytest.raises(ObjectNotFound, match=rf"There is nothing at {URI}\."):
        bucket.download()
    assert not os.path.lexists(bucket.path)


def test_a_cache_that_cannot_be_written_is_an_error(bucket: Bucket, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    settings = Settings(cache_dir=tmp_path / "file" / "cache")
    with pytest.raises(CacheError, match="HEADRACE_CACHE_DIR"):
        ObjectStorageModel.download_and_get_path(URI, settings=settings)
    assert bucket.store.num_closed == 1


def test_a_pull_that_fails_leaves_the_path_where_it_led(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.download()
    before, versions = bucket.path.resolve(), sorted(bucket.path.resolve().parent.iterdir())
    bucket.store.objects["config.json"] = b'{"new": 1}'

    def refuse(stored: StoredObject, **range_: int) -> bytes:
        raise ConnectionResetError("cut")

    monkeypatch.setattr(bucket.store, "read_object", refuse)
    with pytest.raises(StoreUnavailable, match="cut"):
        bucket.download()
    assert bucket.path.resolve() == before and sorted(before.parent.iterdir()) == versions


@pytest.mark.parametrize(("num_lost", "is_error"), [(1, False), (3, True)])
def test_a_path_that_leads_elsewhere_is_noticed(
    num_lost: int, is_error: bool, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where another process swaps it at the same moment, or the cache may only be read."""
    bucket.pull(["config.json"])
    original, lost = SideFileCache._point, []

    def point(self: SideFileCache, uri: str, folder: Path) -> None:
        lost.append(folder)
        if len(lost) > num_lost:
            original(self, uri, folder)

    monkeypatch.setattr(SideFileCache, "_point", point)
    if is_error:
        with pytest.raises(CacheError, match="does not lead to the side files"):
            bucket.download()
        assert bucket.names == {"config.json"}
    else:
        bucket.download()
        assert bucket.names == set(SIDE_FILES)


def test_a_place_that_no_store_serves_is_refused() -> None:
    with pytest.raises(InvalidUri):
        ObjectStorageModel("s3://")


# -- weights

TENSOR_BYTES = 64 << 10
SMALL = Settings(
    memory_limit_bytes=4 * TENSOR_BYTES,
    debug_poison=True,
    progress=False,
    transport=TransportSettings(read_bytes=TENSOR_BYTES, num_connections=2),
)
"""Room for four tensors, of which each is a read; what comes back becomes NaN."""


def value(name: str) -> torch.Tensor:
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    return torch.randn(TENSOR_BYTES // 4, generator=torch.Generator().manual_seed(seed))


def save_files(folder: Path, files: dict[str, list[str]], *, index: bool = True) -> Path:
    for file, names in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        save_file({name: value(name) for name in names}, folder / file)
    if index:
        weight_map = {name: file for file, names in files.items() for name in names}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
FILES = {FIRST: [f"a{number}" for number in range(6)], SECOND: [f"b{number}" for number in range(6)]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_files(tmp_path / "model", FILES)


def paths(folder: Path, *files: str) -> list[str]:
    return [str(folder / file) for file in files or (FIRST, SECOND)]


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("headrace")]


def test_files_that_the_index_does_not_name_are_not_listed(folder: Path) -> None:
    save_file({"a0": value("other")}, folder / "consolidated.safetensors")
    save_file({"a0": value("other")}, folder / "model-00001-of-00003.safetensors")
    assert list_safetensors(str(folder)) == paths(folder)


def test_listed_files_are_spelled_as_the_path_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    for path in (str(folder), f"{folder}/", "model", "./model/"):
        assert list_safetensors(path) == [os.path.join(path, file) for file in (FIRST, SECOND)]
    assert list_safetensors(folder) == list_safetensors(f"file://{folder}") == paths(folder)
    assert list_safetensors(folder / SECOND) == list_safetensors(str(folder / SECOND)) == paths(folder, SECOND)
    monkeypatch.chdir(folder)
    assert list_safetensors(SECOND) == [SECOND]


def test_a_list_of_an_incomplete_or_empty_folder_is_an_error(folder: Path, tmp_path: Path) -> None:
    (folder / SECOND).unlink()
    with pytest.raises(MissingFiles, match=SECOND):
        list_safetensors(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(NoWeights):
        list_safetensors(tmp_path / "empty")


@pytest.mark.parametrize("files", [(FIRST, SECOND), (SECOND, FIRST), (SECOND,)])
def test_tensors_come_file_by_file_in_the_order_given(files: tuple[str, ...], folder: Path) -> None:
    names = []
    for name, tensor in runai_safetensors_weights_iterator(paths(folder, *files), settings=SMALL):
        assert torch.equal(tensor, value(name))
        names.append(name)
    assert names == [name for file in files for name in FILES[file]]
    assert threads() == []


def test_nothing_is_opened_before_the_first_tensor_is_asked_for(folder: Path) -> None:
    weights = runai_safetensors_weights_iterator([str(folder / "absent.safetensors")], False, "cpu", settings=SMALL)
    with pytest.raises(ObjectNotFound):
        next(weights)
    assert list(runai_safetensors_weights_iterator([])) == []


def test_a_file_given_twice_is_read_once(folder: Path) -> None:
    files = [folder / FIRST, str(folder / FIRST), f"file://{folder / FIRST}"]
    assert [name for name, _ in runai_safetensors_weights_iterator(files, settings=SMALL)] == FILES[FIRST]


def test_memory_is_used_again_once_its_tensor_is_gone(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    addresses = set()
    for _, tensor in runai_safetensors_weights_iterator(paths(folder), settings=SMALL):
        addresses.add(tensor.data_ptr())
        del tensor
    assert len(addresses) <= 4 and caplog.text == ""


@pytest.mark.parametrize(
    "keep",
    [
        list,
        lambda weights: [(name, tensor.detach()) for name, tensor in weights],
        lambda weights: [(name, tensor.view(2, -1)[:]) for name, tensor in weights],
    ],
)
def test_kept_tensors_are_never_overwritten(
    keep: Callable[[Any], list[tuple[str, torch.Tensor]]], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = keep(runai_safetensors_weights_iterator(paths(folder), settings=SMALL))
    assert [name for name, _ in kept] == FILES[FIRST] + FILES[SECOND]
    assert all(torch.equal(tensor.flatten(), value(name)) for name, tensor in kept)
    assert caplog.text.count("keeps tensors") == 1


def test_tensor_and_storage_are_marked_and_views_keep_that(folder: Path) -> None:
    names = ("_headrace_streamed", "_sglang_runai_streamer_tensor")
    _, tensor = next(runai_safetensors_weights_iterator(paths(folder), settings=SMALL))
    view = tensor.detach()[3:]
    for name in names:
        assert getattr(tensor, name) is True
        assert getattr(tensor.untyped_storage(), name) is getattr(view.untyped_storage(), name) is True
        assert not hasattr(view, name) and not hasattr(tensor.clone().untyped_storage(), name)


def test_another_device_gets_marked_copies(folder: Path) -> None:
    kept = list(runai_safetensors_weights_iterator(paths(folder), True, "meta", settings=SMALL))
    assert {tensor.device.type for _, tensor in kept} == {"meta"} and len(kept) == 12
    assert all(tensor._sglang_runai_streamer_tensor for _, tensor in kept)
    assert all(tensor.untyped_storage()._sglang_runai_streamer_tensor for _, tensor in kept)


def test_a_file_that_the_index_forgot_comes_last(folder: Path) -> None:
    save_file({"mtp": value("mtp")}, folder / "mtp.safetensors")
    weights = runai_safetensors_weights_iterator(paths(folder, "mtp.safetensors", SECOND, FIRST), settings=SMALL)
    assert [name for name, _ in weights] == FILES[SECOND] + FILES[FIRST] + ["mtp"]


def test_the_index_decides_between_two_files_with_one_name(folder: Path) -> None:
    save_file({name: value(name) for name in FILES[SECOND]} | {"a0": value("stale")}, folder / SECOND)
    weights = dict(runai_safetensors_weights_iterator(paths(folder), settings=SMALL))
    assert len(weights) == 12 and torch.equal(weights["a0"], value("a0"))


def test_files_of_sub_folders_belong_to_the_index_above_them(tmp_path: Path) -> None:
    files = {"one/x.safetensors": ["x"], "two/model-00002-of-00007.safetensors": ["y"]}
    folder = save_files(tmp_path, files)
    listed = list_safetensors(str(folder))
    assert listed == [str(folder / file) for file in files]
    assert [name for name, _ in runai_safetensors_weights_iterator(listed, settings=SMALL)] == ["x", "y"]


def test_a_single_file_needs_no_others(folder: Path) -> None:
    (folder / FIRST).unlink()
    names = [name for name, _ in runai_safetensors_weights_iterator(paths(folder, SECOND), settings=SMALL)]
    assert names == FILES[SECOND]


def test_several_files_are_checked_with_those_that_belong_to_them(tmp_path: Path) -> None:
    files = {f"model-0000{number}-of-00003.safetensors": [str(number)] for number in (1, 2, 3)}
    folder = save_files(tmp_path, files)
    (folder / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(MissingFiles, match=r"model-00003-of-00003"):
        next(runai_safetensors_weights_iterator(paths(folder, *list(files)[:2]), settings=SMALL))


def test_a_cut_file_is_an_error_before_the_first_tensor(folder: Path) -> None:
    os.truncate(folder / SECOND, (folder / SECOND).stat().st_size - 4)
    with pytest.raises(TruncatedObject, match=SECOND):
        next(runai_safetensors_weights_iterator(paths(folder), settings=SMALL))
    assert threads() == []


def test_files_of_two_stores_are_refused(folder: Path) -> None:
    for other in ("s3://bucket/x.safetensors", "gs://bucket/x.safetensors"):
        with pytest.raises(InvalidSetting, match="different stores"):
            next(runai_safetensors_weights_iterator([*paths(folder), other]))
    with pytest.raises(InvalidSetting, match="different stores"):
        next(runai_safetensors_weights_iterator(["s3://one/x.safetensors", "s3://two/x.safetensors"]))


@pytest.mark.parametrize(
    ("files", "common"),
    [
        (["s3://b/m/1.safetensors", "s3://b/m/2.safetensors"], "s3://b/m"),
        (["s3://b/1.safetensors", "s3://b/2.safetensors"], "s3://b"),
        (["s3://b/m/x/1.safetensors", "s3://b/m/y/2.safetensors"], "s3://b/m"),
        (["s3://b/model/1.safetensors", "s3://b/models/2.safetensors"], "s3://b"),
        (["s3://b/m.safetensors/1.safetensors", "S3://b/m.safetensors/2.safetensors"], "s3://b/m.safetensors"),
        (["/m/1.safetensors", "/m/sub/2.safetensors"], "/m"),
        (["/1.safetensors", "/2.safetensors"], "/"),
        (["/x/1.safetensors", "/y/2.safetensors"], "/"),
    ],
)
def test_the_common_folder_is_found_by_whole_names(files: list[str], common: str) -> None:
    folder = sglang._common_folder([headrace.parse_uri(file) for file in files])
    assert str(folder) == common and folder.text.endswith("/")


def test_closing_early_ends_all_reads(folder: Path) -> None:
    weights = runai_safetensors_weights_iterator(paths(folder), settings=SMALL)
    name, tensor = next(weights)
    assert threads() != []
    weights.close()  # type: ignore[attr-defined]
    assert threads() == []
    assert torch.equal(tensor, value(name)), "what was handed out stays"


@pytest.mark.parametrize(("rank", "is_shown"), [(None, True), (0, True), (1, False)])
def test_progress_is_shown_on_the_first_rank(
    rank: int | None, is_shown: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: rank is not None)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    weights = runai_safetensors_weights_iterator(paths(folder), settings=Settings())
    next(weights)
    assert ("headrace-progress" in threads()) is is_shown
    weights.close()  # type: ignore[attr-defined]
    assert threads() == []
