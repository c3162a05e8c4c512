"""Small requests over HTTP: what a store asks before and beside the weights. Bodies are small and come as bytes; ranges of weights are not read here.

Connections are kept and shared by all threads; refused, broken and late requests are tried again. Knows no dialect of any store: what a refusal means is the caller's to say.
"""

from __future__ import annotations

import http.client
import random
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from headrace.errors import StoreUnavailable
from headrace.settings import TransportSettings
from headrace.storage.address import MOST_REDIRECTS, REDIRECTS, Address, follow_location, too_many
from headrace.storage.store import Refusal, Verdict
from headrace.storage.web_connections import Headers, WebConnections

USER_AGENT = "headrace"

_MOST_ATTEMPTS = 4
_MOST_WAIT_S = 30.0
_REFUSAL_BYTES = 8192
_STEP_BYTES = 1 << 16
_FAILURES = (OSError, http.client.HTTPException)
_STALE = (ConnectionError, http.client.BadStatusLine, ssl.SSLEOFError)


@dataclass(frozen=True, slots=True, kw_only=True)
class WebRequest:
    """One GET. ``uri`` names it in messages; ``headers`` go wherever a redirect leads, ``secrets`` to the first address's origin only."""

    address: Address
    uri: str
    headers: Headers = ()
    secrets: Callable[[], Headers] = field(default=tuple, repr=False)
    """Called for each attempt: what is secret may be another one by then."""
    accepts: frozenset[int] = frozenset({200, 206})
    """Statuses that are answers; all others are judged."""
    most_bytes: int
    """Most bytes of the body that are taken."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer. ``headers`` has lower-case names; ``body`` is its first bytes, as many as the request takes."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class WebClient:
    """Sends small requests. Any thread; also in a forked child."""

    def __init__(
        self,
        transport: TransportSettings,
        *,
        ca_file: str | None = None,
        verify_tls: bool = True,
        sleep: Callable[[float], object] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connect to nothing yet. Raises `InvalidSetting` for a CA file that cannot be used."""
        self._transport = transport
        self._sleep = sleep
        self._clock = clock
        self._connections = WebConnections(transport, ca_file=ca_file, verify_tls=verify_tls)

    def ask(self, request: WebRequest, judge: Callable[[Refusal], Verdict]) -> Reply:
        """Return the answer to ``request``.

        ``judge`` says what a refusal means; its error is raised when trying again does not help or has not helped. Raises `StoreUnavailable` where no
        answer comes, or a redirect leads nowhere.
        """
        most = min(self._transport.max_attempts, _MOST_ATTEMPTS)
        for number in range(1, most + 1):
            wait_s = None
            try:
                reply = self._follow(request)
            except _FAILURES as failure:
                if isinstance(failure, ssl.SSLCertVerificationError) or number == most:
                    raise _explain(failure, request) from failure
            else:
                if reply.status in request.accepts:
                    return reply
                verdict = judge(Refusal(reply.status, _reason(reply.status), reply.headers, reply.body))
                if not verdict.retry or number == most:
                    raise verdict.error
                wait_s = verdict.wait_s
            self._sleep(self._wait_s(number) if wait_s is None else min(wait_s, _MOST_WAIT_S))
        raise AssertionError("unreachable")

    def close(self) -> None:
        """Close the connections that are kept. May be called twice, and the client may be used again."""
        self._connections.close()

    def _wait_s(self, number: int) -> float:
        transport = self._transport
        return random.random() * min(transport.backoff_most_s, transport.backoff_first_s * 2.0 ** (number - 1))

    def _follow(self, request: WebRequest) -> Reply:
        address = request.address
        for _ in range(MOST_REDIRECTS + 1):
            stays = address.origin == request.address.origin
            reply = self._exchange(request, address, request.headers + (request.secrets() if stays else ()))
            location = reply.headers.get("location")
            if reply.status not in REDIRECTS or location is None:
                return reply
            address = follow_location(address, location, request.uri)
        raise too_many(address, request.uri)

    def _exchange(self, request: WebRequest, address: Address, headers: Headers) -> Reply:
        """Send one request and take its answer; over a new connection, at once, where the one that was kept had been closed meanwhile."""
        connection = self._connections.take_idle(address)
        if connection is not None:
            try:
                return self._exchange_over(connection, request, address, headers)
            except _STALE:
                pass
        return self._exchange_over(self._connections.connect(address), request, address, headers)

    def _exchange_over(
        self, connection: http.client.HTTPConnection, request: WebRequest, address: Address, headers: Headers
    ) -> Reply:
        is_usable = False
        try:
            deadline = self._clock() + self._transport.total_timeout_s
            target, more = self._connections.form(address)
            connection.putrequest("GET", target, skip_host=True, skip_accept_encoding=True)
            for name, value in (("Host", address.authority), *headers, *more):
                connection.putheader(name, value)
            connection.sock.settimeout(self._transport.idle_timeout_s)
            connection.endheaders()
            with connection.getresponse() as response:
                most_bytes = request.most_bytes if response.status in request.accepts else _REFUSAL_BYTES
                body = self._receive(response, most_bytes, deadline)
                is_usable = response.isclosed() and not response.will_close
                found = {name.lower(): value for name, value in response.headers.items()}
                return Reply(response.status, found, body)
        finally:
            if is_usable:
                self._connections.keep(address, connection)
            else:
                connection.close()

    def _receive(self, response: http.client.HTTPResponse, most_bytes: int, deadline: float) -> bytes:
        """Return the first bytes of the body. Raises OSError where it ends before it is complete, which the library does not tell."""
        length = response.length
        if length == 0:
            return response.read()
        wanted = most_bytes if length is None else min(most_bytes, length)
        found = bytearray()
        while len(found) < wanted:
            step = response.read(min(_STEP_BYTES, wanted - len(found)))
            if not step:
                if length is None:
                    break
                raise ConnectionError(f"{len(found)} of {wanted} bytes came")
            found += step
            if self._clock() > deadline:
                raise TimeoutError("the answer took too long")
        return bytes(found)


def _reason(status: int) -> str:
    return http.client.responses.get(status, "")


def _explain(failure: Exception, request: WebRequest) -> StoreUnavailable:
    """Return the error for a request that got no answer. It quotes nothing of a request, which may be a signed one."""
    authority = request.address.authority
    if isinstance(failure, ssl.SSLCertVerificationError):
        return StoreUnavailable(
            f"The certificate of {authority} is not trusted.",
            f"{failure.verify_message}.",
            "Name the file of the authority that signed it in SSL_CERT_FILE, or correct the host name.",
        )
    what = f"{request.uri} cannot be read."
    if isinstance(failure, TimeoutError):
        return StoreUnavailable(
            what,
            f"No answer came from {authority} in time.",
            "Check the address and the network; HEADRACE_CONNECT_TIMEOUT and HEADRACE_IDLE_TIMEOUT allow more time.",
        )
    said = failure.strerror if isinstance(failure, OSError) and failure.strerror else type(failure).__name__
    return StoreUnavailable(
        what, f"{authority} gave no answer: {said}.", "Check the address, and that its server runs."
    )
