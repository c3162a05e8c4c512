"""The behaviours that Headrace set out from, one short test for each: loading from object storage (A), quantized checkpoints while streaming (B).

What is looked at closely elsewhere is looked at here once more, from outside, through the names that a user has.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin

import headrace
from headrace.compat.sglang import (
    ObjectStorageModel,
    is_runai_obj_uri,
    list_safetensors,
    runai_safetensors_weights_iterator,
)
from headrace.engines.routing import LoaderRequest, UriKind, choose_loader, route
from headrace.errors import HeadraceError, InvalidSetting
from headrace.settings import Settings, TransportSettings
from headrace.storage import open_store
from headrace.storage.s3 import S3Store
from headrace.streaming.formats import LoadFormat
from headrace.transport.file import FileReader
from headrace.transport.http import HttpReader
from tests.engines.models import save_model

ROOT = Path(__file__).resolve().parents[2]
PROMPT = [1, 5, 9, 200]
SMALL = TransportSettings(num_connections=4, read_bytes=16 << 10)
"""Reads small enough that the models here take many."""


@pytest.fixture(autouse=True)
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HEADRACE_PROGRESS", "0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Gemma model in several files, with a tokenizer of one word for each token."""
    folder = save_model("gemma3", tmp_path_factory.mktemp("origin") / "gemma")
    words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(320)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Every stored tensor of that model, as the safetensors library reads it."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.fixture(scope="module")
def stored(folder: Path, s3_client: Any) -> str:
    """That model in a bucket, once for all tests."""
    s3_client.create_bucket(Bucket="origin")
    for path in folder.iterdir():
        s3_client.put_object(Bucket="origin", Key=f"gemma/{path.name}", Body=path.read_bytes())
    return "s3://origin/gemma"


@pytest.fixture
def uri(stored: str, s3_environment: dict[str, str]) -> str:
    return stored


def generated(model: Any) -> list[int]:
    tokens = model.generate(torch.tensor([PROMPT]), max_new_tokens=6, do_sample=False, eos_token_id=None)
    result: list[int] = tokens[0, len(PROMPT) :].tolist()
    return result


def names_below(folder: Path | str) -> set[str]:
    """Return the files below ``folder``, the cache's own marker left out."""
    paths = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)) for path in paths if path.name != ".headrace-complete.json"}


def meet(monkeypatch: pytest.MonkeyPatch, reader: type[Any]) -> None:
    """Let the first two reads wait for each other: where one begins only when the other has ended, both fail."""
    barrier, number = threading.Barrier(2), itertools.count()
    original = reader.read

    def read(self: Any, *arguments: Any) -> None:
        if next(number) < 2:
            barrier.wait(20)
        original(self, *arguments)

    monkeypatch.setattr(reader, "read", read)


# -- A. Loading from object storage


def test_origin_a1_bucket_uris_are_recognised_wherever_a_model_path_is_taken(
    uri: str, weights: dict[str, torch.Tensor]
) -> None:
    """s3, gs and az uris are seen as such in any letter case and as path objects, and what takes a model's path takes them."""
    for scheme in ("s3", "S3", "gs", "Gs", "az", "AZ"):
        for value in (f"{scheme}://bucket/model", Path(f"{scheme}://bucket/model")):
            assert headrace.is_object_uri(value) and is_runai_obj_uri(value)
    assert not is_runai_obj_uri("/s3/model") and not is_runai_obj_uri(Path("gs/model"))
    for value in (uri.replace("s3:", "S3:"), Path(uri), f"{uri}/"):
        with headrace.open(value) as checkpoint:
            assert checkpoint.uri == uri and checkpoint.entries.keys() == weights.keys()
        assert headrace.load_state_dict(value, include="model.norm.weight").keys() == {"model.norm.weight"}
        assert ObjectStorageModel.get_path(value) == ObjectStorageModel.get_path(uri)
        assert len(list_safetensors(value)) > 1


