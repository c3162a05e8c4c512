"""A real emulator of Azure Blob Storage on loopback: Azurite, which the development environment installs from npm."""

from __future__ import annotations

import base64
import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import pytest

from headrace.cli.seaweed import _LAUNCHER

ACCOUNT = "headrace"
_START_TIMEOUT_S = 60.0
_MOST_STARTS = 3
_PROGRAM = Path("node_modules", "azurite", "dist", "src", "blob", "main.js")


class AzuriteServer:
    """The running server; a context manager. It keeps its blobs in memory, and ends with the process that started it."""

    def __init__(self, *arguments: str, scheme: str = "http") -> None:
        """``arguments`` go to the server as well."""
        self.key = base64.b64encode(secrets.token_bytes(64)).decode()
        self._arguments: Sequence[str] = arguments
        self._scheme = scheme
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._folder: Path | None = None
        self._port = 0

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def endpoint(self) -> str:
        """The URL of the only account."""
        return f"{self._scheme}://127.0.0.1:{self._port}/{ACCOUNT}"

    @property
    def connection_string(self) -> str:
        return f"AccountName={ACCOUNT};AccountKey={self.key};BlobEndpoint={self.endpoint};"

    def environment(self, credentials: str = "key") -> dict[str, str]:
        """Return the variables with which Headrace finds this server: by ``key``, ``sas``, ``connection string`` or none."""
        found = {"AZURE_STORAGE_ACCOUNT": ACCOUNT, "AZURE_STORAGE_ENDPOINT": self.endpoint}
        hosts = "127.0.0.1,localhost"
        found |= {"NO_PROXY": hosts, "no_proxy": hosts}
        if credentials == "connection string":
            return {"AZURE_STORAGE_CONNECTION_STRING": self.connection_string}
        if credentials == "sas":
            return found | {"AZURE_STORAGE_SAS_TOKEN": f"?{self.make_sas()}"}
        return found | {"AZURE_STORAGE_KEY": self.key} if credentials == "key" else found

    def make_sas(self, permissions: str = "rl", lasts: timedelta = timedelta(hours=1)) -> str:
        """Return a SAS for the account's containers and blobs."""
        from azure.storage.blob import AccountSasPermissions, ResourceTypes, generate_account_sas

        token: str = generate_account_sas(
            ACCOUNT,
            self.key,
            ResourceTypes(service=True, container=True, object=True),
            AccountSasPermissions.from_string(permissions),
            datetime.now(UTC) + lasts,
            start=datetime.now(UTC) - timedelta(days=1),
        )
        return token

    def make_client(self, **options: Any) -> Any:
        """Return the SDK's client of the account; the caller closes it."""
        from azure.storage.blob import BlobServiceClient

        credential = {"account_name": ACCOUNT, "account_key": self.key}
        return BlobServiceClient(self.endpoint, credential=credential, retry_total=0, **options)

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
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def _launch(self) -> None:
        node, program = find_program()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._folder = Path(tempfile.mkdtemp(prefix="headrace-azurite-"))
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (closed by stop)
        arguments = ["--blobHost", "127.0.0.1", "--blobPort", str(self._port), "--inMemoryPersistence"]
        arguments += ["--skipApiVersionCheck", "--disableTelemetry", "--silent", *self._arguments]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), node, str(program), *arguments],
            cwd=self._folder,
            env={**os.environ, "AZURITE_ACCOUNTS": f"{ACCOUNT}:{self.key}"},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), timeout=1):
                break
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._log.seek(0)
                raise OSError(f"Azurite does not run: {self._log.read().decode('utf-8', 'replace')}")
            time.sleep(0.05)


def find_program() -> tuple[str, Path]:
    """Return the paths of Node.js and of the server's program; skips the test where one of them is missing, and says which."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs Azurite, which needs Node.js (18 or newer), and there is no node on the PATH")
    program = Path(sys.prefix, "azurite", _PROGRAM)
    if not program.is_file():
        pytest.skip(
            f"needs Azurite, which is not there: {program}. Install it with: python tools/azurite.py {sys.prefix}"
        )
    return node, program
