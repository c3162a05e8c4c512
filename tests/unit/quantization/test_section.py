"""Where a quantization section is found, and by which name it goes."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.errors import UnsupportedQuantization
from headrace.quantization import QuantizationSection, find_quantization
from headrace.quantization.section import canonical_method

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
GPTQ = {"quant_method": "gptq", "bits": 4}
FLAT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
NESTED = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("nest", ["", "text_config", "language_config", "llm_config"])
def test_a_section_is_found_wherever_checkpoints_keep_it(nest: str, key: str) -> None:
    config: dict[str, Any] = {"model_type": "x", "vision_config": {"hidden_size": 4}}
    (config.setdefault(nest, {}) if nest else config)[key] = FP8
    found = find_quantization(config)
    assert found == QuantizationSection("fp8", f"config.json: {nest + '.' if nest else ''}{key}", FP8)
    assert found.as_config() == FP8


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"quantization_config": FP8, "text_config": {"quantization_config": GPTQ}}, "fp8"),
        ({"quantization_config": None, "text_config": {"quantization_config": GPTQ}}, "gptq"),
        ({"quantization_config": {}, "llm_config": {"quantization_config": GPTQ}}, "gptq"),
        ({"text_config": {"quantization_config": GPTQ}, "llm_config": {"quantization_config": FP8}}, "gptq"),
        ({"text_config": None, "language_config": "none", "llm_config": {"quantization_config": FP8}}, "fp8"),
    ],
)
def test_the_outer_section_wins_and_empty_ones_are_none(config: dict[str, Any], method: str) -> None:
    found = find_quantization(config)
    assert found is not None and found.method == method


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"quantization_config": None},
        {"quantization_config": {}},
        {"text_config": {}},
        {"vision_config": {"quantization_config": FP8}},
    ],
)
def test_an_unquantized_checkpoint_has_none(config: dict[str, Any]) -> None:
    assert find_quantization(config) is None
    assert find_quantization(config, {}) is None


@pytest.mark.parametrize(
    ("content", "algorithm", "place"),
    [
        (NESTED, "FP8", "hf_quant_config.json: quantization"),
        (FLAT, "NVFP4", "hf_quant_config.json"),
        (
            {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}},
            None,
            "hf_quant_config.json: quantization",
        ),
    ],
)
def test_modelopts_own_file(content: dict[str, Any], algorithm: str | None, place: str) -> None:
    found = find_quantization({"model_type": "llama"}, content)
    assert found is not None
    assert (found.method, found.algorithm, found.place) == ("modelopt", algorithm, place)
    assert found.as_config()["quant_method"] == "modelopt"
    assert found.label == f"modelopt {algorithm}" if algorithm else found.label == "modelopt"


def test_modelopts_file_that_names_no_algorithm_is_none() -> None:
    assert find_quantization({}, {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": None}}) is None


def test_the_section_in_the_configuration_wins_over_modelopts_file() -> None:
    found = find_quantization({"quantization_config": FLAT}, NESTED)
    assert found is not None and found.algorithm == "NVFP4" and found.raw is FLAT


@pytest.mark.parametrize(
    ("section", "method"),
    [
        ({"quant_algo": "FP8"}, "modelopt"),
        ({"producer": {"name": "modelopt", "version": "0.29"}, "config_groups": {}}, "modelopt"),
        ({"load_in_4bit": True}, "bitsandbytes"),
        ({"load_in_8bit": True}, "bitsandbytes"),
        ({"config_groups": {"group_0": {}}}, "compressed-tensors"),
        ({"quant_method": "modelopt_fp4"}, "modelopt"),
        ({"quant_method": "sparseml"}, "compressed-tensors"),
        ({"quant_method": "FP8"}, "fp8"),
        ({"quant_method": "something-new"}, "something-new"),
    ],
)
def test_the_method_is_told_from_what_there_is(section: dict[str, Any], method: str) -> None:
    found = find_quantization({"quantization_config": section})
    assert found is not None and found.method == method
    assert found.raw == section and found.as_config() == {**section, "quant_method": method}


@pytest.mark.parametrize(
    ("config", "hf_quant_config", "said"),
    [
        ({"quantization_config": "fp8"}, None, "quantization_config is text"),
        ({"text_config": {"quantization_config": [1]}}, None, "text_config.quantization_config is a list"),
        ({"quantization_config": {"bits": 4, "group_size": 128}}, None, "names no method.*bits, group_size"),
        ({}, {"quantization": "NVFP4"}, "hf_quant_config.json is text"),
    ],
)
def test_a_section_that_makes_no_sense_is_an_error(
    config: dict[str, Any], hf_quant_config: dict[str, Any] | None, said: str
) -> None:
    with pytest.raises(UnsupportedQuantization, match=said):
        find_quantization(config, hf_quant_config)


def test_a_canonical_method_is_its_own() -> None:
    for name in (
        "awq_marlin",
        "gptq_marlin",
        "modelopt_mixed",
        "compressed_tensors",
        "auto_round",
        "petit_nvfp4",
        "fp8",
    ):
        assert canonical_method(canonical_method(name)) == canonical_method(name)
