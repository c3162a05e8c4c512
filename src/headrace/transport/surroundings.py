"""What a reader needs of the world: a clock, a way to wait, chance, connections and TLS contexts. Tests put their own in their place."""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from headrace.errors import InvalidSetting
from headrace.transport.stopping import StopSwitch
from headrace.transport.turns import Turns, make_turns
from headrace.units import MIB

WINDOW_BYTES = 2 * MIB
"""What may be on its way to a connection from the start, where the system allows it. With it a load took 7 % fewer CPU seconds over TLS, and 13 % fewer without (2026-11, loopback)."""

Connect = Callable[[str, int, float, StopSwitch], socket.socket]
"""``connect(host, port, timeout_s, switch)`` returns a connected socket; the switch watches each socket that it tries, and closes those that fail."""


def dial(host: str, port: int, timeout_s: float, switch: StopSwitch, *, interface: str = "") -> socket.socket:
    """Return a TCP connection to the first address of ``host`` that answers within ``timeout_s`` in all. Raises OSError, `Cancelled`.

    ``interface`` names the network interface that it goes over; empty leaves that to the routes.
    """
    deadline = time.monotonic() + timeout_s
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    failure: OSError = OSError(f"{host} has no address")
    for place, (family, kind, protocol, _, address) in enumerate(addresses):
        sock = socket.socket(family, kind, protocol)
        try:
            switch.watch(sock)
            if interface:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode() + b"\0")
            # An address that does not answer must leave time for the next one (IPv6 without a route, often).
            sock.settimeout(max(0.001, (deadline - time.monotonic()) / (len(addresses) - place)))
            sock.connect(address)
            _widen(sock)
            return sock
        except OSError as error:
            failure = error
            switch.close(sock)
        except BaseException:
            switch.close(sock)
            raise
    raise failure


def _widen(sock: socket.socket) -> None:
    """Enlarge what the system buffers for a connection, which it does by itself only as it learns that the reader is quick.

    By the least that a reader waits for, which is set back at once: the buffer stays (Linux 4.18). Setting the buffer's own size would end the system's adapting it, and cut it to
    ``net.core.rmem_max``: 10 MB/s at 20 ms where that is as it comes.
    """
    with contextlib.suppress(OSError):  # It is as good without.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, WINDOW_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)


class TlsContexts:
    """TLS contexts, one for each CA file: loading the system's CAs takes tens of milliseconds. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._contexts: dict[tuple[str | None, bool], ssl.SSLContext] = {}

    def get(self, ca_file: str | None, verify: bool) -> ssl.SSLContext:
        """Return the context that trusts ``ca_file`` (None: the system's CAs). Raises `InvalidSetting` for a file that is absent or holds none."""
        with self._lock:
            context = self._contexts.get((ca_file, verify))
            if context is None:
                context = self._contexts[ca_file, verify] = _make_context(ca_file, verify)
            return context


def _make_context(ca_file: str | None, verify: bool) -> ssl.SSLContext:
    if ca_file is not None and not Path(ca_file).is_file():
        raise InvalidSetting(
            f"The CA file {ca_file} does not exist.", mend="Name a PEM file with the certificates to trust."
        )
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except (ssl.SSLError, OSError) as error:
        raise InvalidSetting(
            f"The CA file {ca_file} cannot be used.", f"{error}.", "It must hold certificates in PEM form."
        ) from error
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """The world as readers see it. One of these is shared by all readers of a pool."""

    clock: Callable[[], float] = time.monotonic
    """Seconds that only ever grow."""
    wait: Callable[[threading.Event, float], bool] = threading.Event.wait
    """Waits until the event is set or so many seconds have passed, and says whether it is set."""
    random: Callable[[], float] = random.random
    """A number from 0 to 1."""
    connect: Connect = dial
    tls: TlsContexts = field(default_factory=TlsContexts)
    turns: Turns = field(default_factory=make_turns)
    """Who decrypts takes one of these."""
