"""Checkpoints that mix layouts, put together from real ones of the same model: each layer keeps the values that its maker gave it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
from headrace.engines.quantized import detect_quantization
from headrace.settings import Settings
from tests.engines.test_quantized_models import CLOSE, farthest, last_logits, packed_weight, plain_weight, rms
from tests.support.quantized import QuantizedCheckpoints, WeightFacts, checkpoint_names
from tests.support.weight_files import StoredTensor, WeightFile, read_tensors

QUIET = Settings.from_environment({}, progress=False)
PRODUCER = {"name": "modelopt", "version": "0.47.0"}

Choice = Callable[[str], bool]


def load(folder: Path, **options: Any) -> Any:
    return headrace.load_model(str(folder), dtype=torch.float32, settings=QUIET, **options).eval()


class Mixture:
    """Tensors of several checkpoints of one model, those that a choice takes from each, and the facts about them."""

    def __init__(self, quantized: QuantizedCheckpoints, sources: Mapping[str, Choice]) -> None:
        missing = sources.keys() - set(checkpoint_names())
        if missing:
            pytest.skip(f"there is no {', '.join(sorted(missing))} here")
        self.tensors: dict[str, StoredTensor] = {}
        self.facts: dict[str, WeightFacts] = {}
        self.references = quantized[next(iter(sources))].references()
        self.config = quantized[next(iter(sources))].config()
        for name, choose in sources.items():
            stored = read_tensors(quantized[name].folder)
            self.tensors |= {key: tensor for key, tensor in stored.items() if choose(key)}
            self.facts |= {key: facts for key, facts in quantized[name].weights().items() if choose(key)}

    def modules(self) -> list[str]:
        return [name.removesuffix(".weight") for name in self.facts]

    def save(self, folder: Path, section: dict[str, Any]) -> Path:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(WeightFile(self.tensors, {"format": "pt"}).encode())
        (folder / "config.json").write_text(json.dumps({**self.config, "quantization_config": section}))
        return folder

    def check(self, folder: Path, schemes: Mapping[str, int], *, warnings: tuple[str, ...] = ()) -> None:
        """Assert that ``folder`` has these schemes with so many modules each, that every weight is as its maker has it, and that packed and dequantized models agree."""
        with headrace.open(str(folder)) as checkpoint:
            found = detect_quantization(folder, checkpoint.entries, source=str(folder))
        assert found is not None
        counted = {count.scheme: count.num_modules for count in found.counts if not count.scheme.startswith("plain")}
        assert counted == schemes
        assert found.warnings == warnings
        plain, packed = load(folder, dequantize=True), load(folder, weight_only=True)
        for weight, facts in self.facts.items():
            facts.check(plain_weight(plain, weight), name=weight)
            facts.check(packed_weight(packed, weight), name=weight)
        assert farthest(last_logits(plain, self.references, 8), last_logits(packed, self.references, 8)) <= CLOSE


def of_attention(name: str) -> bool:
    return ".self_attn." in name


def of_experts(name: str) -> bool:
    return ".mlp.experts." in name


def not_(choice: Choice) -> Choice:
    return lambda name: not choice(name)


@pytest.mark.parametrize("nested", [False, True], ids=["config.json", "hf_quant_config.json"])
def test_modelopt_names_an_algorithm_for_each_layer(
    quantized: QuantizedCheckpoints, tmp_path: Path, nested: bool
) -> None:
    mixture = Mixture(
        quantized, {"modelopt-nvfp4-kvfp8-llama": not_(of_attention), "modelopt-fp8-kvfp8-llama": of_attention}
    )
    layers = {
        name: {"quant_algo": "FP8"} if of_attention(name) else {"quant_algo": "NVFP4", "group_size": 16}
        for name in mixture.modules()
    }
    section = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    if nested:
        folder = mixture.save(tmp_path / "mixed", {})
        content = {"producer": PRODUCER, "quantization": {**section, "kv_cache_quant_algo": "FP8"}}
        (folder / "hf_quant_config.json").write_text(json.dumps(content))
    else:
        kv = {"dynamic": False, "num_bits": 8, "type": "float"}
        method = {"quant_method": "modelopt", "producer": PRODUCER, "ignore": [], "kv_cache_scheme": kv}
        folder = mixture.save(tmp_path / "mixed", {**section, **method})
    mixture.check(folder, {"FP8 per tensor": 8, "NVFP4": 6})
    assert_rounds_keys_and_values(folder, mixture)


def test_modelopt_names_all_experts_by_one_entry(quantized: QuantizedCheckpoints, tmp_path: Path) -> None:
    mixture = Mixture(
        quantized, {"modelopt-nvfp4-deepseekv3": of_experts, "modelopt-fp8-2dblock-deepseekv3": not_(of_experts)}
    )
    layers = {name: {"quant_algo": "fp8_pb_wo"} for name in mixture.modules() if not of_experts(name)}
    layers["model.layers.1.mlp.experts"] = {"quant_algo": "NVFP4", "group_size": 16}
    section = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "quant_method": "modelopt", "ignore": []}
    folder = mixture.save(tmp_path / "mixed", section)
    mixture.check(folder, {"NVFP4": 24, "FP8 block 128x128": 16})


def test_compressed_tensors_has_a_group_for_each_kind_of_layer(quantized: QuantizedCheckpoints, tmp_path: Path) -> None:
    mixture = Mixture(quantized, {"ct-nvfp4-llama": not_(of_attention), "ct-w4a16-asym-g128-llama": of_attention})
    groups = {}
    for name, targets in (("ct-w4a16-asym-g128-llama", "re:.*self_attn.*"), ("ct-nvfp4-llama", "Linear")):
        section = quantized[name].config()["quantization_config"]
        group = {**section["config_groups"]["group_0"], "format": section["format"], "targets": [targets]}
        groups[f"group_{len(groups)}"] = group
    section = {"quant_method": "compressed-tensors", "format": "mixed-precision", "ignore": ["lm_head"]}
    folder = mixture.save(tmp_path / "mixed", {**section, "config_groups": groups})
    mixture.check(folder, {"NVFP4": 6, "INT4 group 128 asymmetric": 8})


@pytest.mark.parametrize("name", ["modelopt-nvfp4-deepseekv3", "modelopt-fp8-2dblock-deepseekv3"])
def test_latent_attention_rounds_its_expanded_keys_and_values(
    quantized: QuantizedCheckpoints, tmp_path: Path, name: str
) -> None:
    """ModelOpt names the scales after projections that this attention does not have."""
    mixture = Mixture(quantized, {name: lambda _: True})
    for layer in (0, 1):
        for suffix, scale in (("k_proj.k_scale", 0.03), ("v_proj.v_scale", 0.02)):
            tensor = StoredTensor.of(torch.tensor(scale))
            mixture.tensors[f"model.layers.{layer}.self_attn.{suffix}"] = tensor
    section = {**mixture.config["quantization_config"], "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    folder = mixture.save(tmp_path / "kv", section)
    with headrace.open(str(folder)) as checkpoint:
        found = detect_quantization(folder, checkpoint.entries, source=str(folder))
    assert found is not None and found.kv is not None
    assert found.unused == () and found.warnings == ()
    assert list(found.kv.scales) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert_rounds_keys_and_values(folder, mixture)


def assert_rounds_keys_and_values(folder: Path, mixture: Mixture) -> None:
    """Assert that the scales of keys and values are those of the files, and that rounding them shows in the logits, but not much."""
    model = load(folder)
    stored = sorted(
        float(tensor.tensor()) for name, tensor in mixture.tensors.items() if name.endswith((".k_scale", ".v_scale"))
    )
    held = sorted(
        float(parameter.detach())
        for name, parameter in model.named_parameters()
        if name.endswith((".k_scale", ".v_scale"))
    )
    assert held == stored and len(held) == 4
    plain = load(folder, weight_only=True)
    logits, unrounded = (last_logits(one, mixture.references, 8) for one in (model, plain))
    assert 1e-3 < rms(logits - unrounded) < 0.3
