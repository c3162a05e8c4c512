"""Whether the store's host has an address, and whether anything answers there."""

from __future__ import annotations

import errno
import ipaddress
import socket
from dataclasses import dataclass

from headrace.doctor.finding import Finding, failed, ok, warning
from headrace.doctor.naming import describe_host, is_amazon
from headrace.doctor.world import World
from headrace.errors import Cancelled
from headrace.settings import TransportSettings
from headrace.transport.connection import Origin
from headrace.transport.proxy import Proxy, proxy_for
from headrace.transport.stopping import StopSwitch

STEP = "network"

_MOST_ADDRESSES = 4
_CONNECT_TIMEOUT_S = 5.0
_SHARED = ipaddress.ip_network("100.64.0.0/10")  # RFC 6598: between a provider's router and its customers.


@dataclass(frozen=True, slots=True)
class _Try:
    """One connection that was tried: how long it took, or why it failed."""

    address: str
    seconds: float
    failure: OSError | None = None


def examine_network(origin: Origin, transport: TransportSettings, world: World, *, by_path: bool = True) -> Finding:
    """Resolve the host (or its proxy) and connect to each of its first addresses.

    ``by_path`` says whether the bucket's name is in the path: otherwise the host's name holds it. Raises `InvalidSetting` for a proxy that is none.
    """
    proxy = proxy_for(origin.scheme, origin.host, origin.port, transport)
    host, port = (origin.host, origin.port) if proxy is None else (proxy.host, proxy.port)
    details = [("host", f"{host}:{port}")] if proxy is None else [("proxy", f"{host}:{port}, for {origin.host_header}")]
    kind = describe_host(origin.host)
    if kind:
        details.append(("endpoint", kind))
    try:
        addresses = world.resolve(host, port)
    except OSError as error:
        return _unresolved(host, error, proxy, by_path, details)
    tries = [_connect(address, port, transport, world) for address in addresses[:_MOST_ADDRESSES]]
    details += [("address", _line_of(one)) for one in tries]
    if len(addresses) > len(tries):
        details.append(("address", f"and {len(addresses) - len(tries)} more, not tried"))
    place = route_of(host, addresses)
    if place:
        details.append(("route", place))
    return _judge(origin, proxy, port, tries, details)


def route_of(host: str, addresses: tuple[str, ...]) -> str:
    """Return what kind of addresses these are, where that tells how the store is reached; else an empty text."""
    kinds = {_kind_of(address) for address in addresses}
    if kinds == {"private"}:
        if is_amazon(host):
            return "resolves to a private address: a VPC endpoint"
        if host.endswith((".core.windows.net", ".googleapis.com")):
            return "resolves to a private address: a private endpoint"
        return "resolves to a private address"
    if "private" in kinds and is_amazon(host):
        return "resolves to private and public addresses: requests may or may not go through the VPC endpoint"
    return {"loopback": "this machine", "link-local": "a link-local address", "shared": "a carrier's address"}.get(
        next(iter(kinds), ""), ""
    )


def _kind_of(address: str) -> str:
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return "public"
    if parsed.is_loopback:
        return "loopback"
    if parsed.is_link_local:
        return "link-local"
    if parsed.version == 4 and parsed in _SHARED:
        return "shared"
    return "private" if parsed.is_private else "public"


def _connect(address: str, port: int, transport: TransportSettings, world: World) -> _Try:
    switch, clock = StopSwitch(), world.surroundings.clock
    started = clock()
    try:
        timeout_s = min(transport.connect_timeout_s, _CONNECT_TIMEOUT_S)
        switch.close(world.surroundings.connect(address, port, timeout_s, switch))
    except Cancelled as error:
        raise AssertionError("nobody throws this switch") from error
    except OSError as error:
        return _Try(address, clock() - started, error)
    return _Try(address, clock() - started)


def _line_of(one: _Try) -> str:
    if one.failure is None:
        return f"{one.address} answers after {_milliseconds(one.seconds)}"
    return f"{one.address}: {_reason(one.failure)}"


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "no answer"
    return (error.strerror or type(error).__name__).lower()


