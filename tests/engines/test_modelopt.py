"""NVIDIA ModelOpt's calibrating workflow: what it is called with (a stand-in takes its place), who never reaches it, and what ModelOpt itself makes of real models.

The last need nvidia-modelopt (extra ``modelopt``) and are skipped where it is not installed.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import json
import logging
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import headrace
from headrace.cli.main import app
from headrace.cli.serve import ServeOptions
from headrace.engines import modelopt as workflow
from headrace.engines.modelopt import parse_quantization, round_nvfp4
from headrace.errors import InvalidSetting, MissingDependency, ModelError, UnsupportedQuantization
from headrace.settings import Settings
from headrace.streaming import LoadReport
from tests.engines.hub import no_hub_calls
from tests.engines.models import edit_config, rewrite, save_model
from tests.engines.test_serve_flags import complete, save_tokenizer, served
from tests.support.quantized import QuantizedCheckpoints

FP8 = {"quant_method": "fp8", "weight_block_size": [64, 64], "activation_scheme": "dynamic"}
TEXTS = ["w5 w9 w200 w17", "w300", "w8 w8 w31 w2 w77 w140"]
TOKENS = [[5, 9, 200, 17], [300], [8, 8, 31, 2, 77, 140]]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings.from_environment(progress=False, cache_dir=tmp_path / "cache")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama model with a tokenizer of one word for each token. Copy it before changing it."""
    folder = save_model("llama", tmp_path_factory.mktemp("modelopt") / "llama")
    save_tokenizer(folder, "w")
    return folder


@pytest.fixture
def copied(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "llama"))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small products are slower with more."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


# -- a stand-in for the library


class TensorQuantizer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.amax: torch.Tensor | None = None
        self.is_enabled = True

    def see(self, values: torch.Tensor) -> None:
        largest = values.abs().max()
        self.amax = largest if self.amax is None else torch.maximum(self.amax, largest)


