"""The account of a load: every parameter and buffer filled once or tied, every stored tensor placed, left out knowingly or named. Only what no other test looks at."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

import headrace
from headrace.checkpoint import Entry
from headrace.engines import conversion, values
from headrace.engines import weights as streamed_weights
from headrace.engines.placement import Placement, check_ledger
from headrace.errors import HeadraceError, PlacementError
from headrace.quantization.attention import SCALES
from headrace.quantization.linear import QuantizedLinear
from headrace.settings import Settings
from headrace.streaming import TensorStream
from tests.engines.models import edit_config, rewrite, save_model
from tests.support.code_definitions import assert_same
from tests.support.fusing import BlockFp8, Format, ModeloptFp8, ModeloptNvfp4, Tensors

QUIET = Settings.from_environment({}, progress=False)
Saved = Callable[[str], Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Return the folder of a random model, made once; copy it before changing it."""
    root = tmp_path_factory.mktemp("models")
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = save_model(name, root / name)
        return made[name]

    return get


@pytest.fixture
def copied(saved: Saved, tmp_path: Path) -> Saved:
    return lambda name: Path(shutil.copytree(saved(name), tmp_path / name))


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count how often each stored tensor is handed out."""
    counts: Counter[str] = Counter()
    original = TensorStream.take

    def take(self: TensorStream, name: str) -> torch.Tensor:
        counts[name] += 1
        return original(self, name)

    monkeypatch.setattr(TensorStream, "take", take)
    return counts


def load(folder: Path, **options: Any) -> Any:
    return headrace.load_model(folder, settings=QUIET, **options)


def pack(format_: Format, tensors: Tensors, *modules: str) -> dict[str, Tensors]:
    """Replace the weights of ``modules`` in ``tensors`` by packed ones of random values; return these by module and suffix."""
    generator = torch.Generator().manual_seed(5)
    made = {}
    for module in modules:
        rows, columns = tensors.pop(f"{module}.weight").shape
        made[module] = format_.make(rows, generator, columns)
        tensors |= {f"{module}.{suffix}": it for suffix, it in made[module].items()}
    return made


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


# -- the ledger


def entry(name: str) -> Entry:
    return Entry(name, "BF16", (2,), "model.safetensors", 0, 4)


def test_the_ledger_adds_up_or_says_what_is_left() -> None:
    placement = Placement(order=(entry("a"), entry("b")), targets={"a": "a", "b": "b"})
    check_ledger(taken=["b", "a"], placement=placement, unfilled=(), source="here")
    with pytest.raises(PlacementError) as caught:
        check_ledger(taken=["a"], placement=placement, unfilled=(), source="here")
    assert "here" in caught.value.what and caught.value.why == "not taken (1): b" and "report" in caught.value.mend
    with pytest.raises(PlacementError) as caught:
        check_ledger(taken=["a"], placement=placement, unfilled=("c", "d"), source="here")
    assert caught.value.why == "not taken (1): b\nnot filled (2): c, d"


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen3_moe", "deepseek_v3"])
def test_every_stored_tensor_is_taken_once_and_every_place_is_filled(
    name: str, saved: Saved, taken: Counter[str]
) -> None:
    model = load(saved(name))
    with headrace.open(saved(name)) as checkpoint:
        assert taken == Counter(dict.fromkeys(checkpoint.entries, 1))
    assert not [key for key, value in model.state_dict().items() if value.is_meta]
    assert conversion.unfilled_names(model) == []


def test_a_value_that_a_class_never_asks_for_ends_the_load(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers would go on with a parameter of its own making, after a line in the log."""
    forgotten = "model.layers.3.mlp.up_proj.weight"
    original = values.state_dict

    def without_one(*arguments: Any) -> dict[str, Any]:
        lazy: dict[str, Any] = original(*arguments)
        del lazy[forgotten]
        return lazy

    monkeypatch.setattr(streamed_weights, "state_dict", without_one)
    with pytest.raises(PlacementError, match=rf"not taken \(1\): {re.escape(forgotten)}"):
        load(saved("llama"))


def test_a_parameter_that_nothing_filled_is_named(saved: Saved) -> None:
    model = load(saved("llama"))
    model.model.layers[2].mlp.up_proj.to("meta")
    model.model.register_buffer("computed", torch.empty(2, device="meta"), persistent=False)
    assert conversion.unfilled_names(model) == ["model.layers.2.mlp.up_proj.weight"]


