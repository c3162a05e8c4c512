"""A server in a process of its own, with an engine or a load of the test's choosing: ``python server_process.py KIND
TERMINATION_LOG``.

Kinds: ``answers`` at once, ``streams`` without end, ``fails`` with an error of ours, ``breaks`` with any other,
``hangs`` for ever and has a deadline, ``waits`` for ever and has none.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).parent.parent))

from headrace.cli.serve import conclude
from headrace.errors import TruncatedObject
from headrace.progress import LoadProgress
from headrace.serving.backend import LoadedModel, ModelBackend, make_backend
from headrace.serving.lifecycle import LifecycleSettings
from headrace.serving.metrics import Metrics
from headrace.serving.server import Server, ServerSettings, configure_logging
from serving.fakes import NAME, PieceTokenizer, ScriptedEngine

SECRET = "key-0123456789"


def load(kind: str, progress: LoadProgress, metrics: Metrics) -> ModelBackend:
    if kind == "fails":
        raise TruncatedObject(
            "model-3.safetensors is cut.",
            f"Its url is https://host/x?X-Amz-Signature=abc, its key {SECRET}.",
            "Upload it again.",
        )
    if kind == "breaks":
        raise ValueError(f"no idea what {SECRET} is")
    if kind in ("hangs", "waits"):
        hang(progress)
    endless = kind == "streams"
    engine = ScriptedEngine(
        PieceTokenizer(),
        [["x"]] if endless else [["Hello"]],
        end=not endless,
        pause_s=0.02,
        context_tokens=100_000 if endless else 64,
    )
    loaded = LoadedModel(model=None, tokenizer=None, name=NAME)
    return make_backend(loaded, lambda _: (engine, engine.tokenizer), progress=progress, metrics=metrics)


def hang(progress: LoadProgress) -> NoReturn:
    with progress.during("weights"):
        progress.describe_holdup = lambda: "model-2.safetensors on connection 3"
        while True:
            time.sleep(1)


def main(kind: str, termination_log: str) -> int:
    configure_logging(secrets=[SECRET])
    settings = LifecycleSettings(load_deadline_s=0.5 if kind == "hangs" else None, drain_s=60)
    server = Server(ServerSettings(port=0, lifecycle=settings), lambda progress, metrics: load(kind, progress, metrics))
    return conclude(server.run(), termination_log=Path(termination_log), secrets=[SECRET])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
