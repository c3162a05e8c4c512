"""`headrace inspect`: figures from headers and config.json, right also where configurations are nested, odd or absent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.checkpoint import Entry
from headrace.cli.inspect import cache_bytes_per_token, inspect, name_architecture, name_quantization, total_by_dtype
from headrace.settings import Settings

SETTINGS = Settings(progress=False)
LLAMA = {
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
    "dtype": "bfloat16",
}


def test_json_says_what_the_headers_say(checkpoint_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inspect(str(checkpoint_folder), settings=SETTINGS, json=True, tensors=True)
    found = json.loads(capsys.readouterr().out)
    assert (found["num_files"], found["num_tensors"], found["num_parameters"]) == (2, 3, 32 + 32 + 8)
    assert found["size_bytes"] == 112
    assert found["architecture"] == "LlamaForCausalLM"
    assert found["quantization"] is None
    assert found["cache_bytes"] == 2 * 3 * 2 * 8 * 2 * 1000
    assert [row["dtype"] for row in found["dtypes"]] == ["BF16", "F32", "F4"]
    assert {entry["name"] for entry in found["tensors"]} == {"embed.weight", "packed.weight", "norm.weight"}


def test_table_lists_tensors_only_when_asked(checkpoint_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inspect(str(checkpoint_folder), settings=SETTINGS)
    assert "packed.weight" not in capsys.readouterr().out
    inspect(str(checkpoint_folder), settings=SETTINGS, tensors=True)
    shown = capsys.readouterr().out
    assert "packed.weight" in shown
    assert "[2, 16]" in shown


def test_four_bit_values_are_counted_one_by_one() -> None:
    entries = [
        Entry("a", "F4", (2, 8), "f", 0, 8),
        Entry("b", "F4", (4,), "f", 8, 10),
        Entry("c", "U8", (), "f", 10, 11),
    ]
    first, second = total_by_dtype(entries)
    assert (first.dtype, first.num_tensors, first.num_values, first.size_bytes) == ("F4", 2, 20, 10)
    assert (second.dtype, second.num_tensors, second.num_values, second.size_bytes) == ("U8", 1, 1, 1)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (None, None),
        ({}, None),
        ({"quantization_config": None}, None),
        ({"quantization_config": "fp8"}, None),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, "modelopt NVFP4"),
        ({"text_config": {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}}},
         "compressed-tensors pack-quantized"),
        ({"llm_config": {"quantization_config": {}}, "language_config": {"quantization_config": {"quant_method": "awq"}}}, "awq"),
    ],
)  # fmt: skip
def test_quantization_is_found_where_it_is_written(config: dict[str, Any] | None, named: str | None) -> None:
    assert name_quantization(config) == named


@pytest.mark.parametrize(
    ("config", "num_bytes"),
    [
        (None, None),
        ({}, None),
        (LLAMA, 2 * 30 * 3 * 64 * 2),
        ({**LLAMA, "head_dim": 128}, 2 * 30 * 3 * 128 * 2),
        ({**LLAMA, "dtype": "float32"}, 2 * 30 * 3 * 64 * 4),
        ({**LLAMA, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}, 2 * 1 * 3 * 64 * 2),
        (
            {"dtype": "float32", "text_config": {name: value for name, value in LLAMA.items() if name != "dtype"}},
            2 * 30 * 3 * 64 * 4,
        ),
        ({**LLAMA, "kv_lora_rank": 512}, None),
        ({**LLAMA, "num_hidden_layers": "many"}, None),
        ({**LLAMA, "num_hidden_layers": True}, None),
    ],
)
def test_cache_size_follows_the_configuration(config: dict[str, Any] | None, num_bytes: int | None) -> None:
    assert cache_bytes_per_token(config) == num_bytes


def test_architecture_or_model_type() -> None:
    assert name_architecture({"architectures": ["A"], "model_type": "a"}) == "A"
    assert name_architecture({"architectures": [], "model_type": "a"}) == "a"
    assert name_architecture(None) is None
