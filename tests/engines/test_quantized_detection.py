"""Of real checkpoints: every packed weight is found, no other, without a warning that is not due; and its scheme gives the values that its maker gave, bit for bit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import headrace
from headrace.engines.quantized import detect_quantization
from headrace.quantization import CheckpointQuantization, QuantizedModule, Role
from tests.support.quantized import QuantizedCheckpoint, QuantizedCheckpoints, readable_names
from tests.support.weight_files import read_tensors

NAMES = readable_names()


def detected(folder: Path) -> CheckpointQuantization:
    with headrace.open(str(folder)) as checkpoint:
        found = detect_quantization(folder, checkpoint.entries, source=str(folder))
    assert found is not None
    return found


def own_modules(checkpoint: QuantizedCheckpoint, found: CheckpointQuantization) -> dict[str, QuantizedModule]:
    """Return the modules by their weight's name without a wrapper's prefix, and without those of layers after the model's last (multi-token prediction)."""
    config = checkpoint.config()
    num_layers = config.get("text_config", config)["num_hidden_layers"]
    own = {}
    for name, module in found.modules.items():
        layer = re.search(r"\.layers\.(\d+)\.", name)
        if layer is None or int(layer[1]) < num_layers:
            own[f"{name.removeprefix('language_model.')}.weight"] = module
    return own


@pytest.mark.parametrize("name", NAMES)
def test_exactly_the_packed_weights_are_found(quantized: QuantizedCheckpoints, name: str) -> None:
    checkpoint = quantized[name]
    found = detected(checkpoint.folder)
    facts = checkpoint.weights()
    own = own_modules(checkpoint, found)
    assert own.keys() == facts.keys()
    assert {weight: module.weight.shape for weight, module in own.items()} == {
        weight: facts[weight].shape for weight in facts
    }
    assert found.unused == ()
    stored = read_tensors(checkpoint.folder)
    assert found.entry_names() <= stored.keys()
    packed = {"F8_E4M3", "U8", "I8", "I32", "I64"}
    assert not [name for name in stored.keys() - found.entry_names() if stored[name].dtype in packed]
    assert not [name for name in stored.keys() - found.entry_names() if "scale" in name.rpartition(".")[2]]
    assert sum(count.num_bytes for count in found.counts) == sum(
        len(tensor.content) for name, tensor in stored.items() if not is_kv_scale(found, name)
    )


def is_kv_scale(found: CheckpointQuantization, name: str) -> bool:
    pairs = (found.kv.scales if found.kv else {}).values()
    return any(entry is not None and entry.name == name for pair in pairs for entry in pair)


@pytest.mark.parametrize("name", NAMES)
def test_warnings_are_about_what_the_files_contradict(quantized: QuantizedCheckpoints, name: str) -> None:
    """Only Kimi's list does: it leaves out neither its vision tower nor its projector, whose weights are plain."""
    checkpoint = quantized[name]
    warnings = detected(checkpoint.folder).warnings
    if "vision_config" not in checkpoint.config():
        assert warnings == ()
        return
    assert len(warnings) == 1
    assert "have plain weights, and are taken as plain: mm_projector.proj.0" in warnings[0]


@pytest.mark.parametrize("name", NAMES)
def test_every_scheme_gives_its_makers_values(quantized: QuantizedCheckpoints, name: str) -> None:
    checkpoint = quantized[name]
    facts, stored = checkpoint.weights(), read_tensors(checkpoint.folder)
    for weight, module in own_modules(checkpoint, detected(checkpoint.folder)).items():
        scheme, shape = module.weight.scheme, module.weight.shape
        parts = {role: stored[entry.name].tensor() for role, entry in module.entries.items()}
        values = scheme.dequantize(parts, shape=shape)
        facts[weight].check(values, name=weight)
        for dtype in (torch.bfloat16, torch.float16):
            rounded = scheme.dequantize(parts, shape=shape, dtype=dtype)
            assert torch.equal(rounded, values.to(dtype)), f"{weight} in {dtype} is not the float32 value rounded once"
        again = scheme.dequantize({**parts, Role.CODES: scheme.pack(values, parts)}, shape=shape)
        assert torch.equal(again, values), weight
