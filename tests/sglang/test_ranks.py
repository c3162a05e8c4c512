"""Two ranks of SGLang on this machine: the store is asked for every byte once, and each rank has what SGLang's own loader gives it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.seaweed import SeaweedServer
from tests.sglang.server_process import SglangServer
from tests.vllm.counting_proxy import CountingProxy
from tests.vllm.models import PROMPT, save_llama, upload

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LARGE: dict[str, Any] = {"vocab_size": 65536, "most_file_size": "20MB"}
"""34 MB, so that what is read of each file for its header weighs little beside it."""
BIND_TWO = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
TWO_RANKS = ["--tp-size", "2", "--context-length", "64", "--skip-tokenizer-init"]


def test_two_ranks_share_the_reading(
    bucket: str, s3_client: Any, seaweed: SeaweedServer, cache_dir: Path, tmp_path: Path
) -> None:
    folder = save_llama(tmp_path / "llama", **LARGE)
    stored_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    uri = upload(s3_client, bucket, folder, "llama")
    with CountingProxy(seaweed.endpoint) as proxy:
        variables = {**seaweed.environment(), "AWS_ENDPOINT_URL_S3": proxy.endpoint, **BIND_TWO}
        with SglangServer(tmp_path / "log", ["--model-path", uri, *TWO_RANKS], **variables) as server:
            server.wait_until_ready()
            tokens = server.generate(PROMPT)
            said = server.text
            returned = proxy.bytes_returned
            # An update is shared as well.
            elsewhere = upload(s3_client, bucket, save_llama(tmp_path / "other", seed=1, **LARGE), "other")
            assert server.post("update_weights_from_disk", {"model_path": elsewhere})["success"]
            assert server.generate(PROMPT) != tokens
            updated = proxy.bytes_returned - returned
            # By SGLang's own loader.
            answer = server.post("update_weights_from_disk", {"model_path": str(folder), "load_format": "auto"})
            assert answer["success"], answer
            assert server.generate(PROMPT) == tokens
    assert len(set(tokens)) > 3
    assert len(re.findall(r"Headrace: checkpoint [^\n]*handed out", said)) == 1  # by the first rank
    assert stored_bytes < returned < 1.5 * stored_bytes
    assert stored_bytes < updated < 1.5 * stored_bytes
