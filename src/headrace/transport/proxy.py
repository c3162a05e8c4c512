"""HTTP proxies: which one a connection goes through, and the tunnel through it. Knows no objects and no retries.

For ``https`` the proxy is asked for a tunnel (CONNECT, RFC 9110 section 9.3.6) and sees nothing of what goes through. For ``http`` it is sent the whole
address in the request line (RFC 9112 section 3.2.2).
"""

from __future__ import annotations

import base64
import http.client
import socket
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit
from urllib.request import proxy_bypass_environment  # type: ignore[attr-defined]

from headrace.errors import InvalidSetting
from headrace.settings import TransportSettings

_LONGEST_HEAD_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class Proxy:
    """Where a proxy listens. ``authorization`` is the value of Proxy-Authorization, a secret; None without credentials."""

    host: str
    port: int
    authorization: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return f"proxy {self.host}:{self.port}"


class ProxyRefused(ConnectionError):
    """The proxy would not open a tunnel; the message says with which status."""


def proxy_for(scheme: str, host: str, port: int, settings: TransportSettings) -> Proxy | None:
    """Return the proxy for an origin, None where it is reached directly: none is set, or NO_PROXY names the host. Raises `InvalidSetting`."""
    address = settings.https_proxy if scheme == "https" else settings.http_proxy
    if not address:
        return None
    if settings.no_proxy and proxy_bypass_environment(f"{host}:{port}", {"no": settings.no_proxy}):
        return None
    return parse_proxy(address)


def parse_proxy(address: str) -> Proxy:
    """Return the proxy at ``http://[user:password@]host[:port]``; a missing scheme means http. Raises `InvalidSetting`, which quotes no password."""
    try:
        parts = urlsplit(address if "://" in address else f"http://{address}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidSetting("The proxy's address is not a URL.", f"{error}.", "Write http://host:port.") from error
    if parts.scheme != "http" or not host:
        raise InvalidSetting(
            f"A proxy of scheme {parts.scheme!r} is not supported." if host else "The proxy's address names no host.",
            "Proxies are spoken to over plain HTTP; what goes through them to https is encrypted all the same.",
            "Set HTTPS_PROXY and HTTP_PROXY to http://host:port.",
        )
    authorization = None
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        authorization = f"Basic {base64.b64encode(pair.encode()).decode()}"
    return Proxy(host, port or 80, authorization)


def open_tunnel(sock: socket.socket, proxy: Proxy, host: str, port: int) -> None:
    """Have ``proxy``, at the other end of ``sock``, connect to ``host``; the socket's own timeout applies. Raises `ProxyRefused`, OSError."""
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    lines = [f"CONNECT {target} HTTP/1.1", f"Host: {target}"]
    if proxy.authorization is not None:
        lines.append(f"Proxy-Authorization: {proxy.authorization}")
    sock.sendall("\r\n".join([*lines, "", ""]).encode("ascii"))
    head = _receive_head(sock)
    status_line = head.split(b"\r\n", 1)[0].decode("latin-1")
    parts = status_line.split(" ", 2)
    if len(parts) < 2 or not parts[0].startswith("HTTP/1.") or not parts[1].isdigit():
        raise http.client.BadStatusLine("the proxy's answer")
    if not 200 <= int(parts[1]) < 300:
        wants = " (it wants other credentials)" if parts[1] == "407" else ""
        raise ProxyRefused(f"the {proxy} answered {' '.join(parts[1:])}{wants} to CONNECT {target}")


def absolute_target(host_header: str, target: str) -> str:
    """Return the request target that a proxy wants for plain HTTP."""
    return f"http://{host_header}{target}"


def _receive_head(sock: socket.socket) -> bytes:
    """Receive up to the blank line, and not a byte more: what follows belongs to the tunnel. A peek says how much that is."""
    head = b""
    while b"\r\n\r\n" not in head:
        seen = sock.recv(4096, socket.MSG_PEEK)
        if not seen:
            raise ProxyRefused("the proxy closed the connection instead of answering")
        end = (head + seen).find(b"\r\n\r\n")
        wanted = len(seen) if end < 0 else end + 4 - len(head)
        head += sock.recv(wanted)
        if len(head) > _LONGEST_HEAD_BYTES:
            raise ProxyRefused("the proxy's answer has no end")
    return head
