"""SGLang's server on a real model in a real store: the same text as from a disk, weights that change while it runs, and how a start that cannot work ends."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.seaweed import SeaweedServer
from tests.sglang.server_process import SglangServer
from tests.vllm.models import PROMPT as TOKENS
from tests.vllm.models import rewrite, save_llama, upload

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROMPT = "The capital of France is"
REAL = ["--context-length", "256"]
TINY = ["--context-length", "64", "--skip-tokenizer-init"]


@pytest.fixture(scope="module")
def stored(seaweed: SeaweedServer, s3_client: Any, smollm2: Path) -> str:
    """The model in a bucket of its own."""
    s3_client.create_bucket(Bucket="sglang-models")
    return upload(s3_client, "sglang-models", smollm2, "smollm2")


def test_a_uri_alone_serves_the_text_of_the_local_folder(
    stored: str, smollm2: Path, seaweed: SeaweedServer, cache_dir: Path, tmp_path: Path
) -> None:
    with SglangServer(tmp_path / "local", ["--model-path", str(smollm2), *REAL]) as server:
        server.wait_until_ready()
        expected = server.post(
            "generate", {"text": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 16}}
        )
        assert "Headrace: checkpoint" not in server.text

    with SglangServer(tmp_path / "log", ["--model-path", stored, *REAL], **seaweed.environment()) as server:
        server.wait_until_ready()
        found = server.post("generate", {"text": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 16}})
        said = server.text
    assert "Paris" in expected["text"]
    assert found["text"] == expected["text"]
    assert found["output_ids"] == expected["output_ids"]
    assert len(re.findall("in place of Run:ai Model Streamer", said)) == 1
    assert len(re.findall(r"Headrace: checkpoint [^\n]*wanted 269 MB of 269 MB", said)) == 1
    assert f"Headrace: {stored} is at snapshot" in said


@pytest.fixture(scope="module")
def running(
    seaweed: SeaweedServer, s3_client: Any, cache_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[SglangServer, Path, str]]:
    """A server of a small model by its uri: the server, the model's folder, and the bucket."""
    bucket, scratch = "sglang-updates", tmp_path_factory.mktemp("running")
    s3_client.create_bucket(Bucket=bucket)
    folder = save_llama(scratch / "llama")
    uri = upload(s3_client, bucket, folder, "llama")
    extra = ["--model-loader-extra-config", '{"concurrency": 3}']
    with SglangServer(scratch / "log", ["--model-path", uri, *TINY, *extra], **seaweed.environment()) as server:
        server.wait_until_ready()
        yield server, folder, bucket


def test_weights_are_updated_from_a_uri(
    running: tuple[SglangServer, Path, str], s3_client: Any, tmp_path: Path
) -> None:
    server, folder, bucket = running
    before = server.generate(TOKENS)
    assert len(set(before)) > 3

    elsewhere = upload(s3_client, bucket, save_llama(tmp_path / "other", seed=1), "other")
    answer = server.post("update_weights_from_disk", {"model_path": elsewhere})
    assert answer["success"], answer
    after = server.generate(TOKENS)
    assert after != before
    report = next(line for line in server.text.splitlines() if f"Headrace: checkpoint {elsewhere}" in line)
    assert "over 3 connections" in report  # as at the start

    back = server.post("update_weights_from_disk", {"model_path": str(folder), "load_format": "headrace"})
    assert back["success"], back
    assert server.generate(TOKENS) == before


def test_an_update_that_cannot_work_leaves_the_weights(
    running: tuple[SglangServer, Path, str], s3_client: Any, tmp_path: Path
) -> None:
    server, _, bucket = running
    before = server.generate(TOKENS)
    other = save_llama(tmp_path / "other", seed=2)
    uri = upload(s3_client, bucket, other, "broken")
    file = sorted(other.glob("*.safetensors"))[-1]
    s3_client.delete_object(Bucket=bucket, Key=f"broken/{file.name}")
    answer = server.post("update_weights_from_disk", {"model_path": uri})
    assert not answer["success"]
    assert file.name in answer["message"]
    assert server.generate(TOKENS) == before


def test_a_start_that_cannot_work_says_why_and_ends(
    bucket: str, s3_client: Any, cache_dir: Path, tmp_path: Path
) -> None:
    whole = save_llama(tmp_path / "llama")
    uri = upload(s3_client, bucket, whole, "cut")
    file = sorted(whole.glob("*.safetensors"))[-1]
    s3_client.delete_object(Bucket=bucket, Key=f"cut/{file.name}")
    with SglangServer(tmp_path / "log", ["--model-path", uri, *TINY]) as server:
        assert server.wait_for_end() not in (0, None)
        assert re.search(f"MissingFiles: Absent are 1 file .*{file.name}", server.text), server.end_of_log()
        assert "Load weight begin" not in server.text  # before any worker starts

    rewrite(whole, lambda tensors: tensors.pop("model.layers.2.mlp.down_proj.weight"))
    uri = upload(s3_client, bucket, whole, "lost")
    with SglangServer(tmp_path / "log", ["--model-path", uri, *TINY]) as server:
        assert server.wait_for_end() not in (0, None)
        says = r"PlacementError: The checkpoint .* tensors are missing\. Not filled: .*layers\.2\.mlp\.down_proj"
        assert re.search(says, server.text), server.end_of_log()
