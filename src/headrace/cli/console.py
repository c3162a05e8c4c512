"""What the commands show a person: errors, tables, JSON. Names out of files are escaped here, so that none can steer a terminal."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.table import Table

from headrace.errors import HeadraceError

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
"""What a shell gives a command that ended on SIGINT."""

_LONGEST_CELL = 160
_WIDE = 10_000
"""Columns where nobody looks through a window: a pipe or a file gets each row on one line."""


def printable(text: str) -> str:
    """Return ``text`` with every character escaped that a terminal may act on: controls, direction marks, lone surrogates."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def clipped(text: str, most: int = _LONGEST_CELL) -> str:
    """Return ``text`` with its middle left out where it is longer than ``most`` characters."""
    if len(text) <= most:
        return text
    tail = (most - 1) // 2
    return f"{text[: most - 1 - tail]}…{text[-tail:]}"


def make_console(file: TextIO | None = None) -> Console:
    """Return a console on ``file`` (default: standard output) that takes no markup from what it prints."""
    file = sys.stdout if file is None else file
    width = None if file.isatty() else _WIDE
    return Console(file=file, width=width, markup=False, emoji=False, highlight=False)


def print_rows(rows: Sequence[tuple[str, str]], console: Console | None = None) -> None:
    """Print labels and values in two columns."""
    console = console or make_console()
    if not console.is_terminal:
        width = max((len(label) for label, _ in rows), default=0)
        for label, value in rows:
            console.print(f"{printable(label):<{width}}  {clipped(printable(value))}", soft_wrap=True)
        return
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, value in rows:
        grid.add_row(printable(label), printable(value))
    console.print(grid)


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], console: Console | None = None) -> None:
    """Print a table. Every column but the first is aligned on the right, as numbers are."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="right" if place else "left", overflow="ellipsis", no_wrap=True)
    for row in rows:
        table.add_row(*(clipped(printable(cell)) for cell in row))
    (console or make_console()).print(table)


def print_json(value: Any) -> None:
    """Print ``value`` as JSON in ASCII, which nothing on the way can garble."""
    print(json.dumps(value, indent=2))


def print_error(error: HeadraceError, console: Console | None = None) -> None:
    """Print what happened, why, and how to mend it, on standard error."""
    console = console or make_console(sys.stderr)
    console.print(f"{type(error).__name__}: {_paragraph(error.what)}", style="bold red", soft_wrap=True)
    for label, text in (("why ", error.why), ("mend", error.mend)):
        if text:
            console.print(f"  {label}  {_paragraph(text)}", soft_wrap=True)


@contextmanager
def reported(*, debug: bool, after: Callable[[HeadraceError], None] | None = None) -> Iterator[None]:
    """Turn what a command's block raises into words on standard error and an exit code; with ``debug`` into a traceback as well.

    ``after`` is called with an error of ours that has been printed, and may print more below it.

    1 for every error, 130 for Ctrl-C. A reader of our output who has left (``| head``) is no error worth a word.
    """
    try:
        yield
    except BrokenPipeError:
        # Python flushes standard output once more at exit, into the same closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(EXIT_FAILED) from None
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        raise SystemExit(EXIT_INTERRUPTED) from None
    except Exception as error:  # noqa: BLE001  The last place that can say it in words.
        if debug:
            traceback.print_exc()
        if isinstance(error, HeadraceError):
            print_error(error)
            if after is not None:
                after(error)
        elif not debug:
            first_line = (str(error).splitlines() or [""])[0]
            print(f"{type(error).__name__}: {clipped(printable(first_line), 500)}", file=sys.stderr)
            print(
                "  This is not an error that Headrace expects; run it with --debug to see where it comes from.",
                file=sys.stderr,
            )
        raise SystemExit(EXIT_FAILED) from None


def _paragraph(text: str) -> str:
    return "\n        ".join(printable(line) for line in text.splitlines())
