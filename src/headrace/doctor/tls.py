"""Whether the server's certificate is trusted, who signed it and until when it is good."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterator, Mapping
from typing import Any

from headrace.doctor.finding import Finding, failed, ok, skipped, warning
from headrace.doctor.world import World
from headrace.settings import TransportSettings
from headrace.transport.connection import Origin
from headrace.transport.proxy import ProxyRefused, open_tunnel, proxy_for
from headrace.transport.stopping import StopSwitch

STEP = "tls"

CA_VARIABLES = {"s3": "AWS_CA_BUNDLE", "gs": "REQUESTS_CA_BUNDLE"}
"""Kind of store to the variable that names the certificates to trust; `SSL_CERT_FILE` for all others."""

_SOON_S = 14 * 86400.0
_EXPIRED, _NOT_YET, _HOSTNAME, _ADDRESS = 10, 9, 62, 64
"""OpenSSL's codes of verification (x509_vfy.h)."""


def examine_tls(origin: Origin, kind: str, transport: TransportSettings, world: World) -> Finding:
    """Make a handshake as a read does, and say what came of it. Raises `InvalidSetting` for a CA file that cannot be used."""
    if origin.scheme != "https":
        return skipped(STEP, "The endpoint is plain HTTP: there is no certificate, and nothing is encrypted.")
    context = world.surroundings.tls.get(origin.ca_file, origin.verify_tls)
    details = [("trusted", f"{origin.ca_file or 'the certificates of the system'}")]
    try:
        with _handshake(origin, context, transport, world) as sock:
            protocol, cipher = sock.version() or "TLS", sock.cipher()
            certificate = sock.getpeercert() or {}
    except ssl.SSLCertVerificationError as error:
        seen = _look_at(origin, transport, world)
        return _untrusted(origin, kind, error, [*details, *rows_of(seen)])
    except ProxyRefused as error:
        return failed(
            STEP,
            f"The proxy lets nobody through to {origin.host_header}.",
            f"{str(error)[:1].upper()}{str(error)[1:]}.",
            "Allow the host in the proxy, name it in NO_PROXY, or correct the user name and password in HTTPS_PROXY.",
            details,
        )
    except OSError as error:
        return _broken(origin, error, details)
    details = [("protocol", f"{protocol}, {cipher[0]}" if cipher else protocol), *details]
    if not origin.verify_tls:
        return warning(
            STEP,
            f"The certificate of {origin.host_header} is not checked.",
            "HEADRACE_VERIFY_TLS=0 says so; anybody on the way could change the weights.",
            f"Name the authority's certificate in {_variable(kind)} instead, and take HEADRACE_VERIFY_TLS away.",
            details,
        )
    return _trusted(origin, certificate, world.wall_clock(), [*details, *rows_of(certificate)])


