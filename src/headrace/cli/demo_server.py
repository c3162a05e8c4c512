"""A `headrace serve` of our own as a child process: started on a free port, watched until it is ready, stopped in every case."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from headrace.errors import ServingError
from headrace.units import format_bytes

HOST = "127.0.0.1"

_POLL_S = 0.1
_READY_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 15.0
_LOG_LINES = 15
# Becomes the server once it has asked the kernel for SIGTERM at our end, however that comes; the request outlives exec. 1 is PR_SET_PDEATHSIG,
# and we may have died before the call.
_LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class ServerProcess:
    """``headrace serve uri`` with ``options`` in a process of its own, as a context manager; what it prints goes to a file.

    Enter it from a thread that lives as long as the server shall: Linux takes the end of that thread for the end of the parent.
    """

    def __init__(self, uri: str, options: Sequence[str], *, environment: Mapping[str, str]) -> None:
        """Start nothing yet."""
        self.port = find_port()
        self._command = [
            sys.executable,
            "-m",
            "headrace",
            "serve",
            uri,
            "--host",
            HOST,
            "--port",
            str(self.port),
            *options,
        ]
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._log: Any = None

    def __enter__(self) -> Self:
        self._log = tempfile.TemporaryFile(prefix="headrace-serve-")
        try:
            # A session of its own: Ctrl-C reaches us alone, and we stop it in order.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *self._command],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except BaseException:
            self._log.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """Where it listens: ``http://127.0.0.1:port``."""
        return f"http://{HOST}:{self.port}"

    def wait_until_ready(self, show: Callable[[str], None]) -> dict[str, Any]:
        """Return what ``/ready`` says once it is a yes; ``show`` is given its state at each look, as one line.

        Raises `ServingError` with the end of the server's log where it ends before, or takes more than five minutes.
        """
        deadline = time.monotonic() + _READY_TIMEOUT_S
        while time.monotonic() < deadline:
            assert self._process is not None
            code = self._process.poll()
            if code is not None:
                raise ServingError(f"The server ended with {code} before it was ready.", f"It said:\n{self.log_end()}")
            answer = self._ask_ready()
            if answer is not None and answer[0] == 200:
                return answer[1]
            show(_describe(answer[1] if answer else {}))
            time.sleep(_POLL_S)
        raise ServingError(f"The server was not ready after {_READY_TIMEOUT_S:.0f} s.", f"It said:\n{self.log_end()}")

    def wait(self) -> int:
        """Wait until the server ends of itself, and return its exit code."""
        assert self._process is not None
        return self._process.wait()

    def log_end(self) -> str:
        """Return the last lines that the server printed."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - 8192))
        lines = self._log.read().decode("utf-8", "replace").splitlines()
        return "\n".join(lines[-_LOG_LINES:])

    def stop(self) -> None:
        """End the server: politely, then at once after fifteen seconds. May be called twice."""
        process, self._process = self._process, None
        if process is not None:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(_STOP_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    process.kill()
            process.wait()
        if self._log is not None:
            self._log.close()

    def _ask_ready(self) -> tuple[int, dict[str, Any]] | None:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=5)
        try:
            connection.request("GET", "/ready")
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        except (OSError, ValueError, http.client.HTTPException):
            return None  # not listening yet
        finally:
            connection.close()


def find_port() -> int:
    """Return a port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def child_environment(store: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``environment`` for a server that knows the store in ``store`` and no other: none of the user's own keys reach it."""
    own = {
        name: value for name, value in environment.items() if not name.startswith("AWS_") and name != "HEADRACE_API_KEY"
    }
    no_files = {"AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull}
    return {**own, **no_files, **store, "PYTHONUNBUFFERED": "1"}


def _describe(state: Mapping[str, Any]) -> str:
    """Return the state that ``/ready`` tells as one line: ``weights, 120 MB of 269 MB``."""
    progress = state.get("progress") or {}
    phase, wanted = str(progress.get("phase") or "starting"), progress.get("bytes_wanted")
    if not wanted:
        return phase
    return f"{phase}, {format_bytes(progress.get('bytes_done') or 0)} of {format_bytes(wanted)}"