@dataclass
class StandIn:
    """What `modelopt.torch.quantization` was called with. Its quantizers are beside the linear layers and only look."""

    config: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    """The model's, when the call came."""
    calls: list[dict[str, Any]] = field(default_factory=list)
    """Of the model, within the loop."""
    had_gradients: list[bool] = field(default_factory=list)
    backends: dict[str, Callable[..., Any]] = field(default_factory=dict)
    skipped: str = "lm_head"
    """Layers with this in their name get no quantizer."""
    failure: Exception | None = None
    presets: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        plain = {"num_bits": (4, 3), "axis": None}
        blocks = {"num_bits": (2, 1), "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}}
        for name, attributes in (("FP8_DEFAULT_CFG", plain), ("NVFP4_DEFAULT_CFG", blocks)):
            self.presets[name] = {
                "quant_cfg": [
                    {"quantizer_name": "*", "enable": False},
                    {"quantizer_name": "*weight_quantizer", "cfg": copy.deepcopy(attributes)},
                    {"quantizer_name": "*input_quantizer", "cfg": copy.deepcopy(attributes)},
                    {"quantizer_name": "*lm_head*", "enable": False},
                ],
                "algorithm": "max",
            }

    def quantize(self, model: torch.nn.Module, config: dict[str, Any], forward_loop: Any = None) -> torch.nn.Module:
        self.config = config
        self.weights = {name: value.clone() for name, value in model.state_dict().items()}
        if self.failure is not None:
            raise self.failure
        for name, module in list(model.named_modules()):
            if isinstance(module, torch.nn.Linear) and self.skipped not in name:
                module.input_quantizer = TensorQuantizer()
                module.register_forward_pre_hook(lambda module, inputs: module.input_quantizer.see(inputs[0]))

        def note(module: Any, inputs: Any, keywords: Any) -> None:
            assert not inputs
            self.calls.append(keywords)
            self.had_gradients.append(torch.is_grad_enabled())

        hook = model.register_forward_pre_hook(note, with_kwargs=True)
        forward_loop(model)
        hook.remove()
        return model

    def install(self, patch: pytest.MonkeyPatch) -> None:
        modules = {f"modelopt{rest}": ModuleType(f"modelopt{rest}") for rest in ("", ".torch", ".torch.quantization")}
        layers = modules["modelopt.torch.quantization.nn"] = ModuleType("modelopt.torch.quantization.nn")
        modules["modelopt"].__version__ = "9.9"  # type: ignore[attr-defined]
        vars(modules["modelopt.torch.quantization"]).update({**self.presets, "quantize": self.quantize})
        vars(layers).update(
            TensorQuantizer=TensorQuantizer,
            is_registered_quant_backend=self.backends.__contains__,
            register_quant_backend=self.backends.__setitem__,
        )
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    found = StandIn()
    found.install(monkeypatch)
    return found


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """No weight is read, or the test fails."""
    monkeypatch.setattr(
        "headrace.engines.transformers.StreamedWeights", lambda *_, **__: pytest.fail("weights were read")
    )


# -- what ModelOpt is called with


@pytest.mark.parametrize("load_format", ["auto", "modelopt"])
@pytest.mark.parametrize(
    ("asked", "preset"),
    [
        ("modelopt_fp8", "FP8_DEFAULT_CFG"),
        ("ModelOpt-FP8", "FP8_DEFAULT_CFG"),
        ("modelopt_nvfp4", "NVFP4_DEFAULT_CFG"),
        ("modelopt_fp4", "NVFP4_DEFAULT_CFG"),
    ],
)
def test_modelopt_is_given_the_plain_model_its_configuration_and_the_texts(
    asked: str, preset: str, load_format: str, llama: Path, settings: Settings, stand_in: StandIn
) -> None:
    before = copy.deepcopy(stand_in.presets[preset])
    reports: list[LoadReport] = []
    with no_hub_calls():
        model = headrace.load_model(
            llama,
            load_format=load_format,
            quantization=asked,
            calibration=TEXTS,
            settings=settings,
            on_report=reports.append,
        )
    stored = AutoModelForCausalLM.from_pretrained(llama).state_dict()
    assert set(stand_in.weights) == set(stored)
    assert all(torch.equal(stand_in.weights[name], value) for name, value in stored.items())

    assert stand_in.presets[preset] == before, "the configuration is ModelOpt's own, and others use it"
    expected = copy.deepcopy(before)
    if preset == "NVFP4_DEFAULT_CFG":  # on a CPU, where ModelOpt has no NVFP4
        for entry in expected["quant_cfg"][1:3]:
            entry["cfg"]["backend"] = "headrace_nvfp4"
        assert stand_in.backends == {"headrace_nvfp4": round_nvfp4}
    else:
        assert stand_in.backends == {}
    assert stand_in.config == expected

    assert [call["input_ids"].tolist() for call in stand_in.calls] == [[tokens] for tokens in TOKENS]
    assert all(call["use_cache"] is False for call in stand_in.calls)
    assert stand_in.had_gradients == [False] * len(TEXTS)

    assert type(model).__name__ == "LlamaForCausalLM" and model.name_or_path == str(llama)
    assert model.model.layers[11].mlp.down_proj.input_quantizer.amax > 0
    assert reports[0].load_format == "modelopt"
    assert reports[0].bytes_read == reports[0].bytes_wanted == sum(value.nbytes for value in stored.values())
    phases = list(reports[0].phases)
    assert phases.index("planning") < phases.index("weights") < phases.index("calibrating")


def test_what_from_pretrained_returns_is_returned(llama: Path, settings: Settings, stand_in: StandIn) -> None:
    with headrace.open(llama, settings=settings) as checkpoint:
        model, loading_info = headrace.load_model(
            checkpoint,
            quantization="modelopt_fp8",
            calibration=TEXTS,
            output_loading_info=True,
            dtype=torch.float32,
            settings=settings,
        )
    assert loading_info["missing_keys"] == set() or loading_info["missing_keys"] == []
    assert {value.dtype for value in stand_in.weights.values()} == {torch.float32}
    assert model.lm_head.weight.dtype is torch.float32


def test_our_own_texts_are_named_counted_and_called_few(
    llama: Path, settings: Settings, stand_in: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        headrace.load_model(llama, quantization="modelopt_fp8", settings=settings)
    num_tokens = sum(call["input_ids"].numel() for call in stand_in.calls)
    assert num_tokens > 1000
    told = {record.levelname: record.getMessage() for record in caplog.records if "calibrat" in record.getMessage()}
    assert "modelopt_fp8 on Headrace's own texts" in told["INFO"] and f"{num_tokens:,} tokens" in told["INFO"]
    assert f"{num_tokens:,} tokens are few" in told["WARNING"] and "--calibration FILE" in told["WARNING"]
    assert "ModelOpt 9.9 left 84 quantizers" in caplog.text  # 7 layers in each of 12
    assert "no text reached" not in caplog.text


def test_many_tokens_are_not_called_few(
    llama: Path, settings: Settings, stand_in: StandIn, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "texts.txt"
    file.write_text(("w7 " * 4096 + "\n") * 4)
    headrace.load_model(llama, quantization="modelopt_fp8", calibration=file, settings=settings)
    # The model's own limit is below ours.
    assert [tuple(call["input_ids"].shape) for call in stand_in.calls] == [(1, 256)] * 64
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_quantizers_that_no_text_reached_are_named(
    llama: Path,
    settings: Settings,
    stand_in: StandIn,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(TensorQuantizer, "see", lambda self, values: None)
    headrace.load_model(llama, quantization="modelopt_fp8", calibration=TEXTS, settings=settings)
    assert "no text reached 84 of 84 quantizers, such as model.layers.0.self_attn.q_proj.input_quantizer" in caplog.text


# -- what cannot be


@pytest.mark.parametrize("asked", ["modelopt", "modelopt_int4", "modelopt_fp"])
def test_another_name_lists_the_known_ones(
    asked: str, llama: Path, settings: Settings, no_weights: None, stand_in: StandIn
) -> None:
    with pytest.raises(InvalidSetting, match=r"Known: modelopt_fp8, modelopt_nvfp4; modelopt_fp4 is modelopt_nvfp4"):
        headrace.load_model(llama, quantization=asked, settings=settings)


def test_every_known_name_has_its_preset() -> None:
    assert {parse_quantization(name) for name in workflow.PRESETS} == set(workflow.PRESETS)


def test_without_modelopt_the_extra_is_named(
    llama: Path, settings: Settings, no_weights: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "modelopt", None)
    with pytest.raises(MissingDependency, match="needs NVIDIA ModelOpt") as caught:
        headrace.load_model(llama, quantization="modelopt_fp8", settings=settings)
    assert 'pip install "headrace[modelopt]"' in caught.value.mend
    assert isinstance(caught.value.__cause__, ImportError)


def test_a_modelopt_that_is_too_old_is_said_to_be(
    llama: Path, settings: Settings, no_weights: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The configurations of 0.42 were mappings of names to attributes."""
    old = StandIn()
    old.presets["FP8_DEFAULT_CFG"]["quant_cfg"] = {"*weight_quantizer": {"num_bits": (4, 3)}}
    old.install(monkeypatch)
    with pytest.raises(MissingDependency, match=r"ModelOpt 9\.9 is installed"):
        headrace.load_model(llama, quantization="modelopt_fp8", settings=settings)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"dequantize": True}, "dequantize"),
        ({"weight_only": True}, "weight_only"),
        ({"quantization_config": transformers.FineGrainedFP8Config()}, "quantization_config"),
        ({"layers": range(3)}, "layers"),
    ],
)
def test_wishes_about_packed_weights_and_parts_do_not_go_with_it(
    options: dict[str, Any], named: str, llama: Path, settings: Settings, stand_in: StandIn, no_weights: None
) -> None:
    with pytest.raises(InvalidSetting, match=f"{named} cannot be used where a plain model is quantized"):
        headrace.load_model(llama, quantization="modelopt_fp8", settings=settings, **options)


def test_texts_without_anything_to_calibrate_are_refused(llama: Path, settings: Settings, no_weights: None) -> None:
    with pytest.raises(InvalidSetting, match="nothing is quantized while loading"):
        headrace.load_model(llama, calibration=TEXTS, settings=settings)


def test_a_file_that_is_absent_ends_the_load_before_the_weights(
    llama: Path, settings: Settings, stand_in: StandIn, no_weights: None, tmp_path: Path
) -> None:
    with pytest.raises(InvalidSetting, match=r"absent\.txt cannot be read"):
        headrace.load_model(llama, quantization="modelopt_fp8", calibration=tmp_path / "absent.txt", settings=settings)


def test_a_model_without_a_tokenizer_is_refused(
    copied: Path, settings: Settings, stand_in: StandIn, no_weights: None
) -> None:
    for path in copied.glob("token*"):
        path.unlink()
    with pytest.raises(ModelError, match="tokenizer"):
        headrace.load_model(copied, quantization="modelopt_fp8", settings=settings)


def test_an_encoder_and_decoder_is_refused(
    tmp_path: Path, settings: Settings, stand_in: StandIn, no_weights: None
) -> None:
    config = transformers.T5Config(
        vocab_size=320, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    with pytest.raises(UnsupportedQuantization, match="an encoder and a decoder"):
        headrace.load_model(tmp_path / "t5", quantization="modelopt_fp8", settings=settings)


def test_tokens_beyond_the_vocabulary_are_refused(copied: Path, settings: Settings, stand_in: StandIn) -> None:
    rewrite(
        copied,
        lambda tensors: tensors.update(
            {name: tensors[name][:100] for name in ("model.embed_tokens.weight", "lm_head.weight")}
        ),
    )
    edit_config(copied, vocab_size=100)
    with pytest.raises(ModelError, match="makes tokens up to 300, and the model knows 100"):
        headrace.load_model(copied, quantization="modelopt_fp8", calibration=TEXTS, settings=settings)
    assert stand_in.calls == []


@pytest.mark.parametrize("failure", [RuntimeError("no weight quantizer\nis enabled"), KeyError("q")])
def test_where_modelopt_fails_so_does_the_load(
    failure: Exception, llama: Path, settings: Settings, stand_in: StandIn
) -> None:
    """SGLang's loader goes on with the plain model there."""
    stand_in.failure = failure
    with pytest.raises(
        UnsupportedQuantization, match=r"could not be quantized to modelopt_fp8 by ModelOpt 9\.9"
    ) as caught:
        headrace.load_model(llama, quantization="modelopt_fp8", calibration=TEXTS, settings=settings)
    assert caught.value.__cause__ is failure
    assert " ".join(str(failure).split()) in caught.value.why


def test_where_nothing_was_quantized_the_load_fails(llama: Path, settings: Settings, stand_in: StandIn) -> None:
    stand_in.skipped = ""  # in every name
    with pytest.raises(UnsupportedQuantization, match="found no layer to quantize"):
        headrace.load_model(llama, quantization="modelopt_fp8", calibration=TEXTS, settings=settings)


def test_memory_that_runs_out_stays_that_error(llama: Path, settings: Settings, stand_in: StandIn) -> None:
    stand_in.failure = torch.OutOfMemoryError("full")
    with pytest.raises(torch.OutOfMemoryError):
        headrace.load_model(llama, quantization="modelopt_fp8", calibration=TEXTS, settings=settings)


# -- who never reaches it


@pytest.mark.parametrize("load_format", ["auto", "headrace", "modelopt"])
def test_a_bucket_never_reaches_modelopt(
    load_format: str, llama: Path, bucket: str, s3_client: Any, settings: Settings, stand_in: StandIn, no_weights: None
) -> None:
    for path in llama.iterdir():
        s3_client.put_object(Bucket=bucket, Key=f"m/{path.name}", Body=path.read_bytes())
    stand_in.failure = AssertionError("ModelOpt was called")
    with no_hub_calls(), pytest.raises(InvalidSetting, match=r"local folder|cannot read a bucket"):
        headrace.load_model(
            f"s3://{bucket}/m",
            load_format=load_format,
            quantization="modelopt_fp8",
            calibration=TEXTS,
            settings=settings,
        )
    assert stand_in.config == {}


@pytest.mark.parametrize("asked", ["modelopt", "modelopt_fp8", "modelopt_nvfp4"])
def test_what_modelopt_quantized_is_streamed(
    asked: str, quantized: QuantizedCheckpoints, settings: Settings, stand_in: StandIn
) -> None:
    """B2: the method is named in whichever spelling, and the checkpoint is read as it is."""
    folder = quantized["modelopt-fp8-kvfp8-llama"].folder
    reports: list[LoadReport] = []
    with no_hub_calls():
        model = headrace.load_model(folder, quantization=asked, settings=settings, on_report=reports.append)
    assert type(model.model.layers[0].mlp.up_proj).__name__ == "QuantizedLinear"
    assert reports[0].load_format == "headrace"
    assert stand_in.config == {}
    with pytest.raises(InvalidSetting, match="quantized with modelopt already"):
        headrace.load_model(folder, load_format="modelopt", quantization=asked, settings=settings)


@pytest.mark.parametrize("place", ["config.json", "hf_quant_config.json"])
def test_a_folder_that_says_it_is_quantized_never_reaches_modelopt(
    place: str, copied: Path, settings: Settings, stand_in: StandIn
) -> None:
    """Even where its weights are plain: they are loaded as what they are."""
    section = {"quant_method": "modelopt", "quant_algo": "FP8"}
    if place == "config.json":
        edit_config(copied, quantization_config=section)
    else:
        (copied / place).write_text(json.dumps({"quantization": section}))
    model = headrace.load_model(copied, quantization="modelopt_fp8", settings=settings)
    assert type(model.lm_head) is torch.nn.Linear and stand_in.config == {}
    edit_config(copied, quantization_config=FP8)
    with pytest.raises(InvalidSetting, match="quantized with fp8"):
        headrace.load_model(copied, quantization="modelopt_fp8", settings=settings)
    assert stand_in.config == {}


def test_packed_weights_that_nothing_explains_never_reach_modelopt(
    copied: Path, settings: Settings, stand_in: StandIn
) -> None:
    name = "model.layers.3.mlp.up_proj.weight"
    rewrite(copied, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)}))
    with pytest.raises(UnsupportedQuantization, match=r"layers\.3\.mlp\.up_proj"):
        headrace.load_model(copied, quantization="modelopt_fp8", calibration=TEXTS, settings=settings)
    assert stand_in.config == {}


# -- our rounding for ModelOpt


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nvfp4_rounds_by_the_largest_value_that_was_seen(dtype: torch.dtype) -> None:
    """With 2688 (the largest code, 6, times the largest group scale, 448) the second-level factor is 1, and group scales are a sixth of the largest value."""
    group = [12.0, 5.0, -7.0, 0.9, 0.5, 0.4, 3.1, -2.4, *[0.0] * 8]  # scale 2: codes 0, 1, 2, 3, 4, 6, 8, 12
    rounded = [12.0, 4.0, -8.0, 1.0, 0.0, 0.0, 3.0, -2.0, *[0.0] * 8]
    quantizer = TensorQuantizer()
    quantizer.amax = torch.tensor(2688.0)
    values = torch.tensor([group, [value / 4 for value in group]], dtype=dtype)
    found = round_nvfp4(values, quantizer)
    assert found.dtype is dtype
    assert found.tolist() == [rounded, [value / 4 for value in rounded]]


def test_nvfp4_without_a_scale_takes_the_largest_value_at_hand() -> None:
    values = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    known, unknown = TensorQuantizer(), TensorQuantizer()
    known.amax = values.abs().max()
    assert torch.equal(round_nvfp4(values, unknown), round_nvfp4(values, known))
    assert torch.equal(round_nvfp4(torch.zeros(2, 32), unknown), torch.zeros(2, 32))


# -- the command line


def test_the_command_line_brings_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ServeOptions] = []
    monkeypatch.setattr("headrace.cli.serve.serve", lambda options: seen.append(options) or 0)
    arguments = ["serve", "/models/llama", "--quantization", "modelopt_fp8", "--calibration", "texts.txt"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert CliRunner().invoke(app, arguments[:-2]).exit_code == 0
    assert [(options.quantization, options.calibration) for options in seen] == [
        ("modelopt_fp8", Path("texts.txt")),
        ("modelopt_fp8", None),
    ]


def test_a_quantized_model_is_served(llama: Path, tmp_path: Path, stand_in: StandIn) -> None:
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(TEXTS))
    with served(llama, tmp_path, quantization="modelopt_fp8", calibration=file, dtype="float32") as client:
        assert len(complete(client, "w5 w9 w200").json()["choices"][0]["text"].split()) == 5
    assert [call["input_ids"].tolist() for call in stand_in.calls] == [[tokens] for tokens in TOKENS]


# -- ModelOpt itself


@pytest.fixture(scope="module")
def real() -> Any:
    """ModelOpt's module for quantization."""
    if importlib.util.find_spec("modelopt") is None:
        pytest.skip("nvidia-modelopt is not installed: pip install 'headrace[modelopt]'")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit, and a Transformers that is newer than ModelOpt
        return importlib.import_module("modelopt.torch.quantization")


def quantize(folder: Path, asked: str, settings: Settings) -> Any:
    """Return a model that ModelOpt has quantized, in float32."""
    with no_hub_calls():
        return headrace.load_model(
            folder, quantization=asked, calibration=TEXTS, dtype=torch.float32, settings=settings
        )


def logits(model: Any) -> torch.Tensor:
    """Return logits for tokens that the calibration has not seen in this order, ``[2, 24, 320]``."""
    tokens = torch.randint(0, 320, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        found: torch.Tensor = model(input_ids=tokens, use_cache=False).logits
    return found


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the root mean square of the difference, as a part of that of ``expected``."""
    return float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def packed_by(model: Any, target: Path, settings: Settings) -> Any:
    """Return what Headrace loads from ModelOpt's own export of ``model``."""
    export = importlib.import_module("modelopt.torch.export").export_hf_checkpoint
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        export(model, export_dir=target)
    return headrace.load_model(target, dtype=torch.float32, settings=settings)


REAL = pytest.mark.filterwarnings("ignore")
"""ModelOpt warns of much, also while it works."""


@REAL
@pytest.mark.parametrize(("asked", "most"), [("modelopt_fp8", 0.05), ("modelopt_nvfp4", 0.2)])
def test_a_real_model_stays_close(asked: str, most: float, llama: Path, settings: Settings, real: Any) -> None:
    model = quantize(llama, asked, settings)
    plain = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    assert most / 20 < distance(logits(model), logits(plain)) < most
    assert torch.equal(model.model.layers[2].mlp.up_proj.weight, plain.model.layers[2].mlp.up_proj.weight)
    kind = importlib.import_module("modelopt.torch.quantization.nn").TensorQuantizer
    working = {name for name, module in model.named_modules() if isinstance(module, kind) and module.is_enabled}
    projections = [f"self_attn.{part}_proj" for part in "qkvo"] + [
        f"mlp.{part}_proj" for part in ("gate", "up", "down")
    ]
    assert working == {
        f"model.layers.{layer}.{projection}.{side}_quantizer"
        for layer in range(12)
        for projection in projections
        for side in ("input", "weight")
    }
    assert not model.lm_head.weight_quantizer.is_enabled and not model.lm_head.input_quantizer.is_enabled


def to_fp8(values: torch.Tensor, largest: float) -> torch.Tensor:
    """Round to E4M3 with the step that makes ``largest`` its largest value."""
    return (values * 448 / largest).clamp(-448, 448).to(torch.float8_e4m3fn).float() * largest / 448


@REAL
def test_fp8_scales_are_the_largest_values_of_weight_and_texts(llama: Path, settings: Settings, real: Any) -> None:
    """Weight and inputs of a layer, computed by hand from what the plain model's layer sees."""
    plain = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    seen: list[torch.Tensor] = []
    layer = plain.model.layers[0].self_attn.q_proj
    layer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].detach()))
    with torch.no_grad():
        for tokens in TOKENS:
            plain(input_ids=torch.tensor([tokens]))
    largest_input = max(float(values.abs().max()) for values in seen)
    largest_weight = float(layer.weight.detach().abs().max())

    found = quantize(llama, "modelopt_fp8", settings).model.layers[0].self_attn.q_proj
    assert float(found.input_quantizer.amax) == largest_input
    assert float(found.weight_quantizer.amax) == largest_weight
    values = torch.randn(5, 64, generator=torch.Generator().manual_seed(2)) * largest_input
    expected = to_fp8(values, largest_input) @ to_fp8(layer.weight.detach(), largest_weight).T
    with torch.inference_mode():
        assert torch.allclose(found(values), expected, atol=1e-5)