@pytest.mark.slow
def test_origin_a2_a_server_starts_from_a_uri_and_keeps_side_files_only(uri: str, folder: Path, tmp_path: Path) -> None:
    """A server is given the uri and answers; afterwards the disk holds the side files and no weights."""
    command = [sys.executable, "-m", "headrace", "serve", uri, "--port", "0", "--dtype", "float32"]
    with (tmp_path / "printed").open("w") as printed:
        process = subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + 120
        address, status = "", 0
        while status != 200:
            assert process.poll() is None and time.monotonic() < end, (tmp_path / "printed").read_text()
            time.sleep(0.1)
            found = re.search(r"listening on (\S+?),", (tmp_path / "printed").read_text())
            if found:
                address = found[1]
                status = httpx.get(f"{address}/ready", trust_env=False).status_code
        body = {"model": "gemma", "prompt": PROMPT, "temperature": 0, "max_tokens": 6, "ignore_eos": True}
        answer = httpx.post(f"{address}/v1/completions", json=body, trust_env=False, timeout=60).json()
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert answer["choices"][0]["text"].split() == [f"w{token}" for token in generated(reference)]
    side_files = {path.name for path in folder.iterdir() if path.suffix != ".safetensors"}
    mirrored = {Path(name).name for name in names_below(tmp_path / "cache") if not name.startswith("locks/")}
    assert mirrored == side_files


