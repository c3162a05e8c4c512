"""Another engine's own server as a child process: watched until it answers, ended in every case with all that it has started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

_START_S = 420.0
_STOP_S = 15.0
_LOOK_EVERY_S = 0.2


class EngineServer:
    """``command``, which serves on ``port`` of this machine and says at ``/health`` when it is ready; what it prints is in ``log``. A context manager.

    ``environment`` comes on top of this process's.
    """

    def __init__(self, log: Path, port: int, command: list[str], environment: Mapping[str, str]) -> None:
        self.log = log
        self.port = port
        self._command = command
        self._environment = {**os.environ, "PYTHONUNBUFFERED": "1", **environment}
        self._process: subprocess.Popen[bytes] | None = None
        self._family: list[psutil.Process] = []

    def __enter__(self) -> Self:
        with self.log.open("wb") as file:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._running
        self.remember_family()
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
        for one in self._family:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.kill()
        process.wait()

    @property
    def text(self) -> str:
        """What it has printed so far."""
        return self.log.read_text(errors="replace")

    def remember_family(self) -> list[psutil.Process]:
        """Return the processes that descend from the server, those that did before too, and keep them to be ended."""
        with contextlib.suppress(psutil.NoSuchProcess):
            known = {one.pid for one in self._family}
            found = psutil.Process(self._running.pid).children(recursive=True)
            self._family += [one for one in found if one.pid not in known]
        return self._family

    def wait_for(self, seen: Callable[[str], bool], what: str) -> str:
        """Wait until ``seen`` is true of what the server has printed, and return that."""
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            self.remember_family()
            text = self.text
            if seen(text):
                return text
            assert self._running.poll() is None, f"it ended before {what}:\n{self.end_of_log()}"
            time.sleep(_LOOK_EVERY_S)
        raise AssertionError(f"no sign of {what} in:\n{self.end_of_log()}")

    def wait_until_ready(self) -> None:
        """Wait until it says that it is healthy, which it does once the model is loaded."""

        def answers(_: str) -> bool:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=30) as answer:
                    return bool(answer.status == 200)
            except (OSError, urllib.error.URLError):
                return False

        self.wait_for(answers, "an answer")

    def wait_for_end(self) -> int:
        """Wait until the server ends of itself; return its exit code."""
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            self.remember_family()
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._running.wait(_LOOK_EVERY_S)
        raise AssertionError(f"it did not end:\n{self.end_of_log()}")

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer, whatever its status is."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                found: dict[str, Any] = json.loads(answer.read())
        except urllib.error.HTTPError as error:
            found = json.loads(error.read())
        return found

    def end_of_log(self) -> str:
        """Return the last lines that it has printed, without those that only repeat its arguments."""
        return "\n".join([line for line in self.text.splitlines() if "server_args=" not in line][-80:])

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "entered comes first"
        return self._process
