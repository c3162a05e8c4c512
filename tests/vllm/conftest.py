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
from tests.support.engine_plugins import pass_warnings_of_others, smollm2, takeover_of
from tests.support.quantized import quantized
from tests.vllm.models import upload

__all__ = ["quantized", "smollm2"]
"""Fixtures from elsewhere."""
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
    pass_warnings_of_others(items, Path(__file__).parent)


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory, isolated_environment: None) -> Iterator[Path]:
    """The cache of side files of this run, and the takeover switched on for this process and its children."""
    with takeover_of("HEADRACE_VLLM", tmp_path_factory.mktemp("cache")) as folder:
        yield folder


@pytest.fixture(scope="session")
def vllm_here(cache_dir: Path) -> Any:
    """The module ``vllm`` in this process, with our plug-in loaded as vLLM loads it, the takeover with it."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    return sys.modules["vllm"]


@pytest.fixture(scope="session")
def stored(seaweed: SeaweedServer, s3_client: Any, smollm2: Path) -> Iterator[str]:
    """The model in a bucket of its own."""
    s3_client.create_bucket(Bucket="vllm-models")
    yield upload(s3_client, "vllm-models", smollm2, "smollm2")
