"""The folder that stands for a model: the same path for the same snapshot, and it says whose it is."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from headrace.engines.engine_folder import PinnedSource, make_place, read_source
from headrace.storage import parse_uri

SOURCE = PinnedSource(parse_uri("s3://bucket/llama"), "0123456789ab")


@pytest.fixture
def side_files(tmp_path: Path) -> Path:
    folder = tmp_path / "cache" / "side_files" / "v1"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_the_path_is_of_the_uri_and_the_snapshot(side_files: Path, tmp_path: Path) -> None:
    place = make_place(side_files, SOURCE, tmp_path / "cache")
    assert place.keeper is None
    assert place.folder.parent == tmp_path / "cache" / "engines"
    assert (place.folder / "config.json").read_text() == "{}"
    assert read_source(place.folder) == SOURCE
    assert make_place(side_files, SOURCE, tmp_path / "cache") == place
    spelled = PinnedSource(parse_uri("S3://bucket/llama/"), SOURCE.snapshot_id)
    assert spelled.name == SOURCE.name
    for other in (
        PinnedSource(SOURCE.uri, "ffffffffffff"),
        PinnedSource(parse_uri("s3://bucket/other"), SOURCE.snapshot_id),
    ):
        assert make_place(side_files, other, tmp_path / "cache").folder != place.folder


def test_a_moved_cache_is_whole(side_files: Path, tmp_path: Path) -> None:
    make_place(side_files, SOURCE, tmp_path / "cache")
    (tmp_path / "cache").rename(tmp_path / "elsewhere")
    folder = tmp_path / "elsewhere" / "engines" / SOURCE.name
    assert (folder / "config.json").read_text() == "{}"
    assert read_source(folder) == SOURCE


def test_a_link_that_leads_elsewhere_is_mended(side_files: Path, tmp_path: Path) -> None:
    folder = make_place(side_files, SOURCE, tmp_path / "cache").folder
    other = tmp_path / "cache" / "side_files" / "v2"
    shutil.copytree(side_files, other)
    shutil.rmtree(side_files)
    assert not folder.exists()
    assert make_place(other, SOURCE, tmp_path / "cache").folder == folder
    assert folder.resolve() == other


def test_what_leads_nowhere_is_removed(side_files: Path, tmp_path: Path) -> None:
    gone = tmp_path / "cache" / "side_files" / "v0"
    shutil.copytree(side_files, gone)
    old = make_place(gone, PinnedSource(SOURCE.uri, "ffffffffffff"), tmp_path / "cache").folder
    shutil.rmtree(gone)
    make_place(side_files, SOURCE, tmp_path / "cache")
    assert sorted(path.name for path in old.parent.iterdir()) == [SOURCE.name, f"{SOURCE.name}.json"]


def test_a_cache_that_cannot_be_written_costs_a_temporary_folder(side_files: Path, tmp_path: Path) -> None:
    (tmp_path / "cache" / "engines").write_text("not a folder")
    place = make_place(side_files, SOURCE, tmp_path / "cache")
    assert place.keeper is not None
    assert (place.folder / "config.json").read_text() == "{}"
    assert read_source(place.folder) == SOURCE
    place.keeper.cleanup()
    assert not os.path.lexists(place.folder)
    assert (side_files / "config.json").exists()


@pytest.mark.parametrize(
    "record", ["", "[]", '{"uri": "s3://bucket/llama"}', '{"uri": "s3://bucket/other", "snapshot": "0123456789ab"}']
)
def test_another_record_counts_for_nothing(record: str, side_files: Path, tmp_path: Path) -> None:
    folder = make_place(side_files, SOURCE, tmp_path / "cache").folder
    folder.with_name(f"{folder.name}.json").write_text(record)
    assert read_source(folder) is None


def test_other_folders_are_nobodys(side_files: Path, tmp_path: Path) -> None:
    assert read_source(side_files) is None
    assert read_source(tmp_path / SOURCE.name) is None


def test_the_record_holds_no_signature(side_files: Path, tmp_path: Path) -> None:
    source = PinnedSource(parse_uri("https://host/llama?signature=secret"), SOURCE.snapshot_id)
    folder = make_place(side_files, source, tmp_path / "cache").folder
    text = folder.with_name(f"{folder.name}.json").read_text()
    assert json.loads(text)["uri"] == "https://host/llama"
    assert "secret" not in text
