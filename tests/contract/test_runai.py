"""Run:ai Model Streamer itself as the transport, from a folder and from a real S3 server: the same bytes as ours, and errors that say what it does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

import headrace
from headrace.checkpoint import Checkpoint
from headrace.errors import AccessDenied, ObjectChanged, ReadFailed
from headrace.settings import Settings
from headrace.streaming.runai import RunaiStream
from tests.unit.storage.s3_stub import Answer, Asked, S3Stub, error, listing

pytest.importorskip("runai_model_streamer")
pytest.importorskip("runai_model_streamer_s3")

NUM_LAYERS = 12
LIMIT_BYTES = 256 << 10


def content() -> dict[str, bytes]:
    """Return three files of about 1.2 MB each: odd sizes, empty, 0-d and one-byte dtypes among them."""
    generator = torch.Generator().manual_seed(0)
    files = {}
    for number in range(3):
        tensors: dict[str, torch.Tensor] = {
            f"{number}.byte": torch.tensor([number], dtype=torch.uint8),
            f"{number}.empty": torch.empty(0, 4),
            f"{number}.scale": torch.tensor(0.5),
        }
        for layer in range(NUM_LAYERS):
            shape = (101 + layer, 301)
            tensors[f"layers.{layer}.{number}.weight"] = torch.randn(shape, generator=generator).to(torch.bfloat16)
            tensors[f"layers.{layer}.{number}.packed"] = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
            tensors[f"layers.{layer}.{number}.norm"] = torch.randn(17, generator=generator)
        files[f"model-{number}.safetensors"] = save(tensors)
    return files


CONTENT = content()


@pytest.fixture(params=["folder", "bucket"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The model in a folder, and below a key with characters that must be encoded."""
    if request.param == "folder":
        for name, body in CONTENT.items():
            (tmp_path / name).write_bytes(body)
        return str(tmp_path)
    bucket, client = request.getfixturevalue("bucket"), request.getfixturevalue("s3_client")
    for name, body in CONTENT.items():
        client.put_object(Bucket=bucket, Key=f"a b/ü%20+/{name}", Body=body)
    return f"s3://{bucket}/a b/ü%20+"


@pytest.fixture
def settings(s3_settings: Settings) -> Settings:
    return Settings.from_environment(
        cache_dir=s3_settings.cache_dir, progress=False, num_connections=3, memory_limit_bytes=LIMIT_BYTES
    )


@pytest.fixture
def checkpoint(uri: str, settings: Settings) -> Iterator[Checkpoint]:
    with headrace.open(uri, settings=settings) as opened:
        yield opened


def variables() -> dict[str, str]:
    """Return the process's variables, but for pytest's own and one that the library before 0.17 sets and leaves."""
    own = ("PYTEST_CURRENT_TEST", "RUNAI_STREAMER_PROCESS_GROUP_SIZE")
    return {name: value for name, value in os.environ.items() if name not in own}


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Every test leaves the process's variables as it found them, and no thread of ours behind."""
    before = variables()
    yield
    assert variables() == before
    assert not [one for one in threading.enumerate() if one.name.startswith("headrace-arrivals")]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(
        one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
    )


def test_tensors_are_ours_bit_for_bit(checkpoint: Checkpoint, settings: Settings) -> None:
    ours = headrace.load_state_dict(checkpoint, settings=settings)
    reports = []
    theirs = headrace.load_state_dict(
        checkpoint, load_format="runai_streamer", settings=settings, on_report=reports.append
    )
    assert list(theirs) == list(ours)
    assert all(same(theirs[name], ours[name]) for name in ours)
    report = reports[0]
    assert report.load_format == "runai_streamer"
    assert report.bytes_read == report.bytes_wanted == checkpoint.total_bytes
    assert report.num_connections == 3


