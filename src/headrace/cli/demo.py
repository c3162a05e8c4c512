"""`headrace demo`: a real model from a real object store to an answer, on this machine alone, with what each step took.

Starts SeaweedFS and `headrace serve` as processes of its own, and stops both in every case.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from headrace.cli.console import EXIT_FAILED, make_console, print_rows
from headrace.cli.demo_model import prepare_model
from headrace.cli.demo_server import ServerProcess, child_environment
from headrace.cli.seaweed import SeaweedServer
from headrace.errors import MissingDependency
from headrace.units import format_bytes, format_seconds

BUCKET = "models"
PREFIX = "smollm2"
MODEL_NAME = "smollm2-135m"
QUESTION = "What is the capital of France?"
EXPECTED = "Paris"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What the command line asked for."""

    cache_dir: Path
    """The model is kept here between runs, and the server's side files."""
    keep: bool = False
    """Leave the server up until Ctrl-C."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the model said and how fast."""

    text: str
    num_tokens: int
    first_token_s: float
    """From the question to the first piece of text."""
    seconds: float
    """From the question to the end."""

    @property
    def tokens_per_s(self) -> float:
        """The rate after the first token, which waits for the prompt to be read."""
        rest_s = self.seconds - self.first_token_s
        return (self.num_tokens - 1) / rest_s if rest_s > 0 else 0.0


def demo(options: DemoOptions) -> int:
    """Run the demo; return 0 if the model gave the right answer, else 1. Raises what a step raises, with everything stopped."""
    out = make_console()
    with _ended_by_sigterm():
        folder = prepare_model(options.cache_dir, lambda text: out.print(f"· {text}"))
        out.print("· Starting SeaweedFS, an S3 server")
        with SeaweedServer() as store:
            uri = f"s3://{BUCKET}/{PREFIX}"
            size_bytes = upload(store, folder)
            out.print(f"· Stored {format_bytes(size_bytes)} as {uri} at {store.endpoint}")
            arguments = ["--served-model-name", MODEL_NAME, "--cache-dir", str(options.cache_dir), "--no-progress"]
            out.print(f"· headrace serve {uri} --served-model-name {MODEL_NAME}")
            start = time.monotonic()
            environment = child_environment(store.environment(), os.environ)
            with ServerProcess(uri, arguments, environment=environment) as server:
                state = wait(server, out)
                ready_s = time.monotonic() - start
                out.print(f"· Ready after {format_seconds(ready_s)}, importing Python packages included")
                answer = ask(server.url, out)
                print_rows(rows(state, answer), out)
                if options.keep:
                    stay(server, out)
    if EXPECTED not in answer.text:
        print(f"The answer does not hold {EXPECTED!r}: what was loaded is not what was stored.", file=sys.stderr)
        return EXIT_FAILED
    return 0


def upload(store: SeaweedServer, folder: Path) -> int:
    """Put every file of ``folder`` under the demo's prefix, and return how many bytes that was."""
    with contextlib.closing(store.make_client()) as client:
        client.create_bucket(Bucket=BUCKET)
        for path in sorted(folder.iterdir()):
            with path.open("rb") as body:
                client.put_object(Bucket=BUCKET, Key=f"{PREFIX}/{path.name}", Body=body)
    return sum(path.stat().st_size for path in folder.iterdir())


def wait(server: ServerProcess, out: Console) -> dict[str, Any]:
    """Wait until the server is ready, with its progress on a terminal; return what it said of itself."""
    if not out.is_terminal:
        return server.wait_until_ready(lambda line: None)
    with out.status("starting") as status:
        return server.wait_until_ready(status.update)


def ask(url: str, out: Console) -> Answer:
    """Ask the question with OpenAI's client, print the answer as it comes, and return it."""
    try:
        import openai
    except ImportError as error:
        raise MissingDependency(
            "The demo asks with the openai package.", f"{error}.", 'Install: pip install "headrace[demo]"'
        ) from error
    out.print(f"\n  {QUESTION}")
    out.print("  ", end="")
    pieces: list[str] = []
    num_tokens, start, first = 0, time.monotonic(), 0.0
    # The server is on this machine; a proxy that the environment names is not for it.
    transport = openai.DefaultHttpxClient(trust_env=False)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=transport) as client:
        stream = client.chat.completions.create(
            model=MODEL_NAME,
            messages=[{"role": "user", "content": QUESTION}],
            temperature=0,
            max_tokens=64,
            stream=True,
            stream_options={"include_usage": True},
        )
        with stream:
            for event in stream:
                if event.usage:
                    num_tokens = event.usage.completion_tokens
                text = (event.choices[0].delta.content or "") if event.choices else ""
                if text:
                    first = first or time.monotonic() - start
                    pieces.append(text)
                    out.print(text, end="")
    seconds = time.monotonic() - start
    out.print("\n")
    return Answer(text="".join(pieces), num_tokens=num_tokens, first_token_s=first, seconds=seconds)


def rows(state: dict[str, Any], answer: Answer) -> list[tuple[str, str]]:
    """Return what a person wants to read at the end: the account of the load, as the server gives it, and of the answer."""
    speed = f"{answer.num_tokens} tokens, the first after {format_seconds(answer.first_token_s)}, then {answer.tokens_per_s:.1f} tokens/s"
    return [*((str(label), str(value)) for label, value in state.get("report", {}).items()), ("answer", speed)]


def stay(server: ServerProcess, out: Console) -> None:
    """Leave the server up until Ctrl-C, and say how to use it."""
    body = json.dumps({"model": MODEL_NAME, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0})
    out.print(
        f"\n  curl {server.url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'\n", soft_wrap=True
    )
    out.print("· The server stays up; Ctrl-C ends it")
    with contextlib.suppress(KeyboardInterrupt):
        server.wait()


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM raise for the length of a block, so that what was started is stopped, and give the code that a shell expects."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
