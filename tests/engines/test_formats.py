"""Every load format builds the same model from the same side files, none asks a hub, and the checkpoint's quantization reaches the construction in each."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM

import headrace
from headrace.checkpoint.sideopening import open_side_files
from headrace.cli.values import LOAD_FORMATS
from headrace.engines.dummy import fill_packed
from headrace.engines.transformers import load_tokenizer
from headrace.errors import (
    CheckpointError,
    InvalidSetting,
    MissingDependency,
    ObjectNotFound,
    UnknownArchitecture,
    UnsupportedQuantization,
)
from headrace.settings import Settings
from headrace.streaming.formats import LoadFormat
from tests.engines.hub import no_hub_calls
from tests.engines.models import edit_config, rewrite, save_model
from tests.unit.storage.s3_stub import Answer, Asked, S3Stub, error, listing

BUILT_BY_WEIGHTS = [LoadFormat.AUTO, LoadFormat.HEADRACE, LoadFormat.SAFETENSORS, LoadFormat.RUNAI_STREAMER]
STREAMED = [LoadFormat.AUTO, LoadFormat.HEADRACE, LoadFormat.RUNAI_STREAMER]
FP8 = {"quant_method": "fp8", "weight_block_size": [64, 64], "activation_scheme": "dynamic"}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings.from_environment(progress=False, cache_dir=tmp_path / "cache")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama model with a tokenizer of one word for each token. Copy it before changing it."""
    folder = save_model("llama", tmp_path_factory.mktemp("formats") / "llama", max_shard_size="1GB")
    words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(320)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2").save_pretrained(folder)
    return folder


@pytest.fixture
def copied(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "llama"))


@pytest.fixture
def side_only(copied: Path) -> Path:
    """The side files of that model alone."""
    for path in copied.glob("*.safetensors*"):
        path.unlink()
    return copied


