"""The doctor against a server that misbehaves: for each fault the one finding that names it."""

from __future__ import annotations

import contextlib
import random
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path

import pytest

pytest.importorskip("huggingface_hub")

from huggingface_hub import constants

from headrace.doctor import Examination, Finding, Limits, Plan, State, World, advise
from headrace.doctor.throughput import Bounds
from headrace.errors import StoreUnavailable
from headrace.settings import Settings, TransportSettings
from tests.support.fake_hub import FakeHub, fake_hub, fill_cache
from tests.support.fault_server import PLAIN, FaultServer, Script, redirect, refuse, stall
from tests.support.proxy_server import ProxyServer

KEY = "model.safetensors"
PAYLOAD = random.Random(7).randbytes(3_000_000)
SETTINGS = Settings(transport=TransportSettings(num_connections=2, read_bytes=1_000_000, backoff_first_s=0.001))


def examine(
    url: str, *, settings: Settings = SETTINGS, wanted: tuple[str, ...] | None = None, **more: float
) -> dict[str, Finding]:
    """Return the findings by step; ``more`` are limits."""
    limits = Limits(**{"connect_timeout_s": 5, "idle_timeout_s": 5, **more})  # type: ignore[arg-type]
    bounds = Bounds(seconds=60.0, num_bytes=6_000_000)
    plan = Plan(uri=url, read_settings=lambda: settings, limits=limits, bounds=bounds)
    with contextlib.closing(Examination(plan, World())) as examination:
        return {finding.step: finding for finding in examination.run(wanted)}


def troubles(findings: dict[str, Finding]) -> dict[str, State]:
    return {step: finding.state for step, finding in findings.items() if finding.is_trouble}


@pytest.fixture
def server(fault_server: FaultServer) -> FaultServer:
    fault_server.put(KEY, PAYLOAD)
    return fault_server


def test_a_good_server(server: FaultServer) -> None:
    findings = examine(f"{server.url}/{KEY}")
    assert troubles(findings) == {}
    assert findings["tls"].state is State.SKIPPED
    assert findings["clock"].what == "The clocks agree."
    assert findings["credentials"].what == "None are sent: HEADRACE_HTTP_TOKEN is not set."
    assert findings["list"].what == "1 file, 3 MB of weights would be loaded."
    assert findings["range read"].what == "The bytes that were asked for came, and no others (206)."
    assert ("content-range", "bytes 1497952-1502047/3000000") in findings["range read"].details
    assert findings["conditional read"].what == "A version that is not there is refused (412)."
    assert [label for label, _ in findings["throughput"].details][:2] == ["1 connection", "2 connections"]


def test_a_server_that_stops_serving_ranges(server: FaultServer) -> None:
    """Most servers without ranges are recognised when the file is looked up; one behind a proxy may change its mind."""
    server.script(KEY, PLAIN, PLAIN, Script(ignores_range=True))
    findings = examine(f"{server.url}/{KEY}")
    assert troubles(findings) == {"range read": State.FAILED}
    assert "the store answered with the whole object" in findings["range read"].what
    assert "Range requests" in findings["range read"].mend
    assert findings["throughput"].what == "Not tried, because range read failed."


def test_a_server_without_ranges(server: FaultServer) -> None:
    server.always(KEY, Script(ignores_range=True))
    findings = examine(f"{server.url}/{KEY}")
    assert troubles(findings) == {"list": State.FAILED}
    assert "does not serve byte ranges" in findings["list"].why


def test_a_server_that_ignores_the_condition(server: FaultServer) -> None:
    given = {"ETag": server.etag(KEY), "Content-Range": f"bytes 1497952-1502047/{len(PAYLOAD)}"}
    server.script(KEY, PLAIN, PLAIN, PLAIN, Script(status=206, headers=given, body=PAYLOAD[1497952:1502048]))
    findings = examine(f"{server.url}/{KEY}")
    assert troubles(findings) == {"conditional read": State.WARNING}
    finding = findings["conditional read"]
    assert finding.what == f"{server.url} sends a file although another version of it was asked for."
    assert "compares the version that each answer names instead" in finding.why
    assert "folder of its own" in finding.mend
    server.script(KEY, PLAIN, PLAIN, PLAIN, Script(status=206, headers={**given, "ETag": None}, body=PAYLOAD[:4096]))
    finding = examine(f"{server.url}/{KEY}")["conditional read"]
    assert "compares the size of each file instead" in finding.why


