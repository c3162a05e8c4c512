"""Which stored names one worker needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.engines.engine_names import NameFilter, matching_keys
from headrace.storage import parse_uri
from headrace.storage.local import LocalStore


def test_everything_is_needed_where_nothing_is_said() -> None:
    assert NameFilter().is_needed("model.layers.0.weight")


def test_the_model_and_the_ranks_speak_of_stored_names() -> None:
    keep = NameFilter(
        prefix="draft.",
        is_unused=lambda name: name.startswith("model."),
        is_foreign=lambda name: ".experts.3." in name,
    )
    assert not keep.is_needed("model.embed.weight")
    assert not keep.is_needed("mtp.experts.3.up.weight")
    assert keep.is_needed("mtp.experts.4.up.weight")


def test_absent_modules_are_known_by_the_models_names() -> None:
    keep = NameFilter(
        prefix="model.",
        renamed=lambda name: None if name.endswith("inv_freq") else name.replace("model.text.", "language_model."),
        absent_modules=("language_model.layers.1.",),
    )
    assert keep.is_needed("text.layers.0.weight")
    assert not keep.is_needed("text.layers.1.weight")
    assert keep.is_needed("text.layers.11.weight")
    assert keep.is_needed("text.layers.1.inv_freq")  # dropped by the model itself, if at all


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    for key in ("a.safetensors", "b.safetensors", "vae/c.safetensors", "vae/deep/d.safetensors", "x.pt"):
        path = tmp_path / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"1")
    return LocalStore(parse_uri(str(tmp_path)))


@pytest.mark.parametrize(
    ("patterns", "keys"),
    [
        (["*.safetensors"], ["a.safetensors", "b.safetensors"]),
        (["none*", "x.pt", "a*"], ["x.pt"]),
        (["v*e/*.safetensors"], ["vae/c.safetensors"]),
        (["*/*/*.safetensors"], ["vae/deep/d.safetensors"]),
        (["absent/*"], []),
    ],
)
def test_patterns_are_globs_of_each_part(store: LocalStore, patterns: list[str], keys: list[str]) -> None:
    assert matching_keys(store, patterns) == keys
