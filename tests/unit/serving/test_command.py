"""What `headrace serve` makes of its options, and what it imports before the port is open."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.checkpoint import Entry
from headrace.cli import serve as command
from headrace.cli import serve_model
from headrace.cli.serve import ServeOptions, conclude, serve, served_name
from headrace.serving.lifecycle import Outcome
from headrace.storage.uri import parse_uri


@pytest.mark.parametrize(
    ("uri", "name"),
    [
        ("s3://bucket/models/llama", "llama"),
        ("s3://bucket/models/llama/", "llama"),
        ("S3://bucket", "bucket"),
        ("gs://bucket/a.b-c", "a.b-c"),
        ("hf://org/name@main", "name"),
        ("hf://org/name", "name"),
        ("hf://org/name@main/sub/folder", "folder"),
        ("https://host/models/llama?X-Amz-Signature=secret", "llama"),
        ("file:///models/llama/", "llama"),
        ("/models/llama", "llama"),
        ("/", "model"),
    ],
)
def test_a_model_is_called_like_the_last_part_of_its_uri(uri: str, name: str) -> None:
    assert served_name(parse_uri(uri)) == name


def test_a_relative_folder_has_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama").mkdir()
    monkeypatch.chdir(tmp_path / "llama")
    assert served_name(parse_uri(".")) == "llama"


def test_nothing_heavy_is_imported_before_the_port_is_open() -> None:
    code = (
        "import headrace.cli.serve, headrace.cli.main, sys, json;"
        "heavy = ['torch', 'transformers', 'numpy', 'pydantic', 'openai', 'boto3', 'safetensors'];"
        "print(json.dumps([name for name in heavy if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def checkpoint_of(*dtypes: str) -> Any:
    entries = {
        f"w{number}": Entry(f"w{number}", dtype, (4,), "model.safetensors", 0, 8) for number, dtype in enumerate(dtypes)
    }
    return SimpleNamespace(entries=entries)


@pytest.mark.parametrize(
    ("dtype", "device", "expected"),
    [
        ("bfloat16", "cpu", {"dtype": torch.bfloat16}),
        ("float32", "cuda:1", {"dtype": torch.float32, "device_map": {"": "cuda:1"}}),
        ("auto", "cuda", {"dtype": "auto", "device_map": {"": "cuda"}}),
        ("auto", "cpu", {"dtype": torch.float32}),
    ],
)
def test_where_the_model_goes(
    monkeypatch: pytest.MonkeyPatch, dtype: str, device: str, expected: dict[str, Any]
) -> None:
    monkeypatch.setattr("headrace.serving.hardware.product_seconds", lambda dtype: 1.0 if dtype == "float32" else 7.0)
    options = ServeOptions(uri="x", dtype=dtype, device=device)
    options = replace(options, dtype=serve_model._choose_dtype(checkpoint_of("BF16"), options))
    assert serve_model._placing(options) == expected


def test_ranks_have_devices_of_their_own() -> None:
    assert serve_model._placing(ServeOptions(uri="x", dtype="float16", device="cuda", num_ranks=2)) == {
        "dtype": torch.float16
    }


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"uri": "nope://x"}, "nope"),
        ({"uri": "s3://bucket/x", "api_key": ""}, "API key"),
        ({"uri": "s3://bucket/x", "dtype": "int4"}, "--dtype 'int4'"),
        ({"uri": "s3://bucket/x", "revision": "v1"}, "revision 'v1'"),
        ({"uri": "s3://bucket/x", "host": "host.invalid"}, "host.invalid"),
    ],
)
def test_what_cannot_be_served_is_said_and_is_a_1(
    options: dict[str, Any],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "configure_logging", lambda **_: None)
    log = tmp_path / "termination-log"
    log.touch()
    assert serve(ServeOptions(**options, termination_log=log)) == 1
    assert words in log.read_text()
    assert capsys.readouterr().err.endswith(log.read_text() + "\n")


def test_ranks_that_a_launcher_did_not_start_are_said_and_are_a_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "configure_logging", lambda **_: None)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert serve(ServeOptions(uri="/absent", num_ranks=2, termination_log=tmp_path / "none")) == 1
    assert "rank 0 of 4" in capsys.readouterr().err


def test_a_clean_end_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert conclude(Outcome(exit_code=0), termination_log=tmp_path / "none") == 0
    assert capsys.readouterr().err == ""


def test_the_key_is_not_in_a_repr() -> None:
    assert "sk-secret" not in repr(ServeOptions(uri="x", api_key="sk-secret"))
