"""vLLM's own server as a child process, started on a free port."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from headrace.cli.demo_server import find_port
from tests.support.engine_server import EngineServer


class VllmServer(EngineServer):
    """``python -m vllm.entrypoints.openai.api_server`` with ``arguments``; what it prints is in ``log``. A context manager.

    ``launcher`` is what stands between ``python`` and ``-m``.
    """

    def __init__(self, log: Path, arguments: list[str], *, launcher: Sequence[str] = (), **environment: str) -> None:
        port = find_port()
        command = [
            *(sys.executable, *launcher, "-m", "vllm.entrypoints.openai.api_server"),
            *("--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--max-num-seqs", "2"),
            *arguments,
        ]
        super().__init__(log, port, command, {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", **environment})

    def complete(self, prompt: str, num_tokens: int = 16) -> str:
        """Return what the model adds to ``prompt``, the likeliest token each time."""
        body = {"model": "served", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0}
        found = self.post("v1/completions", body)
        assert "choices" in found, found
        return str(found["choices"][0]["text"])
