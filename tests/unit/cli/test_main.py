"""The command line as a person meets it: exit codes, standard output and standard error of real processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

TIMEOUT_S = 60


def headrace(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "HEADRACE_"))}
    # COLUMNS keeps help texts from being wrapped in the middle of what is looked for.
    return subprocess.run(
        [sys.executable, "-m", "headrace", *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**clean, "COLUMNS": "200", **environment},
        stdin=subprocess.DEVNULL,
        check=False,
    )


def test_help_imports_neither_torch_nor_an_sdk() -> None:
    code = (
        "import sys; sys.argv = ['headrace', '--help']\n"
        "from headrace.cli.main import run\n"
        "try:\n    run()\nexcept SystemExit as leaving:\n    assert leaving.code == 0\n"
        "print(sorted({'torch', 'boto3', 'transformers', 'fastapi'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    for command in ("serve", "load", "inspect", "demo"):
        assert command in done.stdout


@pytest.mark.parametrize("command", ["serve", "load", "inspect", "demo"])
def test_every_command_has_help(command: str) -> None:
    done = headrace(command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "--debug" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["lod"], "lod"),
        (["load"], "URI"),
        (["load", "m", "--no-such"], "--no-such"),
        (["load", "m", "--connections", "0"], "--connections"),
        (["load", "m", "--memory-limit", "much"], "not a size"),
        (["inspect", "m", "--ranks", "2"], "--plan"),
        (["inspect", "m", "--plan", "--layers", "12"], "not a range"),
        (["inspect", "m", "--plan", "--experts", "8:8"], "not a range"),
        (["serve"], "URI"),
        (["serve", "s3://a/b", "--model-path", "s3://a/c"], "--model-path"),
        (["serve", "m", "--port", "99999"], "--port"),
        (["serve", "m", "--pipeline-parallel-size", "2"], "known to vLLM/SGLang, not supported yet by Headrace"),
    ],
)
def test_wrong_command_line_exits_2(arguments: list[str], said: str) -> None:
    done = headrace(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["load", "inspect"])
def test_failure_exits_1_with_one_block(command: str, tmp_path: Path) -> None:
    done = headrace(command, str(tmp_path / "absent"))
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("ObjectNotFound: ")
    assert "Traceback" not in done.stderr
    with_trace = headrace(command, str(tmp_path / "absent"), "--debug")
    assert with_trace.returncode == 1
    assert "Traceback" in with_trace.stderr


def test_wrong_environment_is_said(checkpoint_folder: Path) -> None:
    done = headrace("load", str(checkpoint_folder), HEADRACE_CONNECTIONS="many")
    assert done.returncode == 1
    assert "HEADRACE_CONNECTIONS" in done.stderr


def test_load_prints_json_alone(checkpoint_folder: Path) -> None:
    done = headrace(
        "load",
        str(checkpoint_folder),
        "--json",
        "--include",
        "*.weight",
        "--exclude",
        "norm.*",
        "--memory-limit",
        "1MiB",
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["num_tensors"] == 2


def test_inspect_to_a_reader_who_leaves(checkpoint_folder: Path) -> None:
    command = [sys.executable, "-m", "headrace", "inspect", str(checkpoint_folder), "--tensors"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode == 1
    assert said == ""


def test_ctrl_c_exits_130() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        keys = {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_REGION": "us-east-1",
        }
        command = [sys.executable, "-m", "headrace", "inspect", "s3://bucket/model"]
        with subprocess.Popen(
            command, env={**os.environ, **keys}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            silent.settimeout(TIMEOUT_S)
            connection, _ = silent.accept()
            with connection:
                time.sleep(0.2)  # it waits for the answer now, or soon
                process.send_signal(signal.SIGINT)
                _, said = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert "Interrupted" in said
    assert "Traceback" not in said
