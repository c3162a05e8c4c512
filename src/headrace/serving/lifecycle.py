"""The life of a server: loading, ready, draining, stopped; or failed.

Decides when each begins, and what the process ends with.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from headrace.errors import ServingError
from headrace.progress import LoadProgress
from headrace.serving.asgi import App
from headrace.units import format_seconds

logger = logging.getLogger("headrace.serving")

Status = Literal["loading", "ready", "draining", "failed"]

_TICK_S = 0.05
"""How often the state is looked at: what changes it happens in other threads and in signal handlers."""
_ABORT_S = 2.0
"""How long aborted requests may take to send their error event."""


class Backend(Protocol):
    """What a load brings: a model that has proved that it generates."""

    @property
    def app(self) -> App: ...

    @property
    def death(self) -> BaseException | None:
        """Why it will never answer again; None while it lives."""
        ...

    @property
    def report(self) -> dict[str, str]:
        """What the load did, for people: label and value."""
        ...

    def abort_all(self, error: BaseException) -> None: ...

    def close(self, timeout_s: float) -> bool:
        """Free everything and return whether its threads have ended."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LifecycleSettings:
    """How long things may take, in seconds. None is for ever."""

    load_deadline_s: float | None = None
    """For the whole load, until the first token."""
    load_stall_s: float | None = None
    """Without a byte arriving or a phase ending."""
    drain_s: float = 25.0
    """For requests that run when the server is told to stop. Kubernetes kills after 30."""
    farewell_s: float = 10.0
    """How long a server whose engine died still answers 503, so that probes and clients hear of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the process ends with."""

    exit_code: int
    error: BaseException | None = None
    lingering: bool = False
    """A thread could not be ended: the interpreter would wait for it, or crash under it."""


_INTERRUPTED = 130
"""What shells call a process that Ctrl-C ended."""


class Lifecycle:
    """The state that the gate asks for, and the task that moves it on."""

    def __init__(
        self,
        load: Callable[[LoadProgress], Backend],
        progress: LoadProgress,
        settings: LifecycleSettings,
        *,
        num_inside: Callable[[], int],
    ) -> None:
        self.status: Status = "loading"
        self.progress = progress
        self._settings = settings
        self._num_inside = num_inside
        self._load = load
        self._backend: Backend | None = None
        self._error: BaseException | None = None
        self._stops = 0
        self._was_ready = False
        self._was_interrupted = False
        self._thread = threading.Thread(target=self._run_load, name="headrace-load", daemon=True)

    @property
    def is_alive(self) -> bool:
        return self.status != "failed"

    @property
    def app(self) -> App | None:
        return (
            self._backend.app
            if self.status == "ready" and self._backend is not None and self._backend.death is None
            else None
        )

    def describe(self, *, in_full: bool) -> dict[str, Any]:
        """Return the state for a probe. Causes are never in it: anybody may ask."""
        died = self._backend is not None and self._backend.death is not None
        described: dict[str, Any] = {"status": "failed" if died else self.status}
        if self.status == "loading":
            described["progress"] = self.progress.to_dict()
        elif in_full and self._backend is not None:
            described["report"] = self._backend.report
        return described

    def request_stop(self, *, interrupted: bool = False) -> None:
        """Drain and stop; the second time, stop now. From any thread and from signal handlers. ``interrupted`` says that a person did it, by Ctrl-C."""
        self._stops += 1
        self._was_interrupted = self._was_interrupted or interrupted

    async def live(self) -> Outcome:
        """Load, serve until told to stop, and return what the process ends with. The server may be torn down then."""
        self._thread.start()
        if await self._loaded():
            await self._serve()
        return self._end()

    async def _loaded(self) -> bool:
        """Wait for the load; return whether the model is ready."""
        while self._thread.is_alive() and not self._stops and self._error is None:
            overdue = self._overdue()
            if overdue is not None:  # Never None over what the thread may have put there meanwhile.
                self._error = overdue
            await asyncio.sleep(_TICK_S)
        if self._error is not None:
            self.status = "failed"
            self.progress.phase = "failed"
        elif self._backend is not None and not self._stops:
            self.status = "ready"
            self.progress.phase = "ready"
            self._was_ready = True
            logger.info("Ready after %s.", format_seconds(self.progress.seconds))
            return True
        return False

    async def _serve(self) -> None:
        assert self._backend is not None
        await self._until(lambda: self._stops > 0 or self._dead() is not None)
        if self._dead() is not None:
            self._error = ServingError(
                "The engine died.",
                f"It died of {type(self._dead()).__name__}: {self._dead()}",
                "Start the server again.",
            )
            self.status = "failed"
            await self._until(lambda: self._stops > 0, self._settings.farewell_s)
            return
        self.status = "draining"
        logger.info("Stopping: %d requests are running.", self._num_inside())
        await self._until(
            lambda: self._num_inside() == 0 or self._stops > 1 or self._dead() is not None, self._settings.drain_s
        )
        if self._num_inside():
            self._backend.abort_all(
                ServingError("The server is stopping.", "This request did not end in time.", "Send it again.")
            )
            await self._until(lambda: self._num_inside() == 0, _ABORT_S)

    def _end(self) -> Outcome:
        ended = self._backend is None or self._backend.close(_ABORT_S)
        lingering = not ended or self._thread.is_alive()
        code = 1 if self._error is not None else 0
        if code == 0 and not self._was_ready:
            logger.info("Stopped before the model was ready.")
            code = _INTERRUPTED if self._was_interrupted else 0
        return Outcome(exit_code=code, error=self._error, lingering=lingering)

    async def _until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Return when ``condition`` holds, or after ``timeout_s``."""
        clock = asyncio.get_running_loop().time
        end = None if timeout_s is None else clock() + timeout_s
        while not condition() and (end is None or clock() < end):
            await asyncio.sleep(_TICK_S)

    def _dead(self) -> BaseException | None:
        return self._backend.death if self._backend is not None else None

    def _run_load(self) -> None:
        try:
            self._backend = self._load(self.progress)
        except BaseException as error:  # noqa: BLE001  A thread has nobody to raise to.
            self._error = error

    def _overdue(self) -> ServingError | None:
        """Return the error of a load that takes too long, which names what holds it up."""
        progress, settings = self.progress, self._settings
        silent = progress.clock() - progress.changed
        if settings.load_deadline_s is not None and progress.seconds > settings.load_deadline_s:
            what = f"The model was not ready within {format_seconds(settings.load_deadline_s)} (--load-deadline)."
        elif settings.load_stall_s is not None and silent > settings.load_stall_s:
            what = f"The load stood still for {format_seconds(silent)} (--load-stall)."
        else:
            return None
        holdup = progress.describe_holdup()
        why = f"It is at {progress.line()}; the last byte or step came {format_seconds(silent)} ago." + (
            f" Held up by: {holdup}." if holdup else ""
        )
        return ServingError(
            what, why, "Look at the store and the network on the way to it, or give the load more time."
        )
