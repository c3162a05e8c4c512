"""The server: opens the port, loads in the background, serves, and drains. Any loader and any engine can be put in."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.errors import MissingDependency, ServingError
from headrace.progress import LoadProgress
from headrace.serving.failure import RedactingFilter
from headrace.serving.gate import Gate, GateSettings
from headrace.serving.lifecycle import Backend, Lifecycle, LifecycleSettings, Outcome
from headrace.serving.metrics import Metrics

try:
    import uvicorn
except ImportError as error:
    raise MissingDependency(
        "Serving needs uvicorn.", f"Importing it failed: {error}.", 'Install it with: pip install "headrace[serve]"'
    ) from error

logger = logging.getLogger("headrace.serving")

_KEEP_ALIVE_S = 75
"""Longer than the 60 s after which load balancers drop an idle connection: whoever drops first must not be us, or
requests race the close."""
_NEEDED_LATER = ("pydantic", "transformers", "jinja2")
"""Imported once weights have been read: better missed before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Where and how to serve."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes a free one."""
    gate: GateSettings = field(default_factory=GateSettings)
    lifecycle: LifecycleSettings = field(default_factory=LifecycleSettings)


Load = Callable[[LoadProgress, Metrics], Backend]
"""Loads the model, lets it generate a token, and returns what answers. Runs in a thread of its own."""


class Server:
    """One port, one model. `run` returns when the server has stopped; the other members are for other threads."""

    def __init__(self, settings: ServerSettings, load: Load, *, say: Callable[[str], None] | None = None) -> None:
        self.progress = LoadProgress()
        self.metrics = Metrics()
        self.address: tuple[str, int] | None = None
        """Host and port, once the port is open."""
        self._settings = settings
        self._say = say or (lambda text: print(text, file=sys.stderr, flush=True))
        self._lifecycle = Lifecycle(
            lambda progress: load(progress, self.metrics),
            self.progress,
            settings.lifecycle,
            num_inside=lambda: self._gate.num_inside,
        )
        self._gate = Gate(self._lifecycle, self.metrics, settings.gate)
        self.metrics.watch_readiness(lambda: float(self._lifecycle.app is not None))

    def request_stop(self) -> None:
        """Drain and stop; the second time, stop now."""
        self._lifecycle.request_stop()

    def _signalled(self, number: int) -> None:
        self._lifecycle.request_stop(interrupted=number == signal.SIGINT)

    def run(self) -> Outcome:
        """Serve until told to stop, by `request_stop`, SIGTERM or SIGINT.

        Raises `ServingError` where the port cannot be opened.
        """
        listener = open_port(self._settings.host, self._settings.port)
        host, port = listener.getsockname()[:2]
        self.address = (host, port)
        shown = f"[{host}]" if ":" in host else host
        self._say(f"headrace: listening on http://{shown}:{port}, loading")
        return asyncio.run(self._run(listener))

    async def _run(self, listener: socket.socket) -> Outcome:
        server = _Uvicorn(_uvicorn_config(self._gate), on_signal=self._signalled)
        living = asyncio.ensure_future(self._lifecycle.live())
        living.add_done_callback(lambda task: server.leave())
        await server.serve(sockets=[listener])
        return await living


class _Uvicorn(uvicorn.Server):
    """Uvicorn that asks us when a signal comes.

    Its own answer is to close the port first, and then nobody could ask whether we are ready.
    """

    def __init__(self, config: uvicorn.Config, *, on_signal: Callable[[int], None]) -> None:
        super().__init__(config)
        self._on_signal = on_signal

    def handle_exit(self, sig: int, frame: Any) -> None:
        self._on_signal(sig)

    def leave(self) -> None:
        """Close the port and return from `serve`."""
        self.should_exit = True


def _uvicorn_config(app: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="h11",
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=2,
    )


def open_port(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Connections are accepted by the kernel from now on. Raises `ServingError` where that is not possible.
    """
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        return socket.create_server(found[0][4][:2], family=found[0][0], backlog=2048)
    except OSError as error:
        raise ServingError(
            f"Port {port} on {host or 'every address'} cannot be opened.",
            f"{error.strerror or error}.",
            "Choose another with --host and --port.",
        ) from error


def check_installed(names: Sequence[str] = _NEEDED_LATER) -> None:
    """Raise `MissingDependency` for a package that will be needed once the weights are there."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingDependency(
            f"Serving a model needs {', '.join(missing)}.",
            "Not installed in this environment.",
            'Install it with: pip install "headrace[serve]"',
        )


def configure_logging(*, secrets: Sequence[str] = (), level: int = logging.INFO) -> None:
    """Send our log, and warnings of everybody else, to standard error, without ``secrets``.

    For the command line: a library leaves logging alone.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handler.addFilter(RedactingFilter(secrets))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("headrace").setLevel(level)
