"""Makes the pool in this folder from a folder of checkpoints: ``python -m tests.data.quantized.store FOLDER``, from the root of the repository.

FOLDER holds ``NAME/``, ``NAME.weights.json`` and ``NAME.ref.safetensors`` for every name in `CHOSEN`. Everything in ``NAME/`` is stored bit for bit. Of the references stay
the inputs and the two sets of logits that tests compare; see `reduced`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tests.support.file_pool import INDEX, write_pool
from tests.support.quantized import STORED, files_beside
from tests.support.weight_files import StoredTensor, WeightFile

CHOSEN: tuple[str, ...] = (
    "ar-auto_awq-llama",
    "ar-auto_gptq-llama",
    "ct-fp8-block-llama",
    "ct-fp8-dynamic-llama",
    "ct-fp8-static-kvfp8-llama",
    "ct-mxfp4-llama",
    "ct-nvfp4-deepseekv3",
    "ct-nvfp4-llama",
    "ct-w4a16-asym-g128-llama",
    "ct-w8a8-int8-llama",
    "dsfp8-mtp-sharded-deepseekv3",
    "kimi25-int4",
    "modelopt-fp8-2dblock-deepseekv3",
    "modelopt-fp8-kvfp8-llama",
    "modelopt-fp8-pcpt-llama",
    "modelopt-int4-awq-llama",
    "modelopt-int8-sq-llama",
    "modelopt-mxfp4-llama",
    "modelopt-mxfp8-llama",
    "modelopt-nvfp4-awqlite-llama",
    "modelopt-nvfp4-deepseekv3",
    "modelopt-nvfp4-kvfp8-llama",
    "modelopt-w4a8-awq-llama",
    "qwenfp8-qwen3",
)


def main(source: Path) -> None:
    """Replace the pool beside this file by one of the chosen checkpoints in ``source``."""
    files: dict[str, bytes] = {}
    for name in CHOSEN:
        for path in sorted((source / name).iterdir()):
            files[f"{name}/{path.name}"] = path.read_bytes()
        weights, references = files_beside(name)
        files[weights] = (source / weights).read_bytes()
        files[references] = reduced(WeightFile.parse((source / references).read_bytes())).encode()
    for old in [*STORED.glob("*.xz"), STORED / INDEX]:
        old.unlink(missing_ok=True)
    write_pool(STORED, files)


def reduced(file: WeightFile) -> WeightFile:
    """Return the references that tests compare.

    Logits with rounded inputs are compared by their root mean square and their largest entry: half precision is enough (its error is below 0.004; one unit in the last
    place of one input costs ten times that), and where nothing but the weights is rounded there are none. Those without are compared closely, for which the last position
    of each sequence is enough: it has seen all others.
    """
    exact, plain = file.tensors["logits_exact_fp32"], file.tensors["logits_wonly_fp32"]
    kept = {
        "input_ids": file.tensors["input_ids"],
        "logits_wonly_fp32": StoredTensor.of(plain.tensor()[:, -1:]),
    }
    if exact != plain:
        kept["logits_exact_fp32"] = StoredTensor.of(exact.tensor().to(torch.float16))
    return WeightFile(kept, file.metadata)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
