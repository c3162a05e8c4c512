"""What every fault test has: a server, and the proof that nothing is left of it afterwards."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

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


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ca.pem, another-ca.pem, and server.pem with server.key for 127.0.0.1, signed by the first."""
    folder = tmp_path_factory.mktemp("ca")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for name in ("ca", "another-ca"):
        openssl(
            "req",
            "-x509",
            *new_key,
            "-keyout",
            f"{name}.key",
            "-out",
            f"{name}.pem",
            "-days",
            "2",
            "-subj",
            f"/CN={name}",
        )
    openssl("req", *new_key, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=server")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    openssl(
        *("x509", "-req", "-in", "server.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"),
        *("-out", "server.pem", "-days", "2", "-extfile", "names"),
    )
    return folder
