"""SGLang's own server as a child process: started on a free port, watched until it answers, ended in every case with all that it has started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from headrace.cli.demo_server import find_port

_START_S = 420.0
_STOP_S = 15.0


class SglangServer:
    """``python -m sglang.launch_server`` with ``arguments``; what it prints is in ``log``. A context manager.

    ``launcher`` is what stands between ``python`` and ``-m``.
    """

    def __init__(self, log: Path, arguments: list[str], *, launcher: Sequence[str] = (), **environment: str) -> None:
        self.log = log
        self.port = find_port()
        self._command = [
            *(sys.executable, "-W", "ignore", *launcher, "-m", "sglang.launch_server"),
            *("--host", "127.0.0.1", "--port", str(self.port), "--device", "cpu", "--dtype", "float32"),
            *("--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-cuda-graph"),
            *("--max-running-requests", "2", "--max-total-tokens", "512", "--skip-server-warmup"),
            *arguments,
        ]
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
        process = self._process
        assert process is not None
        self._remember_family()
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

    def wait_until_ready(self) -> None:
        """Wait until it says that it is healthy, which it does once the model is loaded."""

        def answers(_: str) -> bool:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=30) as answer:
                    return bool(answer.status == 200)
            except (OSError, urllib.error.URLError):
                return False

        self._wait_for(answers, "an answer")

    def wait_for_end(self) -> int:
        """Wait until the server ends of itself; return its exit code."""
        assert self._process is not None
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            self._remember_family()
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._process.wait(0.5)
        raise AssertionError(f"it did not end:\n{self.end_of_log()}")

    def generate(self, prompt: str | list[int], num_tokens: int = 16) -> list[int]:
        """Return the tokens that the model adds to ``prompt``, the likeliest each time."""
        given = {"text": prompt} if isinstance(prompt, str) else {"input_ids": prompt}
        how = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
        found = self.post("generate", {**given, "sampling_params": how})
        return list(found["output_ids"])

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
        lines = [line for line in self.text.splitlines() if "server_args=" not in line]
        return "\n".join(lines[-80:])

    def _remember_family(self) -> None:
        """Keep the processes that descend from the server now, to be ended."""
        assert self._process is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            known = {one.pid for one in self._family}
            found = psutil.Process(self._process.pid).children(recursive=True)
            self._family += [one for one in found if one.pid not in known]

    def _wait_for(self, seen: Callable[[str], bool], what: str) -> None:
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            self._remember_family()
            if seen(self.text):
                return
            assert self._process is not None
            assert self._process.poll() is None, f"it ended before {what}:\n{self.end_of_log()}"
            time.sleep(0.5)
        raise AssertionError(f"no sign of {what} in:\n{self.end_of_log()}")
