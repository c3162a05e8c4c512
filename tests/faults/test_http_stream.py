"""Checkpoints streamed from a web server: whole and identical over TLS and bad connections, or one clear error; nothing of the weights on the disk."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
from headrace.errors import ObjectChanged, StoreUnavailable, WrongRange
from headrace.settings import Settings
from tests.engines.models import save_model
from tests.support.checkpoints import assert_equal, make_files, make_tensors
from tests.support.fault_server import PLAIN, FaultServer, Script, cut, redirect, refuse

TENSORS = make_tensors()
FILES = make_files(TENSORS, folder="more/")
WEIGHTS = [name for name in FILES if name.endswith(".safetensors")]
DATED = {"ETag": None, "Last-Modified": "Wed, 01 Nov 2023 10:00:00 GMT"}


@pytest.fixture
def tls_server(certificates: Path) -> Iterator[FaultServer]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    with FaultServer(context) as server:
        put(server)
        yield server
        assert server.wait_until_idle()


def put(server: FaultServer, files: dict[str, bytes] | None = None) -> None:
    for name, content in (files or FILES).items():
        server.put(f"models/m 1/{name}", content)


def settings_for(folder: Path, environment: dict[str, str] | None = None, **given: Any) -> Settings:
    quick = {"backoff_first_s": 0.005, "backoff_most_s": 0.02, "idle_timeout_s": 5.0, "max_attempts": 3}
    quick["hedge_after_s"] = 0  # Bytes and requests are counted.
    return Settings.from_environment(
        environment or {},
        cache_dir=folder / "cache",
        progress=False,
        read_bytes=400_000,
        num_connections=3,
        **quick,
        **given,
    )


def bytes_of_weights(server: FaultServer) -> int:
    return sum(sent.bytes_sent for sent in server.log if sent.key.endswith(".safetensors"))


@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"])
def test_a_folder_is_streamed_over_tls_of_a_private_authority(
    tls_server: FaultServer, certificates: Path, tmp_path: Path, variable: str
) -> None:
    settings = settings_for(tmp_path, {variable: str(certificates / "ca.pem"), "HEADRACE_HTTP_TOKEN": "t0ken"})
    uri = f"{tls_server.url}/models/m%201/"
    with headrace.open(uri, settings=settings) as checkpoint:
        assert checkpoint.files == tuple(WEIGHTS)
        assert checkpoint.config == {"model_type": "llama"}
        folder = checkpoint.side_files.folder()
    assert {path.name for path in folder.iterdir() if not path.name.startswith(".")} == set(FILES) - set(WEIGHTS)
    num_asked, before = len(tls_server.log), bytes_of_weights(tls_server)

    assert_equal(headrace.load_state_dict(uri, settings=settings), TENSORS)
    payload = sum(tensor.nbytes for tensor in TENSORS.values())
    assert bytes_of_weights(tls_server) - before <= payload + 2 * (256 << 10) + 10_000, (
        "each byte once, and the headers"
    )
    assert {sent.headers.get("authorization") for sent in tls_server.log} == {"Bearer t0ken"}
    assert all(
        sent.headers["if-match"] == tls_server.etag(sent.key)
        for sent in tls_server.log[num_asked:]
        if sent.stop - sent.start > 1
    )
    kept = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 10_000]
    assert kept == [], "no weights are kept"


def test_an_authority_that_is_not_known_is_an_error_that_says_how_to_mend_it(
    tls_server: FaultServer, tmp_path: Path
) -> None:
    with pytest.raises(StoreUnavailable, match=r"The certificate of 127\.0\.0\.1:\d+ is not trusted.*SSL_CERT_FILE"):
        headrace.load_state_dict(f"{tls_server.url}/models/m%201", settings=settings_for(tmp_path))
    assert tls_server.log == []
    settings = settings_for(tmp_path, verify_tls=False)
    assert_equal(headrace.load_state_dict(f"{tls_server.url}/models/m%201", settings=settings), TENSORS)


def test_a_bad_connection_changes_nothing(fault_server: FaultServer, tmp_path: Path) -> None:
    put(fault_server)
    for name in WEIGHTS:  # The first request of each is for its first byte.
        fault_server.script(
            f"models/m 1/{name}",
            PLAIN,
            cut(1000),
            refuse(503),
            Script(most_bytes=777),
            Script(shift=1),
            Script(chunk_bytes=999),
        )
    fault_server.script("models/m 1/config.json", refuse(500), cut(3))
    found = headrace.load_state_dict(f"{fault_server.url}/models/m%201", settings=settings_for(tmp_path))
    assert_equal(found, TENSORS)


@pytest.mark.parametrize("headers", [{}, DATED], ids=["etag", "last-modified"])
def test_a_file_that_is_replaced_during_the_load_ends_it(
    fault_server: FaultServer, tmp_path: Path, headers: dict[str, Any]
) -> None:
    """Also where the server heeds no condition: what comes is compared with what was pinned."""
    put(fault_server)
    key = f"models/m 1/{WEIGHTS[0]}"
    other = make_files({name: tensor + 1 for name, tensor in TENSORS.items()}, folder="more/")[WEIGHTS[0]]

    changed = headers | ({"Last-Modified": "Wed, 01 Nov 2023 10:00:01 GMT"} if headers else {})

    def replace(server: FaultServer) -> None:
        server.put(key, other)
        server.always(key, Script(headers=changed))

    fault_server.script(key, *[Script(headers=headers)] * 4, Script(headers=changed, then=replace))
    with pytest.raises(ObjectChanged) as caught:
        headrace.load_state_dict(f"{fault_server.url}/models/m%201", settings=settings_for(tmp_path))
    assert WEIGHTS[0] in caught.value.what


def test_a_server_without_ranges_is_an_error_before_any_weight(fault_server: FaultServer, tmp_path: Path) -> None:
    put(fault_server)
    for name in FILES:
        fault_server.always(f"models/m 1/{name}", Script(ignores_range=True))
    with pytest.raises(WrongRange, match="does not serve byte ranges"):
        headrace.load_state_dict(f"{fault_server.url}/models/m%201", settings=settings_for(tmp_path))


def test_a_redirect_is_followed_once_for_each_file_and_no_token_goes_along(
    fault_server: FaultServer, tmp_path: Path
) -> None:
    with FaultServer() as cdn:
        put(fault_server)
        for name in WEIGHTS:
            cdn.put(f"bucket/{name}", FILES[name])
            location = f"{cdn.url}/bucket/{name}?X-Amz-Date=29990101T000000Z&X-Amz-Expires=600&X-Amz-Signature=s"
            fault_server.always(f"models/m 1/{name}", redirect(location))
        settings = settings_for(tmp_path, http_token="t0ken")
        assert_equal(headrace.load_state_dict(f"{fault_server.url}/models/m%201", settings=settings), TENSORS)
        for name in WEIGHTS:
            asked = [sent for sent in fault_server.log if sent.key.endswith(name)]
            assert len(asked) == 2, "for the first byte, and for the header"
        assert len(cdn.log) > 10
        assert not [sent for sent in cdn.log if "authorization" in sent.headers]
        assert cdn.wait_until_idle()


def test_a_model_is_loaded_as_from_a_folder(fault_server: FaultServer, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = save_model("llama", tmp_path / "model")
    put(fault_server, {path.name: path.read_bytes() for path in folder.iterdir()})
    uri = f"{fault_server.url}/models/m%201"
    model = headrace.load_model(uri, settings=settings_for(tmp_path))
    reference = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert json.loads((folder / "config.json").read_text())["model_type"] == model.config.model_type
    assert list(model.state_dict()) == list(reference)
    assert all(torch.equal(value, reference[name]) for name, value in model.state_dict().items())