def _judge(
    origin: Origin, proxy: Proxy | None, port: int, tries: list[_Try], details: list[tuple[str, str]]
) -> Finding:
    name = origin.host if proxy is None else str(proxy)
    good = [one for one in tries if one.failure is None]
    if not good:
        return _unreachable(name, port, proxy, tries, details)
    fastest = min(one.seconds for one in good)
    if proxy is not None:
        what = f"The {proxy} answers after {_milliseconds(fastest)}; it looks {origin.host} up itself."
    else:
        addresses = "" if name == tries[0].address else f" has {_counted(len(tries), 'address')} and"
        what = f"{name}{addresses} answers after {_milliseconds(fastest)}."
    slow = [one for one in tries if isinstance(one.failure, TimeoutError)]
    if slow:
        ipv6 = all(":" in one.address for one in slow)
        return warning(
            STEP,
            f"{name}: {len(slow)} of {_counted(len(tries), 'address')} {'does' if len(slow) == 1 else 'do'} not answer.",
            "Each new connection may wait for a dead address first.",
            "This machine has no way out over IPv6: give it one, or name an endpoint without IPv6 addresses."
            if ipv6
            else "Take the dead address out of the DNS record, or mend the host behind it.",
            details,
        )
    return ok(STEP, what, details)


def _unreachable(
    name: str, port: int, proxy: Proxy | None, tries: list[_Try], details: list[tuple[str, str]]
) -> Finding:
    what = f"Nothing can be reached at {name}{'' if proxy else f' on port {port}'}."
    failures = [one.failure for one in tries if one.failure is not None]
    setting = "HTTPS_PROXY, HTTP_PROXY and NO_PROXY" if proxy else "the endpoint's host and port"
    if any(isinstance(failure, ConnectionRefusedError) for failure in failures):
        return failed(
            STEP,
            what,
            f"A machine is there, but no program listens on port {port}, or a firewall says so.",
            f"Check {setting}, and that the server runs.",
            details,
        )
    if any(failure.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH) for failure in failures):
        return failed(
            STEP,
            what,
            "This machine has no route to that network.",
            "Give the subnet or the pod a way out (NAT gateway, VPC endpoint, proxy), or correct its routes.",
            details,
        )
    if all(isinstance(failure, TimeoutError) for failure in failures):
        return failed(
            STEP,
            what,
            "Packets get no answer, which is how firewalls, security groups and Kubernetes network policies refuse.",
            f"Allow outgoing connections to port {port} (security group, NetworkPolicy, network ACL), give a private subnet a VPC endpoint or NAT gateway, "
            f"or check {setting}.",
            details,
        )
    reasons = " and ".join(dict.fromkeys(_reason(failure) for failure in failures))
    return failed(STEP, what, f"The connection failed: {reasons}.", f"Check {setting}, and the firewall.", details)


def _unresolved(
    host: str, error: OSError, proxy: Proxy | None, by_path: bool, details: list[tuple[str, str]]
) -> Finding:
    code = error.errno if isinstance(error, socket.gaierror) else None
    if code == socket.EAI_AGAIN:
        return failed(
            STEP,
            f"{host} cannot be looked up.",
            "The name server gives no answer.",
            "Check /etc/resolv.conf, and that port 53 is allowed (in Kubernetes: NetworkPolicy, and that CoreDNS runs).",
            details,
        )
    if proxy is not None:
        mend = "Check the host's name in HTTPS_PROXY and HTTP_PROXY."
    elif ".vpce." in host:
        mend = (
            "Check the VPC endpoint's id and region: its name holds both, and exists for as long as the endpoint does."
        )
    elif is_amazon(host):
        mend = (
            "Check the region (AWS_DEFAULT_REGION) and the bucket's name; in a VPC check that its DNS resolution is on."
        )
    elif not by_path:
        mend = "If only the name without the bucket exists, address by path: HEADRACE_S3_ADDRESSING_STYLE=path. Else check the endpoint's name."
    elif "." not in host or host.endswith((".svc", ".local")):
        mend = "Check the name; one of a Kubernetes service is good inside the cluster only, as service.namespace.svc."
    else:
        mend = "Check the spelling, and that this machine's name server knows the name (a private zone, a VPN)."
    reason = "There is no such name" if code in (socket.EAI_NONAME, socket.EAI_NODATA) else "The look-up failed"
    said = f" ({error.strerror})" if error.strerror else ""
    return failed(STEP, f"{host} does not resolve.", f"{reason}{said}.", mend, details)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}es"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds >= 0.001 else "less than 1 ms"
