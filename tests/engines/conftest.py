"""What tests of real models share."""

from __future__ import annotations

import pytest

from tests.support.quantized import QuantizedCheckpoints


@pytest.fixture(scope="session")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> QuantizedCheckpoints:
    """The quantized checkpoints of this run by name, each put together once; copy one before changing it."""
    return QuantizedCheckpoints(tmp_path_factory.mktemp("quantized"))