def test_kept_tensors_keep_their_values_through_many_rounds_of_the_buffer(
    checkpoint: Checkpoint, settings: Settings
) -> None:
    ours = headrace.load_state_dict(checkpoint, settings=settings)
    with headrace.stream(checkpoint, load_format="runai_streamer", settings=settings, ownership="leased") as stream:
        kept = {name: tensor for name, tensor in stream if "weight" in name}
    assert len(kept) == 3 * NUM_LAYERS
    assert checkpoint.total_bytes > 4 * LIMIT_BYTES
    assert all(same(tensor, ours[name]) for name, tensor in kept.items())


def test_tensors_can_be_taken_in_any_order(checkpoint: Checkpoint, settings: Settings) -> None:
    ours = headrace.load_state_dict(checkpoint, settings=settings)
    wanted = [entry for entry in checkpoint.entries.values() if ".1." in entry.name]
    with RunaiStream(checkpoint, wanted, settings=settings) as stream:
        for name in sorted((entry.name for entry in wanted), reverse=True):
            assert same(stream.take(name), ours[name])
    assert stream.report.bytes_read == sum(entry.size_bytes for entry in wanted)


def test_leaving_early_ends_everything(checkpoint: Checkpoint, settings: Settings) -> None:
    with headrace.stream(checkpoint, load_format="runai_streamer", settings=settings) as stream:
        next(iter(stream))


