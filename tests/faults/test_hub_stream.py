"""Models streamed from the hub: identical, at one commit, by ranges of signed addresses that may end, and without a copy on the disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
from headrace.errors import AccessDenied, ObjectChanged
from headrace.settings import Settings
from tests.engines.models import save_model
from tests.support.checkpoints import assert_equal, make_files, make_tensors
from tests.support.fake_hub import FakeHub, fake_hub, fill_cache

pytest.importorskip("huggingface_hub")

TENSORS = make_tensors()
FILES = make_files(TENSORS)
WEIGHTS = [name for name in FILES if name.endswith(".safetensors")]
PAYLOAD = sum(tensor.nbytes for tensor in TENSORS.values())
NAME = "org/name"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    with fake_hub(monkeypatch, tmp_path / "home", tokens=("good",)) as one:
        yield one


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    quick: dict[str, Any] = {"backoff_first_s": 0.005, "backoff_most_s": 0.02, "idle_timeout_s": 5.0, "max_attempts": 3}
    quick["hedge_after_s"] = 0  # Bytes and requests are counted.
    return Settings.from_environment(
        {}, cache_dir=tmp_path / "cache", progress=False, read_bytes=400_000, num_connections=3, **quick
    )


def resolved(hub: FakeHub) -> Counter[str]:
    """Return how often each file was asked of the hub itself."""
    return Counter(sent.path.rpartition("/")[2] for sent in hub.hub.log if "/resolve/" in sent.path)


@pytest.mark.parametrize("uri", [f"hf://{NAME}", f"hf://{NAME}@main/", NAME])
def test_a_repository_is_streamed_without_a_copy(
    hub: FakeHub, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str
) -> None:
    """origin A8: a bare name, too. Each byte comes once, from the CDN, which never sees the token."""
    monkeypatch.setenv("HF_TOKEN", "good")
    monkeypatch.chdir(tmp_path)
    hub.publish(NAME, FILES | {"README.md": b"# name", "original/consolidated.00.pth": b"pickled"}, is_private=True)
    assert_equal(headrace.load_state_dict(uri, settings=settings), TENSORS)
    assert PAYLOAD <= hub.weight_bytes() <= PAYLOAD + 2 * (256 << 10) + 10_000
    assert {name: resolved(hub)[name] for name in WEIGHTS} == dict.fromkeys(WEIGHTS, 1), "one redirect for each file"
    assert {sent.headers.get("authorization") for sent in hub.hub.log} == {"Bearer good"}
    assert not [sent for sent in hub.cdn.log if "authorization" in sent.headers]
    kept = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 10_000]
    assert kept == []
    assert not list((tmp_path / "home").rglob("*.safetensors"))


def test_links_that_end_during_the_load_are_fetched_anew(hub: FakeHub, settings: Settings) -> None:
    hub.publish(NAME, FILES)
    hub.before_cdn = lambda number: hub.expire_links() if number in (6, 15) else None
    assert_equal(headrace.load_state_dict(f"hf://{NAME}", settings=settings), TENSORS)
    assert 403 in {sent.status for sent in hub.cdn.log}
    assert sum(resolved(hub)[name] for name in WEIGHTS) > len(WEIGHTS)


def test_links_that_live_for_a_moment_are_asked_for_each_time(hub: FakeHub, settings: Settings) -> None:
    hub.lifetime_s = 1
    hub.publish(NAME, FILES)
    assert_equal(headrace.load_state_dict(f"hf://{NAME}", settings=settings), TENSORS)
    assert sum(resolved(hub)[name] for name in WEIGHTS) == len(hub.cdn.log)


def test_a_link_to_another_content_ends_the_load(hub: FakeHub, settings: Settings) -> None:
    hub.publish(NAME, FILES)
    hub.linked_etag = "a" * 64
    with pytest.raises(ObjectChanged, match="another content"):
        headrace.load_state_dict(f"hf://{NAME}", settings=settings)
    assert hub.cdn.log == []


def test_a_branch_that_moves_on_does_not_change_what_was_opened(hub: FakeHub, settings: Settings) -> None:
    hub.publish(NAME, FILES)
    with headrace.open(f"hf://{NAME}", settings=settings) as checkpoint:
        first = checkpoint.snapshot.id
        hub.publish(NAME, make_files({name: tensor + 1 for name, tensor in TENSORS.items()}))
        assert_equal(headrace.load_state_dict(checkpoint, settings=settings), TENSORS)
    with headrace.open(f"hf://{NAME}", settings=settings) as checkpoint:
        assert checkpoint.snapshot.id != first


def test_a_gated_repository_is_refused_when_it_is_opened(hub: FakeHub, settings: Settings) -> None:
    hub.publish(NAME, FILES, is_gated=True)
    with pytest.raises(AccessDenied, match="is gated") as caught:
        headrace.open(f"hf://{NAME}", settings=settings)
    assert f"{hub.url}/{NAME}" in caught.value.mend
    assert hub.cdn.log == []


def test_a_whole_snapshot_is_read_from_the_local_cache(hub: FakeHub, settings: Settings, tmp_path: Path) -> None:
    commit = hub.publish(NAME, FILES)
    fill_cache(tmp_path / "home", NAME, commit, FILES)
    assert_equal(headrace.load_state_dict(f"hf://{NAME}", settings=settings), TENSORS)
    assert len(hub.hub.log) == 1, "which commit it is"
    assert hub.cdn.log == []


def test_the_variables_of_the_hub_are_honoured_in_a_process_of_its_own(hub: FakeHub, tmp_path: Path) -> None:
    hub.publish(NAME, FILES, is_private=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "elsewhere"),
        "HF_TOKEN": "good",
        "HEADRACE_CACHE_DIR": str(tmp_path / "cache"),
        "HEADRACE_PROGRESS": "0",
    }
    command = [sys.executable, "-m", "headrace", "load", NAME, "--json"]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["bytes_wanted"] == PAYLOAD
    num_asked = len(hub.hub.log)
    offline = {**environment, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=offline, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "HF_HUB_OFFLINE is set" in " ".join(done.stderr.split())
    assert len(hub.hub.log) == num_asked


def test_a_model_is_loaded_as_from_a_folder(hub: FakeHub, settings: Settings, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = save_model("llama", tmp_path / "model")
    hub.publish(NAME, {path.name: path.read_bytes() for path in folder.iterdir()})
    model = headrace.load_model(NAME, settings=settings)
    reference = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert list(model.state_dict()) == list(reference)
    assert all(torch.equal(value, reference[name]) for name, value in model.state_dict().items())