def rows_of(certificate: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return issuer, names and end of a certificate as ``SSLSocket.getpeercert`` gives it; nothing of an empty one."""
    found = []
    if certificate.get("issuer"):
        found.append(("issuer", name_of(certificate["issuer"])))
    names = [str(value) for _, value in certificate.get("subjectAltName", ())]
    if names:
        found.append(("names", ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")))
    if certificate.get("notAfter"):
        found.append(("expires", str(certificate["notAfter"])))
    return found


def name_of(parts: Any) -> str:
    """Return an issuer's or subject's name in words: organisation and common name."""
    wanted = {"organizationName": "", "organizationalUnitName": "", "commonName": ""}
    wanted |= {key: str(value) for part in parts for key, value in part if key in wanted}
    return ", ".join(value for value in wanted.values() if value) or "no name"


def _variable(kind: str) -> str:
    return CA_VARIABLES.get(kind, "SSL_CERT_FILE")


def _trusted(origin: Origin, certificate: Mapping[str, Any], now: float, details: list[tuple[str, str]]) -> Finding:
    ends = ssl.cert_time_to_seconds(certificate["notAfter"]) if certificate.get("notAfter") else None
    if ends is not None and ends - now < _SOON_S:
        return warning(
            STEP,
            f"The certificate of {origin.host_header} ends in {(ends - now) / 86400:.1f} days.",
            "From then on every connection is refused.",
            "Have the server's certificate renewed.",
            details,
        )
    issuer = f", signed by {name_of(certificate['issuer'])}" if certificate.get("issuer") else ""
    return ok(STEP, f"The certificate of {origin.host_header} is trusted{issuer}.", details)


def _untrusted(
    origin: Origin, kind: str, error: ssl.SSLCertVerificationError, details: list[tuple[str, str]]
) -> Finding:
    what = f"The certificate of {origin.host_header} is not trusted."
    said = str(error.verify_message).rstrip(".")
    why = f"{said[:1].upper()}{said[1:]}."
    if error.verify_code in (_EXPIRED, _NOT_YET):
        mend = "Have the server's certificate renewed, or set this machine's clock if that is wrong."
    elif error.verify_code in (_HOSTNAME, _ADDRESS):
        mend = "Use the name that is in the certificate; for a bucket with dots in its name address by path (HEADRACE_S3_ADDRESSING_STYLE=path)."
    else:
        mend = (
            f"Write the certificate of the authority that signed it (PEM) into a file and name that in {_variable(kind)}; in Kubernetes mount it from a "
            "ConfigMap. If the issuer is your company's proxy, it is the proxy's authority that is wanted."
        )
    return failed(STEP, what, why, mend, details)


def _broken(origin: Origin, error: OSError, details: list[tuple[str, str]]) -> Finding:
    what = f"There is no TLS connection to {origin.host_header}."
    reason = str(getattr(error, "reason", "") or "")
    if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"):
        return failed(
            STEP,
            what,
            f"What listens there does not speak TLS ({reason}).",
            "Write http:// in the endpoint if it is meant to be plain, or give the port that speaks TLS.",
            details,
        )
    if isinstance(error, TimeoutError):
        why = "The connection was made, and the handshake got no answer."
    elif isinstance(error, ConnectionError | ssl.SSLEOFError):
        why = "The other side ended the connection during the handshake."
    else:
        why = f"The handshake failed: {reason or error.strerror or type(error).__name__}."
    mend = "Check for a firewall or proxy that inspects TLS or allows only some host names; a too small MTU (VPN, overlay network) looks like this, too."
    return failed(STEP, what, why, mend, details)


@contextlib.contextmanager
def _handshake(
    origin: Origin, context: ssl.SSLContext, transport: TransportSettings, world: World
) -> Iterator[ssl.SSLSocket]:
    """Yield a TLS connection, made through the proxy where there is one. Raises OSError."""
    proxy = proxy_for(origin.scheme, origin.host, origin.port, transport)
    host, port = (origin.host, origin.port) if proxy is None else (proxy.host, proxy.port)
    sock: socket.socket = world.surroundings.connect(host, port, transport.connect_timeout_s, StopSwitch())
    with contextlib.closing(sock):
        sock.settimeout(transport.connect_timeout_s)
        if proxy is not None:
            open_tunnel(sock, proxy, origin.host, origin.port)
        with context.wrap_socket(sock, server_hostname=origin.host) as secured:
            yield secured


def _look_at(origin: Origin, transport: TransportSettings, world: World) -> Mapping[str, Any]:
    """Return what is in a certificate that is not trusted; nothing where it cannot be read.

    The library takes apart only what it trusts. So the certificate is fetched first, and then trusted as it is, for one more handshake that carries
    nothing.
    """
    with contextlib.suppress(OSError, ValueError):
        unchecked = ssl.create_default_context()
        unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE
        with _handshake(origin, unchecked, transport, world) as sock:
            encoded = sock.getpeercert(binary_form=True)
        if encoded:
            own = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            own.check_hostname = False
            own.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            own.load_verify_locations(cadata=encoded)
            with _handshake(origin, own, transport, world) as sock:
                return sock.getpeercert() or {}
    return {}
