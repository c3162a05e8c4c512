"""Small requests against a scripted server: what comes is whole, what fails is tried again, and secrets stay with their server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.support.fault_server import FaultServer, Script, cut, redirect, refuse, stall
from tests.support.proxy_server import ProxyServer

from headrace.errors import InvalidSetting, ObjectNotFound, StoreUnavailable
from headrace.settings import TransportSettings
from headrace.storage.address import parse_address
from headrace.storage.http_refusal import HTTP
from headrace.storage.refusal import Place, judge_complaint, read_complaint
from headrace.storage.store import Refusal, Verdict
from headrace.storage.web import WebClient, WebRequest

QUICK = TransportSettings(
    max_attempts=3, backoff_first_s=0.001, connect_timeout_s=5, idle_timeout_s=5, total_timeout_s=10
)
BODY = bytes(range(256)) * 300


def judge(refusal: Refusal) -> Verdict:
    return judge_complaint(read_complaint(refusal), Place("http://host/a", "http://host"), now=0.0, dialect=HTTP)


@pytest.fixture
def server() -> Iterator[FaultServer]:
    with FaultServer() as one:
        one.put("a", BODY)
        yield one
        assert one.wait_until_idle(), "connections were left open"


@pytest.fixture
def client() -> Iterator[WebClient]:
    one = WebClient(QUICK)
    yield one
    one.close()


def ask(server: FaultServer, key: str = "a", **fields: object) -> WebRequest:
    given: dict[str, object] = {"most_bytes": 1 << 20, **fields}
    return WebRequest(address=parse_address(f"{server.url}/{key}"), uri="http://host/a", **given)  # type: ignore[arg-type]


def test_a_body_comes_whole_and_the_connection_serves_again(server: FaultServer, client: WebClient) -> None:
    for _ in range(3):
        reply = client.ask(ask(server), judge)
        assert (reply.status, reply.body) == (200, BODY)
        assert reply.headers["etag"] == server.etag("a")
    assert server.num_connections == 1


def test_chunked_and_empty_bodies_come_whole(server: FaultServer, client: WebClient) -> None:
    server.put("empty", b"")
    server.script("a", Script(chunk_bytes=1000))
    assert client.ask(ask(server), judge).body == BODY
    assert client.ask(ask(server, "empty"), judge).body == b""
    assert client.ask(ask(server), judge).body == BODY
    assert server.num_connections == 1


def test_no_more_is_taken_than_was_asked_for(server: FaultServer, client: WebClient) -> None:
    assert client.ask(ask(server, most_bytes=7), judge).body == BODY[:7]
    assert client.ask(ask(server), judge).body == BODY
    assert server.num_connections == 2, "a connection with the rest of a body in it is not used again"


def test_what_fails_is_tried_again(server: FaultServer, client: WebClient) -> None:
    server.script("a", cut(100), refuse(503), Script(chunk_bytes=1000))
    assert client.ask(ask(server), judge).body == BODY
    assert [sent.status for sent in server.log] == [200, 503, 200]


def test_a_wait_that_the_server_asks_for_is_kept_within_reason(server: FaultServer) -> None:
    waits: list[float] = []
    client = WebClient(QUICK, sleep=waits.append)
    server.script("a", refuse(429, retry_after="2"), refuse(503, retry_after="9999"))
    assert client.ask(ask(server), judge).body == BODY
    assert waits == [2.0, 30.0]
    client.close()


def test_attempts_end_with_what_the_refusal_means(server: FaultServer, client: WebClient) -> None:
    server.always("a", refuse(503))
    with pytest.raises(StoreUnavailable, match="503"):
        client.ask(ask(server), judge)
    assert len(server.log) == 3
    with pytest.raises(ObjectNotFound):
        client.ask(ask(server, "absent"), judge)
    assert len(server.log) == 4, "what is absent is not asked for again"


def test_silence_ends_with_an_error_that_names_the_server(server: FaultServer) -> None:
    client = WebClient(replace(QUICK, idle_timeout_s=0.05, max_attempts=2))
    server.always("a", stall(10))
    with pytest.raises(StoreUnavailable, match=rf"No answer came from 127\.0\.0\.1:{server.port} in time") as caught:
        client.ask(ask(server), judge)
    assert isinstance(caught.value.__cause__, TimeoutError)
    assert len(server.log) == 2
    client.close()


def test_a_server_that_is_not_there_is_named(client: WebClient) -> None:
    request = WebRequest(address=parse_address("http://127.0.0.1:9/a?token=secret"), uri="http://host/a", most_bytes=1)
    with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:9 gave no answer") as caught:
        client.ask(request, judge)
    assert "secret" not in str(caught.value)


def test_a_connection_that_went_stale_costs_no_attempt(server: FaultServer) -> None:
    client = WebClient(replace(QUICK, max_attempts=1))
    server.script("a", Script(close_after=True))
    assert client.ask(ask(server), judge).body == BODY
    assert client.ask(ask(server), judge).body == BODY
    client.close()


def test_secrets_stay_with_their_server(server: FaultServer, client: WebClient) -> None:
    with FaultServer() as other:
        other.put("b", b"moved")
        server.script("a", redirect("/c"))
        server.script("c", redirect(f"{other.url}/b?signature=1"))
        request = ask(server, headers=(("X-Plain", "1"),), secrets=lambda: (("Authorization", "Bearer secret"),))
        assert "secret" not in repr(request)
        assert client.ask(request, judge).body == b"moved"
        assert [sent.headers.get("authorization") for sent in server.log] == ["Bearer secret"] * 2
        assert [sent.headers.get("authorization") for sent in other.log] == [None]
        assert other.log[0].headers["x-plain"] == "1"
        client.close()


def test_redirects_that_do_not_end_are_an_error(server: FaultServer, client: WebClient) -> None:
    server.always("a", redirect("/a"))
    with pytest.raises(StoreUnavailable, match="redirect number 6"):
        client.ask(ask(server), judge)


def test_a_proxy_is_asked_unless_the_host_is_exempt(server: FaultServer) -> None:
    with ProxyServer() as proxy:
        through = WebClient(replace(QUICK, http_proxy=f"http://user:p%40ss@{proxy.url.removeprefix('http://')}"))
        assert through.ask(ask(server), judge).body == BODY
        through.close()
        assert proxy.asked == [f"GET {server.url}/a HTTP/1.1"]
        assert proxy.headers[0]["proxy-authorization"] == "Basic dXNlcjpwQHNz"
        past = WebClient(replace(QUICK, http_proxy=proxy.url, no_proxy="127.0.0.1"))
        assert past.ask(ask(server), judge).body == BODY
        past.close()
        assert len(proxy.asked) == 1


def test_a_ca_file_that_cannot_be_used_is_an_error_at_once(tmp_path: object) -> None:
    with pytest.raises(InvalidSetting, match="SSL_CERT_FILE or REQUESTS_CA_BUNDLE"):
        WebClient(QUICK, ca_file=f"{tmp_path}/absent.pem")