@REAL
def test_nvfp4_on_a_cpu_is_what_modelopts_export_packs(
    llama: Path, settings: Settings, real: Any, tmp_path: Path
) -> None:
    """ModelOpt rounds in the packed file itself; while it calibrates, our rounding takes the place of its CUDA kernel. Both must give the same weights."""
    model = quantize(llama, "modelopt_nvfp4", settings)
    names = [f"model.layers.{layer}.{part}" for layer in (0, 7) for part in ("self_attn.o_proj", "mlp.down_proj")]
    with torch.inference_mode():
        # Copied, since the export packs the model that it is given.
        rounded = {name: model.get_submodule(name) for name in names}
        rounded = {name: layer.weight_quantizer(layer.weight).clone() for name, layer in rounded.items()}
        before = logits(model)
    packed = packed_by(model, tmp_path / "packed", settings)
    for name, values in rounded.items():
        stored = packed.get_submodule(name)
        assert stored.weight.dtype is torch.uint8
        assert torch.allclose(stored.dequantized(torch.float32), values, rtol=1e-5, atol=0), name
    assert distance(logits(packed), before) < 0.2  # q, k and v, gate and up share their scales there


@REAL
@pytest.mark.parametrize("asked", ["modelopt_fp8", "modelopt_nvfp4"])
def test_experts_are_quantized_and_their_export_loads(
    asked: str, settings: Settings, real: Any, tmp_path: Path
) -> None:
    folder = save_model("qwen3_moe", tmp_path / "moe")
    save_tokenizer(folder, "w")
    model = quantize(folder, asked, settings)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before = logits(model)
    assert 0.001 < distance(before, logits(plain)) < 0.1
    packed = packed_by(model, tmp_path / "packed", settings)
    assert distance(logits(packed), before) < 0.1


@REAL
def test_a_real_quantized_model_is_served(llama: Path, tmp_path: Path, real: Any) -> None:
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(TEXTS))
    with served(llama, tmp_path, quantization="modelopt_nvfp4", calibration=file, dtype="float32") as client:
        assert len(complete(client, "w5 w9 w200").json()["choices"][0]["text"].split()) == 5
