"""`headrace serve --tp 2` as people run it: two processes that answer like one, from an S3 server, and end together whatever ends one of them."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from safetensors import safe_open

from headrace.cli import serve as command
from headrace.cli.seaweed import SeaweedServer
from headrace.cli.serve import ServeOptions
from headrace.settings import Settings
from tests.engines.models import rewrite
from tests.engines.test_serving import make_model, make_tokenizer
from tests.support.packed_models import pack

pytestmark = pytest.mark.slow

PATIENCE_S = 120.0
END_S = 60.0
CONTEXT = 8192
SERVE = ["-m", "headrace", "serve"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *SERVE]


class Serving:
    """A server of two ranks in processes of its own, and what it prints."""

    def __init__(
        self, uri: str, folder: Path, *, start: list[str], environment: dict[str, str], options: list[str]
    ) -> None:
        folder.mkdir()
        self._printed = folder / "printed"
        arguments = [uri, "--tp", "2", "--port", "0", "--dtype", "float32", "--no-progress", "--served-model-name", "m"]
        with self._printed.open("w") as printed:
            self.process = subprocess.Popen(
                [sys.executable, *start, *arguments, "--cache-dir", str(folder / "cache"), *options],
                stdout=printed,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
            )

    @property
    def printed(self) -> str:
        return self._printed.read_text()

    @contextmanager
    def client(self) -> Iterator[httpx.Client]:
        """Yield a client of the server, which is ready."""
        self.wait_for(lambda: bool(re.search(r"listening on (\S+?),", self.printed)))
        found = re.search(r"listening on (\S+?),", self.printed)
        assert found is not None
        with httpx.Client(base_url=found[1], trust_env=False, timeout=60) as client:
            self.wait_for(lambda: client.get("/ready").status_code == 200)
            yield client

    def wait_for(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE_S
        while not condition():
            assert self.process.poll() is None and time.monotonic() < end, self.printed
            time.sleep(0.02)

    def family(self) -> list[psutil.Process]:
        """Return every process that this one has started."""
        return list(psutil.Process(self.process.pid).children(recursive=True))

    def other_rank(self) -> psutil.Process:
        (rank,) = [one for one in self.family() if "headrace.cli.follower" in " ".join(one.cmdline())]
        return rank

    def end(self) -> int:
        return self.process.wait(END_S)


@contextmanager
def serving(
    uri: str | Path,
    folder: Path,
    *,
    start: list[str] = SERVE,
    environment: dict[str, str] | None = None,
    options: Sequence[str] = (),
) -> Iterator[Serving]:
    """Run a server; when it has ended, no process of it is left."""
    server = Serving(str(uri), folder / "server", start=start, environment=environment or {}, options=list(options))
    family: list[psutil.Process] = []
    try:
        yield server
    finally:
        if server.process.poll() is None:
            family = server.family()
            server.process.kill()
        server.process.wait()
        for process in family:
            process.kill()


def gone(processes: list[psutil.Process]) -> bool:
    """Say whether all have ended, in time."""
    return not psutil.wait_procs(processes, timeout=END_S)[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place: Path = tmp_path_factory.mktemp("ranks") / "model"
    make_model(max_position_embeddings=CONTEXT).save_pretrained(place)
    make_tokenizer().save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def packed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("packed")
    for path in folder.iterdir():
        (place / path.name).write_bytes(path.read_bytes())
    return pack(place, "FP8, inputs per token")


@pytest.fixture(scope="module")
def server(
    folder: Path, seaweed: SeaweedServer, s3_client: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    bucket = f"ranks-{secrets.token_hex(6)}"
    s3_client.create_bucket(Bucket=bucket)
    for path in folder.iterdir():
        s3_client.put_object(Bucket=bucket, Key=f"m/{path.name}", Body=path.read_bytes())
    place = tmp_path_factory.mktemp("serving")
    with serving(f"s3://{bucket}/m", place, environment=seaweed.environment()) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Serving) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@contextmanager
def serving_alone(folder: Path, cache: Path) -> Iterator[httpx.Client]:
    """Yield a client of a server of one process."""
    settings = Settings.from_environment({}, progress=False, cache_dir=cache)
    options = ServeOptions(uri=str(folder), port=0, dtype="float32", served_model_name="m", settings=settings)
    server = command._make_server(options)
    thread = threading.Thread(target=server.run)
    thread.start()
    with ExitStack() as undo:
        undo.callback(thread.join, END_S)
        undo.callback(server.request_stop)
        end = time.monotonic() + PATIENCE_S
        while server.address is None:
            assert time.monotonic() < end
            time.sleep(0.02)
        client = httpx.Client(base_url=f"http://127.0.0.1:{server.address[1]}", trust_env=False, timeout=60)
        undo.enter_context(client)
        while client.get("/ready").status_code != 200:
            assert time.monotonic() < end
            time.sleep(0.05)
        yield client


@pytest.fixture(scope="module")
def alone(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with serving_alone(folder, tmp_path_factory.mktemp("cache")) as client:
        yield client


def complete(client: httpx.Client, **fields: Any) -> Any:
    body = {"model": "m", "prompt": "the sea", "max_tokens": 20, "temperature": 0, "ignore_eos": True, **fields}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def text_of(client: httpx.Client, **fields: Any) -> str:
    return str(complete(client, **fields)["choices"][0]["text"])


@contextmanager
def streaming(client: httpx.Client, **fields: Any) -> Iterator[Iterator[str]]:
    """Yield what a streamed answer consists of."""
    body = {"model": "m", "prompt": "the sea", "temperature": 0, "ignore_eos": True, "stream": True, **fields}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        yield (line.removeprefix("data: ") for line in answer.iter_lines() if line)


def test_two_ranks_answer_as_one_process_does(client: httpx.Client, alone: httpx.Client) -> None:
    for fields in ({}, {"logprobs": 2, "max_tokens": 4}, {"prompt": [7, 9, 11] * 120, "max_tokens": 5}):
        ours, theirs = complete(client, **fields), complete(alone, **fields)
        assert ours["choices"][0]["text"] == theirs["choices"][0]["text"]
        assert ours["usage"] == theirs["usage"]
    report = client.get("/ready").json()["report"]
    assert {"rank 0", "rank 1", "exchange"} <= set(report) and "from others" in report["rank 1"]


def test_the_metrics_have_a_row_for_each_rank(client: httpx.Client, folder: Path) -> None:
    text = client.get("/metrics").text
    rows = {name: float(value) for name, value in re.findall(r"(?m)^headrace_load_rank_(\S+) (\S+)$", text)}
    with safe_open(folder / "model.safetensors", "pt") as file:
        num_bytes = sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118
    read, received = ([rows[f'{name}_bytes{{rank="{rank}"}}'] for rank in "01"] for name in ("read", "received"))
    assert min(read) > 0 and sum(read) == num_bytes
    assert received == [num_bytes - own for own in read]
    seconds = [rows[f'seconds{{rank="{rank}",source="{source}"}}'] for rank in "01" for source in ("store", "ranks")]
    assert sum(seconds) > 0 and len(rows) == 8


@pytest.mark.parametrize("extra", [[], ["--model-loader-extra-config", '{"distributed": false}']])
def test_packed_layers_answer_as_in_one_process(packed: Path, tmp_path: Path, extra: list[str]) -> None:
    """With both ways to read: each byte once for all ranks, and each rank its own slices."""
    with serving(packed, tmp_path, options=extra) as server, server.client() as ours:
        with serving_alone(packed, tmp_path / "cache") as theirs:
            for fields in ({}, {"prompt": [7, 9, 11] * 120, "max_tokens": 5}):
                assert text_of(ours, **fields) == text_of(theirs, **fields)
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0


def test_a_streamed_answer_and_a_stop_string(client: httpx.Client) -> None:
    whole = text_of(client)
    with streaming(client, max_tokens=20) as lines:
        *pieces, end = lines
    assert end == "[DONE]"
    assert "".join(json.loads(piece)["choices"][0]["text"] for piece in pieces) == whole
    stop = whole[7:9]
    assert text_of(client, stop=stop) == whole[: whole.index(stop)]


def test_a_seed_gives_the_same_again_and_no_seed_does_not(client: httpx.Client) -> None:
    seeded = [complete(client, temperature=1, seed=5, n=2)["choices"] for _ in range(2)]
    assert seeded[0] == seeded[1] and seeded[0][0]["text"] != seeded[0][1]["text"]
    assert text_of(client, temperature=1) != text_of(client, temperature=1)


def test_a_client_that_leaves_and_several_at_once(client: httpx.Client) -> None:
    expected = text_of(client)
    with streaming(client, max_tokens=CONTEXT - 100) as lines:
        next(lines)
    assert text_of(client) == expected
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda length: text_of(client, max_tokens=length), (20, 10, 15)))
    assert answers[0] == expected and all(expected.startswith(answer) for answer in answers)


def test_a_request_that_fails_leaves_the_server_in_order(client: httpx.Client) -> None:
    expected = text_of(client)
    refused = client.post("/v1/completions", json={"model": "m", "prompt": "x", "logit_bias": {"100000": 1}})
    assert refused.status_code == 400
    assert text_of(client) == expected


def test_nothing_listens_but_on_loopback(server: Serving, client: httpx.Client) -> None:
    for process in (psutil.Process(server.process.pid), *server.family()):
        listening = [one.laddr.ip for one in process.net_connections() if one.status == psutil.CONN_LISTEN]
        assert set(listening) == {"127.0.0.1"}


def test_sigterm_lets_a_running_answer_end_and_then_all_ranks(server: Serving, client: httpx.Client) -> None:
    """The last test of this server."""
    family = server.family()
    with streaming(client, max_tokens=150, temperature=1) as lines:
        next(lines)
        # Service managers send it to all processes of a service.
        for process in (*family, psutil.Process(server.process.pid)):
            process.send_signal(signal.SIGTERM)
        rest = list(lines)
    assert rest[-1] == "[DONE]" and "error" not in "".join(rest)
    assert server.end() == 0
    assert gone(family)
    assert "Traceback" not in server.printed and "not served" not in server.printed


@pytest.mark.parametrize("when", ["idle", "generating"])
def test_a_rank_that_is_killed_ends_the_server_which_says_which_one(when: str, folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path) as server, server.client() as client:
        family = server.family()
        if when == "idle":
            server.other_rank().kill()
        else:
            with streaming(client, max_tokens=CONTEXT - 100, temperature=1) as lines:
                next(lines)
                server.other_rank().kill()
                *_, error, end = lines
            message = json.loads(error)["error"]["message"]
            assert "Rank 1 ended without a word. Its process was killed by SIGKILL." in message and end == "[DONE]"
        assert server.end() == 1
        assert gone(family)
    last_words = server.printed.rpartition("headrace: the model is not served.")[2]
    assert "Rank 1 ended without a word. Its process was killed by SIGKILL." in last_words
    assert "Traceback" not in server.printed


def test_a_load_that_fails_is_said_once(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in folder.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    rewrite(broken, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with serving(broken, tmp_path) as server:
        server.wait_for(lambda: bool(server.family()))
        family = server.family()
        assert server.end() == 1
        assert gone(family)
    assert server.printed.count("PlacementError") == server.printed.count("model.layers.1.mlp.up_proj.weight") == 1
    assert "Traceback" not in server.printed and "RankFailed" not in server.printed


def test_the_other_ranks_end_with_a_server_that_is_killed(folder: Path, tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    with serving(folder, tmp_path, environment={"TMPDIR": str(temporary)}) as server:
        server.wait_for(lambda: bool(server.family()) and bool(list(temporary.glob("headrace-ranks-*"))))
        family = server.family()
        server.process.kill()
        assert gone(family)
    assert not list(temporary.glob("headrace-ranks-*"))


def test_ranks_of_torchrun(folder: Path, tmp_path: Path, alone: httpx.Client) -> None:
    with serving(folder, tmp_path, start=TORCHRUN) as server, server.client() as client:
        assert text_of(client) == text_of(alone)
        family = server.family()
        assert len([one for one in family if "serve" in one.cmdline()]) == 2
        for process in family:
            process.send_signal(signal.SIGTERM)
        assert server.end() == 0
        assert gone(family)
    assert "Traceback" not in server.printed
