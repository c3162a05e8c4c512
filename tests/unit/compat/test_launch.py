"""`python -m headrace.compat`: what it executes, with which environment, and that the program runs as it would by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.compat.launch import STARTUP_FOLDER, Interpreter, command_line, surroundings
from headrace.errors import InvalidSetting

PYTHON = Interpreter(
    executable="/bin/python",
    flags=("-O",),
    has_startup_file=False,
    reads_pythonpath=True,
    reads_startup_files=True,
)

ASK = "import importlib.util; print(importlib.util.find_spec('runai_model_streamer').origin)"
"""Whose the package would be; to import it takes seconds."""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["-m", "vllm.entrypoints", "-m", "x"], ["/bin/python", "-O", "-m", "vllm.entrypoints", "-m", "x"]),
        (["-c", "pass", "a"], ["/bin/python", "-O", "-c", "pass", "a"]),
        (["serve.py", "--port", "1"], ["/bin/python", "-O", "serve.py", "--port", "1"]),
        (["folder"], ["/bin/python", "-O", "folder"]),
        (["vllm", "serve", "s3://bucket/llama"], ["vllm", "serve", "s3://bucket/llama"]),
        (["absent.py"], ["absent.py"]),
    ],
)
def test_what_is_executed(
    arguments: list[str], expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "serve.py").touch()
    (tmp_path / "folder").mkdir()
    assert command_line(arguments, PYTHON) == expected


@pytest.mark.parametrize("arguments", [[], ["-m"], ["-c"], ["-x", "a"]])
def test_a_program_must_be_named(arguments: list[str]) -> None:
    with pytest.raises(InvalidSetting, match=r"(No program is named|-x is not an option)[^$]*usage: python -m"):
        command_line(arguments, PYTHON)


def test_the_environment_has_the_variable_and_a_folder_where_the_start_up_file_is_not() -> None:
    assert surroundings({"A": "b"}, replace(PYTHON, has_startup_file=True)) == {"A": "b", "HEADRACE_AS_RUNAI": "1"}
    assert surroundings({}, PYTHON) == {"HEADRACE_AS_RUNAI": "1", "PYTHONPATH": str(STARTUP_FOLDER)}
    found = surroundings({"PYTHONPATH": "/mine", "HEADRACE_AS_RUNAI": "0"}, PYTHON)
    assert found == {"HEADRACE_AS_RUNAI": "1", "PYTHONPATH": f"{STARTUP_FOLDER}{os.pathsep}/mine"}


def test_an_interpreter_that_reads_neither_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="-S"):
        surroundings({}, replace(PYTHON, reads_startup_files=False, has_startup_file=True))
    with pytest.raises(InvalidSetting, match=r"-E or -I.*headrace_as_runai\.pth"):
        surroundings({}, replace(PYTHON, reads_pythonpath=False))
    told = surroundings({}, replace(PYTHON, reads_pythonpath=False, has_startup_file=True))
    assert told == {"HEADRACE_AS_RUNAI": "1"}


# -- programs that run


def launch(*arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headrace.compat", *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_a_module_a_script_and_what_they_start_have_the_stand_in(tmp_path: Path) -> None:
    program = (
        f"import subprocess, sys\nfrom beside import NAME\n{ASK}\nprint(NAME, __name__, sys.argv[1:], flush=True)\n"
        f"sys.exit(subprocess.run([sys.executable, '-c', {ASK!r}]).returncode + 7)\n"
    )
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "script.py").write_text(program)
    (tmp_path / "inside" / "beside.py").write_text("NAME = 'beside the script'")
    (tmp_path / "module.py").write_text(program)
    (tmp_path / "beside.py").write_text("NAME = 'beside the module'")
    for arguments, name in ((["inside/script.py"], "the script"), (["-m", "module"], "the module")):
        done = launch(*arguments, "-m", "x", folder=tmp_path)
        assert done.returncode == 7, done.stderr
        assert done.stdout.splitlines() == ["headrace", f"beside {name} __main__ ['-m', 'x']", "headrace"]


def test_what_somebody_else_runs_at_the_start_is_run_too(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.was_customized = True")
    code = f"{ASK}; import sys; print(sys.was_customized, sys.modules['sitecustomize'].__file__)"
    pythonpath = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = launch("-c", code, folder=tmp_path, PYTHONPATH=pythonpath)
    assert done.stdout.splitlines() == ["headrace", f"True {tmp_path / 'sitecustomize.py'}"], done.stderr


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    done = launch("not-a-program", folder=tmp_path)
    assert done.returncode == 127
    assert done.stderr == "headrace.compat: not-a-program cannot be run. No such file or directory.\n"


def test_no_program(tmp_path: Path) -> None:
    done = launch(folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "No program is named" in done.stderr
    assert launch("--help", folder=tmp_path).stdout.startswith("usage: python -m headrace.compat")
