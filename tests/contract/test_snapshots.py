"""A load that starts on exactly one snapshot, against a real S3 server whose bucket keeps versions."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
from headrace.errors import InvalidSetting, ObjectChanged
from headrace.settings import Settings
from headrace.streaming.report import LoadReport
from tests.support.checkpoints import assert_equal, make_files, make_tensors

FIRST = make_tensors(6, rows=60)
SECOND = {name: tensor + 1 for name, tensor in make_tensors(4, rows=60).items()}


@pytest.fixture
def versioned(s3_client: Any, s3_environment: dict[str, str]) -> Iterator[str]:
    """A new bucket that keeps versions."""
    name = f"test-{secrets.token_hex(6)}"
    s3_client.create_bucket(Bucket=name)
    s3_client.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})
    yield name
    for page in s3_client.get_paginator("list_object_versions").paginate(Bucket=name):
        for item in (*page.get("Versions", ()), *page.get("DeleteMarkers", ())):
            s3_client.delete_object(Bucket=name, Key=item["Key"], VersionId=item["VersionId"])
    s3_client.delete_bucket(Bucket=name)


def upload(client: Any, bucket: str, files: Mapping[str, bytes]) -> None:
    """Upload, and wait for the next second: S3 dates changes by the second, so the order of two uploads in one is a matter of luck."""
    for key, body in files.items():
        client.put_object(Bucket=bucket, Key=f"llama ü/{key}", Body=body)
    time.sleep(1.05 - time.time() % 1)


def snapshot_of(uri: str, settings: Settings) -> str:
    with headrace.open(uri, settings=settings) as checkpoint:
        return checkpoint.snapshot.id


def test_an_overwritten_model_is_loaded_as_it_was(versioned: str, s3_client: Any, s3_settings: Settings) -> None:
    uri = f"s3://{versioned}/llama ü"
    upload(s3_client, versioned, make_files(FIRST, folder="part two/"))
    first = snapshot_of(uri, s3_settings)
    upload(s3_client, versioned, make_files(SECOND))
    s3_client.delete_object(Bucket=versioned, Key="llama ü/part two/model-00002-of-00002.safetensors")
    second = snapshot_of(uri, s3_settings)
    assert first != second

    reports: list[LoadReport] = []
    loaded = headrace.load_state_dict(uri, snapshot=first, settings=s3_settings, on_report=reports.append)
    assert_equal(loaded, FIRST)
    assert reports[0].snapshot_id == first
    assert_equal(headrace.load_state_dict(uri, snapshot=second, settings=s3_settings), SECOND)
    assert_equal(headrace.load_state_dict(uri, settings=s3_settings), SECOND)
    with headrace.stream(uri, snapshot=first, settings=s3_settings) as stream:
        assert_equal(dict(stream), FIRST)


def test_a_removed_model_is_loaded_as_it_was(versioned: str, s3_client: Any, s3_settings: Settings) -> None:
    files = make_files(FIRST)
    upload(s3_client, versioned, files)
    uri = f"s3://{versioned}/llama ü"
    first = snapshot_of(uri, s3_settings)
    for key in files:
        s3_client.delete_object(Bucket=versioned, Key=f"llama ü/{key}")
    assert_equal(headrace.load_state_dict(uri, snapshot=first, settings=s3_settings), FIRST)


def test_a_load_of_an_old_snapshot_is_not_disturbed_by_an_upload(
    versioned: str, s3_client: Any, s3_settings: Settings
) -> None:
    """What is there now is read at its ETag, and a new upload ends such a load; old versions stay."""
    uri = f"s3://{versioned}/llama ü"
    upload(s3_client, versioned, make_files(FIRST))
    first = snapshot_of(uri, s3_settings)
    upload(s3_client, versioned, make_files(SECOND))
    one_by_one = replace(
        s3_settings, transport=replace(s3_settings.transport, num_connections=1, read_bytes=65536, gap_bytes=0)
    )
    loaded: dict[str, torch.Tensor] = {}
    with headrace.stream(uri, snapshot=first, settings=one_by_one) as stream:
        for name, tensor in stream:
            loaded[name] = tensor
            if len(loaded) == 1:
                upload(s3_client, versioned, make_files(SECOND))
    assert_equal(loaded, FIRST)


def test_a_bucket_without_versioning_has_only_what_is_there(bucket: str, s3_client: Any, s3_settings: Settings) -> None:
    uri = f"s3://{bucket}/llama ü"
    upload(s3_client, bucket, make_files(FIRST))
    first = snapshot_of(uri, s3_settings)
    upload(s3_client, bucket, make_files(SECOND))
    second = snapshot_of(uri, s3_settings)
    with pytest.raises(ObjectChanged) as caught:
        headrace.load_state_dict(uri, snapshot=first, settings=s3_settings)
    assert f"is not at snapshot {first}" in caught.value.what
    assert f"Snapshot {second} is there now" in caught.value.why


def test_what_was_only_added_to_is_found_without_versioning(bucket: str, s3_client: Any, s3_settings: Settings) -> None:
    uri = f"s3://{bucket}/llama ü"
    upload(s3_client, bucket, make_files(FIRST))
    first = snapshot_of(uri, s3_settings)
    upload(s3_client, bucket, {"zz.txt": b"added"})
    assert snapshot_of(uri, s3_settings) != first
    assert_equal(headrace.load_state_dict(uri, snapshot=first, settings=s3_settings), FIRST)


def test_an_open_checkpoint_is_the_snapshot_that_it_is(bucket: str, s3_client: Any, s3_settings: Settings) -> None:
    upload(s3_client, bucket, make_files(FIRST))
    with headrace.open(f"s3://{bucket}/llama ü", settings=s3_settings) as checkpoint:
        same = headrace.load_state_dict(checkpoint, snapshot=checkpoint.snapshot.id, settings=s3_settings)
        assert_equal(same, FIRST)
        with pytest.raises(InvalidSetting, match=checkpoint.snapshot.id):
            headrace.load_state_dict(checkpoint, snapshot="0" * 12, settings=s3_settings)


def test_run_ai_s_library_cannot_read_old_versions(versioned: str, s3_client: Any, s3_settings: Settings) -> None:
    pytest.importorskip("runai_model_streamer")
    uri = f"s3://{versioned}/llama ü"
    upload(s3_client, versioned, make_files(FIRST))
    first = snapshot_of(uri, s3_settings)
    upload(s3_client, versioned, make_files(SECOND))
    with pytest.raises(InvalidSetting, match="old versions"):
        headrace.load_state_dict(uri, snapshot=first, load_format="runai_streamer", settings=s3_settings)


def test_a_model_is_loaded_as_it_was(
    versioned: str, s3_client: Any, s3_settings: Settings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights and configuration of the same moment, although another architecture lies there now."""
    pytest.importorskip("transformers")
    from tests.engines.models import save_model

    uri = f"s3://{versioned}/llama ü"
    folders = [save_model(name, tmp_path / name) for name in ("llama", "llama-tied")]
    snapshots = []
    for folder in folders:
        upload(s3_client, versioned, {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()})
        snapshots.append(snapshot_of(uri, s3_settings))
    reports: list[LoadReport] = []
    with caplog.at_level(logging.INFO, "headrace"):
        model = headrace.load_model(uri, snapshot=snapshots[0], settings=s3_settings, on_report=reports.append)
    assert not model.config.tie_word_embeddings
    assert reports[0].snapshot_id == snapshots[0]
    assert f"Opened {uri}: snapshot {snapshots[0]}" in caplog.text
    assert headrace.load_model(uri, snapshot=snapshots[1], settings=s3_settings).config.tie_word_embeddings
    with headrace.open(uri, settings=s3_settings) as checkpoint, pytest.raises(InvalidSetting, match=snapshots[1]):
        headrace.load_model(checkpoint, snapshot=snapshots[0], settings=s3_settings)
    with pytest.raises(InvalidSetting, match="dummy"):
        headrace.load_model(uri, snapshot=snapshots[1], load_format="dummy", settings=s3_settings)
