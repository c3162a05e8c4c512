"""S3 stores for tests that script the server."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import botocore.loaders
import botocore.session
import pytest

from headrace.settings import TransportSettings
from headrace.storage import parse_uri
from headrace.storage.s3 import S3Store
from headrace.storage.s3_access import S3Options

ACCESS_KEY = "AKIDEXAMPLE"
SECRET_KEY = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"


@pytest.fixture(scope="session")
def loader() -> Any:
    """The SDK's description of S3, which takes it a tenth of a second to read, once for all sessions."""
    return botocore.loaders.create_loader()


def make_session(loader: Any) -> Any:
    session = botocore.session.Session()
    session.register_component("data_loader", loader)
    return session


@pytest.fixture
def open_s3(monkeypatch: pytest.MonkeyPatch, loader: Any) -> Iterator[Callable[..., S3Store]]:
    """Open ``s3://`` uris with a key pair in the environment, at the given endpoint; all are closed in the end."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    with contextlib.ExitStack() as stack:

        def open_one(
            uri: str = "s3://bucket/m",
            *,
            endpoint: str | None = None,
            clock: Callable[[], float] | None = None,
            **options: object,
        ) -> S3Store:
            if endpoint is not None:
                monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
            transport = TransportSettings(max_attempts=1, connect_timeout_s=5, idle_timeout_s=5)
            options.setdefault("new_session", lambda: make_session(loader))
            more = {} if clock is None else {"clock": clock}
            store = S3Store(parse_uri(uri), transport=transport, options=S3Options(**options), **more)  # type: ignore[arg-type]
            stack.callback(store.close)
            return store

        yield open_one
