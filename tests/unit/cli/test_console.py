"""Errors become words and exit codes; names out of files cannot steer the terminal that shows them."""

from __future__ import annotations

import io
import json
import re

import pytest

from headrace.cli.console import (
    clipped,
    make_console,
    print_error,
    print_json,
    print_rows,
    print_table,
    printable,
    reported,
)
from headrace.errors import AccessDenied


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("model.embed.weight", "model.embed.weight"),
        ("größe 重み", "größe 重み"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("a\x00b\tc\nd", "a\\x00b\\tc\\nd"),
        ("\x9b2J", "\\x9b2J"),
        ("abc\u202egnp.exe", "abc\\u202egnp.exe"),
        ("\ud800", "\\ud800"),
    ],
)
def test_controls_are_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_long_text_loses_its_middle() -> None:
    assert clipped("abcdefghij", 10) == "abcdefghij"
    assert clipped("abcdefghijk", 10) == "abcde…hijk"


def test_error_block_has_three_parts(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(AccessDenied("s3://b/m was refused.", "The key is unknown.", "Set AWS_PROFILE."))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert (
        captured.err == "AccessDenied: s3://b/m was refused.\n  why   The key is unknown.\n  mend  Set AWS_PROFILE.\n"
    )


def test_error_text_is_not_markup_and_cannot_steer(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(AccessDenied("[bold]x[/bold] \x1b[2J", "one\ntwo"))
    assert capsys.readouterr().err == "AccessDenied: [bold]x[/bold] \\x1b[2J\n  why   one\n        two\n"


def test_headrace_error_exits_1_without_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught, reported(debug=False):
        raise AccessDenied("Refused.")
    assert caught.value.code == 1
    assert capsys.readouterr().err == "AccessDenied: Refused.\n"


def test_debug_adds_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught, reported(debug=True):
        raise AccessDenied("Refused.")
    assert caught.value.code == 1
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert shown.endswith("AccessDenied: Refused.\n")


def test_unexpected_error_is_one_line_and_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught, reported(debug=False):
        raise ZeroDivisionError("first\nsecond")
    assert caught.value.code == 1
    shown = capsys.readouterr().err
    assert shown.splitlines()[0] == "ZeroDivisionError: first"
    assert "--debug" in shown
    assert "Traceback" not in shown


def test_interrupt_exits_130(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught, reported(debug=False):
        raise KeyboardInterrupt
    assert caught.value.code == 130
    assert "Traceback" not in capsys.readouterr().err


def test_own_exit_codes_pass() -> None:
    with pytest.raises(SystemExit) as caught, reported(debug=False):
        raise SystemExit(7)
    assert caught.value.code == 7


def test_table_without_terminal_keeps_each_row_on_one_line() -> None:
    out = io.StringIO()
    name = "model.layers.0." + "x" * 100
    print_table(("tensor", "size"), [(name, "1 B"), ("[red]b\x1b", "22 B")], make_console(out))
    lines = out.getvalue().splitlines()
    assert lines[2].split() == [name, "1", "B"]
    assert lines[3].split() == ["[red]b\\x1b", "22", "B"]
    assert "\x1b" not in out.getvalue()


def test_table_on_a_terminal_fits_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    out = Terminal()
    print_table(("tensor", "size"), [("x" * 150, "1 B")], make_console(out))
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in out.getvalue().splitlines()]
    assert max(len(line) for line in lines) == 60
    assert "…" in lines[-1]


def test_rows_align_their_values() -> None:
    out = io.StringIO()
    print_rows([("a", "1"), ("longer", "2")], make_console(out))
    assert out.getvalue().splitlines() == ["a       1", "longer  2"]


def test_rows_on_a_terminal_fold_rather_than_lose_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    out = Terminal()
    print_rows([("note", "x" * 70)], make_console(out))
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in out.getvalue().splitlines()]
    assert "".join(lines).count("x") == 70
    assert max(len(line) for line in lines) <= 40


def test_json_is_ascii(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"name": "重み\x1b"})
    shown = capsys.readouterr().out
    assert shown.isascii()
    assert json.loads(shown) == {"name": "重み\x1b"}
