"""vLLM's own loader `runai_streamer`, with Headrace in the place of Run:ai's package, which is not installed here: nothing of vLLM is replaced."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headrace.cli.seaweed import SeaweedServer
from tests.vllm.models import save_llama, upload
from tests.vllm.server_process import VllmServer
from tests.vllm.test_server import PROMPT, REAL, text_from_disk

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LAUNCHER = ("-m", "headrace.compat")

_BUILT_IN = """
import hashlib, json, sys
from pathlib import Path
import torch
from vllm.config import LoadConfig
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.weight_utils import runai_safetensors_weights_iterator
from vllm.transformers_utils.runai_utils import ObjectStorageModel
uri = sys.argv[1]
side = ObjectStorageModel(uri)
side.pull_files(uri, allow_pattern=["*.model", "*.py", "*.json"])
side.pull_files(uri, ignore_pattern=["*.pt", "*.safetensors", "*.bin", "*.tensors", "*.pth"])
loader = get_model_loader(LoadConfig(load_format="runai_streamer", model_loader_extra_config={"concurrency": 2}))
files = loader._prepare_weights(uri, None)
digest = lambda tensor: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
print(json.dumps({
    "loader": type(loader).__module__,
    "side": sorted(path.name for path in Path(side.dir).iterdir() if path.is_file()),
    "files": files,
    "tensors": {name: digest(tensor) for name, tensor in runai_safetensors_weights_iterator(files, False)},
    "again": {name: digest(tensor) for name, tensor in loader._get_weights_iterator(uri, None)},
}))
"""


@pytest.fixture
def environment(seaweed: SeaweedServer, cache_dir: Path, tmp_path: Path) -> dict[str, str]:
    """The store, a cache for vLLM, and no takeover."""
    return {**seaweed.environment(), "HEADRACE_VLLM": "0", "VLLM_ASSETS_CACHE": str(tmp_path / "assets")}


def test_the_built_in_loader_lists_pulls_and_streams(
    bucket: str, s3_client: Any, environment: dict[str, str], tmp_path: Path
) -> None:
    llama = save_llama(tmp_path / "llama")
    uri = upload(s3_client, bucket, llama, "models/llama")
    done = subprocess.run(
        [sys.executable, *LAUNCHER, "-c", _BUILT_IN, uri],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    stored = {
        name: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for file in llama.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    assert found["loader"] == "vllm.model_executor.model_loader.runai_streamer_loader"
    assert found["files"] == [f"{uri}/{file.name}" for file in sorted(llama.glob("*.safetensors"))]
    assert len(found["files"]) > 1
    assert found["tensors"] == found["again"] == stored
    assert found["side"] == sorted(file.name for file in llama.iterdir() if file.suffix != ".safetensors")


def test_a_server_with_the_built_in_loader_serves_the_text_of_the_local_folder(
    stored: str, smollm2: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    arguments = ["--model", stored, "--load-format", "runai_streamer", *REAL]
    with VllmServer(tmp_path / "log", arguments, launcher=LAUNCHER, **environment) as server:
        server.wait_until_ready()
        text = server.complete(PROMPT)
        said = server.text
    assert "Paris" in text
    assert text == text_from_disk(smollm2)
    assert "Loading safetensors using Runai Model Streamer" in said  # vLLM's own words, by its own loader
    assert "Headrace loads the weights" not in said
    assert len(re.findall(r"Headrace: checkpoint [^\n]*wanted 269 MB of 269 MB", said)) == 1
