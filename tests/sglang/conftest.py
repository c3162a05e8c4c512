"""What the tests with SGLang share. Where SGLang is not installed (in the development environment) they are not even collected.

SGLang's wheel is for CUDA. That it runs on a CPU takes the two stubs in `tests/sglang/stubs`: names without kernels, and operators that torchvision looks for. Children find
them by ``PYTHONPATH``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine_plugins import pass_warnings_of_others, smollm2, takeover_of
from tests.support.quantized import quantized

__all__ = ["quantized", "smollm2"]
"""Fixtures from elsewhere."""
STUBS = Path(__file__).parent / "stubs"
HAS_SGLANG = find_spec("sglang") is not None
collect_ignore_glob = ["stubs/*", *([] if HAS_SGLANG else ["test_*.py"])]

if HAS_SGLANG:  # read by SGLang and its libraries when they are imported
    os.environ.update(
        {
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "SGLANG_USE_CPU_ENGINE": "1",
            "PYTHONPATH": os.pathsep.join([str(STUBS), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
    )
    sys.path.insert(0, str(STUBS))
    import torchvision_operators

    sys.meta_path.insert(0, torchvision_operators.Finder())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    pass_warnings_of_others(items, Path(__file__).parent)


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory, isolated_environment: None) -> Iterator[Path]:
    """The cache of side files of this run, and the takeover switched on for this process and its children."""
    with takeover_of("HEADRACE_SGLANG", tmp_path_factory.mktemp("cache")) as folder:
        yield folder


@pytest.fixture(scope="session")
def sglang_here(cache_dir: Path) -> Any:
    """The module ``sglang`` in this process, with our plug-in loaded as SGLang loads it, the takeover with it."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    return sys.modules["sglang"]
