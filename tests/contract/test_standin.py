"""A program that knows only Run:ai's package, with Headrace in its place: the same results as with that package itself, from folders and from a real S3 server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from headrace.cli.seaweed import SeaweedServer
from tests.support.installed import install_checkout

PROGRAM = Path(__file__).parents[1] / "support" / "runai_program.py"
SIDE = {"config.json": b"{}", "model.safetensors.index.json": b"{}", "code/modeling.py": b"pass", "code/x.json": b"[]"}


def weights() -> dict[str, bytes]:
    generator = torch.Generator().manual_seed(5)
    main = {
        f"llama/model-{number}.safetensors": save(
            {
                f"{number}.weight": torch.randn(50, 33, generator=generator).to(torch.bfloat16),
                f"{number}.packed": torch.randn(7, 5, generator=generator).to(torch.float8_e5m2),
                f"{number}.scale": torch.tensor(0.5 + number),
                f"{number}.empty": torch.empty(3, 0),
                "both": torch.full((3,), number),
            }
        )
        for number in range(2)
    }
    other = {"other.weight": torch.randn(9, generator=generator), "both": torch.full((3,), 7)}
    return {**main, "projector/model.safetensors": save(other)}


@pytest.fixture(params=["folder", "bucket"])
def folders(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    """Two folders of one store with weights, one of them with side files, too."""
    files = weights() | {f"llama/{name}": body for name, body in SIDE.items()}
    if request.param == "folder":
        for name, body in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(body)
        return str(tmp_path / "llama"), str(tmp_path / "projector")
    bucket, client = request.getfixturevalue("bucket"), request.getfixturevalue("s3_client")
    seaweed: SeaweedServer = request.getfixturevalue("seaweed")
    patch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
    patch.setenv("AWS_ENDPOINT_URL", seaweed.endpoint)  # that package knows no other
    patch.setenv("RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING", "0")
    for key, body in {**files, "llama-2/config.json": b"another model"}.items():
        client.put_object(Bucket=bucket, Key=f"models/{key}", Body=body)
    return f"s3://{bucket}/models/llama", f"s3://{bucket}/models/projector"


def run(command: list[str], folders: tuple[str, str], pulled: Path, **environment: str) -> dict[str, Any]:
    pulled.mkdir()
    done = subprocess.run(
        [*command, *folders, str(pulled)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout.splitlines()[-1]), "said": done.stderr}


def test_a_program_finds_with_the_stand_in_what_it_finds_with_the_library(
    folders: tuple[str, str], tmp_path: Path
) -> None:
    for package in ("runai_model_streamer", "runai_model_streamer_s3"):
        if find_spec(package) is None:
            pytest.skip(f"needs {package}")
    theirs = run([sys.executable, str(PROGRAM)], folders, tmp_path / "theirs")
    ours = run([sys.executable, "-m", "headrace.compat", str(PROGRAM)], folders, tmp_path / "ours")
    assert theirs["modules"] == ["runai_model_streamer.safetensors_streamer.safetensors_streamer"] * 2
    assert ours["modules"] == ["headrace.compat.runai"] * 2
    assert ours["found"] == theirs["found"]
    assert len(ours["found"]["stream"]["all"]) == 12
    # Once in each of the two processes.
    assert ours["said"].count("Headrace stands in for runai_model_streamer (HEADRACE_AS_RUNAI)") == 2
    assert "the installed Run:ai Model Streamer 0.17.1 is not used" in ours["said"]


def test_the_variable_alone_is_enough_where_headrace_is_installed(folders: tuple[str, str], tmp_path: Path) -> None:
    python = install_checkout(tmp_path / "installed")
    environment = {"HEADRACE_AS_RUNAI": "1", "PYTHONPATH": ""}
    ours = run([str(python), str(PROGRAM)], folders, tmp_path / "ours", **environment)
    assert ours["modules"] == ["headrace.compat.runai"] * 2
    assert ours["found"]["stream"] == ours["found"]["spawned"]
    assert [len(names) for names in ours["found"]["stream"]["groups"].values()] == [5, 5, 2]
    assert [name for name, *_ in ours["found"]["stream"]["some"]] == ["0.weight", "other.weight"]
