"""vLLM's server on a real model in a real store: what it says, what its workers read, and how a start that cannot work ends."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.seaweed import SeaweedServer
from tests.vllm.models import rewrite, save_llama, upload
from tests.vllm.server_process import VllmServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROMPT = "The capital of France is"
REAL = ["--dtype", "float32", "--max-model-len", "256", "--served-model-name", "served"]
TINY = [
    *("--dtype", "float32", "--max-model-len", "64", "--skip-tokenizer-init", "--served-model-name", "served"),
]


def text_from_disk(folder: Path) -> str:
    """Return what an engine in this process, with vLLM's own loader, adds to the prompt."""
    from vllm import LLM, SamplingParams

    engine = LLM(str(folder), enforce_eager=True, dtype="float32", max_model_len=256, max_num_seqs=2)
    try:
        how = SamplingParams(temperature=0, max_tokens=16)
        return str(engine.generate([PROMPT], how, use_tqdm=False)[0].outputs[0].text)
    finally:
        engine.llm_engine.engine_core.shutdown()


def test_a_uri_alone_serves_the_text_of_the_local_folder(
    stored: str, smollm2: Path, seaweed: SeaweedServer, vllm_here: Any, tmp_path: Path
) -> None:
    with VllmServer(tmp_path / "log", ["--model", stored, *REAL], **seaweed.environment()) as server:
        server.wait_until_ready()
        text = server.complete(PROMPT)
        said = server.text
    assert "Paris" in text
    assert text == text_from_disk(smollm2)
    assert f"Headrace loads the weights of {stored}; runai_streamer is its name here" in said
    assert len(re.findall(r"Headrace: checkpoint [^\n]*wanted 269 MB of 269 MB", said)) == 1


def test_an_object_that_changes_during_the_load_ends_the_start(
    stored: str, smollm2: Path, s3_client: Any, seaweed: SeaweedServer, cache_dir: Path, tmp_path: Path
) -> None:
    last = sorted(smollm2.glob("*.safetensors"))[-1]
    slow = {"HEADRACE_BANDWIDTH_LIMIT": "20MB", **seaweed.environment()}
    try:
        with VllmServer(tmp_path / "log", ["--model", stored, *REAL], **slow) as server:
            server.wait_for(lambda text: "headrace: weights" in text, "the progress of weights")
            content = last.read_bytes()
            s3_client.put_object(Bucket="vllm-models", Key=f"smollm2/{last.name}", Body=content[:-1] + b"\1")
            assert server.wait_for_end() != 0
            assert f"ObjectChanged: s3://vllm-models/smollm2/{last.name}" in server.text
    finally:
        s3_client.put_object(Bucket="vllm-models", Key=f"smollm2/{last.name}", Body=last.read_bytes())


@pytest.mark.parametrize("fault", ["missing file", "missing tensor"])
def test_a_start_that_cannot_work_says_why_and_ends(
    fault: str, bucket: str, s3_client: Any, cache_dir: Path, tmp_path: Path
) -> None:
    llama = save_llama(tmp_path / "llama")
    if fault == "missing tensor":
        rewrite(llama, lambda tensors: tensors.pop("model.layers.2.mlp.down_proj.weight"))
    uri = upload(s3_client, bucket, llama, "llama")
    file = sorted(llama.glob("*.safetensors"))[-1]
    says = {
        "missing file": f"MissingFiles: Absent are 1 file .*{file.name}",
        "missing tensor": r"PlacementError: The checkpoint .* tensors are missing\. Not filled: .*layers\.2\.mlp\.down_proj",
    }
    if fault == "missing file":
        s3_client.delete_object(Bucket=bucket, Key=f"llama/{file.name}")
    with VllmServer(tmp_path / "log", ["--model", uri, *TINY]) as server:
        assert server.wait_for_end() not in (0, None)
        assert re.search(says[fault], server.text), server.end_of_log()
