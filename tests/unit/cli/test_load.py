"""`headrace load` on a small folder: what it prints, what it asks for, how it fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli.load import LoadOptions, load
from headrace.errors import InvalidSetting, TruncatedObject
from headrace.settings import Settings

SETTINGS = Settings(progress=False)


def test_json_report_counts_every_byte(checkpoint_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load(LoadOptions(uri=str(checkpoint_folder), settings=SETTINGS, json=True))
    report = json.loads(capsys.readouterr().out)
    assert report["num_tensors"] == 3
    assert report["bytes_wanted"] == report["bytes_checkpoint"] == 64 + 16 + 32
    assert report["num_files"] == 2


def test_left_out_tensors_are_not_wanted(checkpoint_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = LoadOptions(
        uri=str(checkpoint_folder), settings=SETTINGS, include=["*.weight"], exclude=["packed.*"], json=True
    )
    load(options)
    report = json.loads(capsys.readouterr().out)
    assert report["num_tensors"] == 2
    assert (report["bytes_wanted"], report["bytes_skipped"]) == (64 + 32, 16)


def test_table_names_the_checkpoint(checkpoint_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load(LoadOptions(uri=str(checkpoint_folder), settings=SETTINGS, keep=True))
    shown = capsys.readouterr().out
    assert "3 handed out" in shown
    assert "112 B of 112 B" in shown


def test_failure_prints_no_report(checkpoint_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = checkpoint_folder / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(TruncatedObject, match="model-00002-of-00002"):
        load(LoadOptions(uri=str(checkpoint_folder), settings=SETTINGS))
    assert capsys.readouterr().out == ""


def test_globs_that_leave_nothing_are_an_error(checkpoint_folder: Path) -> None:
    with pytest.raises(InvalidSetting, match="No tensor is left"):
        load(LoadOptions(uri=str(checkpoint_folder), settings=SETTINGS, include=["weight"]))
