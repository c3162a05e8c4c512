"""Names that do not resolve, and addresses that do not answer: each reason has its own words."""

from __future__ import annotations

import errno
import socket
from dataclasses import replace

import pytest

from headrace.doctor.finding import State
from headrace.doctor.network import examine_network, route_of
from headrace.settings import TransportSettings
from headrace.transport.connection import Origin

from .fakes import ORIGIN, world

PLAIN = TransportSettings()
REFUSED = ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
NO_ROUTE = OSError(errno.ENETUNREACH, "Network is unreachable")


def test_a_host_that_answers() -> None:
    finding = examine_network(ORIGIN, PLAIN, world(addresses=("10.0.0.5", "10.0.0.6")))
    assert finding.state is State.OK
    assert finding.what == f"{ORIGIN.host} has 2 addresses and answers after 4 ms."
    assert ("route", "resolves to a private address: a VPC endpoint") in finding.details
    assert ("address", "10.0.0.5 answers after 4 ms") in finding.details


def test_a_host_that_is_an_address() -> None:
    finding = examine_network(replace(ORIGIN, host="127.0.0.1"), PLAIN, world(addresses=("127.0.0.1",)))
    assert finding.what == "127.0.0.1 answers after 4 ms."
    assert ("route", "this machine") in finding.details


def test_a_vpc_endpoint_is_recognised_by_its_name() -> None:
    origin = replace(ORIGIN, host="b.vpce-0a1b-2c.s3.eu-west-1.vpce.amazonaws.com")
    finding = examine_network(origin, PLAIN, world(addresses=("10.1.2.3",)))
    assert ("endpoint", "the interface VPC endpoint vpce-0a1b-2c for s3 in eu-west-1") in finding.details


@pytest.mark.parametrize(
    ("host", "addresses", "route"),
    [
        ("b.s3.amazonaws.com", ("10.0.0.1",), "resolves to a private address: a VPC endpoint"),
        ("b.s3.amazonaws.com", ("52.1.2.3",), ""),
        (
            "b.s3.amazonaws.com",
            ("52.1.2.3", "10.0.0.1"),
            "resolves to private and public addresses: requests may or may not go through the VPC endpoint",
        ),
        ("acct.blob.core.windows.net", ("10.0.0.1",), "resolves to a private address: a private endpoint"),
        ("storage.googleapis.com", ("fd00::1",), "resolves to a private address: a private endpoint"),
        ("minio", ("192.168.1.5",), "resolves to a private address"),
        ("x", ("100.64.0.1",), "a carrier's address"),
        ("x", ("169.254.1.1",), "a link-local address"),
        ("x", ("fe80::1%eth0",), "a link-local address"),
    ],
)
def test_routes(host: str, addresses: tuple[str, ...], route: str) -> None:
    assert route_of(host, addresses) == route


@pytest.mark.parametrize(
    ("origin", "by_path", "mend"),
    [
        (ORIGIN, False, "AWS_DEFAULT_REGION"),
        (replace(ORIGIN, host="b.vpce-1.s3.us-east-1.vpce.amazonaws.com"), True, "VPC endpoint's id"),
        (replace(ORIGIN, host="models.minio.example"), False, "HEADRACE_S3_ADDRESSING_STYLE=path"),
        (replace(ORIGIN, host="minio"), True, "Kubernetes"),
        (replace(ORIGIN, host="minio.example"), True, "spelling"),
    ],
)
def test_a_name_that_does_not_exist(origin: Origin, by_path: bool, mend: str) -> None:
    nobody = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    finding = examine_network(origin, PLAIN, world(addresses=nobody), by_path=by_path)
    assert finding.state is State.FAILED
    assert finding.what == f"{origin.host} does not resolve."
    assert finding.why == "There is no such name (Name or service not known)."
    assert mend in finding.mend


def test_a_name_server_that_is_silent() -> None:
    finding = examine_network(ORIGIN, PLAIN, world(addresses=socket.gaierror(socket.EAI_AGAIN, "try again")))
    assert finding.why == "The name server gives no answer."
    assert "port 53" in finding.mend


@pytest.mark.parametrize(
    ("failure", "why", "mend"),
    [
        (REFUSED, "no program listens on port 443", "server runs"),
        (NO_ROUTE, "no route", "NAT gateway"),
        (TimeoutError(), "Packets get no answer", "security group"),
        (OSError(errno.ECONNRESET, "Connection reset by peer"), "connection reset by peer", "firewall"),
    ],
)
def test_an_address_that_does_not_answer(failure: OSError, why: str, mend: str) -> None:
    finding = examine_network(ORIGIN, PLAIN, world(failures={"203.0.113.7": failure}))
    assert finding.state is State.FAILED
    assert finding.what == f"Nothing can be reached at {ORIGIN.host} on port 443."
    assert why in finding.why
    assert mend in finding.mend


def test_a_dead_address_among_good_ones_costs_time() -> None:
    several = world(addresses=("2001:db8::1", "203.0.113.7"), failures={"2001:db8::1": TimeoutError()})
    finding = examine_network(ORIGIN, PLAIN, several)
    assert finding.state is State.WARNING
    assert "1 of 2 addresses does not answer" in finding.what
    assert "IPv6" in finding.mend
    # Without a route it is known at once, and costs nothing.
    several = world(addresses=("2001:db8::1", "203.0.113.7"), failures={"2001:db8::1": NO_ROUTE})
    finding = examine_network(ORIGIN, PLAIN, several)
    assert finding.state is State.OK
    assert ("address", "2001:db8::1: network is unreachable") in finding.details


def test_only_the_first_addresses_are_tried() -> None:
    finding = examine_network(ORIGIN, PLAIN, world(addresses=tuple(f"52.0.0.{number}" for number in range(9))))
    assert ("address", "and 5 more, not tried") in finding.details


def test_a_proxy_is_what_is_reached() -> None:
    proxied = TransportSettings(https_proxy="http://user:pass-word@proxy.example:3128")
    finding = examine_network(ORIGIN, proxied, world())
    assert finding.what == f"The proxy proxy.example:3128 answers after 4 ms; it looks {ORIGIN.host} up itself."
    finding = examine_network(ORIGIN, proxied, world(failures={"203.0.113.7": REFUSED}))
    assert finding.what == "Nothing can be reached at proxy proxy.example:3128."
    assert "HTTPS_PROXY" in finding.mend
    finding = examine_network(ORIGIN, proxied, world(addresses=socket.gaierror(socket.EAI_NONAME, "no")))
    assert finding.what == "proxy.example does not resolve."
    assert "HTTPS_PROXY" in finding.mend
    assert "pass-word" not in repr(finding)
    bypassed = examine_network(ORIGIN, replace(proxied, no_proxy=".amazonaws.com"), world())
    assert bypassed.what.startswith(ORIGIN.host)
