"""What huggingface_hub itself makes of the stand-in for the hub, and what its cache is to us: neither may be only our idea of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import headrace
from headrace.settings import Settings
from headrace.storage import open_store
from headrace.storage.local import LocalStore
from tests.support.checkpoints import assert_equal, make_files, make_tensors
from tests.support.fake_hub import FakeHub, fake_hub

huggingface_hub = pytest.importorskip("huggingface_hub")

from huggingface_hub import constants  # noqa: E402
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError  # noqa: E402

TENSORS = make_tensors(4)
FILES = make_files(TENSORS)
NAME = "org/name"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    with fake_hub(monkeypatch, tmp_path / "home", tokens=("good",)) as one:
        yield one


def fetch(hub: FakeHub, **options: object) -> Path:
    return Path(huggingface_hub.snapshot_download(NAME, endpoint=hub.url, cache_dir=constants.HF_HUB_CACHE, **options))


def test_what_the_library_fetched_is_read_from_its_cache(
    hub: FakeHub, s3_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.publish(NAME, FILES | {"README.md": b"# name"})
    snapshot = fetch(hub, ignore_patterns="*.md")
    num_sent = len(hub.cdn.log)
    with contextlib.closing(open_store(f"hf://{NAME}", settings=s3_settings)) as store:
        assert isinstance(store, LocalStore)
        assert str(store.uri) == str(snapshot)
    assert_equal(headrace.load_state_dict(NAME, settings=s3_settings), TENSORS)
    assert len(hub.cdn.log) == num_sent

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    num_asked = len(hub.hub.log)
    for uri in (NAME, f"hf://{NAME}@main", f"hf://{NAME}@{commit}"):
        assert_equal(headrace.load_state_dict(uri, settings=s3_settings), TENSORS)
    assert len(hub.hub.log) == num_asked


def test_what_the_library_fetched_in_part_is_streamed(hub: FakeHub, s3_settings: Settings) -> None:
    hub.publish(NAME, FILES)
    fetch(hub, ignore_patterns="*-00002-*")
    num_sent = len(hub.cdn.log)
    assert_equal(headrace.load_state_dict(NAME, settings=s3_settings), TENSORS)
    assert len(hub.cdn.log) > num_sent


def test_the_stand_in_refuses_as_the_library_expects(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    api = huggingface_hub.HfApi(endpoint=hub.url)
    with pytest.raises(RepositoryNotFoundError):
        api.model_info("org/absent")
    hub.publish(NAME, FILES, is_gated=True)
    with pytest.raises(RevisionNotFoundError):
        api.model_info(NAME, revision="v9")
    url = huggingface_hub.hf_hub_url(NAME, "config.json", endpoint=hub.url)
    with pytest.raises(GatedRepoError):
        huggingface_hub.get_hf_file_metadata(url)
    monkeypatch.setenv("HF_TOKEN", "good")
    found = huggingface_hub.get_hf_file_metadata(
        huggingface_hub.hf_hub_url(NAME, "model-00001-of-00002.safetensors", endpoint=hub.url), token=True
    )
    assert found.size == len(FILES["model-00001-of-00002.safetensors"])
    assert found.location.startswith(hub.cdn.url)
    assert {file.rfilename for file in api.model_info(NAME, files_metadata=True).siblings} == set(FILES)
    assert {file.path for file in api.list_repo_tree(NAME, recursive=True)} == set(FILES)
