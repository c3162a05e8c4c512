"""nginx on loopback that answers as S3 does for one bucket of files: lists, heads and ranges with ETags and If-Match, plain or over TLS; signatures are not checked.

It serves files with sendfile and costs little, so that client and server can share a machine without the server being what is measured. A `Link` gives each connection
a most of bytes per second and each request a delay, as a store far away has; handshakes are not delayed, nor does the window of a connection grow slowly. For benchmarks only.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from xml.sax.saxutils import escape

from delay_server import DelayServer

_CONFIGURATION = """\
daemon off;
user {user};
worker_processes {workers};
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{ worker_connections 1024; }}
http {{
    log_format bytes "$body_bytes_sent";
    access_log {folder}/access.log bytes;
    sendfile on;
    sendfile_max_chunk 2m;
    tcp_nopush on;
    keepalive_requests 1000000;
    types {{ }}
    default_type application/octet-stream;
    client_body_temp_path {folder}/tmp;
    proxy_temp_path {folder}/tmp;
    fastcgi_temp_path {folder}/tmp;
    uwsgi_temp_path {folder}/tmp;
    scgi_temp_path {folder}/tmp;
    map $args $list {{ default ""; ~list-type=2 /listing.xml; }}
    upstream delay {{ server unix:{folder}/delay; keepalive 256; }}
    server {{
        listen 127.0.0.1:{port}{ssl};
        {certificate}
        {link}
        if ($list) {{ rewrite ^ $list last; }}
        location = /listing.xml {{ internal; types {{ }} default_type application/xml; root {folder}; }}
        location /{bucket}/ {{ alias {files}/; }}
    }}
}}
"""
_CERTIFICATE = """\
ssl_certificate {folder}/server.pem;
        ssl_certificate_key {folder}/server.key;
        ssl_protocols TLSv1.2 TLSv1.3;
        ssl_session_cache shared:tls:1m;"""
# What is sent at a time is followed by a pause as long as it should have taken: over TLS nginx would otherwise send less than a millisecond's worth, and never pause.
_LINK = """\
limit_rate {bytes_per_s};
        output_buffers 1 1m;
        auth_request /delay;
        location = /delay {{ internal; auth_request off; proxy_pass http://delay; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_pass_request_body off; proxy_set_header Content-Length ""; }}"""


@dataclass(frozen=True, slots=True)
class Link:
    """What each connection gets: at most so many bytes per second, and the first byte of each answer so late."""

    bytes_per_s: int = 100_000_000
    delay_s: float = 0.02


class NginxServer:
    """Serves the files of ``folder`` as ``s3://BUCKET/PREFIX/…`` while the context lasts; ``endpoint`` is for path-style requests.

    With ``tls`` the certificate is made here, by openssl, and ``ca_file`` is to be trusted by clients. Raises `RuntimeError` where nginx is not installed or does not start.
    """

    def __init__(
        self,
        folder: Path,
        *,
        bucket: str,
        prefix: str,
        tls: bool = False,
        workers: int = 2,
        link: Link | None = None,
    ) -> None:
        self._link = link
        self._ends = ExitStack()
        self._files = folder.resolve()
        self._bucket, self._prefix, self._tls, self._workers = bucket, prefix, tls, workers
        self.port = _free_port()
        self.endpoint = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"

    def __enter__(self) -> NginxServer:
        program = find_nginx()
        if program is None:
            raise RuntimeError("nginx is not installed (Debian: apt-get install nginx-light)")
        self._folder = Path(tempfile.mkdtemp(prefix="headrace-nginx-"))
        self._folder.chmod(0o755)
        (self._folder / "tmp").mkdir()
        root = self._folder / "bucket"
        (root / self._prefix).parent.mkdir(parents=True)
        (root / self._prefix).symlink_to(self._files)
        self._write_listing()
        if self._tls:
            self._make_certificate()
        text = _CONFIGURATION.format(
            user=_user(),
            workers=self._workers,
            folder=self._folder,
            port=self.port,
            ssl=" ssl" if self._tls else "",
            certificate=_CERTIFICATE.format(folder=self._folder) if self._tls else "",
            link="" if self._link is None else _LINK.format(bytes_per_s=self._link.bytes_per_s),
            bucket=self._bucket,
            files=root,
        )
        (self._folder / "nginx.conf").write_text(text)
        if self._link is not None:
            self._ends.enter_context(DelayServer(self._folder / "delay", self._link.delay_s))
        command = [program, "-p", str(self._folder), "-c", str(self._folder / "nginx.conf")]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
        deadline = time.monotonic() + 10
        while self._process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return self
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        self._process.terminate()
        self._ends.close()
        raise RuntimeError(f"nginx did not start: {self._process.communicate()[1].decode()}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(10)
        self._ends.close()
        shutil.rmtree(self._folder)

    @property
    def ca_file(self) -> Path:
        """The certificate of the CA, to be trusted."""
        return self._folder / "ca.pem"

    def environment(self) -> dict[str, str]:
        """Return the variables that point clients here; any key will do."""
        found = {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "any",
            "AWS_SECRET_ACCESS_KEY": "any",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        return found | ({"AWS_CA_BUNDLE": str(self.ca_file)} if self._tls else {})

    def bytes_sent(self) -> int:
        """Return how many bytes of bodies it has sent so far, for requests that are over."""
        path = self._folder / "access.log"
        return sum(int(line) for line in path.read_text().split()) if path.exists() else 0

    def cpu_s(self) -> float:
        """Return the CPU seconds of its workers so far, user and system."""
        return sum(_cpu_s(int(child)) for child in _children(self._process.pid))

    def _write_listing(self) -> None:
        """Write what a list request is answered: every file with the ETag that nginx gives it, its time and size in hexadecimal."""
        items = []
        for path in sorted(self._files.rglob("*")):
            if path.is_file():
                facts = path.stat()
                key = f"{self._prefix}/{path.relative_to(self._files)}"
                when = datetime.fromtimestamp(int(facts.st_mtime), UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
                items.append(
                    f"<Contents><Key>{escape(key)}</Key><LastModified>{when}</LastModified>"
                    f"<ETag>&quot;{int(facts.st_mtime):x}-{facts.st_size:x}&quot;</ETag><Size>{facts.st_size}</Size></Contents>"
                )
        (self._folder / "listing.xml").write_text(
            '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{self._bucket}</Name><Prefix>{self._prefix}/</Prefix><KeyCount>{len(items)}</KeyCount><MaxKeys>1000</MaxKeys>"
            f"<IsTruncated>false</IsTruncated>{''.join(items)}</ListBucketResult>"
        )

    def _make_certificate(self) -> None:
        """Make a CA, and a certificate that it signs: some clients refuse a server whose certificate is its own CA."""
        new = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
        names = [
            "-addext",
            "subjectAltName=IP:127.0.0.1,DNS:localhost",
            "-addext",
            "basicConstraints=critical,CA:FALSE",
        ]
        signer = ["-CA", "ca.pem", "-CAkey", "ca.key"]
        for command in (
            [*new, "-subj", "/CN=benchmark CA", "-keyout", "ca.key", "-out", "ca.pem"],
            [*new, "-subj", "/CN=127.0.0.1", *names, *signer, "-keyout", "server.key", "-out", "server.pem"],
        ):
            subprocess.run(command, check=True, capture_output=True, cwd=self._folder)


def find_nginx() -> str | None:
    """Return the path of nginx's program, None where it is not installed."""
    return shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _user() -> str:
    import pwd

    return pwd.getpwuid(os.getuid()).pw_name


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def _cpu_s(pid: int) -> float:
    text = Path(f"/proc/{pid}/stat").read_text()
    fields = text[text.rindex(")") + 2 :].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
