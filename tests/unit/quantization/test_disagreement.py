"""Two files that speak of one checkpoint: what they may say differently, and what is a disagreement."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.stored_entries import PLACE, make_entries, nvfp4, plain

from headrace.quantization import detect, find_modelopt, find_quantization

NESTED_PLACE = "hf_quant_config.json: quantization"
NAME = "model.layers.0.mlp.up_proj"
ENTRIES = make_entries({**nvfp4(NAME), **plain("lm_head", "model.embed_tokens")})
FLAT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "model.embed_tokens"]}
NESTED = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": ["model.embed_tokens", "lm_head"]}  # fmt: skip


def warnings(flat: dict[str, Any] | None, nested: dict[str, Any] | None) -> tuple[str, ...]:
    config = {"quantization_config": flat} if flat else {}
    other = {"producer": {"name": "modelopt"}, "quantization": nested} if nested else {}
    answer = detect(find_quantization(config, other), ENTRIES, modelopt_section=find_modelopt(other))
    assert answer is not None and list(answer.modules) == [NAME]
    assert answer.modules[NAME].weight.scheme.describe() == "NVFP4"
    return answer.warnings


def test_one_file_or_two_that_agree_are_no_matter() -> None:
    assert warnings(FLAT, None) == warnings(None, NESTED) == warnings(FLAT, NESTED) == ()
    old = [f"language_model.{name}" for name in NESTED["exclude_modules"]]
    assert warnings(FLAT, {**NESTED, "exclude_modules": old}) == ()


@pytest.mark.parametrize(
    ("flat", "nested", "said"),
    [
        ({}, {"quant_algo": "FP8"}, "NVFP4 and FP8; the tensors count, and the first where they do not tell"),
        ({"quant_algo": "FP8"}, {}, "FP8 and NVFP4; the tensors count, and the first where they do not tell"),
        (
            {},
            {"exclude_modules": ["lm_head", "model.embed_tokens", "model.layers.0*"]},
            f"only {NESTED_PLACE} excludes layers.0*; the tensors count",
        ),
        (
            {"ignore": ["lm_head", "model.embed_tokens", "a"]},
            {"exclude_modules": ["lm_head", "model.embed_tokens", "b"]},
            f"only {PLACE} excludes a, and only {NESTED_PLACE} excludes b; the tensors count",
        ),
        ({}, {"kv_cache_quant_algo": "FP8"}, "keys and values are cached as they are and as e4m3; e4m3 counts"),
        ({"group_size": 32}, {}, "groups of 32 and of 16; the tensors count"),
        ({"quant_method": "fp8"}, {}, "fp8 and modelopt; the first counts where the tensors do not tell"),
    ],
)
def test_each_disagreement_is_warned_of(flat: dict[str, Any], nested: dict[str, Any], said: str) -> None:
    sentence = f"{PLACE} and {NESTED_PLACE} disagree: {said}."
    assert sentence in warnings({**FLAT, **flat}, {**NESTED, **nested})


def test_the_list_of_the_first_file_is_the_one_that_counts() -> None:
    found = warnings({**FLAT, "ignore": ["lm_head", "model.embed_tokens", NAME]}, NESTED)
    assert f"{PLACE} excludes modules that are stored quantized, and they are taken so: {NAME}." in found
