from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

pytest.importorskip("huggingface_hub")

from huggingface_hub import constants
from tests.support.fake_hub import fill_cache

from headrace.errors import InvalidUri
from headrace.storage import parse_uri
from headrace.storage.hub_access import HubRepository
from headrace.storage.hub_cache import find_snapshot, has_weights, is_complete, missing_weights

COMMIT = "ab" * 20
INDEX = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode()
WHOLE = {
    "model.safetensors.index.json": INDEX,
    "model-1.safetensors": b"1",
    "model-2.safetensors": b"22",
    "config.json": b'{"auto_map": {"AutoModel": "modeling_x.X"}}',
    "modeling_x.py": b"",
    "tokenizer.json": b"{}",
}
MORE = {"README.md": 100, "onnx/model.onnx": 5000, "consolidated.safetensors": 9, ".gitattributes": 5}


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def sizes(files: Mapping[str, bytes]) -> dict[str, int]:
    return {key: len(content) for key, content in files.items()} | MORE


def without(*keys: str) -> dict[str, bytes]:
    return {key: content for key, content in WHOLE.items() if key not in keys}


@pytest.mark.parametrize(
    ("uri", "name", "revision", "is_commit"),
    [
        ("hf://org/name", "org/name", "main", False),
        ("hf://org/name@v1.0/sub", "org/name", "v1.0", False),
        ("hf://org/name@refs%2Fpr%2F4", "org/name", "refs/pr/4", False),
        (f"hf://org/name@{COMMIT}", "org/name", COMMIT, True),
    ],
)
def test_a_uri_names_a_repository_and_a_revision(uri: str, name: str, revision: str, is_commit: bool) -> None:
    repository = HubRepository.of(parse_uri(uri))
    assert (repository.name, repository.revision, repository.is_commit) == (name, revision, is_commit)


@pytest.mark.parametrize(
    "uri", ["hf://datasets/org/name", "hf://spaces/name", "hf://org/name@a%2F..%2Fb", "hf://org/name@a%2F%2Fb"]
)
def test_what_is_no_model_or_no_revision_is_refused(uri: str) -> None:
    with pytest.raises(InvalidUri):
        HubRepository.of(parse_uri(uri))


def test_a_snapshot_is_found_by_revision_and_by_commit(home: Path) -> None:
    repository = HubRepository("org/name")
    assert find_snapshot(repository) is None
    snapshot = fill_cache(home, "org/name", COMMIT, WHOLE)
    assert find_snapshot(repository) == snapshot
    assert find_snapshot(HubRepository("org/name", COMMIT)) == snapshot
    assert find_snapshot(repository, COMMIT) == snapshot
    assert find_snapshot(repository, "cd" * 20) is None
    assert find_snapshot(HubRepository("org/name", "v2")) is None
    assert find_snapshot(HubRepository("org/other")) is None
    (home / "hub/models--org--name/refs/main").write_text("../../elsewhere")
    assert find_snapshot(repository) is None


def test_a_snapshot_with_all_that_a_load_needs_is_complete(home: Path) -> None:
    snapshot = fill_cache(home, "org/name", COMMIT, WHOLE)
    assert is_complete(snapshot, sizes(WHOLE), None)
    assert is_complete(snapshot, sizes(WHOLE), "model-1.safetensors")
    assert not is_complete(snapshot, sizes(WHOLE), "consolidated.safetensors")
    assert missing_weights(snapshot, None) == []


@pytest.mark.parametrize("absent", sorted(WHOLE))
def test_a_snapshot_that_lacks_a_file_is_not_complete(home: Path, absent: str) -> None:
    snapshot = fill_cache(home, "org/name", COMMIT, without(absent))
    assert not is_complete(snapshot, sizes(WHOLE), None)
    assert missing_weights(snapshot, None) == ([absent] if absent.startswith("model-") else [])


def test_a_file_that_is_cut_or_whose_link_leads_nowhere_is_not_there(home: Path) -> None:
    snapshot = fill_cache(home, "org/name", COMMIT, WHOLE)
    (snapshot / "model-2.safetensors").resolve().write_bytes(b"2")
    assert not is_complete(snapshot, sizes(WHOLE), None)
    (snapshot / "model-2.safetensors").resolve().unlink()
    assert missing_weights(snapshot, None) == ["model-2.safetensors"]


def test_without_an_index_every_published_weight_file_is_needed(home: Path) -> None:
    files = {"model.safetensors": b"1", "config.json": b"{}"}
    snapshot = fill_cache(home, "org/name", COMMIT, files)
    published = {key: len(content) for key, content in files.items()}
    assert is_complete(snapshot, published, None)
    assert not is_complete(snapshot, {**published, "other.safetensors": 1}, None)
    assert not is_complete(snapshot, {"config.json": 2}, None), "no weights at all"
    assert missing_weights(snapshot, "other.safetensors") == ["other.safetensors"]
    assert missing_weights(snapshot, None) == missing_weights(home / "absent", None) == []
    assert has_weights(snapshot)
    assert not has_weights(home / "absent")
