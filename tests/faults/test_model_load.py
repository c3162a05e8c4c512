"""A model loaded over a connection that misbehaves: the same parameters or one clear error, and nothing left behind."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

import headrace
from headrace.checkpoint import open_checkpoint
from headrace.errors import ObjectChanged, ReadFailed
from headrace.settings import Settings
from tests.engines.models import rewrite, save_model
from tests.support.fault_server import PLAIN, FaultServer, Script, cut, refuse, reset
from tests.support.stub_store import StubStore

KEY = "model.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model in one file that begins with a tensor which no Llama wants."""
    saved = save_model("llama", tmp_path_factory.mktemp("model"))
    rewrite(saved, lambda tensors: tensors.update({"model.rotary_emb.inv_freq": torch.ones(300_000)}))
    return saved


@pytest.fixture
def quick(tmp_path: Path) -> Settings:
    return Settings.from_environment(
        {},
        cache_dir=tmp_path / "cache",
        progress=False,
        read_bytes=100_000,
        num_connections=3,
        backoff_first_s=0.01,
        backoff_most_s=0.02,
        max_attempts=3,
        idle_timeout_s=1.0,
        hedge_after_s=0,  # Requests and retries are counted.
    )


def serve(server: FaultServer, folder: Path) -> StubStore:
    for path in folder.iterdir():
        server.put(path.name, path.read_bytes())
    return StubStore(server)


def load(store: StubStore, settings: Settings, **options: Any) -> Any:
    with open_checkpoint(store, settings=settings) as checkpoint:
        return headrace.load_model(checkpoint, settings=settings, **options)


def assert_same(model: Any, folder: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert list(model.state_dict()) == list(reference)
    assert all(torch.equal(value, reference[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    "scripts",
    [
        [cut(1000), PLAIN, cut(50_000), reset(10), refuse(503), Script(most_bytes=777), Script(ignores_range=True)],
        [refuse(429, retry_after="0"), Script(shift=-1), Script(chunk_bytes=1000), Script(hang_up=True)],
        [Script(stall_after=5000), cut(0), refuse(500), PLAIN, cut(99_999)],
    ],
)
def test_a_bad_connection_gives_the_same_model(
    scripts: list[Script], fault_server: FaultServer, folder: Path, quick: Settings
) -> None:
    store = serve(fault_server, folder)
    with open_checkpoint(store, settings=quick) as checkpoint:
        fault_server.script(KEY, *scripts)
        reports: list[headrace.LoadReport] = []
        model = headrace.load_model(checkpoint, settings=quick, on_report=reports.append)
    assert_same(model, folder)
    assert reports[0].num_retries >= 2 and reports[0].bytes_read >= reports[0].bytes_wanted


def test_unwanted_bytes_are_never_requested(fault_server: FaultServer, folder: Path, quick: Settings) -> None:
    """Seen on the server: the tensor that the class ignores is in no requested range, and every other byte is in exactly one."""
    with open_checkpoint(serve(fault_server, folder), settings=quick) as checkpoint:
        ignored = checkpoint.entries["model.rotary_emb.inv_freq"]
        before = len(fault_server.log)
        headrace.load_model(checkpoint, settings=quick)
        wanted = {(entry.start, entry.stop) for entry in checkpoint.entries.values() if entry != ignored}
    ranges = sorted((sent.start, sent.stop) for sent in fault_server.log[before:] if sent.key == KEY)
    assert all(stop <= ignored.start or start >= ignored.stop for start, stop in ranges)
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(ranges)), "no byte is asked for twice"
    assert sum(stop - start for start, stop in ranges) == sum(stop - start for start, stop in wanted)


def test_an_object_that_is_replaced_during_the_load_is_one_clear_error(
    fault_server: FaultServer, folder: Path, quick: Settings
) -> None:
    store = serve(fault_server, folder)
    changed = bytearray((folder / KEY).read_bytes())
    changed[-1] ^= 1
    with open_checkpoint(store, settings=quick) as checkpoint:
        fault_server.script(KEY, PLAIN, PLAIN, Script(then=lambda server: server.put(KEY, bytes(changed))))
        with pytest.raises(ObjectChanged) as caught:
            headrace.load_model(checkpoint, settings=quick)
    assert KEY in str(caught.value)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("headrace")]


def test_a_store_that_stays_broken_ends_the_load_with_what_was_tried(
    fault_server: FaultServer, folder: Path, quick: Settings
) -> None:
    store = serve(fault_server, folder)
    with open_checkpoint(store, settings=quick) as checkpoint:
        fault_server.always(KEY, cut(0))
        with pytest.raises(ReadFailed) as caught:
            headrace.load_model(checkpoint, settings=quick)
    text = str(caught.value)
    assert KEY in text and fault_server.url in text and "3" in text
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("headrace")]


STALLED = """
import json, sys, threading
import headrace
from headrace.checkpoint import open_checkpoint
from headrace.settings import Settings
from tests.support.stub_store import StubStore

class Server:  # what StubStore wants of the server that runs in the parent
    def __init__(self, url, etags, sizes):
        self.url, self.port, self._etags, self._sizes = url, int(url.rsplit(":", 1)[1]), etags, sizes
    def objects(self):
        return {key: bytes(size) for key, size in self._sizes.items()}
    def etag(self, key):
        return self._etags[key]

server = Server(*json.loads(sys.argv[1]))
settings = Settings.from_environment(progress=False, idle_timeout_s=60.0)
with open_checkpoint(StubStore(server), settings=settings) as checkpoint:
    threading.Timer(0, lambda: print("loading", flush=True)).start()
    headrace.load_state_dict(checkpoint, settings=settings)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_a_stalled_load_within_two_seconds(
    number: signal.Signals, fault_server: FaultServer, folder: Path
) -> None:
    serve(fault_server, folder)
    fault_server.script(KEY, PLAIN)  # the header
    fault_server.always(KEY, Script(stall_after=1000))
    sizes = {key: len(payload) for key, payload in fault_server.objects().items() if key == KEY}
    about = json.dumps([fault_server.url, {KEY: fault_server.etag(KEY)}, sizes])
    with subprocess.Popen(
        [sys.executable, "-c", STALLED, about], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "loading\n"
            deadline = time.monotonic() + 20
            while not any(sent.bytes_sent == 1000 for sent in fault_server.log):
                assert time.monotonic() < deadline
                time.sleep(0.02)
            children = psutil.Process(process.pid).children(recursive=True)
            start = time.monotonic()
            os.kill(process.pid, number)
            _, errors = process.communicate(timeout=20)
            assert time.monotonic() - start < 2
        finally:
            process.kill()
    assert process.returncode != 0
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" in errors
    assert not [child for child in children if child.is_running()]
