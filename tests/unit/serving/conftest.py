"""OpenAI's client, pointed at a server of the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import openai
import pytest

from .fakes import Running, ScriptedEngine, SharedServer


@pytest.fixture(scope="session")
def shared_server() -> Iterator[SharedServer]:
    server = SharedServer()
    yield server
    server.stop()


@pytest.fixture
def answering(shared_server: SharedServer) -> Callable[[ScriptedEngine], AbstractContextManager[Running]]:
    """Return what makes the shared server answer with an engine for the length of a block."""
    return shared_server.answering


@pytest.fixture
def client_of() -> Iterator[Callable[..., openai.OpenAI]]:
    """Return a function that makes a client of a running server."""
    made: list[openai.OpenAI] = []

    def make(running: Running, api_key: str = "none") -> openai.OpenAI:
        made.append(
            openai.OpenAI(
                base_url=f"{running.url}/v1",
                api_key=api_key,
                max_retries=0,
                timeout=20,
                http_client=openai.DefaultHttpxClient(trust_env=False),
            )
        )
        return made[-1]

    yield make
    for client in made:
        client.close()
