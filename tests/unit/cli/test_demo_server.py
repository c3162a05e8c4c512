"""The demo's child process: nothing of the user's reaches it, its failure is told with its own words, and it is gone at the end."""

from __future__ import annotations

import os
import sys
import time

import psutil
import pytest

from headrace.cli.demo_server import ServerProcess, child_environment, find_port
from headrace.errors import ServingError

READY = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    looks = 0
    def do_GET(self):
        Handler.looks += 1
        self.send_response(200 if Handler.looks > 3 else 503)
        self.end_headers()
        progress = {"phase": "weights", "bytes_done": 120000000, "bytes_wanted": 269000000}
        state = {"status": "ready"} if Handler.looks > 3 else {"status": "loading", "progress": progress}
        self.wfile.write(json.dumps(state).encode())
    def log_message(self, *words):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def server(code: str) -> ServerProcess:
    process = ServerProcess("s3://models/m", [], environment=dict(os.environ))
    process._command = [sys.executable, "-c", code, str(process.port)]
    return process


def test_waits_through_progress_and_stops() -> None:
    shown: list[str] = []
    with server(READY) as running:
        assert running._process is not None
        pid = running._process.pid
        state = running.wait_until_ready(shown.append)
    assert state == {"status": "ready"}
    assert "weights, 120 MB of 269 MB" in shown
    assert not psutil.pid_exists(pid)


def test_early_end_is_told_with_its_last_words() -> None:
    with (
        server("import sys; print('the bucket is gone'); sys.exit(3)") as running,
        pytest.raises(ServingError) as caught,
    ):
        running.wait_until_ready(lambda line: None)
    assert "ended with 3" in caught.value.what
    assert "the bucket is gone" in caught.value.why


def test_server_that_ignores_the_polite_signal_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.cli.demo_server._STOP_TIMEOUT_S", 0.2)
    stubborn = server(
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    )
    with stubborn as running:
        assert running._process is not None
        pid = running._process.pid
        while "up" not in running.log_end():
            time.sleep(0.02)
    assert not psutil.pid_exists(pid)
    running.stop()


def test_users_own_keys_do_not_reach_the_server() -> None:
    theirs = {
        "AWS_PROFILE": "work",
        "AWS_SESSION_TOKEN": "t",
        "HEADRACE_API_KEY": "k",
        "PATH": "/bin",
        "HEADRACE_CONNECTIONS": "4",
    }
    given = child_environment({"AWS_ACCESS_KEY_ID": "demo"}, theirs)
    assert given["AWS_ACCESS_KEY_ID"] == "demo"
    assert given["AWS_CONFIG_FILE"] == given["AWS_SHARED_CREDENTIALS_FILE"] == os.devnull
    assert not {"AWS_PROFILE", "AWS_SESSION_TOKEN", "HEADRACE_API_KEY"} & set(given)
    assert (given["PATH"], given["HEADRACE_CONNECTIONS"]) == ("/bin", "4")


def test_port_is_free() -> None:
    assert 1024 <= find_port() <= 65535
