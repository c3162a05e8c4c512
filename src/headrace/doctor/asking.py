"""One plain request over a connection of its own, and its answer's head: what the checks look at more closely than a read does. No retries of its own."""

from __future__ import annotations

import contextlib
import http.client
from collections.abc import Callable
from dataclasses import dataclass

from headrace.errors import HeadraceError
from headrace.settings import TransportSettings
from headrace.storage import HttpRange, ObjectStore, Refusal, StoredObject
from headrace.transport import Surroundings
from headrace.transport.connection import Answer, Origin, open_connection
from headrace.transport.patience import Patience
from headrace.transport.redirect import MOST_REDIRECTS, REDIRECTS, follow, too_many
from headrace.transport.stopping import StopSwitch
from headrace.units import KIB

_MOST_BODY_BYTES = 8 * KIB
_MOST_ATTEMPTS = 3
"""A bucket's region may be learnt, and credentials fetched anew."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer to ``asked``, which is the last request of a chain of redirects; ``body`` is its first 8 KiB at most."""

    asked: HttpRange
    refusal: Refusal
    """Status, reason, headers and body, in the form in which stores judge them."""

    @property
    def status(self) -> int:
        return self.refusal.status


def ask(asked: HttpRange, transport: TransportSettings, surroundings: Surroundings) -> Reply:
    """Send one GET and return the answer, whatever it is. Raises OSError, ``http.client.HTTPException`` and `HeadraceError`."""
    patience = Patience(transport, surroundings.clock)
    connection = open_connection(Origin.of(asked), transport, surroundings, StopSwitch(), patience)
    try:
        answer = connection.ask(asked.target, asked.headers, patience)
        patience.body_begins()
        return Reply(asked, Refusal(answer.status, answer.reason, answer.headers, _body_of(answer)))
    finally:
        connection.close()


def ask_store(
    store: ObjectStore,
    stored: StoredObject,
    start: int,
    stop: int,
    transport: TransportSettings,
    surroundings: Surroundings,
) -> Reply:
    """Send a ranged GET as a read does, and follow where it leads; return the answer, whatever it is.

    Raises what describing and judging raise, OSError and ``http.client.HTTPException``.
    """
    for attempt in range(1, _MOST_ATTEMPTS + 1):
        asked = store.describe_range(stored, start, stop)
        assert isinstance(asked, HttpRange)
        for _ in range(MOST_REDIRECTS + 1):
            reply = ask(asked, transport, surroundings)
            location = reply.refusal.headers.get("location")
            if reply.status in (200, 206):
                return reply
            verdict = store.judge(stored, reply.refusal)
            if reply.status not in REDIRECTS or location is None or verdict.retry:
                break
            asked = follow(asked, location, store.uri_of(stored.key))
        else:
            raise too_many(asked, store.uri_of(stored.key))
        # An overloaded store is not asked again here: that it is overloaded is a finding.
        if not verdict.retry or reply.status in (429, 503) or attempt == _MOST_ATTEMPTS:
            return reply
    raise AssertionError("unreachable")


def explain(store: ObjectStore, stored: StoredObject, reply: Reply) -> HeadraceError:
    """Return the error that a refused read ends with."""
    return store.judge(stored, reply.refusal).error


def words_for(failure: Exception) -> str:
    """Return a failed request in words that hold nothing of it: ``http.client`` quotes what it could not parse."""
    if isinstance(failure, http.client.HTTPException) and not isinstance(failure, OSError):
        return f"what came is not HTTP ({type(failure).__name__})"
    if isinstance(failure, TimeoutError):
        return str(failure) if str(failure) and not failure.strerror else "nothing came in time"
    strerror = getattr(failure, "strerror", None)
    return str(strerror) if strerror else type(failure).__name__


NETWORK_FAILURES: tuple[type[Exception], ...] = (OSError, http.client.HTTPException)
"""What a request raises where no answer came."""

Ask = Callable[[HttpRange, TransportSettings, Surroundings], Reply]


def _body_of(answer: Answer) -> bytes:
    """Return what came of the body's beginning. One that does not come in full is as good as what came."""
    body = bytearray(_MOST_BODY_BYTES)
    filled = 0
    with contextlib.suppress(OSError, http.client.HTTPException):
        while filled < len(body) and (num_bytes := answer.receive(memoryview(body)[filled:])):
            filled += num_bytes
    return bytes(body[:filled])
