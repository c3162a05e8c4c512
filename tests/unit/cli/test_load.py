"""`headrace load` on a small folder: what it prints, what it asks for, how it fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli.load import LoadOptions, load, unsaid
from headrace.cli.main import app
from headrace.errors import InvalidSetting, TruncatedObject
from headrace.settings import Settings
from headrace.streaming import ExtraConfig, parse_extra_config

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


def test_exactly_one_snapshot_is_taken_or_none(checkpoint_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    app(["load", str(checkpoint_folder), "--no-progress", "--json"], standalone_mode=False)
    now = json.loads(capsys.readouterr().out)["snapshot_id"]
    app(["load", str(checkpoint_folder), "--no-progress", "--json", "--snapshot", now], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["snapshot_id"] == now
    app(["inspect", str(checkpoint_folder), "--json", "--snapshot", now], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["snapshot_id"] == now
    for command in ("load", "inspect"):
        with pytest.raises(SystemExit):
            app([command, str(checkpoint_folder), "--snapshot", "0" * 12], standalone_mode=False)
        said = capsys.readouterr()
        assert said.out == ""
        assert f"Snapshot {now} is there now" in " ".join(said.err.split())


def test_the_report_says_which_variables_counted(
    checkpoint_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNAI_STREAMER_CONCURRENCY", "3")
    app(["load", str(checkpoint_folder), "--no-progress", "--json"], standalone_mode=False)
    report = json.loads(capsys.readouterr().out)
    assert report["num_connections"] == 3
    assert report["settings_from"] == {"num_connections": "RUNAI_STREAMER_CONCURRENCY"}
    extra = ["--model-loader-extra-config", '{"concurrency": 5}']
    app(["load", str(checkpoint_folder), "--no-progress", "--json", *extra], standalone_mode=False)
    report = json.loads(capsys.readouterr().out)
    assert report["num_connections"] == 5
    assert report["settings_from"] == {"num_connections": "the extra config"}
    app(["load", str(checkpoint_folder), "--no-progress", "--json", "--connections", "2"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["settings_from"] == {}


@pytest.mark.parametrize(("text", "rate"), [("100MB", 100_000_000), ("1GiB", 1 << 30), ("2MB/s", 2_000_000), ("0", 0)])
def test_the_bandwidth_limit_arrives(
    checkpoint_folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, rate: int
) -> None:
    seen: list[LoadOptions] = []
    monkeypatch.setattr("headrace.cli.load.load", seen.append)
    app(["load", str(checkpoint_folder), "--bandwidth-limit", text], standalone_mode=False)
    assert seen[0].settings.transport.bandwidth_bytes_per_s == rate


def test_who_reads_arrives_and_wins_over_the_variable(checkpoint_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[LoadOptions] = []
    monkeypatch.setattr("headrace.cli.load.load", seen.append)
    monkeypatch.setenv("HEADRACE_READERS", "7")
    app(["load", str(checkpoint_folder)], standalone_mode=False)
    app(["load", str(checkpoint_folder), "--readers", "3"], standalone_mode=False)
    app(["load", str(checkpoint_folder), "--readers", "0"], standalone_mode=False)
    assert [one.settings.transport.readers for one in seen] == [7, 3, 0]


def test_globs_that_leave_nothing_are_an_error(checkpoint_folder: Path) -> None:
    with pytest.raises(InvalidSetting, match="No tensor is left"):
        load(LoadOptions(uri=str(checkpoint_folder), settings=SETTINGS, include=["weight"]))


def test_another_format_moves_the_bytes(checkpoint_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load(LoadOptions(uri=str(checkpoint_folder), settings=SETTINGS, load_format="safetensors", json=True))
    report = json.loads(capsys.readouterr().out)
    assert (report["load_format"], report["num_tensors"], report["num_requests"]) == ("safetensors", 3, None)


def test_the_extra_config_counts_where_no_option_says_otherwise() -> None:
    text = '{"concurrency": 3, "memory_limit": 4096, "distributed": false}'
    assert unsaid(text, connections=None, memory_limit=None) == parse_extra_config(text)
    left = unsaid(text, connections=9, memory_limit=None)
    assert (left.concurrency, left.memory_limit, left.distributed) == (None, 4096, False)
    assert unsaid(text, connections=None, memory_limit=0).memory_limit is None
    assert unsaid(None, connections=1, memory_limit=1) == ExtraConfig()
    with pytest.raises(InvalidSetting, match="Allowed: concurrency"):
        unsaid('{"threads": 3}', connections=None, memory_limit=None)


@pytest.mark.parametrize(
    ("options", "num_connections"),
    [([], 3), (["--connections", "5"], 5)],
)
def test_options_win_over_the_extra_config(
    checkpoint_folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], num_connections: int
) -> None:
    command = [
        "load",
        str(checkpoint_folder),
        "--no-progress",
        "--json",
        "--model-loader-extra-config",
        '{"concurrency": 3}',
    ]
    app([*command, *options], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["num_connections"] == num_connections