def test_a_copy_that_the_index_does_not_name_is_not_taken(tmp_path: Path, settings: Settings) -> None:
    """A stale file holds the same names: the library itself would refuse, or hand out either."""
    right, stale = torch.arange(100.0), torch.zeros(100)
    (tmp_path / "model-1.safetensors").write_bytes(save({"w": right, "v": right.clone()}))
    (tmp_path / "model-2.safetensors").write_bytes(save({"w": stale, "u": right}))
    weight_map = {"w": "model-1.safetensors", "v": "model-1.safetensors", "u": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    loaded = headrace.load_state_dict(tmp_path, load_format="runai_streamer", settings=settings)
    assert loaded.keys() == {"u", "v", "w"}
    assert torch.equal(loaded["w"], right)


def test_an_object_that_was_replaced_is_refused(bucket: str, s3_client: Any, settings: Settings) -> None:
    for name, body in CONTENT.items():
        s3_client.put_object(Bucket=bucket, Key=f"m/{name}", Body=body)
    with headrace.open(f"s3://{bucket}/m", settings=settings) as checkpoint:
        changed = CONTENT["model-1.safetensors"][:-1] + b"\x00"
        s3_client.put_object(Bucket=bucket, Key="m/model-1.safetensors", Body=changed)
        with (
            headrace.stream(checkpoint, load_format="runai_streamer", settings=settings) as stream,
            pytest.raises(ObjectChanged, match=r"m/model-1\.safetensors is not the version"),
        ):
            list(stream)


def test_an_object_that_is_replaced_meanwhile_is_noticed(bucket: str, s3_client: Any, settings: Settings) -> None:
    for name, body in CONTENT.items():
        s3_client.put_object(Bucket=bucket, Key=f"m/{name}", Body=body)
    with headrace.open(f"s3://{bucket}/m", settings=settings) as checkpoint:
        stream = headrace.stream(checkpoint, load_format="runai_streamer", settings=settings)
        with stream, pytest.raises(ObjectChanged, match=r"m/model-2\.safetensors"):
            for place, _ in enumerate(stream):
                if place == 0:
                    body = CONTENT["model-2.safetensors"][:-1] + b"\x00"
                    s3_client.put_object(Bucket=bucket, Key="m/model-2.safetensors", Body=body)


def test_keys_that_work_no_more_are_named_by_the_store(
    bucket: str, s3_client: Any, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the library calls a file access error."""
    s3_client.put_object(Bucket=bucket, Key="m/model.safetensors", Body=CONTENT["model-0.safetensors"])
    with headrace.open(f"s3://{bucket}/m", settings=settings) as checkpoint:
        store: Any = checkpoint.store
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
        store._replace_access(store._access.target.region)
        stream = headrace.stream(checkpoint, load_format="runai_streamer", settings=settings)
        with stream, pytest.raises(AccessDenied, match=r"m/model\.safetensors"):
            list(stream)


# -- a server that is not quite right

KEY = "m/model.safetensors"
BODY = CONTENT["model-0.safetensors"]


class Server:
    """One object, by path; anonymous requests only, where ``refuses_keys``. ``fails`` says what becomes of ranged reads beyond the header."""

    def __init__(self, *, fails: Answer | None = None, refuses_keys: bool = False) -> None:
        self.fails = fails
        self.refuses_keys = refuses_keys

    def __call__(self, asked: Asked) -> Answer:
        if self.refuses_keys and "authorization" in asked.headers:
            return error(403, "AccessDenied")
        if "list-type" in asked.query:
            return listing({KEY: len(BODY)})
        headers = {"ETag": '"e-0"', "Accept-Ranges": "bytes"}
        if asked.method == "HEAD":
            return Answer(200, b"\x00" * len(BODY), headers)
        start, _, stop = asked.headers.get("range", f"bytes=0-{len(BODY) - 1}").removeprefix("bytes=").partition("-")
        first, last = int(start), min(int(stop or len(BODY) - 1), len(BODY) - 1)
        if self.fails is not None and first > 0:
            return self.fails
        return Answer(206, BODY[first : last + 1], {**headers, "Content-Range": f"bytes {first}-{last}/{len(BODY)}"})


def test_public_buckets_get_no_keys(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKID")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    anonymous = Settings.from_environment(progress=False, s3_anonymous=True, num_connections=2)
    with S3Stub(Server(refuses_keys=True)) as stub:
        monkeypatch.setenv("AWS_ENDPOINT_URL", stub.endpoint)
        loaded = headrace.load_state_dict("s3://bucket/m", load_format="runai_streamer", settings=anonymous)
    assert len(loaded) == 3 + 3 * NUM_LAYERS
    assert all("authorization" not in asked.headers for asked in stub.asked)


def test_a_refusal_becomes_an_error_that_names_the_object(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKID")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with S3Stub(Server(fails=error(404, "NoSuchKey"))) as stub:
        monkeypatch.setenv("AWS_ENDPOINT_URL", stub.endpoint)
        with pytest.raises(ReadFailed) as raised:
            headrace.load_state_dict("s3://bucket/m", load_format="runai_streamer", settings=settings)
    assert "s3://bucket/m/model.safetensors" in raised.value.what
    assert stub.endpoint in raised.value.what
    assert "File access error" in raised.value.why
    assert "secret" not in str(raised.value)


SCRIPT = """
import sys, headrace
from headrace.errors import ReadStalled
from headrace.settings import Settings
settings = Settings.from_environment(progress=False, total_timeout_s=0.5, max_attempts=2, idle_timeout_s=1)
try:
    headrace.load_state_dict(sys.argv[1], load_format="runai_streamer", settings=settings)
except ReadStalled as error:
    print(error)
"""


def test_a_server_that_hangs_is_given_up_and_the_process_ends() -> None:
    release = threading.Event()

    class Hanging(Server):
        def __call__(self, asked: Asked) -> Answer:
            if "=" in asked.headers.get("range", "") and not asked.headers["range"].startswith("bytes=0-"):
                release.wait(60)
                return Answer(silent=True)
            return super().__call__(asked)

    with S3Stub(Hanging()) as stub:
        variables = {
            "AWS_ENDPOINT_URL": stub.endpoint,
            "AWS_ACCESS_KEY_ID": "AKID",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        command = [sys.executable, "-c", SCRIPT, "s3://bucket/m"]
        try:
            done = subprocess.run(
                command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=120, check=False
            )
        finally:
            release.set()
    assert done.returncode == 0, done.stderr
    assert "No tensor has come for 1 s" in done.stdout
    assert "s3://bucket/m/model.safetensors" in done.stdout
