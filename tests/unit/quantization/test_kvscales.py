"""Scales of keys and values: every name they have had, whose they are, and when they count."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.stored_entries import PLACE, fp8, make_entries, plain, section

from headrace.errors import UnsupportedQuantization
from headrace.quantization import CheckpointQuantization, detect
from headrace.quantization.kvscales import describe_kv

ATTENTION = "model.layers.0.self_attn"
FP8_SCHEME = {"num_bits": 8, "type": "float", "dynamic": False}


def projections(attention: str, *names: str) -> dict[str, str]:
    return {key: text for name in names for key, text in fp8(f"{attention}.{name}", inputs=True).items()}


def layer(number: int = 0) -> dict[str, str]:
    attention = f"model.layers.{number}.self_attn"
    return projections(attention, "q_proj", "k_proj", "v_proj")


LATENT = projections(ATTENTION, "q_a_proj", "kv_b_proj", "o_proj")
FUSED = projections(ATTENTION, "qkv_proj", "o_proj")


def scale(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "F32")


def read(tensors: dict[str, str], method: str = "modelopt", **raw: Any) -> CheckpointQuantization:
    answer = detect(section(method, **{"quant_algo": "FP8", **raw}), make_entries(tensors))
    assert answer is not None
    return answer


def pair(answer: CheckpointQuantization, attention: str = ATTENTION) -> list[str | None]:
    assert answer.kv is not None
    return [entry and entry.name.removeprefix(f"{attention}.") for entry in answer.kv.scales[attention]]


@pytest.mark.parametrize(
    "names",
    [
        ("k_scale", "v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("qkv_proj.k_scale", "qkv_proj.v_scale"),
        ("attn.k_scale", "attn.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
    ],
)
@pytest.mark.parametrize("tensors", [layer(), LATENT, FUSED], ids=["separate", "latent", "fused"])
def test_every_spelling_is_found_on_every_kind_of_attention(names: tuple[str, str], tensors: dict[str, str]) -> None:
    entries = {**tensors, **scale(*(f"{ATTENTION}.{name}" for name in names))}
    answer = read(entries, kv_cache_scheme=FP8_SCHEME)
    assert answer.kv is not None and (answer.kv.format, answer.kv.group_size) == ("e4m3", None)
    assert pair(answer) == list(names)
    assert answer.warnings == () and answer.unused == ()
    assert answer.entry_names() == set(entries)


def test_one_scale_stands_for_both_and_separate_ones_are_preferred() -> None:
    old, new = scale(f"{ATTENTION}.kv_scale"), scale(f"{ATTENTION}.k_proj.k_scale", f"{ATTENTION}.v_proj.v_scale")
    assert pair(read({**layer(), **old}, "fp8")) == ["kv_scale", "kv_scale"]
    both = read({**layer(), **old, **new}, "fp8")
    assert pair(both) == ["k_proj.k_scale", "v_proj.v_scale"]
    assert both.unused == (f"{ATTENTION}.kv_scale",)
    assert both.warnings == (
        f"Scales of keys and values that no attention module takes are not used: {ATTENTION}.kv_scale.",
    )
    alone = read({**layer(), **scale(f"{ATTENTION}.k_scale")}, kv_cache_quant_algo="FP8")
    assert pair(alone) == ["k_scale", "k_scale"]


def test_a_scale_without_an_attention_module_is_unused_and_named() -> None:
    entries = {**layer(), **scale(f"{ATTENTION}.k_scale", f"{ATTENTION}.v_scale", "model.layers.9.self_attn.k_scale")}
    answer = read(entries, kv_cache_quant_algo="FP8")
    assert answer.unused == ("model.layers.9.self_attn.k_scale",)
    assert answer.kv is not None and list(answer.kv.scales) == [ATTENTION]
    assert "model.layers.9.self_attn.k_scale" in answer.warnings[0]


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.k_scale",
        "model.layers.0.mlp.kv_scale",
        "model.layers.0.mlp.attn.v_scale",
        "model.layers.0.k_scale",
        "model.layers.0.input_layernorm.k_scale",
        "model.k_scale",
        "k_scale",
        f"{ATTENTION}.q_proj.k_scale",
        "backbone.layers.1.mixer.k_scale",
        "backbone.layers.1.mixer.k_proj.k_scale",
    ],
)
@pytest.mark.parametrize("method", ["modelopt", "fp8"])
def test_a_scale_on_what_is_no_attention_is_unused_and_named(name: str, method: str) -> None:
    others = ("model.layers.0.mlp.gate_proj", "model.layers.0.input_layernorm", "model.norm", "lm_head")
    mamba = ("backbone.layers.1.mixer.in_proj", "backbone.layers.1.mixer.out_proj")
    weights = {key: text for module in (*others, *mamba) for key, text in plain(module).items()}
    entries = {**layer(), **weights, **scale(f"{ATTENTION}.k_scale", f"{ATTENTION}.v_scale", name)}
    answer = read(entries, method, kv_cache_quant_algo="FP8")
    assert answer.unused == (name,)
    assert answer.warnings == (f"Scales of keys and values that no attention module takes are not used: {name}.",)
    assert answer.kv is not None and list(answer.kv.scales) == [ATTENTION]


@pytest.mark.parametrize(
    ("attention", "module", "names"),
    [
        ("backbone.layers.0.mixer", "k_proj", ("k_proj.k_scale", "v_proj.v_scale")),
        ("transformer.h.0.attn", "c_attn", ("k_scale", "v_scale")),
        ("transformer.h.0.self_attention", "query_key_value", ("k_scale", "v_scale")),
        ("layers.0.attention", "wqkv", ("k_scale", "v_scale")),
        ("model.layers.0.attn", "k_proj", ("attn.k_scale", "attn.v_scale")),
        ("model.layers.0.self_attn.attn", "k_proj", ("k_scale", "v_scale")),
    ],
)
def test_attention_is_known_by_its_projections_or_its_name(attention: str, module: str, names: tuple[str, str]) -> None:
    entries = {**plain(f"{attention}.{module}"), **scale(*(f"{attention}.{name}" for name in names))}
    answer = read({**layer(7), **entries}, kv_cache_quant_algo="FP8")
    assert pair(answer, attention) == list(names)
    assert answer.unused == ()


def test_layers_without_scales_beside_others_that_have_them_are_named() -> None:
    entries = {**layer(0), **layer(11), **plain("vision.layers.0.self_attn.k_proj")}
    answer = read({**entries, **scale(f"{ATTENTION}.k_scale", f"{ATTENTION}.v_scale")}, kv_cache_quant_algo="FP8")
    assert answer.warnings == (
        "Attention modules without scales of keys and values, beside others that have them; theirs are taken as 1: model.layers.11.self_attn.",
    )
    none = read(entries, kv_cache_quant_algo="FP8")
    assert none.kv is not None and none.kv.scales == {} and none.warnings == ()
    assert describe_kv(none.kv) == "FP8, no scales (taken as 1)"


@pytest.mark.parametrize(
    "raw", [{}, {"kv_cache_scheme": None}, {"kv_cache_quant_algo": None}, {"kv_cache_quant_algo": "auto"}]
)
def test_scales_that_no_configuration_asks_for_are_unused_and_named(raw: dict[str, Any]) -> None:
    entries = {**layer(), **scale(f"{ATTENTION}.k_scale", f"{ATTENTION}.v_scale")}
    answer = read(entries, **raw)
    assert answer.kv is None
    assert answer.unused == (f"{ATTENTION}.k_scale", f"{ATTENTION}.v_scale")
    assert answer.warnings == (
        f"Scales of keys and values that no configuration asks for are not used; keys and values are left as they are: {ATTENTION}.k_scale, {ATTENTION}.v_scale.",
    )
    # quant_method fp8 has no key to ask with: there the scales are the statement.
    assert pair(read(entries, "fp8", **raw)) == ["k_scale", "v_scale"]


@pytest.mark.parametrize(
    ("raw", "format", "group_size"),
    [
        ({"kv_cache_scheme": FP8_SCHEME}, "e4m3", None),
        ({"kv_cache_scheme": "NVFP4"}, "nvfp4", 16),
        ({"kv_cache_scheme": {"num_bits": 4, "type": "float", "group_size": 16}}, "nvfp4", 16),
        ({"kv_cache_quant_algo": "FP8"}, "e4m3", None),
        ({"kv_cache_quant_algo": "NVFP4"}, "nvfp4", 16),
        ({"kv_cache_quant_targets": ["k_proj", "v_proj"]}, "e4m3", None),
        ({"static_kv_dtype": "torch.float8_e4m3fn"}, "e4m3", None),
        ({"config_groups": {"kv": {"targets": ["re:.*k_proj", "re:.*v_proj"], "output_activations": FP8_SCHEME}}}, "e4m3", None),
    ],
)  # fmt: skip
def test_a_format_is_asked_for_in_many_ways(raw: dict[str, Any], format: str, group_size: int | None) -> None:
    answer = read(layer(), **raw)
    assert answer.kv is not None and (answer.kv.format, answer.kv.group_size) == (format, group_size)


def test_modelopts_own_file_may_ask_for_it_alone() -> None:
    other = section("modelopt", kv_cache_quant_algo="FP8")
    answer = detect(section("modelopt", quant_algo="FP8"), make_entries(layer()), modelopt_section=other)
    assert answer is not None and answer.kv is not None and answer.kv.format == "e4m3"
    only = detect(None, make_entries(plain(f"{ATTENTION}.k_proj")), modelopt_section=other)
    assert only is not None and only.kv is not None and only.modules == {}


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"kv_cache_quant_algo": "INT8"}, "kv_cache_quant_algo 'INT8'.*Known are FP8, NVFP4"),
        ({"kv_cache_scheme": "NVFP4_AFFINE"}, "kv_cache_scheme 'NVFP4_AFFINE'"),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "int"}}, "caches keys and values as 8-bit int values"),
        ({"kv_cache_scheme": {**FP8_SCHEME, "dynamic": True}}, "as dynamic 8-bit float values"),
    ],
)
def test_other_formats_are_refused_by_name(raw: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedQuantization, match=f"{PLACE}.*{said}"):
        read(layer(), **raw)


def test_kv_in_words() -> None:
    assert describe_kv(None) is None
    answer = read({**layer(), **scale(f"{ATTENTION}.k_scale", f"{ATTENTION}.v_scale")}, kv_cache_quant_algo="NVFP4")
    assert describe_kv(answer.kv) == "NVFP4, scales for 1 attention module"
