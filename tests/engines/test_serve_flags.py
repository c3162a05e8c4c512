"""`headrace serve` with its loading flags, in this process, on a real model: what each changes in what is served."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import headrace
from headrace.cli import serve as command
from headrace.cli.serve import ServeOptions
from headrace.cli.serve_model import load_served
from headrace.errors import InvalidSetting, ObjectChanged
from headrace.progress import LoadProgress
from headrace.settings import Settings
from headrace.storage import parse_uri
from tests.engines.hub import no_hub_calls
from tests.engines.models import save_model


def save_tokenizer(folder: Path, word: str) -> None:
    """Save a tokenizer whose token ``n`` is ``word`` and the number."""
    words = Tokenizer(models.WordLevel({f"{word}{token}": token for token in range(320)}, unk_token=f"{word}0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_model("llama", tmp_path_factory.mktemp("flags") / "llama")
    save_tokenizer(folder, "w")
    return folder


def upload(client: Any, bucket: str, folder: Path) -> str:
    """Put a saved model into a bucket, and return its uri."""
    for path in folder.iterdir():
        client.put_object(Bucket=bucket, Key=f"m/{path.name}", Body=path.read_bytes())
    return f"s3://{bucket}/m"


@contextmanager
def served(uri: str | Path, tmp_path: Path, **options: Any) -> Iterator[httpx.Client]:
    """Serve ``uri`` and yield a client once it is ready."""
    settings = Settings.from_environment(progress=False, cache_dir=tmp_path / "cache")
    server = command._make_server(ServeOptions(uri=str(uri), port=0, settings=settings, **options))
    outcome: list[Any] = []
    thread = threading.Thread(target=lambda: outcome.append(server.run()))
    thread.start()
    try:
        deadline = time.monotonic() + 60
        while server.address is None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert server.address is not None
        with httpx.Client(base_url=f"http://127.0.0.1:{server.address[1]}", trust_env=False, timeout=60) as client:
            while client.get("/ready").status_code != 200:
                assert thread.is_alive() and time.monotonic() < deadline, outcome
                time.sleep(0.05)
            yield client
    finally:
        server.request_stop()
        thread.join(30)
    assert outcome[0].exit_code == 0


def complete(client: httpx.Client, prompt: Any) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    return client.post("/v1/completions", json=body)


@pytest.fixture
def greedy(llama: Path) -> list[int]:
    """What the model itself says after the prompt of these tests."""
    model = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    prompt = torch.tensor([[5, 9, 200]])
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5, min_new_tokens=5, do_sample=False
    )
    return [int(token) for token in out[0, 3:]]


def test_a_bucket_is_served(llama: Path, bucket: str, s3_client: Any, tmp_path: Path, greedy: list[int]) -> None:
    with served(upload(s3_client, bucket, llama), tmp_path, dtype="float32") as client:
        answer = complete(client, "w5 w9 w200").json()
    assert answer["choices"][0]["text"].split() == [f"w{token}" for token in greedy]


@pytest.mark.parametrize("load_format", ["safetensors", "runai_streamer"])
def test_other_load_formats_serve_the_same(load_format: str, llama: Path, tmp_path: Path, greedy: list[int]) -> None:
    if load_format == "runai_streamer":
        pytest.importorskip("runai_model_streamer")
    with served(llama, tmp_path, load_format=load_format, dtype="float", extra_config='{"concurrency": 2}') as client:
        answer = complete(client, [5, 9, 200]).json()
    assert answer["choices"][0]["text"].split() == [f"w{token}" for token in greedy]


def test_a_tokenizer_of_another_uri(llama: Path, tmp_path: Path, greedy: list[int]) -> None:
    other = tmp_path / "tokenizer"
    save_tokenizer(other, "x")
    with served(llama, tmp_path, tokenizer_path=str(other), dtype="float32") as client:
        answer = complete(client, "x5 x9 x200").json()
    assert answer["choices"][0]["text"].split() == [f"x{token}" for token in greedy]


def test_random_weights_and_no_tokenizer_need_a_configuration_alone(llama: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((llama / "config.json").read_bytes())
    with served(bare, tmp_path, load_format="dummy", skip_tokenizer_init=True, dtype="float32") as client:
        answer = complete(client, [5, 9, 200])
        text = complete(client, "w5 w9")
        chat = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]})
        again = complete(client, [5, 9, 200])
    tokens = [int(number) for number in answer.json()["choices"][0]["text"].split()]
    assert len(tokens) == 5 and all(0 <= token < 320 for token in tokens)
    assert again.json()["choices"][0]["text"] == answer.json()["choices"][0]["text"]
    assert text.status_code == 400 and "no tokens" in text.text
    assert chat.status_code == 400 and chat.json()["error"]["code"] == "no_tokenizer"


@pytest.mark.parametrize("load_format", ["auto", "headrace", "runai_streamer", "dummy"])
def test_serving_a_bucket_asks_no_hub_and_begins_with_the_side_files(
    load_format: str, llama: Path, bucket: str, s3_client: Any, tmp_path: Path
) -> None:
    if load_format == "runai_streamer":
        pytest.importorskip("runai_model_streamer")
    uri = upload(s3_client, bucket, llama)
    settings = Settings.from_environment(progress=False, cache_dir=tmp_path / "cache")
    options = ServeOptions(uri=uri, settings=settings, dtype="float32", load_format=load_format)
    progress = LoadProgress()
    with no_hub_calls():
        loaded = load_served(parse_uri(uri), "llama", options, progress)
    assert loaded.tokenizer("w5 w9")["input_ids"] == [5, 9]
    assert loaded.report is not None
    assert loaded.report.load_format == ("headrace" if load_format == "auto" else load_format)
    phases = list(progress.phases)
    assert phases.index("side files") < phases.index("planning") < phases.index("weights")


@pytest.mark.parametrize("load_format", ["safetensors", "modelopt"])
def test_a_format_for_local_files_is_refused_before_a_bucket_is_asked(load_format: str, tmp_path: Path) -> None:
    options = ServeOptions(uri="s3://absent/model", load_format=load_format)
    with no_hub_calls(), pytest.raises(InvalidSetting, match=f"{load_format} cannot read a bucket"):
        load_served(parse_uri(options.uri), "model", options, LoadProgress())


def test_a_snapshot_is_served_and_named(llama: Path, tmp_path: Path) -> None:
    """By its id the server takes what is there; `/v1/models` and `/metrics` say which it is. Another id ends the load."""
    settings = Settings.from_environment(progress=False, cache_dir=tmp_path / "cache")
    with headrace.open(llama, settings=settings) as checkpoint:
        snapshot = checkpoint.snapshot.id
    with served(llama, tmp_path, snapshot=snapshot, served_model_name="tiny") as client:
        assert client.get("/v1/models").json()["data"][0]["snapshot"] == snapshot
        assert f'headrace_model_snapshot{{model="tiny",snapshot="{snapshot}"}} 1.0' in client.get("/metrics").text
    other = ServeOptions(uri=str(llama), port=0, settings=settings, snapshot="0" * 12)
    with pytest.raises(ObjectChanged, match=f"Snapshot {snapshot} is there now"):
        load_served(parse_uri(llama), "tiny", other, LoadProgress())
