"""SGLang's own server as a child process, started on a free port."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from headrace.cli.demo_server import find_port
from tests.support.engine_server import EngineServer


class SglangServer(EngineServer):
    """``python -m sglang.launch_server`` with ``arguments``; what it prints is in ``log``. A context manager.

    ``launcher`` is what stands between ``python`` and ``-m``.
    """

    def __init__(self, log: Path, arguments: list[str], *, launcher: Sequence[str] = (), **environment: str) -> None:
        port = find_port()
        command = [
            *(sys.executable, "-W", "ignore", *launcher, "-m", "sglang.launch_server"),
            *("--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32"),
            *("--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-cuda-graph"),
            *("--max-running-requests", "2", "--max-total-tokens", "512", "--skip-server-warmup"),
            *arguments,
        ]
        super().__init__(log, port, command, environment)

    def generate(self, prompt: str | list[int], num_tokens: int = 16) -> list[int]:
        """Return the tokens that the model adds to ``prompt``, the likeliest each time."""
        given = {"text": prompt} if isinstance(prompt, str) else {"input_ids": prompt}
        how = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
        found = self.post("generate", {**given, "sampling_params": how})
        return list(found["output_ids"])
