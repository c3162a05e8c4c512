"""What the loader for SGLang takes as extra configuration, how it refuses the rest, and what it knows of SGLang's ways by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.engines.sglang import is_wanted
from headrace.engines.sglang_options import parse_loader_options
from headrace.engines.sglang_sources import (
    forgotten_files,
    has_fp8_experts,
    is_quantized_while_loading,
    routed_expert_dtype,
)
from headrace.errors import InvalidSetting


def test_nothing_says_nothing() -> None:
    options = parse_loader_options({})
    assert options.uri is None
    assert options.check_weights
    assert (options.extra.concurrency, options.extra.memory_limit, options.extra.distributed) == (None, None, None)


def test_every_key_arrives_where_it_belongs() -> None:
    given = {"concurrency": 4, "memory_limit": -1, "distributed": False, "uri": "S3://b/m/", "check_weights": False}
    options = parse_loader_options(given)
    assert (options.extra.concurrency, options.extra.memory_limit, options.extra.distributed) == (4, -1, False)
    assert str(options.uri) == "s3://b/m"
    assert not options.check_weights


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("text", "is a str, not an object"),
        ({"memory_limits": 1}, "Did you mean memory_limit"),
        ({3: 1}, "Unknown in model_loader_extra_config: 3"),
        ({"enable_multithread_load": True}, "several connections at once"),
        ({"num_threads": 4}, "calls it concurrency"),
        ({"enable_gds": True}, "through the memory of the node"),
        ({"memory_limit": -2}, "less than -1"),
        ({"distributed": None}, "is null"),
        ({"uri": "org/name"}, "in which store"),
        ({"check_weights": 1}, "must be true or false"),
    ],
)
def test_what_cannot_be_is_refused(config: Any, says: str) -> None:
    with pytest.raises(InvalidSetting, match=says):
        parse_loader_options(config)


def test_a_refusal_lists_what_is_allowed() -> None:
    with pytest.raises(InvalidSetting) as caught:
        parse_loader_options({"speed": 9})
    for key in ("concurrency", "memory_limit", "distributed", "uri", "check_weights"):
        assert key in caught.value.mend


@pytest.mark.parametrize(("text", "wanted"), [("", False), ("0", False), ("no", False), ("1", True), (" True ", True)])
def test_the_takeover_is_asked_for_in_so_many_words(text: str, wanted: bool) -> None:
    assert is_wanted(text) is wanted


def test_a_word_that_says_neither_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="HEADRACE_SGLANG is 'maybe'"):
        is_wanted("maybe")


@pytest.mark.parametrize(
    ("fields", "files"),
    [
        ({"architectures": ["Glm4MoeForCausalLM"], "num_nextn_predict_layers": 1}, ["mtp.safetensors"]),
        ({"architectures": ["Glm4MoeForCausalLM"], "num_nextn_predict_layers": 0}, []),
        ({"architectures": ["LlamaForCausalLM"], "num_nextn_predict_layers": 1}, []),
        ({"architectures": None}, []),
        ({}, []),
    ],
)
def test_files_that_an_index_forgot(fields: dict[str, Any], files: list[str]) -> None:
    assert forgotten_files(SimpleNamespace(**fields)) == files


@pytest.mark.parametrize(
    ("fields", "is_stored", "paths", "asked"),
    [
        ({"quantization": None}, False, {}, ""),
        ({"quantization": "modelopt_fp8"}, True, {}, ""),
        ({"quantization": "modelopt_fp8"}, False, {}, "--quantization modelopt_fp8"),
        ({"quantization": "modelopt_fp4"}, False, {}, ""),
        ({"quantization": "modelopt_fp4"}, False, {"export_path": "/out"}, "--quantization modelopt_fp4"),
        ({"quantization": "auto-round-int8"}, False, {}, "--quantization auto-round-int8"),
        ({"quantization": "fp8"}, False, {}, ""),
        ({"quantization": None, "modelopt_quant": "fp8"}, True, {}, "--modelopt-quant fp8"),
    ],
)
def test_what_is_quantized_while_it_is_loaded(
    fields: dict[str, Any], is_stored: bool, paths: dict[str, str], asked: str
) -> None:
    config = SimpleNamespace(**fields, _is_already_quantized=lambda: is_stored)
    assert is_quantized_while_loading(config, SimpleNamespace(**paths)) == asked


def test_experts_are_known_by_their_names() -> None:
    stored = [
        SimpleNamespace(name="model.layers.0.mlp.gate_proj.weight", dtype="F8_E4M3"),
        SimpleNamespace(name="model.layers.1.mlp.experts.0.gate_proj.weight", dtype="U8"),
    ]
    assert not has_fp8_experts(stored)
    assert routed_expert_dtype(stored) == "U8"
    assert routed_expert_dtype(stored[:1]) is None
    assert has_fp8_experts([SimpleNamespace(name="model.layers.1.mlp.experts.0.w1.weight", dtype="F8_E4M3")])
