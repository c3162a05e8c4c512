"""Two workers of one engine: they share the reading, fail together, and ask for nothing that another stage holds."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.cli.seaweed import SeaweedServer
from tests.vllm.counting_proxy import CountingProxy
from tests.vllm.models import greedy, running, save_llama, upload
from tests.vllm.server_process import VllmServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TINY = [
    *("--dtype", "float32", "--max-model-len", "64", "--skip-tokenizer-init", "--served-model-name", "served"),
]
BIND_TWO = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 111 MB in two files, so that what is read of each for its header weighs little beside it."""
    fields = {"hidden_size": 512, "intermediate_size": 1376, "vocab_size": 8000, "num_attention_heads": 8}
    return save_llama(tmp_path_factory.mktemp("models") / "llama", num_layers=8, most_file_size="80MB", **fields)


def weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


@pytest.mark.parametrize("shares", [True, False])
def test_two_workers_agree_with_one_and_read_the_store_once(
    shares: bool,
    llama: Path,
    bucket: str,
    s3_client: Any,
    seaweed: SeaweedServer,
    vllm_here: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uri = upload(s3_client, bucket, llama, "llama")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", BIND_TWO["VLLM_CPU_OMP_THREADS_BIND"])
    options = {} if shares else {"model_loader_extra_config": {"distributed": False}}
    with CountingProxy(seaweed.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
        with running(uri, tensor_parallel_size=2, **options) as engine:
            bytes_returned = proxy.bytes_returned
            found = greedy(engine)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-1")
    with running(str(llama)) as engine:
        assert found == greedy(engine)
    times = bytes_returned / weight_bytes(llama)
    assert 1.0 <= times <= 1.02 if shares else 2.0 <= times <= 2.04


def test_a_worker_that_dies_while_loading_ends_the_other(
    llama: Path, bucket: str, s3_client: Any, seaweed: SeaweedServer, cache_dir: Path, tmp_path: Path
) -> None:
    uri = upload(s3_client, bucket, llama, "llama")
    slow = {"HEADRACE_BANDWIDTH_LIMIT": "1MB", **BIND_TWO}
    arguments = ["--model", uri, *TINY, "--tensor-parallel-size", "2"]
    with VllmServer(tmp_path / "log", arguments, **slow) as server:
        text = server.wait_for(lambda text: "headrace: weights" in text, "the progress of weights")
        pids = {int(pid) for pid in re.findall(r"Worker_TP\d pid=(\d+)", text)}
        workers = [one for one in server.remember_family() if one.pid in pids]
        assert len(workers) == 2
        workers[1].kill()
        started = time.monotonic()
        _, alive = psutil.wait_procs(workers, timeout=60)  # at this speed the load would take two minutes
        print(f"the other worker lived for {time.monotonic() - started:.1f} s")
        assert not alive
        assert server.wait_for_end() != 0


def test_pipeline_stages_ask_only_for_their_own_layers(
    bucket: str, s3_client: Any, cache_dir: Path, tmp_path: Path
) -> None:
    """Loading alone: vLLM's CPU build cannot run a pipeline."""
    uri = upload(s3_client, bucket, save_llama(tmp_path / "llama"), "llama")
    arguments = ["--model", uri, *TINY, "--pipeline-parallel-size", "2"]
    with VllmServer(tmp_path / "log", arguments, **BIND_TWO) as server:
        text = server.wait_for(lambda text: len(re.findall(r"Headrace: checkpoint", text)) == 2, "both reports")
    reports = re.findall(r"Worker_PP(\d)[^\n]*tensors (\d+) handed out; wanted (\d+) kB of 854 kB", text)
    assert sorted(reports) == [("0", "19", "427"), ("1", "20", "427")]