def test_a_server_without_versions(server: FaultServer) -> None:
    server.always(KEY, Script(headers={"ETag": None}))
    findings = examine(f"{server.url}/{KEY}")
    assert troubles(findings) == {"stat": State.WARNING}
    assert "gives no version" in findings["stat"].what
    assert findings["conditional read"].state is State.SKIPPED


def test_a_server_with_weak_versions(server: FaultServer) -> None:
    server.always(KEY, Script(headers={"ETag": 'W/"1"'}))
    findings = examine(f"{server.url}/{KEY}")
    assert troubles(findings) == {"conditional read": State.WARNING}
    assert "weak versions only" in findings["conditional read"].what


@pytest.mark.parametrize(("ahead_s", "way"), [(-700, "ahead of"), (700, "behind")])
def test_a_skewed_clock(server: FaultServer, ahead_s: float, way: str) -> None:
    server.always("", Script(status=403, headers={"Date": formatdate(time.time() + ahead_s, usegmt=True)}))
    finding = examine(f"{server.url}/{KEY}")["clock"]
    # Nothing is signed for a web server, so it is a warning; for S3 it would be a failure.
    assert finding.state is State.WARNING
    assert f"{way} the store's" in finding.what
    server.always("", Script(status=403, headers={"Date": None}))
    assert examine(f"{server.url}/{KEY}", wanted=("clock",))["clock"].state is State.SKIPPED


def test_a_port_at_which_nothing_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    findings = examine(f"http://127.0.0.1:{port}/{KEY}")
    assert troubles(findings) == {"network": State.FAILED}
    assert findings["network"].what == f"Nothing can be reached at 127.0.0.1 on port {port}."
    assert "no program listens" in findings["network"].why
    assert ("address", "127.0.0.1: connection refused") in findings["network"].details
    assert findings["list"].what == "Not tried, because network failed."


def test_a_name_that_does_not_exist() -> None:
    findings = examine("http://models.invalid/m")  # RFC 6761: nobody ever has it.
    assert findings["network"].what in ("models.invalid does not resolve.", "models.invalid cannot be looked up.")


def test_a_server_that_says_nothing(server: FaultServer) -> None:
    server.always("", Script(delay_s=30))
    server.always(KEY, Script(delay_s=30))
    findings = examine(f"{server.url}/{KEY}", idle_timeout_s=0.2, max_attempts=1)
    assert findings["network"].state is State.OK
    assert findings["clock"].state is State.FAILED
    assert "nothing came" in findings["clock"].why
    assert findings["list"].state is State.FAILED
    assert findings["range read"].state is State.SKIPPED


def test_a_read_that_is_refused_where_looking_up_is_not(server: FaultServer) -> None:
    server.script(KEY, PLAIN, PLAIN, refuse(403))
    findings = examine(f"{server.url}/{KEY}")
    assert troubles(findings) == {"range read": State.FAILED}
    assert ("answer", "403 Forbidden") in findings["range read"].details


