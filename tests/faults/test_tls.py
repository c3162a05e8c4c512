"""Reads over TLS against a private CA that is made for the test."""

from __future__ import annotations

import random
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.errors import Cancelled, InvalidSetting, StoreUnavailable
from headrace.settings import TransportSettings
from headrace.storage import HttpRange, StoredObject
from headrace.transport import HttpReader, RangeRead, Surroundings, TlsContexts
from tests.support.fault_server import FaultServer, Script, cut, stall
from tests.support.stub_store import StubStore

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="needs the openssl command to make certificates"
)

KEY = "weights"
PAYLOAD = random.Random(5).randbytes(200_000)
QUICK = TransportSettings(backoff_first_s=0.002, backoff_most_s=0.01, idle_timeout_s=20, connect_timeout_s=5)


@pytest.fixture
def tls_server(certificates: Path) -> Iterator[FaultServer]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    with FaultServer(context) as server:
        server.put(KEY, PAYLOAD)
        yield server
        assert server.wait_until_idle()


def _read(reader: HttpReader, store: StubStore, start: int = 0, stop: int = len(PAYLOAD)) -> bytes:
    memory = bytearray(stop - start)
    reader.read(RangeRead(store.stat(KEY), start, stop), [memoryview(memory)[:9], memoryview(memory)[9:]])
    return bytes(memory)


def test_a_private_ca_is_trusted_by_its_file_and_the_connection_is_kept(
    tls_server: FaultServer, certificates: Path
) -> None:
    store = StubStore(tls_server, ca_file=str(certificates / "ca.pem"))
    reader = HttpReader(store, QUICK)
    tls_server.script(KEY, Script(), cut(50_000))
    assert _read(reader, store, 10, 60_000) == PAYLOAD[10:60_000]
    assert _read(reader, store) == PAYLOAD
    assert [sent.start for sent in tls_server.log] == [10, 0, 50_000]
    assert tls_server.num_connections == 2
    reader.close()


def test_another_ca_is_an_error_at_once_that_says_how_to_mend_it(tls_server: FaultServer, certificates: Path) -> None:
    store = StubStore(tls_server, ca_file=str(certificates / "another-ca.pem"))
    reader = HttpReader(store, QUICK)
    with pytest.raises(StoreUnavailable, match=r"The certificate of 127\.0\.0\.1:\d+ is not trusted\. .*AWS_CA_BUNDLE"):
        _read(reader, store)
    assert tls_server.num_connections == 1
    assert tls_server.log == []
    reader.close()


def test_verification_can_be_turned_off(tls_server: FaultServer) -> None:
    class Careless(StubStore):
        def describe_range(self, stored, start: int, stop: int) -> HttpRange:
            return replace(super().describe_range(stored, start, stop), verify_tls=False)

    store = Careless(tls_server)
    reader = HttpReader(store, QUICK)
    assert _read(reader, store) == PAYLOAD
    reader.close()


def test_a_ca_file_that_is_absent_or_holds_none_is_an_error_before_any_connection(
    tls_server: FaultServer, tmp_path: Path
) -> None:
    (tmp_path / "empty.pem").write_text("nothing\n")
    for name in ("absent.pem", "empty.pem"):
        store = StubStore(tls_server, ca_file=str(tmp_path / name))
        reader = HttpReader(store, QUICK)
        with pytest.raises(InvalidSetting, match=name):
            _read(reader, store)
    assert tls_server.num_connections == 0


def test_contexts_are_shared_by_what_they_trust(certificates: Path) -> None:
    contexts, ca_file = TlsContexts(), str(certificates / "ca.pem")
    assert contexts.get(ca_file, True) is contexts.get(ca_file, True)
    assert contexts.get(ca_file, False) is not contexts.get(ca_file, True)
    assert contexts.get(ca_file, True).verify_mode == ssl.CERT_REQUIRED
    assert contexts.get(ca_file, False).verify_mode == ssl.CERT_NONE


def test_cancel_wakes_a_blocked_tls_read_and_no_ciphertext_lands_in_memory(
    tls_server: FaultServer, certificates: Path
) -> None:
    store = StubStore(tls_server, ca_file=str(certificates / "ca.pem"))
    reader = HttpReader(store, replace(QUICK, idle_timeout_s=60))
    tls_server.script(KEY, stall(30_000))
    memory, errors = bytearray(len(PAYLOAD)), []

    def read() -> None:
        try:
            reader.read(RangeRead(store.stat(KEY), 0, len(PAYLOAD)), [memoryview(memory)])
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    deadline = time.monotonic() + 20
    while reader.counters.bytes_received < 30_000 and time.monotonic() < deadline:
        time.sleep(0.005)
    reader.cancel()
    thread.join(20)
    assert not thread.is_alive()
    assert [type(error) for error in errors] == [Cancelled]
    assert memory[:30_000] == PAYLOAD[:30_000]
    assert memory[30_000:] == bytes(len(PAYLOAD) - 30_000)
    reader.close()


def test_a_tls_read_that_is_cancelled_while_bytes_wait_takes_no_ciphertext_for_them(
    tls_server: FaultServer, certificates: Path
) -> None:
    store = StubStore(tls_server, ca_file=str(certificates / "ca.pem"))

    def cancel_from_another_thread(num_bytes: int) -> None:
        if not stoppers:
            time.sleep(0.2)  # Until the rest of the answer lies in the socket's buffer.
            stoppers.append(threading.Thread(target=reader.cancel))
            stoppers[0].start()
            stoppers[0].join(10)

    stoppers: list[threading.Thread] = []
    reader = HttpReader(store, QUICK, on_bytes=cancel_from_another_thread)
    memory = bytearray(len(PAYLOAD))
    with pytest.raises(Cancelled):
        reader.read(RangeRead(store.stat(KEY), 0, len(PAYLOAD)), [memoryview(memory)])
    filled = reader.counters.bytes_received
    assert memory[:filled] == PAYLOAD[:filled]
    assert memory[filled:] == bytes(len(PAYLOAD) - filled)
    reader.close()


def test_cancel_wakes_a_handshake_that_gets_no_answer(certificates: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:

        class Silent(StubStore):
            uri_of = staticmethod(lambda key: f"https://silent/{key}")
            endpoint = "https://silent"

            def __init__(self) -> None:
                pass

            def describe_range(self, stored, start: int, stop: int) -> HttpRange:
                port = silent.getsockname()[1]
                return HttpRange("https", "127.0.0.1", port, "/", (), start, stop, ca_file=str(certificates / "ca.pem"))

        connected = threading.Event()
        world = Surroundings()

        def connect(*given):
            sock = world.connect(*given)
            connected.set()
            return sock

        reader = HttpReader(Silent(), replace(QUICK, connect_timeout_s=60), replace(world, connect=connect))
        errors: list[BaseException] = []

        def read() -> None:
            try:
                reader.read(RangeRead(StoredObject(KEY, 10, "v"), 0, 10), [memoryview(bytearray(10))])
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=read)
        thread.start()
        assert connected.wait(20)
        time.sleep(0.05)
        reader.cancel()
        thread.join(20)
        assert not thread.is_alive()
        assert [type(error) for error in errors] == [Cancelled]
        reader.close()
