"""The demo as a person runs it: a right answer from a real server, the account of the load, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TIMEOUT_S = 300.0
MARK = "DEMO_TEST_MARKER"
"""A variable that every process of one demo inherits, so that those left over can be found."""


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo-cache")


class Demo:
    """One run of the demo, its output in a file that can be read while it runs."""

    def __init__(self, folder: Path, arguments: list[str]) -> None:
        self.mark = uuid.uuid4().hex
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.out, self.err = folder / "out", folder / "err"
        environment = {**os.environ, MARK: self.mark, "TMPDIR": str(self.temporary)}
        command = [sys.executable, "-m", "headrace", "demo", *arguments]
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err)

    def wait_for(self, text: str) -> str:
        """Wait until the output holds ``text``, and return the output."""
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            if text in self.out.read_text():
                return self.out.read_text()
            assert self.process.poll() is None, self.err.read_text()
            time.sleep(0.05)
        raise AssertionError(f"{text!r} did not appear in: {self.out.read_text()}")

    def end(self) -> int:
        return self.process.wait(TIMEOUT_S)

    def processes(self) -> list[str]:
        """Return the command lines of the processes that this run has started and that still run."""
        return [" ".join(process.cmdline()) for process in psutil.process_iter() if _marked(process, self.mark)]

    def leftovers(self) -> list[str]:
        """Return the processes and temporary files that this run has left."""
        # Torch keeps a folder for what it compiles; it is the same one for every process of this user.
        return self.processes() + [
            path.name for path in self.temporary.iterdir() if not path.name.startswith("torchinductor_")
        ]


def _marked(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


@contextmanager
def running_demo(folder: Path, *arguments: str) -> Iterator[Demo]:
    demo = Demo(folder, list(arguments))
    try:
        yield demo
    finally:
        if demo.process.poll() is None:
            demo.process.kill()
            demo.process.wait()


def test_demo_answers_and_accounts_for_the_load(cache_dir: Path, tmp_path: Path) -> None:
    with running_demo(tmp_path, "--cache-dir", str(cache_dir)) as demo:
        code = demo.end()
    shown = demo.out.read_text()
    assert code == 0, shown + demo.err.read_text()
    assert "The capital of France is Paris." in shown
    assert "272 handed out" in shown
    assert "269 MB of 269 MB" in shown
    assert re.search(r"\d+ requests, 0 retried", shown)
    assert re.search(r"Ready after [\d.]+ s", shown)
    assert re.search(r"\d+ tokens, .*[\d.]+ tokens/s", shown)
    assert demo.err.read_text() == ""
    assert demo.leftovers() == []
    model = cache_dir / "demo"
    assert len(list(model.glob("*/model-*-of-00004.safetensors"))) == 4
    assert not list(model.glob(".*")), "something unfinished was left"
    weights_elsewhere = [path for path in cache_dir.rglob("*.safetensors") if model not in path.parents]
    assert weights_elsewhere == [], "the server copied weights to the disk"


def test_kept_server_answers_until_interrupted(cache_dir: Path, tmp_path: Path) -> None:
    with running_demo(tmp_path, "--cache-dir", str(cache_dir), "--keep") as demo:
        shown = demo.wait_for("Ctrl-C ends it")
        command = re.search(r"curl (\S+) -H '(.*?)' -d '(.*)'", shown)
        assert command is not None
        request = urllib.request.Request(command[1], command[3].encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            assert "Paris" in json.load(answer)["choices"][0]["message"]["content"]
        demo.process.send_signal(signal.SIGINT)
        assert demo.end() == 0
    assert demo.leftovers() == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_demo_stops_what_it_started(
    number: signal.Signals, code: int, cache_dir: Path, tmp_path: Path
) -> None:
    with running_demo(tmp_path, "--cache-dir", str(cache_dir)) as demo:
        demo.wait_for("headrace serve")
        demo.process.send_signal(number)
        assert demo.end() == code
    assert "Traceback" not in demo.err.read_text()
    assert demo.leftovers() == []


def test_killed_demo_takes_its_servers_with_it(cache_dir: Path, tmp_path: Path) -> None:
    with running_demo(tmp_path, "--cache-dir", str(cache_dir), "--keep") as demo:
        demo.wait_for("Ctrl-C ends it")
        assert len(demo.processes()) == 3
        demo.process.kill()
        demo.end()
    deadline = time.monotonic() + 60
    while demo.processes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert demo.processes() == []