def test_a_read_that_is_redirected_to_where_nothing_listens(server: FaultServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    server.script(KEY, PLAIN, PLAIN, redirect(f"http://127.0.0.1:{port}/elsewhere?Signature=not-to-be-seen"))
    findings = examine(f"{server.url}/{KEY}")
    assert findings["range read"].state is State.FAILED
    assert "the host that the store redirects to" in findings["range read"].mend
    assert "not-to-be-seen" not in repr(findings)


def test_bodies_that_do_not_come(server: FaultServer) -> None:
    server.script(KEY, PLAIN, PLAIN, PLAIN, PLAIN)
    server.always(KEY, stall(0))
    finding = examine(f"{server.url}/{KEY}", idle_timeout_s=0.2, max_attempts=1)["throughput"]
    assert finding.state is State.FAILED
    assert "0 of 1048576 bytes came" in finding.what


def test_answers_that_hold_less_than_was_asked_for(server: FaultServer) -> None:
    server.script(KEY, PLAIN, PLAIN, Script(most_bytes=100))
    finding = examine(f"{server.url}/{KEY}")["range read"]
    assert (finding.state, finding.what) == (State.WARNING, f"{server.url} sends less than is asked for.")


def test_the_error_of_a_load_gets_its_reason() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    error = StoreUnavailable("It cannot be read.", "No answer came in time.", "Check it.")
    plan = Plan(uri=f"http://127.0.0.1:{port}/{KEY}", read_settings=lambda: SETTINGS, measures=False)
    advice = advise(error, plan, World())
    assert advice.finding is not None
    assert advice.lines()[0].startswith(f"network: Nothing can be reached at 127.0.0.1 on port {port}.")
    assert advice.lines()[1] == f"Run headrace doctor http://127.0.0.1:{port}/{KEY} for all checks."


# -- TLS


@pytest.fixture
def tls_server(certificates: Path) -> Iterator[FaultServer]:
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command to make certificates")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    with FaultServer(context) as server:
        server.put(KEY, PAYLOAD)
        yield server
        assert server.wait_until_idle()


def test_an_authority_that_is_trusted(tls_server: FaultServer, certificates: Path) -> None:
    findings = examine(f"{tls_server.url}/{KEY}", settings=replace(SETTINGS, ca_file=str(certificates / "ca.pem")))
    # Good for two days: that is soon.
    assert troubles(findings) == {"tls": State.WARNING}
    assert "ends in" in findings["tls"].what
    details = dict(findings["tls"].details)
    assert details["issuer"] == "ca"
    assert details["protocol"].startswith("TLSv1.")
    assert details["trusted"] == str(certificates / "ca.pem")


def test_an_authority_that_is_not_known_is_named_all_the_same(tls_server: FaultServer, certificates: Path) -> None:
    findings = examine(
        f"{tls_server.url}/{KEY}", settings=replace(SETTINGS, ca_file=str(certificates / "another-ca.pem"))
    )
    assert troubles(findings) == {"tls": State.FAILED}
    finding = findings["tls"]
    assert finding.what == f"The certificate of 127.0.0.1:{tls_server.port} is not trusted."
    assert "SSL_CERT_FILE" in finding.mend
    assert dict(finding.details)["issuer"] == "ca"
    assert findings["list"].what == "Not tried, because tls failed."


def test_a_certificate_of_another_name(tls_server: FaultServer, certificates: Path) -> None:
    settings = replace(SETTINGS, ca_file=str(certificates / "ca.pem"))
    finding = examine(f"https://localhost:{tls_server.port}/{KEY}", settings=settings)["tls"]
    assert finding.state is State.FAILED
    assert "Hostname mismatch" in finding.why
    assert finding.mend.startswith("Use the name that is in the certificate")
    assert dict(finding.details)["names"] == "127.0.0.1"


def test_certificates_that_are_not_checked(tls_server: FaultServer) -> None:
    finding = examine(f"{tls_server.url}/{KEY}", settings=replace(SETTINGS, verify_tls=False))["tls"]
    assert (finding.state, "HEADRACE_VERIFY_TLS" in finding.why) == (State.WARNING, True)


def test_a_ca_file_that_is_not_there(tls_server: FaultServer, tmp_path: Path) -> None:
    findings = examine(f"{tls_server.url}/{KEY}", settings=replace(SETTINGS, ca_file=str(tmp_path / "absent.pem")))
    assert findings["settings"].state is State.FAILED
    assert "absent.pem" in findings["settings"].what


def test_plain_http_where_tls_is_expected() -> None:
    def answer(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        findings = examine(f"https://127.0.0.1:{listener.getsockname()[1]}/{KEY}")
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(20)
    assert troubles(findings) == {"tls": State.FAILED}
    assert "does not speak TLS" in findings["tls"].why
    assert "http://" in findings["tls"].mend


# -- the same for S3, which signs


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> str:
    """A key pair in the environment; the secret is returned."""
    secret = "the-secret-key-of-this-test"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAOFTHISTESTALONE0")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    return secret


@pytest.mark.parametrize("ahead_s", [-700, 700])
def test_a_clock_that_is_off_fails_where_requests_are_signed(
    server: FaultServer, keys: str, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    server.always("", Script(status=403, headers={"Date": formatdate(time.time() + ahead_s, usegmt=True)}))
    findings = examine("s3://bucket/m", wanted=("clock", "credentials"))
    assert troubles(findings) == {"clock": State.FAILED}
    assert "Signatures and tokens hold the time" in findings["clock"].why
    assert "Set this machine's clock" in findings["clock"].mend
    assert keys not in repr(findings)
    assert all("authorization" not in sent.headers for sent in server.log), (
        "the front page is asked without credentials"
    )


def test_a_private_authority_has_the_variable_of_the_sdk(
    tls_server: FaultServer, certificates: Path, keys: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", tls_server.url)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificates / "another-ca.pem"))
    finding = examine("s3://bucket/m", wanted=("tls",))["tls"]
    assert finding.state is State.FAILED
    assert "AWS_CA_BUNDLE" in finding.mend
    assert dict(finding.details)["trusted"] == str(certificates / "another-ca.pem")
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificates / "ca.pem"))
    assert examine("s3://bucket/m", wanted=("tls",))["tls"].state is State.WARNING, "it ends in a day"


def test_a_proxy_that_lets_nobody_through(certificates: Path) -> None:
    with ProxyServer(refuse_with=403) as proxy:
        transport = replace(SETTINGS.transport, https_proxy=proxy.url)
        findings = examine("https://models.invalid/m", settings=replace(SETTINGS, transport=transport))
    assert troubles(findings) == {"tls": State.FAILED}
    assert findings["tls"].what == "The proxy lets nobody through to models.invalid."
    assert "answered 403" in findings["tls"].why
    assert "NO_PROXY" in findings["tls"].mend


def test_a_proxy_that_lets_requests_through(tls_server: FaultServer, certificates: Path) -> None:
    with ProxyServer() as proxy:
        transport = replace(SETTINGS.transport, https_proxy=proxy.url)
        settings = replace(SETTINGS, transport=transport, ca_file=str(certificates / "ca.pem"))
        findings = examine(f"{tls_server.url}/{KEY}", settings=settings)
        asked = list(proxy.asked)
    assert troubles(findings) == {"tls": State.WARNING}
    assert findings["network"].what.startswith("The proxy 127.0.0.1:")
    assert asked[0].startswith("CONNECT 127.0.0.1:")


# -- the hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub(monkeypatch, tmp_path / "hf") as server:
        server.publish("org/name", {"config.json": b"{}", "model.safetensors": PAYLOAD})
        yield server


def test_a_model_of_the_hub(hub: FakeHub) -> None:
    findings = examine("org/name")
    assert troubles(findings) == {}
    assert findings["name"].what == "The repository org/name of the hub at main."
    assert findings["list"].what == "1 file, 3 MB of weights would be loaded."
    assert findings["range read"].state is State.OK
    assert "Files of one commit never change" in findings["conditional read"].what
    assert "Signature" not in repr(findings)


def test_a_repository_that_does_not_exist(hub: FakeHub) -> None:
    findings = examine("hf://org/nothing")
    assert troubles(findings) == {"list": State.FAILED}
    assert "is not a repository that this user can see" in findings["list"].what


def test_a_hub_that_is_gone_and_a_snapshot_that_is_there(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_cache(tmp_path / "hf", "org/name", "a" * 40, {"config.json": b"{}", "model.safetensors": PAYLOAD})
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    findings = examine("hf://org/name")
    assert troubles(findings) == {"network": State.WARNING}
    assert "snapshot in the hub's cache" in findings["network"].why
    assert findings["list"].state is State.OK
    assert dict(findings["list"].details)["read from"].startswith("the hub's cache: ")
