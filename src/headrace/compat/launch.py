"""``python -m headrace.compat``: runs another program with Headrace in the place of Run:ai's package, in it and in every process that it starts.

The program takes this process's place: it starts as it would by itself, with two variables more in its environment. ``HEADRACE_AS_RUNAI=1`` asks for the stand-in; where the wheel's start-up
file is not there (Headrace is on ``PYTHONPATH``, or runs from its sources), ``PYTHONPATH`` begins with a folder whose ``sitecustomize`` does the same.
"""

from __future__ import annotations

import os
import site
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.compat.standin import PACKAGE, STARTUP_FILE, VARIABLE
from headrace.errors import HeadraceError, InvalidSetting

STARTUP_FOLDER = Path(__file__).parent / "startup"

USAGE = f"""\
usage: python -m headrace.compat -m MODULE [ARGUMENT …]
       python -m headrace.compat -c CODE [ARGUMENT …]
       python -m headrace.compat SCRIPT.py [ARGUMENT …]
       python -m headrace.compat COMMAND [ARGUMENT …]

Runs a program with Headrace in the place of {PACKAGE}, in all its processes.
The same without this command: set {VARIABLE}=1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """What is asked of the Python that runs."""

    executable: str
    flags: tuple[str, ...]
    """Those it was started with, for another one like it."""
    has_startup_file: bool
    """Whether the wheel's start-up file is among those that Python reads."""
    reads_pythonpath: bool
    reads_startup_files: bool

    @classmethod
    def running(cls) -> Interpreter:
        """Return what is true of this process."""
        return cls(
            executable=sys.executable,
            flags=tuple(subprocess._args_from_interpreter_flags()),  # type: ignore[attr-defined]
            has_startup_file=any((Path(folder) / STARTUP_FILE).is_file() for folder in _site_folders()),
            reads_pythonpath=not sys.flags.ignore_environment,
            reads_startup_files=not sys.flags.no_site,
        )


def command_line(arguments: Sequence[str], interpreter: Interpreter) -> list[str]:
    """Return what to execute for ``arguments``: an interpreter for modules, code and scripts, and anything else itself. Raises `InvalidSetting` where they name no program."""
    if not arguments or (arguments[0] in ("-m", "-c") and len(arguments) < 2):
        raise InvalidSetting("No program is named.", mend=f"\n{USAGE}")
    first = arguments[0]
    python = [interpreter.executable, *interpreter.flags]
    is_script = Path(first).is_dir() or (Path(first).is_file() and Path(first).suffix in (".py", ".pyz"))
    if first in ("-m", "-c") or is_script:
        return [*python, *arguments]
    if first.startswith("-"):
        raise InvalidSetting(f"{first} is not an option.", mend=f"\n{USAGE}")
    return list(arguments)


def surroundings(environment: Mapping[str, str], interpreter: Interpreter) -> dict[str, str]:
    """Return ``environment`` as the program gets it. Raises `InvalidSetting` for an interpreter that cannot be told."""
    if not interpreter.reads_startup_files:
        raise InvalidSetting("Python was started with -S.", "The stand-in is put in place by Python's start-up files.")
    found = {**environment, VARIABLE: "1"}
    if interpreter.has_startup_file:
        return found
    if not interpreter.reads_pythonpath:
        raise InvalidSetting(
            "Python was started with -E or -I.",
            f"The file {STARTUP_FILE} is in none of its folders, and PYTHONPATH is not read.",
            "Install Headrace with pip for this Python, or leave the option out.",
        )
    folders = [str(STARTUP_FOLDER), *filter(None, [environment.get("PYTHONPATH")])]
    return found | {"PYTHONPATH": os.pathsep.join(folders)}


def main(arguments: Sequence[str]) -> int:
    """Replace this process by the program. Returns only where that cannot be, with an exit code, after saying why."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    try:
        interpreter = Interpreter.running()
        command = command_line(arguments, interpreter)
        environment = surroundings(os.environ, interpreter)
    except HeadraceError as error:
        print(f"headrace.compat: {error}", file=sys.stderr)
        return 2
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        print(f"headrace.compat: {command[0]} cannot be run. {error.strerror or error}.", file=sys.stderr)
    return 127


def _site_folders() -> list[str]:
    """Return the folders whose start-up files this Python reads."""
    return [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
