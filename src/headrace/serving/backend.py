"""From a loaded model to something that answers: engine, tokenizer and application, proved by one token before anybody
may ask."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.errors import ServingError
from headrace.progress import LoadProgress
from headrace.serving.application import Application
from headrace.serving.asgi import App
from headrace.serving.engine import SamplingOptions, Step, TextEngine
from headrace.serving.metrics import Metrics
from headrace.serving.service import Service
from headrace.serving.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from headrace.streaming.report import LoadReport

_PROOF = "Hello"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """What a loader returns."""

    model: Any
    tokenizer: Any
    name: str
    """The name under which it is served."""
    report: LoadReport | None = None


MakeEngine = Callable[[LoadedModel], tuple[TextEngine, TextTokenizer]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBackend:
    """A model that answers; see `headrace.serving.lifecycle.Backend`."""

    engine: TextEngine
    app: App
    report: dict[str, str] = field(default_factory=dict)

    @property
    def death(self) -> BaseException | None:
        return self.engine.death

    def abort_all(self, error: BaseException) -> None:
        self.engine.abort_all(error)

    def close(self, timeout_s: float) -> bool:
        return self.engine.close(timeout_s)


def make_backend(
    loaded: LoadedModel, make_engine: MakeEngine, *, progress: LoadProgress, metrics: Metrics, max_waiting: int = 128
) -> ModelBackend:
    """Return the backend of ``loaded`` once it has generated a token.

    Raises what the engine raises, or `ServingError`; then the engine is closed.
    """
    with progress.during("warming up"):
        engine, tokenizer = make_engine(loaded)
        try:
            asyncio.run(_prove(engine, tokenizer))
        except BaseException:
            engine.close(0)
            raise
    metrics.record_load(bytes_done=progress.bytes_done, phases=progress.phases)
    if loaded.report is not None:
        metrics.record_ranks(loaded.report.ranks)
    metrics.watch_engine(running=lambda: float(engine.num_running), waiting=lambda: float(engine.num_waiting))
    # Random weights come from no files, and so from no snapshot.
    snapshot = loaded.report.snapshot_id if loaded.report is not None and loaded.report.num_files else None
    if snapshot is not None:
        metrics.record_snapshot(model=loaded.name, snapshot=snapshot)
    service = Service(
        engine=engine,
        tokenizer=tokenizer,
        model_name=loaded.name,
        snapshot=snapshot,
        metrics=metrics,
        max_waiting=max_waiting,
    )
    report = dict(loaded.report.rows()) if loaded.report is not None else {}
    return ModelBackend(engine=engine, app=Application(service), report=report)


async def _prove(engine: TextEngine, tokenizer: TextTokenizer) -> None:
    """Generate one token, which is neither counted nor shown."""
    prompt = tokenizer.encode(_PROOF) or [0]
    steps: list[Step] = []
    async for batch in engine.submit(prompt, SamplingOptions(max_tokens=1, temperature=0.0)).steps():
        steps.extend(batch)
    if not steps:
        raise ServingError("The model generated nothing.", "Its engine ended the test request without a token.")


def make_transformers_engine(
    loaded: LoadedModel, *, num_threads: int | None = None
) -> tuple[TextEngine, TextTokenizer]:
    """Return the engine and the tokenizer of a Transformers model."""
    from headrace.serving.tokenizer import HubTokenizer
    from headrace.serving.transformers_engine import TransformersEngine

    return TransformersEngine(loaded.model, loaded.tokenizer, num_threads=num_threads), HubTokenizer(loaded.tokenizer)