@pytest.fixture
def fp8(tmp_path: Path) -> tuple[Path, Callable[[], dict[str, torch.Tensor]]]:
    """A model in block FP8 without a word about it in config.json, and what its weights are when they are unpacked."""
    folder = save_model("llama", tmp_path / "fp8", max_shard_size="1GB")
    values: dict[str, torch.Tensor] = {}

    def quantize(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "_proj" in name]:
            scale = tensors[name].float().abs().max() / 448
            packed = (tensors[name].float() / scale).to(torch.float8_e4m3fn)
            rows, columns = (-(-size // 64) for size in packed.shape)
            tensors[name] = packed
            tensors[name + "_scale_inv"] = scale.expand(rows, columns).contiguous()
        values.update(
            {
                name: (value.float() * tensors[name + "_scale_inv"][0, 0]).to(torch.bfloat16)
                if value.dtype == torch.float8_e4m3fn
                else value
                for name, value in tensors.items()
                if not name.endswith("_scale_inv")
            }
        )

    rewrite(folder, quantize)
    return folder, lambda: values


def put(client: Any, bucket: str, folder: Path) -> str:
    for path in folder.iterdir():
        client.put_object(Bucket=bucket, Key=f"m/{path.name}", Body=path.read_bytes())
    return f"s3://{bucket}/m"


def need(load_format: LoadFormat) -> None:
    if load_format is LoadFormat.RUNAI_STREAMER:
        pytest.importorskip("runai_model_streamer")


def assert_same(model: Any, expected: dict[str, torch.Tensor]) -> None:
    found = model.state_dict()
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


# -- the formats


def test_the_command_line_knows_the_formats() -> None:
    assert list(LoadFormat) == list(LOAD_FORMATS)


@pytest.mark.parametrize("load_format", BUILT_BY_WEIGHTS)
def test_every_format_loads_a_local_folder(load_format: LoadFormat, llama: Path, settings: Settings) -> None:
    need(load_format)
    reference = AutoModelForCausalLM.from_pretrained(llama)
    reports: list[headrace.LoadReport] = []
    with no_hub_calls():
        model = headrace.load_model(llama, load_format=load_format, settings=settings, on_report=reports.append)
    assert_same(model, reference.state_dict())
    expected = LoadFormat.HEADRACE if load_format is LoadFormat.AUTO else load_format
    assert reports[0].load_format == expected
    assert reports[0].bytes_wanted == sum(value.nbytes for value in reference.state_dict().values())


@pytest.mark.parametrize("load_format", STREAMED)
def test_streaming_formats_load_a_bucket_and_ask_no_hub(
    load_format: LoadFormat, llama: Path, bucket: str, s3_client: Any, settings: Settings
) -> None:
    need(load_format)
    uri = put(s3_client, bucket, llama)
    with no_hub_calls(), headrace.open(uri, settings=settings) as checkpoint:
        model = headrace.load_model(checkpoint, load_format=load_format, settings=settings)
        tokenizer = load_tokenizer(checkpoint)
    assert_same(model, AutoModelForCausalLM.from_pretrained(llama).state_dict())
    assert tokenizer("w5 w9")["input_ids"] == [5, 9]


def test_the_watch_notices_a_hub_call() -> None:
    with pytest.raises(AssertionError, match=r"HfApi|httpx|validate_repo_id|hub_download"), no_hub_calls() as calls:
        with pytest.raises(Exception, match=r"."):
            transformers.AutoTokenizer.from_pretrained("organisation/name")
        assert calls


@pytest.mark.parametrize("uri", ["s3://bucket/llama", "gs://bucket/llama", "https://127.0.0.1/llama", "hf://org/name"])
@pytest.mark.parametrize("load_format", [LoadFormat.SAFETENSORS, LoadFormat.MODELOPT])
def test_what_needs_local_files_is_refused_before_anything_is_opened(
    load_format: LoadFormat, uri: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.engines.transformers.open_checkpoint", lambda *_, **__: pytest.fail("it was opened"))
    with no_hub_calls(), pytest.raises(InvalidSetting, match=f"{load_format} cannot read"):
        headrace.load_model(uri, load_format=load_format, settings=settings)


def test_an_unknown_format_lists_the_known_ones(llama: Path, settings: Settings) -> None:
    with pytest.raises(InvalidSetting, match="headrace, runai_streamer, safetensors, modelopt, dummy"):
        headrace.load_model(llama, load_format="runai", settings=settings)


def test_extra_configuration_takes_the_place_of_settings(llama: Path, settings: Settings) -> None:
    reports: list[headrace.LoadReport] = []
    extra = '{"concurrency": 3, "memory_limit": 0}'
    headrace.load_model(llama, extra_config=extra, settings=settings, on_report=reports.append)
    assert reports[0].num_connections == 3
    with pytest.raises(InvalidSetting, match="concurency"):
        headrace.load_model(llama, extra_config={"concurency": 3}, settings=settings)


# -- random weights


def test_dummy_needs_side_files_alone(side_only: Path, settings: Settings) -> None:
    reports: list[headrace.LoadReport] = []
    state = torch.random.get_rng_state()
    with no_hub_calls():
        model = headrace.load_model(side_only, load_format="dummy", settings=settings, on_report=reports.append)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert type(model).__name__ == "LlamaForCausalLM" and not model.training
    assert {value.dtype for value in model.parameters()} == {torch.bfloat16}
    assert {value.device.type for value in model.parameters()} == {"cpu"}
    weight = model.model.layers[3].mlp.up_proj.weight.float()
    assert weight.std().item() == pytest.approx(model.config.initializer_range, rel=0.1)
    assert not torch.equal(weight, model.model.layers[4].mlp.up_proj.weight.float())
    assert torch.equal(model.model.norm.weight, torch.ones(64, dtype=torch.bfloat16))
    assert model.generation_config.max_new_tokens == 7
    assert reports[0].load_format == "dummy" and reports[0].bytes_read == 0
    with torch.inference_mode():
        assert model(torch.tensor([[1, 5, 9]])).logits.isfinite().all()


def test_dummy_is_the_same_each_time_and_in_the_dtype_asked_for(side_only: Path, settings: Settings) -> None:
    first = headrace.load_model(side_only, load_format="dummy", dtype=torch.float32, settings=settings)
    torch.manual_seed(1234)
    second = headrace.load_model(side_only, load_format="dummy", dtype=torch.float32, settings=settings)
    assert {value.dtype for value in first.parameters()} == {torch.float32}
    assert_same(second, first.state_dict())


def test_dummy_reads_no_weights_that_are_there(
    llama: Path, bucket: str, s3_client: Any, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    uri = put(s3_client, bucket, llama)
    with caplog.at_level(logging.WARNING):
        model = headrace.load_model(uri, load_format="dummy", settings=settings)
    assert caplog.records == []  # above all no list of every parameter as missing
    assert model.name_or_path == uri
    stored = AutoModelForCausalLM.from_pretrained(llama)
    assert not torch.equal(model.lm_head.weight, stored.lm_head.weight)


def test_dummy_without_a_configuration_says_so(tmp_path: Path, settings: Settings) -> None:
    (tmp_path / "README.md").write_text("nothing else")
    with pytest.raises(UnknownArchitecture, match=r"no config\.json"):
        headrace.load_model(tmp_path, load_format="dummy", settings=settings)
    (tmp_path / "README.md").unlink()
    with pytest.raises(ObjectNotFound, match="no side files"):
        headrace.load_model(tmp_path, load_format="dummy", settings=settings)


def test_dummy_fills_packed_parameters_with_finite_codes() -> None:
    """As a quantizer leaves them: codes, scales and positions in a module that no initialisation knows. They were memory as it came."""

    class PackedLinear(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, value in {
                "weight": torch.full((64, 32), float("nan")).to(torch.float8_e4m3fn),
                "weight_scale": torch.full((64, 1), 255, dtype=torch.uint8),
                "weight_scale_2": torch.tensor(float("nan")),
                "qweight": torch.zeros(8, 16, dtype=torch.int32),
                "g_idx": torch.full((64,), -7, dtype=torch.int32),
            }.items():
                self.register_buffer(name, value)

    model = torch.nn.Sequential(PackedLinear(), torch.nn.Linear(2, 2))
    untouched = model[1].weight.clone()
    fill_packed(model)
    layer = model[0]
    assert layer.weight.float().isfinite().all() and len(layer.weight.view(torch.uint8).unique()) > 50
    assert layer.weight_scale.unique().tolist() == [120]
    assert 0 < layer.weight_scale_2 < 1
    assert len(layer.qweight.unique()) == layer.qweight.numel()
    assert layer.g_idx.unique().tolist() == [0]
    assert torch.equal(model[1].weight, untouched)


# -- quantization


@pytest.mark.parametrize("load_format", BUILT_BY_WEIGHTS)
@pytest.mark.parametrize("nest", [None, "llm_config", "language_config"])
def test_the_section_reaches_the_construction(
    nest: str | None, load_format: LoadFormat, fp8: tuple[Path, Any], settings: Settings
) -> None:
    """B1, in every loader: wherever config.json keeps it. Without it the packed numbers would become the parameters, up to 448."""
    need(load_format)
    folder, values = fp8
    edit_config(folder, **({nest: {"quantization_config": FP8}} if nest else {"quantization_config": FP8}))
    model = headrace.load_model(folder, load_format=load_format, settings=settings)
    layer = model.model.layers[2].mlp.up_proj
    assert type(layer).__name__ == "QuantizedLinear" and layer.weight.dtype is torch.float8_e4m3fn
    assert torch.equal(layer.dequantized(torch.bfloat16), values()["model.layers.2.mlp.up_proj.weight"])
    assert model.config.quantization_config.to_dict() == FP8
    plain = headrace.load_model(folder, load_format=load_format, dequantize=True, settings=settings)
    assert_same(plain, values())


def test_a_quantizer_that_the_caller_names_is_transformers_own(fp8: tuple[Path, Any], settings: Settings) -> None:
    folder, values = fp8
    edit_config(folder, quantization_config=FP8)
    aligned = {
        name: value for name, value in values().items() if value.dim() == 2 and not any(s % 64 for s in value.shape)
    }
    wanted = transformers.FineGrainedFP8Config(weight_block_size=(64, 64), dequantize=True)
    model = headrace.load_model(folder, quantization_config=wanted, settings=settings)
    found = model.state_dict()
    assert aligned and all(torch.equal(found[name], value) for name, value in aligned.items())


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("scales", [True, False])
def test_packed_weights_without_a_section_never_become_parameters(
    scales: bool, strict: bool, fp8: tuple[Path, Any], settings: Settings
) -> None:
    folder, _ = fp8
    if not scales:
        rewrite(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.endswith("_inv")])
    with pytest.raises(UnsupportedQuantization, match=r"model\.layers\.0\.mlp\.down_proj"):
        headrace.load_model(folder, strict=strict, settings=settings)


def test_one_lost_scale_is_named(fp8: tuple[Path, Any], settings: Settings) -> None:
    folder, _ = fp8
    edit_config(folder, quantization_config=FP8)
    lost = "model.layers.7.mlp.up_proj.weight_scale_inv"
    rewrite(folder, lambda tensors: tensors.pop(lost))
    with pytest.raises(UnsupportedQuantization, match=r"model\.layers\.7\.mlp\.up_proj"):
        headrace.load_model(folder, settings=settings)


@pytest.mark.parametrize("load_format", [*BUILT_BY_WEIGHTS, LoadFormat.DUMMY])
@pytest.mark.parametrize("place", ["config.json", "hf_quant_config.json"])
def test_a_method_without_a_reader_is_refused_in_every_format(
    place: str, load_format: LoadFormat, copied: Path, settings: Settings
) -> None:
    """Transformers would go on without one after a log line, and build plain parameters."""
    need(load_format)
    section = {"quant_method": "nonesuch", "quant_algo": "X4"}
    if place == "config.json":
        edit_config(copied, quantization_config=section)
    else:
        (copied / place).write_text(json.dumps({"quantization": section}))
    with pytest.raises(UnsupportedQuantization, match=f"nonesuch X4.*{place}"):
        headrace.load_model(copied, load_format=load_format, settings=settings)


def test_a_section_over_plain_weights_is_warned_of(
    copied: Path, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    edit_config(copied, quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4"})
    with caplog.at_level(logging.WARNING):
        model = headrace.load_model(copied, settings=settings)
    assert "no weight is packed" in caplog.text
    assert type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear
    assert getattr(model.config, "quantization_config", None) is None


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (ImportError("unpacker>=2 is required"), MissingDependency),
        (RuntimeError("unpacker wants a GPU"), UnsupportedQuantization),
    ],
)
def test_what_a_quantizer_of_transformers_lacks_is_said(
    raised: Exception,
    expected: type[Exception],
    copied: Path,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    edit_config(copied, quantization_config={"quant_method": "hqq", "quant_config": {}})

    def refuse(self: Any, *args: Any, **options: Any) -> None:
        raise raised

    monkeypatch.setattr(transformers.HqqConfig, "__init__", refuse)
    with pytest.raises(expected, match=r"quantized with hqq.*unpacker") as caught:
        headrace.load_model(copied, settings=settings)
    assert caught.value.__cause__ is raised


def test_another_quantization_than_the_stored_one_is_refused(fp8: tuple[Path, Any], settings: Settings) -> None:
    folder, values = fp8
    edit_config(folder, quantization_config=FP8)
    with pytest.raises(InvalidSetting, match="gptq was asked for, and the checkpoint is quantized with fp8"):
        headrace.load_model(folder, quantization="gptq", settings=settings)
    model = headrace.load_model(folder, quantization="fp8", dequantize=True, settings=settings)
    assert_same(model, values())


@pytest.mark.parametrize("load_format", ["auto", "modelopt"])
def test_the_modelopt_workflow_is_said_to_be_missing(
    load_format: str, llama: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "modelopt", None)
    with no_hub_calls(), pytest.raises(MissingDependency, match=r"headrace\[modelopt\]"):
        headrace.load_model(llama, load_format=load_format, quantization="modelopt_fp8", settings=settings)


def test_a_bucket_is_never_quantized_while_loading(
    llama: Path, bucket: str, s3_client: Any, settings: Settings
) -> None:
    uri = put(s3_client, bucket, llama)
    with no_hub_calls(), pytest.raises(InvalidSetting, match=r"(?s)modelopt_fp8.*from a local folder"):
        headrace.load_model(uri, quantization="modelopt_fp8", settings=settings)


@pytest.mark.parametrize("content", ["[]", "{", '{"a": '])
def test_modelopts_file_must_be_an_object(content: str, copied: Path, settings: Settings) -> None:
    (copied / "hf_quant_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json of .* is not a configuration"):
        headrace.load_model(copied, settings=settings)


# -- side files


class CountingBucket:
    """A bucket of one folder, and how often each of its objects was read."""

    def __init__(self, folder: Path) -> None:
        self._objects = {f"m/{path.name}": path.read_bytes() for path in sorted(folder.iterdir())}
        self._etags = {key: f'"e-{number}"' for number, key in enumerate(self._objects)}

    def __call__(self, asked: Asked) -> Answer:
        if asked.query.get("list-type") == "2":
            return listing({key: len(body) for key, body in self._objects.items()})
        key = asked.path.removeprefix("/bucket/")
        if key not in self._objects:
            return error(404, "NoSuchKey")
        body, headers = self._objects[key], {"ETag": self._etags[key]}
        if "range" not in asked.headers:
            return Answer(200, body, headers)
        first, _, last = asked.headers["range"].removeprefix("bytes=").partition("-")
        piece = body[int(first) : int(last) + 1]
        content_range = f"bytes {first}-{int(first) + len(piece) - 1}/{len(body)}"
        return Answer(206, piece, {**headers, "Content-Range": content_range})


CHILD = """
import headrace, sys
from headrace.engines.transformers import load_tokenizer
with headrace.open(sys.argv[1]) as checkpoint:
    tokenizer = load_tokenizer(checkpoint)
    model = headrace.load_model(checkpoint)
    print(checkpoint.config["model_type"], tokenizer("w5 w9")["input_ids"], model.generation_config.max_new_tokens)
"""


def test_a_second_process_downloads_no_side_file_again(llama: Path, tmp_path: Path) -> None:
    """The first reads each once, for configuration, tokenizer, generation settings and weights together; the second none."""
    sides = {path.name for path in llama.iterdir() if path.suffix != ".safetensors"}
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= sides
    with S3Stub(CountingBucket(llama)) as stub:
        environment = {
            **os.environ,
            "AWS_ENDPOINT_URL": stub.endpoint,
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_REGION": "us-east-1",
            "HEADRACE_CACHE_DIR": str(tmp_path / "cache"),
            "HEADRACE_PROGRESS": "0",
        }
        read = []
        for _ in range(2):
            stub.asked.clear()
            done = subprocess.run(
                [sys.executable, "-c", CHILD, "s3://bucket/m"],
                env=environment,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            assert done.stdout == "llama [5, 9] 7\n", done.stderr
            names = [asked.path.rpartition("/")[2] for asked in stub.asked if asked.path.startswith("/bucket/m/")]
            assert "model.safetensors" in names
            read.append(sorted(name for name in names if name in sides))
    assert read == [sorted(sides), []]


def test_side_files_of_another_uri_bring_the_tokenizer(llama: Path, settings: Settings) -> None:
    with open_side_files(llama, settings=settings) as side_files:
        assert load_tokenizer(side_files)("w5 w9")["input_ids"] == [5, 9]


def test_weights_beside_the_side_files_are_not_opened(side_only: Path, settings: Settings) -> None:
    (side_only / "model.safetensors").write_bytes(b"no header at all")
    with open_side_files(side_only, settings=settings) as side_files:
        assert side_files.folder() == side_only
        assert "config.json" in {stored.key for stored in side_files.objects}
