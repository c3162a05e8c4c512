"""What every fault test has: a server, and the proof that nothing is left of it afterwards."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.support.fault_server import FaultServer


@pytest.fixture
def fault_server() -> Iterator[FaultServer]:
    """A `FaultServer`; at the end every client has closed its connections and no reader thread is left."""
    with FaultServer() as server:
        yield server
        assert server.wait_until_idle(), f"{server.num_open} connections were left open"
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith("headrace-reader")]
        assert left == []
