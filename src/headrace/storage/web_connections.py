"""Connections for small requests: opened directly or through a proxy, kept while idle, shared by all threads."""

from __future__ import annotations

import base64
import http.client
import os
import ssl
import threading
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import proxy_bypass_environment  # type: ignore[attr-defined]

from headrace.errors import InvalidSetting
from headrace.settings import TransportSettings
from headrace.storage.address import Address
from headrace.storage.certificates import check_ca_file

Headers = tuple[tuple[str, str], ...]

_PROXY_PORT = 80


class WebConnections:
    """Idle connections by origin, and how new ones are made. Any thread; a forked child opens its own."""

    def __init__(self, transport: TransportSettings, *, ca_file: str | None, verify_tls: bool) -> None:
        """Connect to nothing yet. Raises `InvalidSetting` for a CA file that cannot be used."""
        self._transport = transport
        self._verify_tls = verify_tls
        # The system's certificates take tens of milliseconds to load, and plain HTTP needs none; a file that was named is to be an error at once.
        self._context = None if ca_file is None else make_context(ca_file, verify_tls)
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._idle: dict[tuple[str, str, int], list[http.client.HTTPConnection]] = {}

    def take_idle(self, address: Address) -> http.client.HTTPConnection | None:
        """Return a connection that has served before and may have been closed meanwhile, if there is one; it is the caller's now."""
        with self._current_lock():
            waiting = self._idle.get(address.origin)
            return waiting.pop() if waiting else None

    def keep(self, address: Address, connection: http.client.HTTPConnection) -> None:
        """Take a connection back whose last answer was taken to its end."""
        with self._current_lock():
            self._idle.setdefault(address.origin, []).append(connection)

    def close(self) -> None:
        """Close all that are idle."""
        with self._current_lock():
            idle, self._idle = self._idle, {}
        for connections in idle.values():
            for connection in connections:
                connection.close()

    def connect(self, address: Address) -> http.client.HTTPConnection:
        """Return a new connection for requests at ``address``. Raises OSError."""
        proxy = self._proxy_for(address)
        host, port = (
            (address.host, address.port) if proxy is None else (proxy.hostname or "", proxy.port or _PROXY_PORT)
        )
        timeout_s = self._transport.connect_timeout_s
        connection: http.client.HTTPConnection
        if address.scheme == "https":
            connection = http.client.HTTPSConnection(host, port, timeout=timeout_s, context=self._tls_context())
            if proxy is not None:
                connection.set_tunnel(address.host, address.port, dict(_proxy_headers(proxy)))
        else:
            connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
        try:
            connection.connect()
        except BaseException:
            connection.close()
            raise
        return connection

    def form(self, address: Address) -> tuple[str, Headers]:
        """Return a request's target, and headers for the proxy: one for plain HTTP wants the whole URL (RFC 9112, 3.2.2)."""
        proxy = self._proxy_for(address) if address.scheme == "http" else None
        if proxy is None:
            return address.target, ()
        return f"http://{address.authority}{address.target}", _proxy_headers(proxy)

    def _proxy_for(self, address: Address) -> SplitResult | None:
        transport = self._transport
        url = transport.https_proxy if address.scheme == "https" else transport.http_proxy
        place = f"{address.host}:{address.port}"
        if not url or (transport.no_proxy and proxy_bypass_environment(place, {"no": transport.no_proxy})):
            return None
        return urlsplit(url if "://" in url else f"http://{url}")

    def _tls_context(self) -> ssl.SSLContext:
        with self._current_lock():
            if self._context is None:
                self._context = make_context(None, self._verify_tls)
            return self._context

    def _current_lock(self) -> threading.Lock:
        if os.getpid() != self._process:
            # A forked child: the lock may have been held at the fork, and the sockets are also the parent's.
            self._lock = threading.Lock()
            self._idle = {}
            self._process = os.getpid()
        return self._lock


def make_context(ca_file: str | None, verify: bool) -> ssl.SSLContext:
    """Return a TLS context that trusts ``ca_file``; None means the system's. Raises `InvalidSetting` for a file that is absent or holds no certificate."""
    if ca_file is not None:
        check_ca_file(ca_file, "SSL_CERT_FILE or REQUESTS_CA_BUNDLE")
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except (ssl.SSLError, OSError) as error:
        raise InvalidSetting(
            f"The certificate bundle {ca_file} cannot be used.", f"{error}.", "It must hold certificates in PEM form."
        ) from error
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _proxy_headers(proxy: SplitResult) -> Headers:
    if proxy.username is None:
        return ()
    pair = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return (("Proxy-Authorization", f"Basic {base64.b64encode(pair.encode()).decode()}"),)
