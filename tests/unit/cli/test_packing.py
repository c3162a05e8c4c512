"""What `headrace inspect` says of packed weights: a table of schemes, keys and values, warnings; and what it says where they cannot be read."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.stored_entries import fp8, nvfp4, packed_int4, plain

from headrace.checkpoint import DTYPES
from headrace.cli.inspect import inspect
from headrace.settings import Settings

from .conftest import write_safetensors

SETTINGS = Settings(progress=False)
ATTENTION = "model.layers.0.self_attn"
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
TENSORS = {
    **nvfp4(f"{ATTENTION}.q_proj"),
    **nvfp4(f"{ATTENTION}.o_proj"),
    **plain("lm_head"),
    f"{ATTENTION}.k_proj.k_scale": "F32",
    f"{ATTENTION}.v_proj.v_scale": "F32",
}


def make_checkpoint(
    folder: Path, tensors: dict[str, str], config: dict[str, Any], modelopt: dict[str, Any] | str | None = None
) -> str:
    folder.mkdir()
    stored = {}
    for name, text in tensors.items():
        dtype, *sizes = text.split()
        shape = list(map(int, sizes))
        stored[name] = (dtype, shape, bytes(math.prod(shape) * DTYPES[dtype].bits // 8))
    write_safetensors(folder / "model.safetensors", stored)
    (folder / "config.json").write_text(json.dumps(config))
    if modelopt is not None:
        text = modelopt if isinstance(modelopt, str) else json.dumps(modelopt)
        (folder / "hf_quant_config.json").write_text(text)
    return str(folder)


def shown(uri: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines that are printed, with single spaces."""
    inspect(uri, settings=SETTINGS)
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def packing(uri: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    inspect(uri, settings=SETTINGS, json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["quantization"] == found["packing"]["label"] or found["packing"]["label"] is None
    return dict(found["packing"])


def test_one_row_for_each_scheme(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"quantization_config": {**NVFP4, "kv_cache_scheme": {"num_bits": 8, "type": "float"}}}
    uri = make_checkpoint(tmp_path / "model", TENSORS, config)
    lines = shown(uri, capsys)
    assert "quantization modelopt NVFP4" in lines
    assert "keys, values cached as FP8, scales for 1 attention module" in lines
    assert "scheme inputs modules size" in lines
    assert "NVFP4 NVFP4 2 4.62 kB" in lines
    assert "plain BF16 as they are 1 8.19 kB" in lines
    assert packing(uri, capsys) == {
        "label": "modelopt NVFP4",
        "schemes": [
            {"scheme": "NVFP4", "inputs": "NVFP4", "num_modules": 2, "num_bytes": 2 * (2048 + 256 + 8)},
            {"scheme": "plain BF16", "inputs": "as they are", "num_modules": 1, "num_bytes": 8192},
        ],
        "kv_cache": "FP8, scales for 1 attention module",
        "warnings": [],
        "unused": [],
    }


def test_modelopts_own_file_is_enough_and_disagreements_are_shown_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nested = {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    alone = make_checkpoint(tmp_path / "alone", TENSORS, {"model_type": "llama"}, nested)
    assert "quantization modelopt NVFP4" in shown(alone, capsys)
    assert packing(alone, capsys)["kv_cache"] == "FP8, scales for 1 attention module"
    both = make_checkpoint(tmp_path / "both", TENSORS, {"quantization_config": {**NVFP4, "ignore": []}}, nested)
    warning, other = packing(both, capsys)["warnings"]
    assert warning.endswith("only hf_quant_config.json: quantization excludes lm_head; the tensors count.")
    assert other.endswith("keys and values are cached as they are and as e4m3; e4m3 counts.")
    assert f"warning: {warning}" in shown(both, capsys)


def test_unused_scales_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    uri = make_checkpoint(tmp_path / "model", TENSORS, {"quantization_config": NVFP4})
    found = packing(uri, capsys)
    assert found["kv_cache"] is None
    assert found["unused"] == [f"{ATTENTION}.k_proj.k_scale", f"{ATTENTION}.v_proj.v_scale"]
    assert found["unused"][0] in found["warnings"][0]


@pytest.mark.parametrize(
    ("tensors", "config", "modelopt", "said"),
    [
        (TENSORS, {"quantization_config": {**NVFP4, "quant_algo": "NVFP4_SVD"}}, None, "low-rank branch"),
        (TENSORS, {"quantization_config": "fp8"}, None, "is text"),
        (TENSORS, {}, "{", "hf_quant_config.json is not a configuration. It is not JSON"),
        (TENSORS, {}, "[]", "hf_quant_config.json is not a configuration. It is not an object"),
        (packed_int4("a.up_proj"), {}, None, "no side file says how they are quantized: a.up_proj.weight_packed"),
        ({"a.up_proj.weight": "F8_E4M3 64 64"}, {"quantization_config": {"quant_method": "fp8"}}, None, "no scale"),
    ],
)
def test_what_cannot_be_read_is_a_warning_and_all_else_is_shown(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    tensors: dict[str, str],
    config: dict[str, Any],
    modelopt: str | None,
    said: str,
) -> None:
    uri = make_checkpoint(tmp_path / "model", tensors, config, modelopt)
    found = packing(uri, capsys)
    assert found["schemes"] == [] and len(found["warnings"]) == 1 and said in found["warnings"][0]
    lines = shown(uri, capsys)
    assert f"warning: {found['warnings'][0]}" in lines
    assert "dtype tensors values size" in lines


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16"])
def test_plain_float8_is_told_by_the_dtype_of_the_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str
) -> None:
    uri = make_checkpoint(tmp_path / "model", {"a.up_proj.weight": "F8_E4M3 64 64"}, {"dtype": dtype})
    assert (packing(uri, capsys)["warnings"] == []) is (dtype == "float8_e4m3fn")


def test_methods_of_others_are_named_and_not_looked_into(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    uri = make_checkpoint(tmp_path / "model", {"a.weight": "U8 64 1", "a.weight.absmax": "F32 4"}, config)
    assert packing(uri, capsys) == {
        "label": "bitsandbytes",
        "schemes": [],
        "kv_cache": None,
        "warnings": [],
        "unused": [],
    }


@pytest.mark.parametrize(("tensors", "needs_torch"), [(plain("lm_head"), False), (fp8("a.q_proj"), True)])
def test_torch_is_imported_only_where_weights_are_packed(
    tmp_path: Path, tensors: dict[str, str], needs_torch: bool
) -> None:
    uri = make_checkpoint(tmp_path / "model", tensors, {})
    code = f"import sys; from headrace.cli.inspect import inspect; from headrace.settings import Settings; inspect({uri!r}, settings=Settings()); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == str(needs_torch)
