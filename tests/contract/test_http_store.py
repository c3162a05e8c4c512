"""Web servers that are not ours: an object store behind signed addresses, and Python's own, which knows no ranges."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save

import headrace
from headrace.errors import AccessDenied, ObjectChanged, StorageError, WrongRange
from headrace.settings import Settings
from headrace.storage import open_store
from tests.support.checkpoints import assert_equal, make_tensors

TENSORS = make_tensors(3)


@contextlib.contextmanager
def file_server(folder: Path) -> Iterator[str]:
    """Run ``python -m http.server`` in ``folder``."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def sign(client: Any, bucket: str, key: str) -> str:
    url: str = client.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": key}, ExpiresIn=600)
    return url


def test_a_signed_address_is_streamed_and_stays_a_secret(
    s3_client: Any, bucket: str, s3_settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """It is good for GET alone, so that nothing may be asked by HEAD; its signature is in no message."""
    s3_client.put_object(Bucket=bucket, Key="m 1/model.safetensors", Body=save(TENSORS))
    url = sign(s3_client, bucket, "m 1/model.safetensors")
    signature = url.partition("?")[2]
    assert_equal(headrace.load_state_dict(url, settings=s3_settings), TENSORS)

    with headrace.open(url, settings=s3_settings) as checkpoint:
        s3_client.put_object(Bucket=bucket, Key="m 1/model.safetensors", Body=save(TENSORS | {"x": TENSORS["w0"] + 1}))
        with pytest.raises(ObjectChanged) as changed:
            headrace.load_state_dict(checkpoint, settings=s3_settings)
        said = [repr(checkpoint), checkpoint.uri, str(checkpoint.store), repr(changed.value), caplog.text]
    with pytest.raises(AccessDenied) as denied:
        headrace.load_state_dict(url.replace("Signature=", "Signature=0"), settings=s3_settings)
    said.append(repr(denied.value))
    assert not [text for text in said if signature in text or "Signature=" in text]


def test_a_server_without_ranges_is_recognised(tmp_path: Path, s3_settings: Settings) -> None:
    (tmp_path / "model.safetensors").write_bytes(save(TENSORS))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with file_server(tmp_path) as url:
        with pytest.raises(WrongRange, match="does not serve byte ranges") as caught:
            headrace.load_state_dict(url, settings=s3_settings)
        assert "python -m http.server" in caught.value.mend
        with contextlib.closing(open_store(url, settings=s3_settings)) as store:
            config = store.stat("config.json")
            assert config.version.startswith("modified ")
            assert store.read_object(config) == b'{"model_type": "llama"}'
            (tmp_path / "config.json").write_text('{"model_type": "longer"}')
            with pytest.raises(StorageError):
                store.read_object(config)
