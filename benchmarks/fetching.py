"""What fetches a checkpoint from S3 in `benchmarks/readers.py`: Headrace with threads and with reader processes, and its peers. Each runs in a process of its own.

A subject is a function that imports what it needs and returns the load, which returns what it loaded as tensors by name. Those that fetch objects and know no tensors (awscrt's S3
client, obstore) fetch whole files into one memory file or one buffer for each; tensors are views of that, made after the clock has stopped, so that all are checked alike.
Connections come from ``BENCH_CONNECTIONS``; where the server is, and whom to trust, from the AWS variables.
"""

from __future__ import annotations

import json
import mmap
import os
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from stream import BUCKET, PREFIX

URI = f"s3://{BUCKET}/{PREFIX}"
PART_BYTES = 16 << 20
"""What is asked for at a time, as Headrace does."""

Load = Callable[[], Any]
ToTensors = Callable[[Any], dict[str, Any]]


def headrace_by(readers: int | str) -> tuple[Load, ToTensors]:
    """Headrace, by threads (0), so many reader processes, or as it chooses."""
    import headrace
    import headrace.storage.s3

    settings = headrace.Settings.from_environment(progress=False, readers=readers)
    load_state_dict = headrace.load_state_dict
    return lambda: load_state_dict(URI, settings=settings), dict


def runai() -> tuple[Load, ToTensors]:
    """Run:ai Model Streamer, as its documentation has it, tensors kept."""
    import torch  # noqa: F401
    from runai_model_streamer import SafetensorsStreamer, list_safetensors

    def load() -> dict[str, Any]:
        with SafetensorsStreamer() as streamer:
            streamer.stream_files(sorted(list_safetensors(URI)))
            return dict(streamer.get_tensors())

    return load, dict


def awscrt() -> tuple[Load, ToTensors]:
    """The S3 client of AWS's common runtime, which writes each object into a file in memory, all objects at once."""
    from awscrt import auth, http, io, s3

    secure, host = _endpoint()
    group = io.EventLoopGroup()
    bootstrap = io.ClientBootstrap(group, io.DefaultHostResolver(group))
    trust = None
    if secure:
        context = io.TlsContextOptions()
        context.override_default_trust_store_from_path(None, os.environ["AWS_CA_BUNDLE"])
        trust = io.ClientTlsContext(context).new_connection_options()
    keys = auth.AwsCredentialsProvider.new_static("any", "any")
    connections = _num_connections()

    def load() -> list[int]:
        client = s3.S3Client(
            bootstrap=bootstrap,
            region="us-east-1",
            tls_mode=s3.S3RequestTlsMode.ENABLED if secure else s3.S3RequestTlsMode.DISABLED,
            tls_connection_options=trust,
            signing_config=s3.create_default_s3_signing_config(region="us-east-1", credential_provider=keys),
            part_size=PART_BYTES,
            throughput_target_gbps=100.0,
            max_active_connections_override=connections,
        )
        files, waited_for = [], []
        for key in _keys():
            files.append(os.memfd_create("bench", os.MFD_CLOEXEC))
            request = http.HttpRequest("GET", f"/{BUCKET}/{key}", http.HttpHeaders([("Host", host)]))
            path = f"/proc/self/fd/{files[-1]}"
            asked = client.make_request(type=s3.S3RequestType.GET_OBJECT, request=request, recv_filepath=path)
            waited_for.append(asked.finished_future)
        for future in waited_for:
            future.result(300)
        return files

    return load, lambda files: _tensors([mmap.mmap(file, 0) for file in files])


def obstore() -> tuple[Load, ToTensors]:
    """obstore (object_store in Rust): ranges, one a thread at a time, each copied to its place in a buffer."""
    import numpy as np
    from obstore import get_range, head
    from obstore.store import S3Store

    secure, _ = _endpoint()
    trust = {"root_certificate": Path(os.environ["AWS_CA_BUNDLE"]).read_text()} if secure else {"allow_http": True}
    store = S3Store(
        BUCKET,
        endpoint=os.environ["AWS_ENDPOINT_URL"],
        access_key_id="any",
        secret_access_key="any",
        region="us-east-1",
        client_options=trust,
    )

    def fetch(key: str, into: Any, start: int) -> None:
        stop = min(start + PART_BYTES, len(into))
        into[start:stop] = np.frombuffer(get_range(store, key, start=start, end=stop), dtype=np.uint8)

    def load() -> list[Any]:
        buffers = {key: np.empty(head(store, key)["size"], dtype=np.uint8) for key in _keys()}
        with ThreadPoolExecutor(_num_connections()) as threads:
            parts = [(key, into, start) for key, into in buffers.items() for start in range(0, len(into), PART_BYTES)]
            for future in [threads.submit(fetch, *part) for part in parts]:
                future.result()
        return list(buffers.values())

    return load, _tensors


SUBJECTS: dict[str, tuple[str, Callable[[], tuple[Load, ToTensors]]]] = {
    "threads": ("Headrace, threads", partial(headrace_by, 0)),
    "processes-1": ("Headrace, 1 reader process", partial(headrace_by, 1)),
    "processes-2": ("Headrace, 2 reader processes", partial(headrace_by, 2)),
    "processes-4": ("Headrace, 4 reader processes", partial(headrace_by, 4)),
    "processes-8": ("Headrace, 8 reader processes", partial(headrace_by, 8)),
    "auto": ("Headrace as it chooses", partial(headrace_by, "auto")),
    "awscrt": ("awscrt's S3 client, files in memory", awscrt),
    "obstore": ("obstore, ranges copied to a buffer", obstore),
    "runai": ("Run:ai Model Streamer", runai),
}
"""Name, what it is for people, and what makes it."""


def _num_connections() -> int:
    return int(os.environ["BENCH_CONNECTIONS"])


def _endpoint() -> tuple[bool, str]:
    scheme, _, host = os.environ["AWS_ENDPOINT_URL"].partition("://")
    return scheme == "https", host


def _keys() -> list[str]:
    """Return the keys of the checkpoint's files, by a request of the store."""
    import ssl
    from urllib.request import urlopen

    context = ssl.create_default_context(cafile=os.environ["AWS_CA_BUNDLE"]) if _endpoint()[0] else None
    url = f"{os.environ['AWS_ENDPOINT_URL']}/{BUCKET}/?list-type=2&prefix={PREFIX}/"
    with urlopen(url, context=context) as answer:
        listing = ElementTree.fromstring(answer.read())
    found = [element.text or "" for element in listing.iter() if element.tag.endswith("}Key")]
    return sorted(key for key in found if key.endswith(".safetensors"))


def _tensors(files: list[Any]) -> dict[str, Any]:
    """Return the tensors of whole safetensors files in memory, as flat bytes."""
    import torch

    tensors = {}
    for file in files:
        whole = torch.frombuffer(file, dtype=torch.uint8)
        header_bytes = int.from_bytes(bytes(file[:8]), "little")
        header = json.loads(bytes(file[8 : 8 + header_bytes]))
        for name, entry in header.items():
            if name != "__metadata__":
                start, stop = entry["data_offsets"]
                tensors[name] = whole[8 + header_bytes + start : 8 + header_bytes + stop]
    return tensors
