"""Reads through an HTTP proxy: tunnels for TLS, whole addresses for plain HTTP, and what is said when the proxy will not."""

from __future__ import annotations

import base64
import random
import shutil
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.errors import InvalidSetting, ReadFailed
from headrace.settings import Settings, TransportSettings
from headrace.storage import StoredObject
from headrace.transport import HttpReader, RangeRead, ReadJob, open_pool
from headrace.transport.bandwidth import Bandwidth
from headrace.transport.proxy import parse_proxy, proxy_for
from tests.support.fault_server import FaultServer
from tests.support.proxy_server import ProxyServer
from tests.support.stub_store import StubStore

KEY = "weights"
PAYLOAD = random.Random(9).randbytes(300_000)
QUICK = TransportSettings(
    backoff_first_s=0.002, backoff_most_s=0.01, idle_timeout_s=20, connect_timeout_s=5, max_attempts=2
)


@pytest.fixture
def plain_server(fault_server: FaultServer) -> FaultServer:
    fault_server.put(KEY, PAYLOAD)
    return fault_server


@pytest.fixture
def tls_server(certificates: Path) -> Iterator[FaultServer]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    with FaultServer(context) as server:
        server.put(KEY, PAYLOAD)
        yield server


def read(store: StubStore, settings: TransportSettings) -> bytes:
    memory = bytearray(len(PAYLOAD))
    reader = HttpReader(store, settings)
    try:
        for start in (0, 100_000):
            stop = 100_000 if start == 0 else len(PAYLOAD)
            reader.read(RangeRead(store.stat(KEY), start, stop), [memoryview(memory)[start:stop]])
    finally:
        reader.close()
    return bytes(memory)


def test_plain_http_goes_through_the_proxy_by_its_whole_address(plain_server: FaultServer) -> None:
    with ProxyServer() as proxy:
        assert read(StubStore(plain_server), replace(QUICK, http_proxy=proxy.url)) == PAYLOAD
    assert proxy.asked == [f"GET {plain_server.url}/{KEY} HTTP/1.1"]
    assert proxy.headers[0]["host"] == f"127.0.0.1:{plain_server.port}"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command to make certificates")
def test_tls_goes_through_a_tunnel_that_is_kept(tls_server: FaultServer, certificates: Path) -> None:
    store = StubStore(tls_server, ca_file=str(certificates / "ca.pem"))
    secret = base64.b64encode(b"me:p@ss").decode()
    with ProxyServer(authorization=f"Basic {secret}") as proxy:
        address = proxy.url.replace("http://", "http://me:p%40ss@")
        assert read(store, replace(QUICK, https_proxy=address)) == PAYLOAD
    assert proxy.asked == [f"CONNECT 127.0.0.1:{tls_server.port} HTTP/1.1"]
    assert all("proxy-authorization" not in sent.headers for sent in tls_server.log)


@pytest.mark.parametrize("no_proxy", ["127.0.0.1", "*", "example.com,127.0.0.1"])
def test_no_proxy_names_hosts_that_are_reached_directly(no_proxy: str, plain_server: FaultServer) -> None:
    with ProxyServer() as proxy:
        assert read(StubStore(plain_server), replace(QUICK, http_proxy=proxy.url, no_proxy=no_proxy)) == PAYLOAD
    assert proxy.asked == []


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command to make certificates")
@pytest.mark.parametrize(("status", "words"), [(403, "403"), (407, "407 Refused (it wants other credentials)")])
def test_a_proxy_that_refuses_is_named_with_what_it_said(
    status: int, words: str, tls_server: FaultServer, certificates: Path
) -> None:
    store = StubStore(tls_server, ca_file=str(certificates / "ca.pem"))
    with ProxyServer(refuse_with=status) as proxy, pytest.raises(ReadFailed) as caught:
        read(store, replace(QUICK, https_proxy=proxy.url.replace("//", "//user:hidden@")))
    assert words in str(caught.value) and f"proxy {proxy.url.removeprefix('http://')}" in str(caught.value)
    assert "hidden" not in str(caught.value)
    assert tls_server.log == []


def test_a_proxy_where_nobody_listens_is_an_error_that_can_be_told(plain_server: FaultServer) -> None:
    with pytest.raises(ReadFailed, match="Connection refused"):
        read(StubStore(plain_server), replace(QUICK, http_proxy="http://127.0.0.1:9"))


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("https://proxy:3128", "scheme 'https' is not supported"),
        ("socks5://proxy", "scheme 'socks5' is not supported"),
        ("http://:3128", "names no host"),
        ("http://user:secret@proxy:port", "not a URL"),
    ],
)
def test_an_address_that_cannot_be_a_proxys_is_refused(address: str, message: str) -> None:
    with pytest.raises(InvalidSetting, match=message) as caught:
        parse_proxy(address)
    assert "secret" not in str(caught.value)


def test_proxies_come_from_the_environment_as_everybody_spells_them() -> None:
    environment = {
        "HTTPS_PROXY": "http://upper:1",
        "https_proxy": "http://lower:2",
        "HTTP_PROXY": "plain:3",
        "NO_PROXY": "localhost,.internal",
    }
    settings = Settings.from_environment(environment).transport
    assert (settings.https_proxy, settings.http_proxy) == ("http://lower:2", "plain:3")
    found = [
        str(proxy_for(scheme, host, 443, settings))
        for scheme, host in [
            ("https", "s3.example"),
            ("http", "s3.example"),
            ("https", "minio.internal"),
            ("http", "localhost"),
        ]
    ]
    assert found == ["proxy lower:2", "proxy plain:3", "None", "None"]
    assert "lower" not in repr(settings)


def test_bandwidth_is_shared_by_all_connections_and_the_bytes_are_right(plain_server: FaultServer) -> None:
    limit = 600_000
    settings = replace(QUICK, bandwidth_bytes_per_s=limit, num_connections=3, least_rate_window_s=0.01)
    store = StubStore(plain_server)
    stored: StoredObject = store.stat(KEY)
    memory = bytearray(len(PAYLOAD))
    ended: list[BaseException | None] = []
    done = threading.Event()
    start = time.monotonic()
    with open_pool(store, settings) as pool:
        for place in range(3):
            first, last = place * 100_000, (place + 1) * 100_000

            def finish(error: BaseException | None) -> None:
                ended.append(error)
                if len(ended) == 3:
                    done.set()

            pool.submit(
                ReadJob(
                    RangeRead(stored, first, last),
                    lambda first=first, last=last: [memoryview(memory)[first:last]],
                    finish,
                )
            )
        assert done.wait(20)
    elapsed = time.monotonic() - start
    assert ended == [None, None, None] and bytes(memory) == PAYLOAD
    assert elapsed > len(PAYLOAD) / limit - 0.25 - 0.1, "a quarter of a second's worth is free"
    assert len(plain_server.log) == 3, "no read was given up for being slow"


def test_the_bucket_lets_a_burst_through_and_then_the_rate() -> None:
    now = [100.0]
    bandwidth = Bandwidth(1000, lambda: now[0])
    assert bandwidth.delay_s(250) == 0
    assert bandwidth.delay_s(500) == pytest.approx(0.5)
    now[0] += 10
    assert bandwidth.delay_s(250) == 0 and bandwidth.delay_s(100) == pytest.approx(0.1), (
        "a pause earns one burst, not ten seconds' worth"
    )
