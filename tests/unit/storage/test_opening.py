from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest

from headrace.errors import MissingDependency
from headrace.settings import Settings
from headrace.storage import HttpRange, StoredObject, open_store
from headrace.storage.local import LocalStore


def test_settings_lead_to_a_web_server() -> None:
    settings = Settings(http_token="t0ken", verify_tls=False)
    with contextlib.closing(open_store("https://host/m/a.safetensors?Signature=s/", settings=settings)) as store:
        described = store.describe_range(StoredObject("a.safetensors", 9, '"7"'), 0, 9)
    assert isinstance(described, HttpRange)
    assert (described.host, described.target) == ("host", "/m/a.safetensors?Signature=s/")
    assert dict(described.headers)["Authorization"] == "Bearer t0ken"
    assert not described.verify_tls
    assert store.selected_key == "a.safetensors"
    assert str(store.uri) == "https://host/m"


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


def test_a_missing_google_sdk_names_the_extra_and_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gcs", "gcs_access"):
        monkeypatch.delitem(sys.modules, f"headrace.storage.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "google.cloud.storage", None)
    monkeypatch.delattr("google.cloud.storage", raising=False)
    with pytest.raises(MissingDependency) as caught:
        open_store("gs://bucket/a", settings=Settings())
    assert "headrace[gcs]" in caught.value.mend
    assert "google.cloud" in caught.value.why
    assert isinstance(caught.value.__cause__, ImportError)


def test_settings_lead_to_google_s_store() -> None:
    settings = Settings(gcs_anonymous=True, gcs_endpoint="https://storage-x.p.googleapis.com", gcs_user_project="payer")
    with contextlib.closing(open_store("gs://bucket/m/a.safetensors", settings=settings)) as store:
        described = store.describe_range(StoredObject("a.safetensors", 9, "7"), 0, 9)
    assert isinstance(described, HttpRange)
    assert described.host == "storage-x.p.googleapis.com"
    assert "userProject=payer" in described.target
    assert store.selected_key == "a.safetensors"
    assert str(store.uri) == "gs://bucket/m"