def test_a_persistent_buffer_that_nothing_fills_is_an_error(copied: Saved, taken: Counter[str]) -> None:
    """A router's correction is a buffer and no parameter, and without it other experts are chosen."""
    folder, lost = copied("deepseek_v3"), "model.layers.1.mlp.gate.e_score_correction_bias"
    assert lost in dict(load(folder).named_buffers())
    taken.clear()
    rewrite(folder, lambda tensors: tensors.pop(lost))
    with pytest.raises(PlacementError, match=rf"missing \(1\): {re.escape(lost)}"):
        load(folder)
    assert not taken


# -- layers for multi-token prediction


def extra_layer(tensors: Tensors, number: int, *, projection: bool = True) -> list[str]:
    """Add a layer like the one before it, numbered on; return its names."""
    copies = {
        name.replace(f"layers.{number - 1}.", f"layers.{number}."): tensor.clone()
        for name, tensor in tensors.items()
        if f"layers.{number - 1}." in name
    }
    if projection:
        copies[f"model.layers.{number}.eh_proj.weight"] = torch.zeros(64, 128, dtype=torch.bfloat16)
    tensors |= copies
    return list(copies)


@pytest.mark.parametrize("name", ["deepseek_v3", "llama"])
@pytest.mark.parametrize("stated", [0, 1])
def test_the_number_of_an_extra_layer_follows_from_the_configuration(
    name: str, stated: int, copied: Saved, saved: Saved, taken: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The first after the model's own, however many these are: 3 and 12 here, 61 in DeepSeek V3."""
    folder = copied(name)
    number = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    extra: list[str] = []
    rewrite(folder, lambda tensors: extra.extend(extra_layer(tensors, number)))
    edit_config(folder, num_nextn_predict_layers=stated)
    with caplog.at_level(logging.INFO, logger="headrace"):
        model = load(folder)
    assert not taken.keys() & set(extra)
    assert f"layers for multi-token prediction ({len(extra)} tensors, " in caplog.text
    expected = load(saved(name)).state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())


def test_a_layer_too_many_is_an_error_unless_it_is_known_for_what_it_is(copied: Saved) -> None:
    """It may as well be that config.json is another model's."""
    folder = copied("llama")
    rewrite(folder, lambda tensors: extra_layer(tensors, 12, projection=False))
    with pytest.raises(PlacementError, match=r"unexpected \(9\): model\.layers\.12\."):
        load(folder)


