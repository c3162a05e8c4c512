"""What the tests with vLLM share. Where vLLM is not installed (in the development environment) they are not even collected."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.seaweed import SeaweedServer
from tests.support.quantized import QuantizedCheckpoints
from tests.vllm.models import upload

HAS_VLLM = find_spec("vllm") is not None
collect_ignore_glob = [] if HAS_VLLM else ["test_*.py"]

if HAS_VLLM:  # read by vLLM and its libraries when they are imported
    os.environ.update(
        {
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "0-1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_NO_USAGE_STATS": "1",
        }
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Warnings of vLLM and what it imports are not ours to mend; those of our own modules stay errors."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:::(?!headrace)"))


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory, isolated_environment: None) -> Iterator[Path]:
    """The cache of side files of this run, and the takeover switched on for this process and its children."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_CACHE_DIR", str(folder))
        patch.setenv("HEADRACE_VLLM", "1")
        yield folder


@pytest.fixture(scope="session")
def vllm_here(cache_dir: Path) -> Any:
    """The module ``vllm`` in this process, with our plug-in loaded as vLLM loads it, the takeover with it."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    return sys.modules["vllm"]


@pytest.fixture(scope="session")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> QuantizedCheckpoints:
    """Real quantized checkpoints."""
    return QuantizedCheckpoints(tmp_path_factory.mktemp("quantized"))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as the demo writes it: 269 MB of bf16 in four files."""
    folder = os.environ.get("SMOLLM2_FOLDER")
    if not folder:
        pytest.skip("SMOLLM2_FOLDER names no folder; `make test-vllm` makes one")
    return Path(folder)


@pytest.fixture(scope="session")
def stored(seaweed: SeaweedServer, s3_client: Any, smollm2: Path) -> Iterator[str]:
    """The model in a bucket of its own."""
    s3_client.create_bucket(Bucket="vllm-models")
    yield upload(s3_client, "vllm-models", smollm2, "smollm2")
