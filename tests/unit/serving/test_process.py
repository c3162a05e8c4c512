"""What a supervisor sees of a server in a process of its own: signals, exit codes, last lines, termination log."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from .fakes import NAME
from .server_process import SECRET

SCRIPT = Path(__file__).with_name("server_process.py")
CHAT: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "hi"}], "stream": True}


class Child:
    """The process and what it prints."""

    def __init__(self, process: subprocess.Popen[str], printed: Path) -> None:
        self.process = process
        self._printed = printed

    @property
    def printed(self) -> str:
        return self._printed.read_text()

    @property
    def url(self) -> str:
        found: list[str] = []

        def look() -> bool:
            found[:] = re.findall(r"listening on (http://\S+?),", self.printed)
            return bool(found)

        wait_for(look)
        return found[0]

    def status(self, path: str) -> int:
        return httpx.get(self.url + path, trust_env=False, timeout=10).status_code

    def end(self) -> int:
        return self.process.wait(30)


def wait_for(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


@contextmanager
def child(kind: str, folder: Path, *, with_log: bool = True) -> Iterator[Child]:
    if with_log:
        (folder / "termination-log").touch()
    with (folder / "printed").open("w") as printed:
        command = [sys.executable, "-W", "error", str(SCRIPT), kind, str(folder / "termination-log")]
        process = subprocess.Popen(
            command, stdout=printed, stderr=subprocess.STDOUT, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
        )
    try:
        yield Child(process, folder / "printed")
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def test_sigterm_of_an_idle_server_is_a_clean_end(tmp_path: Path) -> None:
    with child("answers", tmp_path) as server:
        wait_for(lambda: server.status("/ready") == 200)
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0
    assert "Traceback" not in server.printed
    assert "headrace: the model is not served" not in server.printed
    assert (tmp_path / "termination-log").read_text() == ""


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT], ids=["term-term", "term-int"])
def test_a_running_stream_outlives_the_first_signal_and_is_told_of_the_second(tmp_path: Path, second: int) -> None:
    with child("streams", tmp_path) as server:
        wait_for(lambda: server.status("/ready") == 200)
        with httpx.stream(
            "POST", f"{server.url}/v1/chat/completions", json=CHAT, trust_env=False, timeout=20
        ) as answer:
            lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            wait_for(lambda: server.status("/ready") == 503)
            assert server.status("/health") == 200
            for _ in range(5):
                assert json.loads(next(lines))["choices"][0]["delta"]["content"] == "x"
            server.process.send_signal(second)
            *_, error, end = lines
        assert "is stopping" in json.loads(error)["error"]["message"]
        assert end == "[DONE]"
        assert server.end() == 0


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (
            "fails",
            [
                "TruncatedObject: model-3.safetensors is cut.",
                "Its url is https://host/x?*** its key ***.",
                "Upload it again.",
            ],
        ),
        (
            "breaks",
            [
                "ValueError: no idea what *** is",
                "This is not an error that Headrace expects; the traceback above says where it comes from.",
            ],
        ),
    ],
)
def test_a_load_that_fails_ends_in_its_cause_here_and_for_the_orchestrator(
    tmp_path: Path, kind: str, expected: list[str]
) -> None:
    with child(kind, tmp_path) as server:
        assert server.end() == 1
    assert server.printed.splitlines()[-len(expected) :] == expected
    assert (tmp_path / "termination-log").read_text().splitlines() == ["headrace: the model is not served.", *expected]
    assert SECRET not in server.printed
    assert ("Traceback" in server.printed) is (kind == "breaks")


def test_a_load_that_hangs_ends_with_the_process(tmp_path: Path) -> None:
    with child("hangs", tmp_path) as server:
        assert server.end() == 1
    words = (tmp_path / "termination-log").read_text()
    assert "--load-deadline" in words
    assert "model-2.safetensors on connection 3" in words
    assert server.printed.endswith(words + "\n")


def test_sigterm_while_it_hangs_is_obeyed(tmp_path: Path) -> None:
    with child("waits", tmp_path) as server:
        assert server.status("/ready") == 503
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0
    assert (tmp_path / "termination-log").read_text() == ""


def test_without_a_termination_log_none_is_made(tmp_path: Path) -> None:
    with child("fails", tmp_path, with_log=False) as server:
        assert server.end() == 1
    assert not (tmp_path / "termination-log").exists()