@pytest.mark.parametrize("dequantize", [False, True])
def test_a_packed_layer_for_multi_token_prediction_is_left_out_whole(
    dequantize: bool, copied: Saved, taken: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder = copied("deepseek_v3")
    extra: list[str] = []

    def change(tensors: Tensors) -> None:
        extra_layer(tensors, 3)
        projections = [
            name.removesuffix(".weight")
            for name in tensors
            if name.endswith("_proj.weight") and tensors[name].dim() == 2 and ".layers." in name and "eh_" not in name
        ]
        pack(BlockFp8(), tensors, *projections)
        extra.extend(name for name in tensors if ".layers.3." in name)

    rewrite(folder, change)
    assert any(name.endswith("weight_scale_inv") and ".experts." in name for name in extra)
    section = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    edit_config(folder, quantization_config=section, num_nextn_predict_layers=1)
    with caplog.at_level(logging.INFO, logger="headrace"):
        load(folder, dequantize=dequantize)
    assert not taken.keys() & set(extra)
    assert f"layers for multi-token prediction ({len(extra)} tensors, " in caplog.text


@pytest.mark.parametrize("key", ["num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers"])
def test_a_configuration_may_count_extra_layers_by_several_names(
    key: str, copied: Saved, caplog: pytest.LogCaptureFixture
) -> None:
    """An export that lost them says so in one line; where none are counted there is nothing to say."""
    folder = copied("llama")
    said = "not in the checkpoint, and not needed here: layers for multi-token prediction"
    with caplog.at_level(logging.INFO, logger="headrace"):
        load(folder)
        assert said not in caplog.text
        edit_config(folder, **{key: 1})
        load(folder)
    assert said in caplog.text


def test_two_users_of_one_streamed_tensor_both_have_it_to_the_end(saved: Saved) -> None:
    """Layers for multi-token prediction share embeddings and head: an engine gives one streamed tensor to several of them, early or late."""
    settings = Settings.from_environment(
        {}, progress=False, memory_limit_bytes=100_000, read_bytes=4096, debug_poison=True
    )
    shared = ("model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.up_proj.weight")
    first: Tensors = {}
    second: Tensors = {}
    with headrace.stream(saved("llama"), ownership="leased", settings=settings) as stream:
        for name, tensor in stream:
            if name in shared:
                first[name] = tensor
                second[name] = tensor.detach().view(-1)
            del tensor
    expected = headrace.load_state_dict(saved("llama"), include=list(shared), settings=QUIET)
    copies = {name: tensor.clone() for name, tensor in first.items()}
    first.clear()
    for name, tensor in expected.items():
        assert torch.equal(copies[name], tensor) and torch.equal(second[name], tensor.view(-1))


# -- heads


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("excluded", [["lm_head*"], ["lm_head"], []], ids=str)
@pytest.mark.parametrize("format_", [ModeloptNvfp4(), ModeloptFp8()], ids=lambda format_: format_.name)
def test_a_packed_head_is_known_by_its_tensors(
    format_: Format, excluded: list[str], tied: bool, copied: Saved, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the list of what is left out says, and a flag that ties it: packed bytes are never taken for numbers, and embeddings never for the head."""
    folder = copied("llama-tied" if tied else "llama")
    packed: dict[str, Tensors] = {}

    def change(tensors: Tensors) -> None:
        tensors.setdefault("lm_head.weight", torch.zeros(320, 64))
        packed.update(pack(format_, tensors, "lm_head", "model.layers.0.mlp.up_proj"))

    rewrite(folder, change)
    algorithm = "NVFP4" if isinstance(format_, ModeloptNvfp4) else "FP8"
    section = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": excluded}
    edit_config(folder, quantization_config=section)
    expected = format_.expand(packed["lm_head"])
    with caplog.at_level(logging.WARNING, logger="headrace"):
        model = load(folder, dtype=torch.float32)
    assert ("lm_head" in caplog.text and "excludes modules that are stored quantized" in caplog.text) is bool(excluded)
    assert isinstance(model.lm_head, QuantizedLinear)
    assert_same(model.lm_head.dequantized(), expected)
    for suffix, tensor in packed["lm_head"].items():
        assert torch.equal(as_bytes(model.lm_head.get_parameter(suffix)), as_bytes(tensor))
    model.tie_weights()
    assert isinstance(model.lm_head, QuantizedLinear) and model.config.tie_word_embeddings is False
    plain = load(folder, dtype=torch.float32, dequantize=True)
    assert_same(plain.lm_head.weight.detach(), expected)
    assert not torch.equal(plain.lm_head.weight, plain.model.embed_tokens.weight)


def test_a_packed_head_without_its_scale_is_an_error(copied: Saved) -> None:
    folder = copied("llama-tied")
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(320, 32, dtype=torch.uint8)}))
    edit_config(folder, quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head*"]})
    with pytest.raises(HeadraceError, match="lm_head"):
        load(folder)


# -- scales of keys and values

SPELLINGS = {
    "on the attention": ("k_scale", "v_scale"),
    "on its projections": ("k_proj.k_scale", "v_proj.v_scale"),
    "on a fused projection": ("qkv_proj.k_scale", "qkv_proj.v_scale"),
    "one for both": ("kv_scale",),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_scales_of_keys_and_values_arrive_under_every_spelling(
    spelling: str, copied: Saved, taken: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder, names = copied("llama"), SPELLINGS[spelling]

    def change(tensors: Tensors) -> None:
        pack(ModeloptFp8(), tensors, *(f"model.layers.{layer}.self_attn.k_proj" for layer in range(12)))
        for layer in range(12):
            for number, name in enumerate(names):
                tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor(0.03 + number / 64 + layer)

    rewrite(folder, change)
    scheme = {"num_bits": 8, "type": "float", "dynamic": False}
    section = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"], "kv_cache_scheme": scheme}
    edit_config(folder, quantization_config=section)
    with caplog.at_level(logging.WARNING, logger="headrace"):
        model = load(folder)
    for layer in range(12):
        attention = model.model.layers[layer].self_attn
        assert float(attention.k_scale) == float(torch.tensor(0.03 + layer))
        assert float(attention.v_scale) == float(torch.tensor(0.03 + (len(names) - 1) / 64 + layer))
    assert sum(
        "_scale" in name.rpartition(".")[2] and "weight" not in name and "input" not in name for name in taken
    ) == (12 * len(names))
    assert "scales of keys" not in caplog.text.lower()


@pytest.mark.parametrize("owner", ["model.layers.0.attention", "model.layers.0.mlp", "model.layers.0", "model.norm"])
def test_a_scale_that_nothing_takes_is_named(
    owner: str, copied: Saved, taken: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder, loose = copied("llama"), f"{owner}.k_scale"

    def change(tensors: Tensors) -> None:
        pack(ModeloptFp8(), tensors, "model.layers.0.self_attn.k_proj")
        tensors[loose] = torch.tensor(0.03)

    rewrite(folder, change)
    scheme = {"num_bits": 8, "type": "float", "dynamic": False}
    section = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"], "kv_cache_scheme": scheme}
    edit_config(folder, quantization_config=section)
    with caplog.at_level(logging.INFO, logger="headrace"):
        load(folder)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any(loose in warning for warning in warnings)
    assert "scales that nothing uses (1 tensors, 4 B)" in caplog.text
    assert loose not in taken


def test_scales_of_an_attention_that_the_model_has_not_are_named(
    tmp_path: Path, taken: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    # Its attention has c_attn and c_proj.
    config = GPT2Config(n_layer=2, n_embd=64, n_head=4, n_positions=64, vocab_size=320, tie_word_embeddings=False)
    folder = tmp_path / "gpt2"
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    scales = {f"transformer.h.{layer}.attn.{name}": torch.tensor(0.03) for layer in range(2) for name in SCALES}
    rewrite(folder, lambda tensors: tensors.update(scales))
    scheme = {"num_bits": 8, "type": "float", "dynamic": False}
    section = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_scheme": scheme}
    edit_config(folder, quantization_config=section)
    with caplog.at_level(logging.WARNING, logger="headrace"):
        load(folder)
    assert "Keys and values are not rounded to e4m3" in caplog.text
    assert "transformer.h.0.attn" in caplog.text
    assert not taken.keys() & scales.keys()


def test_a_scale_of_what_another_module_gives_is_refused_by_name(copied: Saved, taken: Counter[str]) -> None:
    """No scale of keys and values, though it is called like one: some files round the outputs of any layer."""
    folder, loose = copied("llama"), "model.layers.0.mlp.gate_proj.output_scale"

    def change(tensors: Tensors) -> None:
        pack(ModeloptFp8(), tensors, "model.layers.0.mlp.gate_proj")
        tensors[loose] = torch.tensor(0.03)

    rewrite(folder, change)
    edit_config(folder, quantization_config={"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]})
    with pytest.raises(PlacementError, match=f"unexpected.*{re.escape(loose)}"):
        load(folder)
    assert not taken


# -- experts under other names


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32], ids=str)
@pytest.mark.parametrize("strict", [True, False])
def test_experts_under_a_name_that_nobody_knows_never_become_random_ones(
    strict: bool, dtype: torch.dtype, copied: Saved, taken: Counter[str]
) -> None:
    """What is missing and what is unexpected are two sides of one thing, whatever else is let pass."""
    folder = copied("qwen3_moe")
    target = "model.layers.1.mlp.experts.gate_up_proj"

    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if re.search(r"layers\.1\..*experts\..*(gate|up)_proj", name)]:
            del tensors[name]
        tensors[f"{target}_packed"] = torch.zeros(12, 64, 32, dtype=dtype)

    rewrite(folder, change)
    with pytest.raises(HeadraceError) as caught:
        load(folder, strict=strict)
    assert f"{target}_packed" in str(caught.value) and re.search(rf"{re.escape(target)}\b", str(caught.value))
    assert not taken


def test_what_is_missing_without_a_packed_form_may_still_be_initialised(
    copied: Saved, caplog: pytest.LogCaptureFixture
) -> None:
    """A packed tensor that belongs to nothing else is left out, and a head that was never stored is made."""
    folder = copied("llama")

    def change(tensors: Tensors) -> None:
        del tensors["lm_head.weight"]
        tensors["lm_head_codes.weight"] = torch.zeros(4, 4, dtype=torch.uint8)

    rewrite(folder, change)
    model = load(folder, strict=False)
    assert model.lm_head.weight.isfinite().all()
    assert "lm_head_codes.weight" in caplog.text