def test_origin_a3_the_cache_is_filled_once_and_found_by_the_uri_alone(
    uri: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Side files lie at a path made of the uri's hash. Whoever fills it at the same time reads nothing twice; later the path alone is enough."""
    reads: Counter[str] = Counter()
    original = S3Store.read_object

    def read_object(self: S3Store, stored: Any, **options: Any) -> bytes:
        reads[stored.key] += 1
        return original(self, stored, **options)

    monkeypatch.setattr(S3Store, "read_object", read_object)
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(ObjectStorageModel.download_and_get_path, [uri] * 4))
    assert paths == {ObjectStorageModel.get_path(uri)} and set(reads.values()) == {1}
    (path,) = paths
    assert re.fullmatch(r"[0-9a-f]{16}", Path(path).name) and Path(path).parent.name == "model_streamer"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")  # nobody answers there
    found = Path(ObjectStorageModel.get_path(uri))
    assert (found / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    assert len(transformers.AutoTokenizer.from_pretrained(found)) == 320


def test_origin_a4_weights_are_left_out_of_the_side_files(bucket: str, s3_client: Any) -> None:
    """No object with a name that weights have, in any of five formats, becomes a side file."""
    for key in ("m.safetensors", "pytorch_model.bin", "m.pt", "m.pth", "m.tensors", "sub/m.bin", "config.json"):
        s3_client.put_object(Bucket=bucket, Key=f"m/{key}", Body=b"{}")
    path = ObjectStorageModel.download_and_get_path(f"s3://{bucket}/m")
    assert names_below(path) == {"config.json"}


def test_origin_a5_safetensors_are_listed_without_what_the_index_does_not_name(
    uri: str, folder: Path, s3_client: Any
) -> None:
    """The list under the uri is the index's; a second copy of the weights beside it is dropped."""
    expected = sorted(path.name for path in folder.glob("*.safetensors"))
    s3_client.put_object(Bucket="origin", Key="gemma/consolidated.safetensors", Body=b"not even read")
    try:
        listed = list_safetensors(uri)
    finally:
        s3_client.delete_object(Bucket="origin", Key="gemma/consolidated.safetensors")
    assert listed == [f"{uri}/{name}" for name in expected] and len(listed) > 1


def test_origin_a6_the_load_format_follows_from_the_uri(uri: str) -> None:
    """Nobody has to name a load format for an object uri: it is Headrace's own, and Run:ai's remains to be asked for."""
    for scheme in ("s3", "gs", "az"):
        kind = UriKind.of(headrace.parse_uri(f"{scheme}://bucket/model"))
        assert route(LoadFormat.AUTO, kind) is LoadFormat.HEADRACE
        assert route(LoadFormat.RUNAI_STREAMER, kind) is LoadFormat.RUNAI_STREAMER
    reports: list[headrace.LoadReport] = []
    headrace.load_model(uri, on_report=reports.append)
    assert reports[0].load_format == "headrace"
    with pytest.raises(InvalidSetting, match="runai_streamer"):  # among the formats that it lists
        headrace.load_model(uri, load_format="runai")


def test_origin_a7_extra_configuration_has_three_keys(uri: str) -> None:
    """concurrency and memory_limit reach the stream, distributed is a bool; another key and another type are errors that list what is allowed."""
    reports: list[headrace.LoadReport] = []
    extra = {"concurrency": 3, "memory_limit": 100_000, "distributed": False}
    settings = Settings.from_environment(read_bytes=16384, memory_limit_bytes=-1)
    headrace.load_model(uri, extra_config=extra, settings=settings, on_report=reports.append)
    assert reports[0].num_connections == 3
    largest = 320 * 64 * 2
    assert reports[0].peak_staging_bytes <= 100_000 + largest + 16384 < reports[0].bytes_wanted
    for wrong in ({"concurency": 3}, {"concurrency": True}, {"distributed": 1}, {"memory_limit": "8GB"}):
        with pytest.raises(InvalidSetting, match=r"concurrency .*memory_limit .*distributed "):
            headrace.load_model(uri, extra_config=wrong)


def test_origin_a9_local_disks_stream_concurrently(
    folder: Path, weights: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path on a disk streams like a bucket, and several reads are under way at a time."""
    meet(monkeypatch, FileReader)
    loaded = headrace.load_state_dict(folder, settings=Settings.from_environment(num_connections=4, read_bytes=16384))
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())


def test_origin_a10_streams_are_concurrent(
    uri: str, weights: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One stream reads over several connections at a time, and several streams run side by side."""
    meet(monkeypatch, HttpReader)
    settings = Settings.from_environment(num_connections=4, read_bytes=16384)
    with ThreadPoolExecutor(2) as pool:
        for loaded in pool.map(lambda _: headrace.load_state_dict(uri, settings=settings), range(2)):
            assert all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize(("rank", "num_shown"), [(0, 1), (1, 0)])
def test_origin_a11_only_the_first_rank_shows_progress(
    rank: int, num_shown: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the ranks that load together the first shows a progress bar, and the others show none."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    stream = runai_safetensors_weights_iterator(list_safetensors(folder), settings=Settings())
    next(stream)
    assert [thread.name for thread in threading.enumerate()].count("headrace-progress") == num_shown
    assert len(list(stream)) > 1


def test_origin_a12_the_aws_endpoint_variable_is_honoured(
    uri: str, s3_environment: dict[str, str], weights: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """AWS_ENDPOINT_URL alone leads to a store that is compatible with S3, for listing, side files and weights."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_environment["AWS_ENDPOINT_URL_S3"])
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    with headrace.open(uri) as checkpoint:
        assert checkpoint.store.endpoint == s3_environment["AWS_ENDPOINT_URL_S3"]
        assert checkpoint.config["model_type"] == "gemma3_text"
    assert torch.equal(headrace.load_state_dict(uri)["model.norm.weight"], weights["model.norm.weight"])


def test_origin_a13_runai_model_streamer_is_optional() -> None:
    """An extra brings Run:ai Model Streamer, 0.15.7 or newer with its store packages; nothing needs it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [item for items in project["optional-dependencies"].values() for item in items]
    named = [item for item in extras if item.startswith("runai-model-streamer")]
    assert named and all(
        re.fullmatch(r"runai-model-streamer\[[a-z0-9,]*s3[a-z0-9,]*\]>=0\.15\.7", item) for item in named
    )
    assert not [item for item in project["dependencies"] if "runai" in item]


def is_supported(scheme: str) -> bool:
    try:
        open_store(
            f"{scheme}:///absent" if scheme == "file" else f"{scheme}://absent/model", settings=Settings()
        ).close()
    except HeadraceError as error:
        return "not supported yet" not in str(error)
    return True


def test_origin_a14_the_guide_lists_the_stores_that_work() -> None:
    """The guide for object storage has examples, parameters and advice, and says of each kind of uri whether it works, rightly."""
    guide = (ROOT / "docs/guide/object-storage.md").read_text()
    rows = re.findall(r"^\| (.*`.*) \| (yes|.*not supported).* \|$", guide, re.MULTILINE)
    supported = {}
    for uris, answer in rows:
        for scheme in re.findall(r"`(\w+)://", uris):
            supported[scheme] = answer == "yes"
    assert {"s3", "gs", "az", "hf"} <= supported.keys()
    assert supported == {scheme: is_supported(scheme) for scheme in supported}
    assert "AWS_ENDPOINT_URL" in guide and "HEADRACE_CONNECTIONS" in guide and "memory" in guide.lower()


def test_origin_a15_a_model_from_a_bucket_generates_what_it_does_from_a_disk(uri: str, folder: Path) -> None:
    """End to end: a Gemma model loads from a real S3 server and writes what the same model writes after a plain load."""
    model = headrace.load_model(uri, dtype=torch.float32)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert type(model) is type(reference)
    assert generated(model) == generated(reference)
    with torch.no_grad():
        model.model.norm.weight.neg_().sub_(2)  # Gemma multiplies by 1 + weight: this turns every logit round
    assert generated(model) != generated(reference), "the comparison can fail"


# -- B. Quantized checkpoints while streaming


class ProbeConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """A quantization configuration that Transformers does not know by itself."""

    def __init__(self, **fields: Any) -> None:
        self.quant_method = "probe"
        self.fields = fields


class ProbeQuantizer(HfQuantizer):  # type: ignore[misc]
    """Changes nothing of a model, and leaves in it what it was told."""

    requires_calibration = False
    is_serializable = is_trainable = False

    def _process_model_before_weight_loading(self, model: Any, **options: Any) -> Any:
        model.was_told = (self.pre_quantized, self.quantization_config.fields)
        return model


def test_origin_b1_the_quantization_configuration_reaches_the_construction(
    folder: Path, bucket: str, s3_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the side files of a streamed checkpoint say of its quantization, in a file of its own or nested in config.json, is what the model is built with."""
    monkeypatch.setitem(AUTO_QUANTIZATION_CONFIG_MAPPING, "probe", ProbeConfig)
    monkeypatch.setitem(AUTO_QUANTIZER_MAPPING, "probe", ProbeQuantizer)
    config = json.loads((folder / "config.json").read_text())
    said = {"quant_method": "probe", "bits": 5}
    side_files = [
        {"config.json": {**config, "quantization_config": said}},
        {"config.json": config, "hf_quant_config.json": {"quantization": said}},
    ]
    for path in folder.iterdir():
        s3_client.put_object(Bucket=bucket, Key=f"m/{path.name}", Body=path.read_bytes())
    assert not hasattr(headrace.load_model(f"s3://{bucket}/m"), "was_told")
    for files in side_files:
        for name, content in files.items():
            s3_client.put_object(Bucket=bucket, Key=f"m/{name}", Body=json.dumps(content).encode())
        model = headrace.load_model(f"s3://{bucket}/m")
        pre_quantized, fields = model.was_told
        assert pre_quantized is True and fields["bits"] == 5


def test_origin_b2_what_is_quantized_already_is_streamed() -> None:
    """A checkpoint that ModelOpt has quantized goes through the streaming loader, whatever was asked for, and never through ModelOpt's workflow, which would look its
    uri up on the hub. The choice is a function of what is known; it asks nobody."""
    for format_ in (LoadFormat.AUTO, LoadFormat.HEADRACE, LoadFormat.RUNAI_STREAMER):
        for kind, asked in itertools.product((UriKind.BUCKET, UriKind.LOCAL), (None, "modelopt", "modelopt_fp4")):
            request = LoaderRequest(load_format=format_, uri_kind=kind, quantization=asked)
            decision = choose_loader(replace(request, stored_quantization="modelopt"))
            assert decision.load_format is route(format_, kind) and decision.quantization == "modelopt"
    plain = LoaderRequest(uri_kind=UriKind.LOCAL, quantization="modelopt_fp8")
    assert choose_loader(plain).load_format is LoadFormat.MODELOPT, "what is not quantized is the workflow's business"
    with pytest.raises(InvalidSetting, match="already"):
        choose_loader(replace(plain, load_format=LoadFormat.MODELOPT, stored_quantization="modelopt"))


Q_HALF, KV_HALF = "q_a_proj.weight", "kv_a_proj_with_mqa.weight"


def load_fused(stream: Iterator[tuple[str, torch.Tensor]], lines: list[int]) -> dict[str, torch.Tensor]:
    """Load as a consumer that fuses two stored tensors into one parameter: whichever comes first is put aside, as it is, until the other comes.

    ``lines`` is given the cache lines, of 64 bytes, in which the tensors lay.
    """
    parameters: dict[str, torch.Tensor] = {}
    waiting: dict[str, torch.Tensor] = {}
    for name, tensor in stream:
        lines.extend(range(tensor.data_ptr() // 64, (tensor.data_ptr() + tensor.nbytes) // 64))
        prefix = name.removesuffix(Q_HALF).removesuffix(KV_HALF)
        if prefix == name:
            parameters[name] = tensor.clone()
        elif prefix not in waiting:
            waiting[prefix] = tensor
        else:
            first = waiting.pop(prefix)
            halves = (first, tensor) if name.endswith(KV_HALF) else (tensor, first)
            parameters[f"{prefix}fused_qkv_a_proj_with_mqa.weight"] = torch.cat(halves)
        del tensor
    assert not waiting
    return parameters


@pytest.mark.parametrize("first_half", [Q_HALF, KV_HALF])
def test_origin_b5_half_of_a_fused_parameter_survives_until_the_other_half_comes(
    first_half: str, tmp_path: Path
) -> None:
    """DeepSeek's two projections become one parameter. One half of each layer lies in the first file and the other in the last; in between the stream uses its memory
    over and over (what it takes back is filled with NaN), and the halves that were put aside stay what they are."""
    saved = save_model("deepseek_v3", tmp_path / "saved")
    stored = {name: tensor for path in saved.glob("*.safetensors") for name, tensor in load_file(path).items()}
    second_half = KV_HALF if first_half == Q_HALF else Q_HALF
    pick: list[Callable[[str], bool]] = [
        lambda name: name.endswith(first_half),
        lambda name: not name.endswith((first_half, second_half)),
        lambda name: name.endswith(second_half),
    ]
    (tmp_path / "split").mkdir()
    for number, is_here in enumerate(pick, 1):
        part = {name: tensor for name, tensor in stored.items() if is_here(name)}
        save_file(part, tmp_path / "split" / f"model-0000{number}-of-00003.safetensors")

    limit = 88 << 10
    settings = Settings.from_environment(memory_limit_bytes=limit, debug_poison=True, read_bytes=4096)
    lines: list[int] = []
    files = list_safetensors(tmp_path / "split")
    parameters = load_fused(runai_safetensors_weights_iterator(files, settings=settings), lines)

    assert sum(tensor.nbytes for tensor in stored.values()) > 3 * limit
    assert len(set(lines)) < len(lines) // 2, "the stream has used its memory again"
    expected = {name: tensor for name, tensor in stored.items() if not name.endswith((Q_HALF, KV_HALF))}
    for layer in range(3):
        prefix = f"model.layers.{layer}.self_attn."
        halves = (stored[prefix + Q_HALF], stored[prefix + KV_HALF])
        expected[f"{prefix}fused_qkv_a_proj_with_mqa.weight"] = torch.cat(halves)
    assert parameters.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(parameters[name], tensor)] == []


def test_origin_b6_streamed_tensors_are_marked(folder: Path) -> None:
    """A consumer knows a streamed tensor by an attribute of it, and a view of one by an attribute of its storage."""
    for _, tensor in runai_safetensors_weights_iterator(list_safetensors(folder)):
        view = tensor.detach().view(-1)[1:]
        for attribute in ("_headrace_streamed", "_sglang_runai_streamer_tensor"):
            assert getattr(tensor, attribute) is getattr(view.untyped_storage(), attribute) is True
            assert not hasattr(tensor.clone(), attribute)


def test_origin_b7_a_stream_is_consumed_once_and_may_become_a_list(
    folder: Path, weights: dict[str, torch.Tensor]
) -> None:
    """Tensors come while most of the checkpoint is unread, each once. Who collects them all gets the right values, although memory is used again where it can be."""
    limit = 96 << 10
    settings = Settings(memory_limit_bytes=limit, debug_poison=True, progress=False, transport=SMALL)
    with headrace.stream(folder, ownership="leased", settings=settings) as stream:
        first, _ = next(iter(stream))
        assert stream.report.bytes_read <= limit < stream.report.bytes_wanted // 2
        assert first not in stream.names_left and len(stream.names_left) == len(weights) - 1
    iterator = runai_safetensors_weights_iterator(list_safetensors(folder), settings=settings)
    collected = list(iterator)
    assert list(iterator) == [] and len(collected) == len(weights)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in collected)


def test_origin_b8_loading_without_runai_is_as_before(
    folder: Path, uri: str, weights: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where Run:ai Model Streamer is not installed, models load from a disk and from a bucket, and through Transformers alone."""
    for name in [name for name in sys.modules if name.startswith("runai_model_streamer")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("runai_model_streamer", "runai_model_streamer_s3", "sglang"):
        monkeypatch.setitem(sys.modules, name, None)  # an import of it fails
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for source in (folder, uri):
        loaded = headrace.load_model(source).state_dict()
        assert loaded.keys() == reference.keys()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in reference.items())
        assert len(list(runai_safetensors_weights_iterator(list_safetensors(source)))) == len(weights)
