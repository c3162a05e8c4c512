"""The checkout, installed as a user installs it: its wheel in the folder of packages of a Python of its own, which sees this environment's packages, too."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path
from sysconfig import get_path

import pytest

CHECKOUT = Path(__file__).parents[2]


def install_checkout(folder: Path) -> Path:
    """Make that Python in ``folder``; return its executable. Start-up files of the wheel are read, and of this environment only its folder. Needs no network."""
    pytest.importorskip("hatchling")
    venv.create(folder, symlinks=True)
    packages = folder / Path(get_path("purelib")).relative_to(sys.prefix)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(packages)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(CHECKOUT)], check=True, timeout=120)
    (packages / "environment.pth").write_text(get_path("purelib") + "\n")
    return folder / "bin" / "python"
