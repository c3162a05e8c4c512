"""vLLM's own server as a child process: started on a free port, watched until it answers, ended in every case with all that it has started."""

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


class VllmServer:
    """``python -m vllm.entrypoints.openai.api_server`` with ``arguments``; what it prints is in ``log``. A context manager.

    ``launcher`` is what stands between ``python`` and ``-m``.
    """

    def __init__(self, log: Path, arguments: list[str], *, launcher: Sequence[str] = (), **environment: str) -> None:
        self.log = log
        self.port = find_port()
        self._command = [
            *(sys.executable, *launcher, "-m", "vllm.entrypoints.openai.api_server"),
            *("--host", "127.0.0.1", "--port", str(self.port), "--enforce-eager", "--max-num-seqs", "2"),
            *arguments,
        ]
        own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "PYTHONUNBUFFERED": "1"}
        self._environment = {**os.environ, **own, **environment}
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
        """Return the processes that descend from the server now, and keep them to be ended."""
        assert self._process is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            known = {one.pid for one in self._family}
            found = psutil.Process(self._process.pid).children(recursive=True)
            self._family += [one for one in found if one.pid not in known]
        return self._family

    def wait_for(self, seen: Callable[[str], bool], what: str) -> str:
        """Wait until ``seen`` is true of what the server has printed, and return that."""
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            text = self.text
            if seen(text):
                return text
            assert self._process is not None
            assert self._process.poll() is None, f"it ended before {what}:\n{self.end_of_log()}"
            time.sleep(0.1)
        raise AssertionError(f"no sign of {what} in:\n{self.end_of_log()}")

    def wait_until_ready(self) -> None:
        def answers(_: str) -> bool:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as answer:
                    return bool(answer.status == 200)
            except (OSError, urllib.error.URLError):
                return False

        self.wait_for(answers, "an answer")

    def wait_for_end(self) -> int:
        """Wait until the server ends of itself; return its exit code."""
        assert self._process is not None
        try:
            return self._process.wait(_START_S)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"it did not end:\n{self.end_of_log()}") from error

    def complete(self, prompt: str, num_tokens: int = 16) -> str:
        """Return what the model adds to ``prompt``, the likeliest token each time."""
        body = {"model": "served", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            found: dict[str, Any] = json.loads(answer.read())
        return str(found["choices"][0]["text"])

    def end_of_log(self) -> str:
        return "\n".join(self.text.splitlines()[-60:])
