from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headrace.errors import InvalidUri, MissingDependency
from headrace.settings import Settings
from headrace.storage import open_store
from headrace.storage.local import LocalStore


@pytest.mark.parametrize(
    "uri", ["gs://bucket/a", "az://container/a", "hf://org/name", "https://host/a", "http://host/a"]
)
def test_a_scheme_without_a_store_says_what_there_is(uri: str) -> None:
    with pytest.raises(InvalidUri) as caught:
        open_store(uri, settings=Settings())
    assert uri in caught.value.what
    assert "s3" in caught.value.why
    assert caught.value.mend


def test_a_hub_id_is_explained_as_an_absent_path() -> None:
    with pytest.raises(InvalidUri, match="There is no local path org/name"):
        open_store("org/name", settings=Settings())


def test_a_file_is_selected_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"x")
    for given in (tmp_path / "a.safetensors", f"file://{tmp_path}/a.safetensors"):
        store = open_store(given, settings=Settings())
        assert isinstance(store, LocalStore)
        assert store.selected_key == "a.safetensors"
        assert str(store.uri) == str(tmp_path)
    (tmp_path / "folder.safetensors").mkdir()
    store = open_store(tmp_path / "folder.safetensors", settings=Settings())
    assert store.selected_key is None
    assert str(store.uri) == f"{tmp_path}/folder.safetensors"


def test_a_missing_sdk_names_the_extra_and_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in ("botocore", "boto3")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("s3", "s3_access", "signing", "sdk_errors"):
        monkeypatch.delitem(sys.modules, f"headrace.storage.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "botocore", None)
    with pytest.raises(MissingDependency) as caught:
        open_store("s3://bucket/a", settings=Settings())
    assert "headrace[s3]" in caught.value.mend
    assert "botocore" in caught.value.why
    assert isinstance(caught.value.__cause__, ImportError)
