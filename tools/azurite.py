#!/usr/bin/env python3
"""Installs Azurite, Microsoft's emulator of Azure Blob Storage, into an environment folder, for the tests. Uses the standard library alone.

``python tools/azurite.py FOLDER`` puts it into ``FOLDER/azurite``, where tests look for it below the running Python's own folder. It comes from npm,
and Node.js runs it: without them the tests that need it are skipped, and say so.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

VERSION = "3.35.0"
"""The newest that runs on Node.js 18 and 20."""

MARKER = "complete"


def is_settled(environment: Path) -> bool:
    """Say whether there is nothing to do: this version is installed, or there is no npm that could install it."""
    marker = environment / "azurite" / MARKER
    return (marker.exists() and marker.read_text() == VERSION) or shutil.which("npm") is None


def install(environment: Path) -> None:
    """Put Azurite into ``environment``; its marker is written when all is there. A failure is told and borne: only some tests need it."""
    folder = environment / "azurite"
    print(f"Installing Azurite {VERSION} into {folder} (once; half a minute) …", file=sys.stderr, flush=True)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    options = [
        "--prefix",
        str(folder),
        "--no-audit",
        "--no-fund",
        "--no-save",
        "--ignore-scripts",
        "--fetch-retries=1",
        "--loglevel=error",
    ]
    command = ["npm", "install", *options, f"azurite@{VERSION}"]
    if subprocess.run(command, stdout=sys.stderr, stdin=subprocess.DEVNULL, cwd=folder, check=False).returncode:
        print("Azurite could not be installed; the lines above say why. Its tests are skipped.", file=sys.stderr)
        return
    unfinished = folder / f"{MARKER}.{os.getpid()}"
    unfinished.write_text(VERSION)
    unfinished.rename(folder / MARKER)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/azurite.py FOLDER")
    if shutil.which("npm") is None:
        sys.exit("npm is not on the PATH; install Node.js 18 or newer, which brings it.")
    install(Path(sys.argv[1]))
