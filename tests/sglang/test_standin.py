"""SGLang's own loader `runai_streamer`, with Headrace in the place of Run:ai's package, which is not installed here: nothing of SGLang is replaced."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.seaweed import SeaweedServer
from tests.sglang.server_process import SglangServer
from tests.vllm.models import PROMPT, save_llama, upload

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TINY = ["--context-length", "64", "--skip-tokenizer-init"]
ASK = {"input_ids": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}}


def test_a_server_with_the_built_in_loader_gives_the_tokens_of_the_local_folder(
    bucket: str, s3_client: Any, seaweed: SeaweedServer, cache_dir: Path, tmp_path: Path
) -> None:
    llama = save_llama(tmp_path / "llama")
    uri = upload(s3_client, bucket, llama, "models/llama")
    off = {"HEADRACE_SGLANG": "0"}
    with SglangServer(tmp_path / "local", ["--model-path", str(llama), *TINY], **off) as server:
        server.wait_until_ready()
        expected = server.post("generate", ASK)
    assert len(expected["output_ids"]) == 12

    environment = {**seaweed.environment(), **off, "SGLANG_CACHE_DIR": str(tmp_path / "cache")}
    launcher = ("-m", "headrace.compat")
    with SglangServer(tmp_path / "log", ["--model-path", uri, *TINY], launcher=launcher, **environment) as server:
        server.wait_until_ready()
        found = server.post("generate", ASK)
        said = server.text
    assert found["output_ids"] == expected["output_ids"]
    assert "Loading safetensors using Runai Model Streamer" in said  # SGLang's own words, by its own loader
    assert "in place of Run:ai Model Streamer" not in said
    assert len(re.findall("Headrace: checkpoint [^\n]*", said)) == 1
    (side,) = (tmp_path / "cache" / "model_streamer").glob("*/config.json")
    assert sorted(path.name for path in side.parent.iterdir() if not path.name.startswith(".")) == sorted(
        path.name for path in llama.iterdir() if path.suffix != ".safetensors"
    )
