"""A tokenizer whose tokens are bytes and pieces of text, an engine that says what it was told to, and a server around
them in a thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from headrace.errors import ServingError
from headrace.progress import LoadProgress
from headrace.serving.backend import LoadedModel, ModelBackend, make_backend
from headrace.serving.engine import Generation, SamplingOptions, Step
from headrace.serving.gate import GateSettings
from headrace.serving.lifecycle import LifecycleSettings, Outcome
from headrace.serving.metrics import Metrics
from headrace.serving.server import Server, ServerSettings
from headrace.serving.wire import Refusal

NAME = "toy"


class PieceTokenizer:
    """Tokens 0 to 255 are bytes; what `token` is asked for gets a number above; token 256 is special and has no text."""

    END = 256

    def __init__(self) -> None:
        self._pieces: list[bytes] = [bytes((number,)) for number in range(256)] + [b""]
        self.writes_tool_calls = True
        self.rendered: list[dict[str, Any]] = []

    def token(self, piece: str | bytes) -> int:
        self._pieces.append(piece.encode() if isinstance(piece, str) else piece)
        return len(self._pieces) - 1

    @property
    def vocabulary_size(self) -> int:
        return len(self._pieces)

    def decode(self, tokens: Sequence[int]) -> str:
        return b"".join(self._pieces[token] for token in tokens).decode("utf-8", "replace")

    def byte_of(self, token: int) -> int | None:
        return None

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> list[int]:
        self.rendered.append({"messages": list(messages), "tools": tools, "variables": dict(variables)})
        text = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        if "<fail>" in text:
            raise Refusal(400, "The template does not take it.", param="messages", code="chat_template_error")
        return list(text.encode())


@dataclass
class ScriptedEngine:
    """Answers each sample with the next pieces of its script, then ends it; ``pause_s`` before each step."""

    tokenizer: PieceTokenizer
    scripts: Sequence[Sequence[str | bytes]] = (("Hello", " world"),)
    """Sample j of every prompt says script j, or the last there is."""
    end: bool = True
    """End with a hidden end token; otherwise go on with the last piece until the limit."""
    pause_s: float = 0.0
    logprob: float | None = None
    failure: Exception | None = None
    """Raised instead of the first token, after the test request."""
    context_tokens: int | None = 64
    death: BaseException | None = None
    asked: list[tuple[tuple[int, ...], SamplingOptions]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._running: dict[Generation, asyncio.Task[None]] = {}
        self._tokens = [[self.tokenizer.token(piece) for piece in script] for script in self.scripts]
        self.closed = False
        self.full = 0

    @property
    def vocabulary_size(self) -> int:
        return self.tokenizer.vocabulary_size

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return self.full

    def submit(self, prompt: Sequence[int], options: SamplingOptions) -> Generation:
        if self.closed:
            raise ServingError("The engine has stopped.")
        self.asked.append((tuple(prompt), options))
        generation = Generation(prompt, options, on_cancel=self._forget)
        is_proof = prompt == self.tokenizer.encode("Hello") and len(self.asked) == 1
        self._running[generation] = asyncio.get_running_loop().create_task(self._play(generation, is_proof=is_proof))
        return generation

    def abort_all(self, error: BaseException) -> None:
        for generation in list(self._running):
            generation.fail(error)
            generation.cancel()

    def close(self, timeout_s: float) -> bool:
        self.closed = True
        self._running.clear()
        return True

    def _forget(self, generation: Generation) -> None:
        task = self._running.pop(generation, None)
        if task is not None:
            task.cancel()

    async def _play(self, generation: Generation, *, is_proof: bool) -> None:
        options = generation.options
        if self.failure is not None and not is_proof:
            generation.fail(self.failure)
        for number in range(options.max_tokens):
            await asyncio.sleep(0 if is_proof else self.pause_s)
            steps = [
                step
                for sample in range(options.num_samples)
                if (step := self._step(sample, number, options)) is not None
            ]
            if not steps:
                break
            generation.put(steps)
        generation.finish()
        self._running.pop(generation, None)

    def _step(self, sample: int, number: int, options: SamplingOptions) -> Step | None:
        tokens = self._tokens[min(sample, len(self._tokens) - 1)]
        is_last = number + 1 == options.max_tokens
        logprob = self.logprob if options.num_logprobs is not None else None
        if number > len(tokens) and self.end:
            return None
        if number == len(tokens) and self.end:
            return Step(sample, PieceTokenizer.END, logprob, (), "stop", hidden=True)
        token = tokens[min(number, len(tokens) - 1)]
        top = ((token, self.logprob),) if options.num_logprobs and self.logprob is not None else ()
        return Step(sample, token, logprob, top, "length" if is_last else None)


@dataclass
class Running:
    """A server that runs."""

    server: Server
    url: str
    engine: Any
    thread: threading.Thread
    outcomes: list[Outcome] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def get(self, path: str, **headers: str) -> httpx.Response:
        return httpx.get(self.url + path, headers=headers, trust_env=False, timeout=20)

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return httpx.post(self.url + path, json=body, headers=headers, trust_env=False, timeout=20)

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        end = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end, "it did not happen in time"
            time.sleep(0.01)

    def stop(self) -> Outcome:
        self.server.request_stop()
        self.server.request_stop()
        self.thread.join(20)
        assert not self.thread.is_alive()
        return self.outcomes[0]


@contextmanager
def serving(
    engine: ScriptedEngine | None = None,
    *,
    load: Callable[[LoadProgress, Metrics], Any] | None = None,
    gate: GateSettings | None = None,
    lifecycle: LifecycleSettings | None = None,
    wait: bool = True,
    max_waiting: int = 128,
) -> Iterator[Running]:
    """Run a server on a free port of the loopback interface around ``engine``, or around what ``load`` brings."""
    engine = engine or ScriptedEngine(PieceTokenizer())

    def load_engine(progress: LoadProgress, metrics: Metrics) -> ModelBackend:
        loaded = LoadedModel(model=None, tokenizer=None, name=NAME)
        return make_backend(
            loaded, lambda _: (engine, engine.tokenizer), progress=progress, metrics=metrics, max_waiting=max_waiting
        )

    settings = ServerSettings(port=0, gate=gate or GateSettings(), lifecycle=lifecycle or LifecycleSettings(drain_s=5))
    said: list[str] = []
    outcomes: list[Outcome] = []
    server = Server(settings, load or load_engine, say=said.append)
    thread = threading.Thread(target=lambda: outcomes.append(server.run()), name="test-server")
    thread.start()
    running = Running(server, "", engine, thread, outcomes, said)
    try:
        running.wait_for(lambda: server.address is not None or not thread.is_alive())
        assert server.address is not None
        running.url = f"http://127.0.0.1:{server.address[1]}"
        if wait:
            running.wait_for(lambda: running.get("/ready").status_code == 200)
        yield running
    finally:
        running.stop()


class Switch:
    """Stands for whichever engine and tokenizer are in use, so that tests can share a server."""

    def __init__(self) -> None:
        self.engine = ScriptedEngine(PieceTokenizer())

    def __getattr__(self, name: str) -> Any:
        source = self.engine if hasattr(self.engine, name) else self.engine.tokenizer
        return getattr(source, name)


class SharedServer:
    """One server for all tests that look at answers alone: starting and stopping one takes a third of a second."""

    def __init__(self) -> None:
        self._switch = Switch()
        self._stack = ExitStack()
        self._running: Running | None = None

    @contextmanager
    def answering(self, engine: ScriptedEngine) -> Iterator[Running]:
        """Answer with ``engine`` for the length of a block; afterwards nothing may run."""
        if self._running is None:
            self._running = self._stack.enter_context(serving(load=self._load))
        self._switch.engine = self._running.engine = engine
        yield self._running
        assert engine.num_running == 0

    def stop(self) -> None:
        self._stack.close()

    def _load(self, progress: LoadProgress, metrics: Metrics) -> ModelBackend:
        loaded = LoadedModel(model=None, tokenizer=None, name=NAME)
        return make_backend(loaded, lambda _: (self._switch, self._switch), progress=progress, metrics=metrics)
