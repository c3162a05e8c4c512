"""What the doctor's command prints, and what it never prints."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import doctor as module
from headrace.cli.doctor import (
    DoctorOptions,
    doctor,
    find_advice,
    print_advice,
    print_finding,
    secrets_of,
    without_secrets,
)
from headrace.doctor.finding import failed, ok
from headrace.errors import AccessDenied, InvalidHeader, ObjectNotFound
from headrace.settings import Settings

SECRET = "wJalrXUtnFEMI/K7MDENG"


def options(folder: Path, **more: Any) -> DoctorOptions:
    return DoctorOptions(uri=str(folder), read_settings=lambda: Settings(cache_dir=folder.parent / "cache"), **more)


def test_a_folder_on_this_machine(checkpoint_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(options(checkpoint_folder), {}) == 0
    lines = capsys.readouterr().out.splitlines()
    steps = [line.split()[1] for line in lines if line and not line.startswith(" ")][:-1]
    assert steps == ["name", "settings", "list", "stat", "range", "conditional", "throughput", "cache"]
    assert lines[-1] == "A load should work: nothing is wrong."


def test_json_alone(checkpoint_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(options(checkpoint_folder, json=True), {}) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["uri"], report["state"]) == (str(checkpoint_folder), "ok")


def test_a_folder_that_is_absent_exits_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(options(tmp_path / "absent"), {}) == 1
    said = capsys.readouterr().out
    assert "FAILED   list" in said
    assert said.splitlines()[-1].startswith("Mend this first: list.")


@pytest.mark.parametrize(
    ("name", "value", "is_secret"),
    [
        ("AWS_SECRET_ACCESS_KEY", SECRET, True),
        ("AWS_SESSION_TOKEN", SECRET, True),
        ("AZURE_STORAGE_KEY", SECRET, True),
        ("AZURE_STORAGE_CONNECTION_STRING", SECRET, True),
        ("HF_TOKEN", SECRET, True),
        ("HEADRACE_HTTP_TOKEN", SECRET, True),
        ("AWS_ACCESS_KEY_ID", SECRET, False),
        ("AWS_WEB_IDENTITY_TOKEN_FILE", "/var/run/secrets/token", False),
        ("AWS_SECRET_ACCESS_KEY", "short", False),
        ("HOME", "/home/somebody", False),
    ],
)
def test_secrets_are_known_by_the_names_of_their_variables(name: str, value: str, is_secret: bool) -> None:
    assert (value in secrets_of("s3://bucket/m", {name: value})) is is_secret


def test_queries_and_passwords_of_proxies_are_secrets() -> None:
    assert "X-Amz-Signature=abcdef" in secrets_of("https://host/m?X-Amz-Signature=abcdef", {})
    assert "user:password" in secrets_of("s3://b/m", {"HTTPS_PROXY": "http://user:password@proxy:3128"})


def test_the_longest_secret_goes_first() -> None:
    """A key with a line end is looked for with and without it; what is left of it must be nothing."""
    secrets = secrets_of("s3://b/m", {"AWS_SECRET_ACCESS_KEY": f"{SECRET}\n", "HF_TOKEN": SECRET[:10]})
    finding = failed("list", f"It said {SECRET}.", SECRET, SECRET, [("shown", f"{SECRET}\n")])
    assert SECRET[:10] not in repr(without_secrets(finding, secrets))


def test_what_a_server_says_may_hold_a_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.Examination, "run", lambda _: iter([failed("list", f"It said {SECRET}.", "", "", [])]))
    for json_wanted in (False, True):
        assert doctor(options(tmp_path, json=json_wanted), {"AWS_SECRET_ACCESS_KEY": SECRET}) == 1
        said = capsys.readouterr().out
        assert SECRET not in said
        assert "It said ***." in said


def terminal(width: int) -> Any:
    from rich.console import Console

    return Console(
        file=io.StringIO(), width=width, force_terminal=True, markup=False, highlight=False, color_system=None
    )


def test_a_terminal_gets_folded_lines_under_their_first_word() -> None:
    console = terminal(60)
    print_finding(failed("list", "One two three four five six seven eight.", "", "", []), console)
    lines = console.file.getvalue().splitlines()
    assert lines[0].rstrip() == "FAILED   list              One two three four five six seven"
    assert lines[1].rstrip() == " " * 27 + "eight."


def test_names_out_of_files_cannot_steer_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_finding(ok("list", "\x1b[2Jgone", [("note", "[bold]x\r\n")]), module.make_console())
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert "\\x1b[2Jgone" in said
    assert "[bold]x\\r\\n" in said


def test_advice_is_for_errors_of_stores(tmp_path: Path) -> None:
    assert find_advice(InvalidHeader("x"), str(tmp_path)) is None
    assert find_advice(ValueError("x"), str(tmp_path)) is None
    missing = tmp_path / "absent"
    found = find_advice(ObjectNotFound("x"), str(missing))
    assert found is not None
    assert found[-1] == f"Run headrace doctor {missing} for all checks."


def test_advice_is_printed_below_the_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_advice(AccessDenied("x"), str(tmp_path))
    assert capsys.readouterr().err == f"  doctor  Run headrace doctor {tmp_path} for all checks.\n"
    print_advice(InvalidHeader("x"), str(tmp_path))
    assert capsys.readouterr().err == ""


def test_whoever_does_not_wait_gets_no_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "advise", interrupt)
    assert find_advice(AccessDenied("x"), str(tmp_path)) is None


def test_the_command_imports_no_torch(checkpoint_folder: Path, tmp_path: Path) -> None:
    code = (
        f"import sys; sys.argv = ['headrace', 'doctor', {str(checkpoint_folder)!r}, '--json', '--cache-dir', {str(tmp_path / 'c')!r}]\n"
        "from headrace.cli.main import run\n"
        "try:\n    run()\nexcept SystemExit as leaving:\n    assert leaving.code == 0\n"
        "print(sorted({'torch', 'boto3', 'transformers'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr.strip() == "[]"
    report = json.loads(done.stdout)
    assert report["state"] == "ok"
    folder = report["findings"][-1]["details"]["folder"]
    assert folder == f"{tmp_path / 'c'} (--cache-dir)", "what was typed is not called a default"


def test_help_names_the_command() -> None:
    command = [sys.executable, "-m", "headrace", "doctor", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    for option in ("--json", "--no-throughput", "--connections", "--cache-dir"):
        assert option in done.stdout
