"""Real quantized checkpoints, loaded: packed, weight-only and dequantized, against the values and the logits that were computed when they were made. All in float32."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import headrace
from headrace.quantization.linear import QuantizedLinear
from headrace.quantization.stack import PackedStack
from headrace.settings import Settings
from tests.support.quantized import QuantizedCheckpoint, QuantizedCheckpoints, References, readable_names
from tests.support.weight_files import StoredTensor, read_tensors

NAMES = readable_names()
QUIET = Settings.from_environment({}, progress=False)

CLOSE = 1e-3
"""Between two ways to compute the same in float32."""
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj")
_WRAPPED = {"model.": "model.language_model."}


def load(source: str | Path, **options: Any) -> Any:
    return headrace.load_model(str(source), dtype=torch.float32, settings=QUIET, **options).eval()


def last_logits(model: Any, references: References, num_positions: int) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=references.input_ids, use_cache=False).logits
    return logits[:, -num_positions:].float()


def farthest(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max())


def rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())


def path_in(model: nn.Module, name: str) -> str:
    """Return a module's path in ``model``, where a wrapper may hold the language model."""
    modules = dict(model.named_modules())
    for stored, wrapped in ((name, name), *((old, new + name.removeprefix(old)) for old, new in _WRAPPED.items())):
        if wrapped in modules and name.startswith(stored[:6]):
            return wrapped
    raise KeyError(name)


def plain_weight(model: nn.Module, name: str) -> torch.Tensor:
    """Return a dequantized weight by its name in the files; of experts the rows that Transformers has stacked it into."""
    expert = _EXPERT.fullmatch(name.removesuffix(".weight"))
    if expert is None:
        return model.get_submodule(path_in(model, name.removesuffix(".weight"))).get_parameter("weight")
    stack = model.get_submodule(path_in(model, expert[1]))
    if expert[3] == "down":
        return stack.get_parameter("down_proj")[int(expert[2])]
    gate, up = stack.get_parameter("gate_up_proj")[int(expert[2])].chunk(2)
    return gate if expert[3] == "gate" else up


def packed_weight(model: nn.Module, name: str) -> torch.Tensor:
    """Return the values of a weight that is packed in the model, by its name in the files."""
    expert = _EXPERT.fullmatch(name.removesuffix(".weight"))
    if expert is None:
        layer = model.get_submodule(path_in(model, name.removesuffix(".weight")))
        assert isinstance(layer, QuantizedLinear)
        return layer.dequantized(torch.float32)
    stack = model.get_submodule(f"{path_in(model, expert[1])}.{expert[3]}_proj")
    assert isinstance(stack, PackedStack)
    return stack.dequantized(int(expert[2]), torch.float32)


@pytest.mark.parametrize("name", NAMES)
def test_dequantized_weights_and_logits_are_its_makers(quantized: QuantizedCheckpoints, name: str) -> None:
    checkpoint = quantized[name]
    references = checkpoint.references()
    model = load(checkpoint.folder, dequantize=True)
    assert not [module for module in model.modules() if isinstance(module, QuantizedLinear | PackedStack)]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    for weight, facts in checkpoint.weights().items():
        facts.check(plain_weight(model, weight), name=weight)
    logits = last_logits(model, references, references.plain.shape[1])
    assert farthest(logits, references.plain) <= CLOSE


@pytest.mark.parametrize("name", NAMES)
def test_packed_weights_stay_as_they_are_stored(quantized: QuantizedCheckpoints, name: str) -> None:
    checkpoint = quantized[name]
    references = checkpoint.references()
    model = load(checkpoint.folder, weight_only=True)
    for weight, facts in checkpoint.weights().items():
        facts.check(packed_weight(model, weight), name=weight)
    logits = last_logits(model, references, references.plain.shape[1])
    assert farthest(logits, references.plain) <= CLOSE
    assert_stored_bits(model, checkpoint)


def assert_stored_bits(model: nn.Module, checkpoint: QuantizedCheckpoint) -> None:
    """Assert that every stored part of a packed weight is a parameter, of the stored type, shape and bits."""
    stored = read_tensors(checkpoint.folder)
    for weight in checkpoint.weights():
        module = weight.removesuffix(".weight")
        parts = {
            name: tensor
            for name, tensor in stored.items()
            if name.removeprefix("language_model.").startswith(f"{module}.")
        }
        expert = _EXPERT.fullmatch(module)
        for name, part in parts.items():
            suffix = name.rpartition(".")[2]
            if suffix in ("k_scale", "v_scale", "bias") or "lora" in suffix:
                continue
            if expert is None:
                found = model.get_submodule(path_in(model, module)).get_parameter(suffix)
            else:
                stack = model.get_submodule(f"{path_in(model, expert[1])}.{expert[3]}_proj")
                found = stack.get_parameter(suffix)[int(expert[2])]
            assert StoredTensor.of(found) == part, name


@pytest.mark.parametrize("name", NAMES)
def test_inputs_keys_and_values_are_rounded_as_its_maker_meant(quantized: QuantizedCheckpoints, name: str) -> None:
    """Rounding turns a difference in the last place into one of a whole code, here and there. At a logit rms of 3 that costs about 0.04 rms with 8 bits and 0.1 to 0.2 with 4
    (measured when the references were made), as much as rounding itself. So what rounding changes must also point where it pointed then; a wrong rule's does not."""
    checkpoint = quantized[name]
    references = checkpoint.references()
    model = load(checkpoint.folder)
    if references.rounded is None:
        logits = last_logits(model, references, references.plain.shape[1])
        assert farthest(logits, references.plain) <= CLOSE
        assert not input_formats(model)
        return
    num_positions = references.rounded.shape[1]
    logits = last_logits(model, references, num_positions)
    most = 0.4 if input_formats(model) & {"nvfp4", "mxfp4"} else 0.08
    assert rms(logits - references.rounded) <= most
    assert float((logits.argmax(-1) == references.rounded.argmax(-1)).float().mean()) >= 0.9
    plain = last_logits(load(checkpoint.folder, weight_only=True), references, num_positions)
    found, expected = (logits - plain).flatten(), (references.rounded - plain).flatten()
    assert float(functional.cosine_similarity(found, expected, dim=0)) >= 0.5


def input_formats(model: nn.Module) -> set[str]:
    """Return how the packed layers of ``model`` round their inputs."""
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear | PackedStack)]
    assert layers
    return {layer.quantization.inputs.format for layer in layers if layer.quantization.inputs is not None}


@pytest.mark.parametrize("name", NAMES)
def test_a_bucket_gives_what_the_disk_gives(
    quantized: QuantizedCheckpoints, name: str, bucket: str, s3_client: Any
) -> None:
    """Packed and dequantized, and the stored tensors themselves in memory of their own and in leased memory."""
    folder, uri = quantized[name].folder, f"s3://{bucket}/{name}"
    for path in folder.iterdir():
        s3_client.put_object(Bucket=bucket, Key=f"{name}/{path.name}", Body=path.read_bytes())
    packed, plain = load(uri), load(uri, dequantize=True)
    assert_stored_bits(packed, quantized[name])
    for weight, facts in quantized[name].weights().items():
        facts.check(packed_weight(packed, weight), name=weight)
        facts.check(plain_weight(plain, weight), name=weight)
    stored = read_tensors(folder)
    for ownership in ("owned", "leased"):
        with headrace.stream(uri, ownership=ownership, settings=QUIET) as stream:
            streamed = {tensor_name: StoredTensor.of(tensor) for tensor_name, tensor in stream}
        assert streamed == stored


@pytest.mark.parametrize("options", [{}, {"dequantize": True}], ids=["packed", "dequantized"])
@pytest.mark.parametrize("name", NAMES)
def test_generation_with_a_cache_says_what_the_whole_sequence_says(
    quantized: QuantizedCheckpoints, name: str, options: dict[str, Any]
) -> None:
    """Each token is the likeliest after those before it, up to what rounding may change."""
    checkpoint = quantized[name]
    prompt = checkpoint.references().input_ids[:, :12]
    model = load(checkpoint.folder, **options)
    with torch.no_grad():
        sequence = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), min_new_tokens=5, max_new_tokens=5, do_sample=False
        )
        logits = model(input_ids=sequence, use_cache=False).logits
    assert sequence.shape == (2, 17)
    # The end of a text is not among the choices before the fifth token.
    logits[..., model.generation_config.eos_token_id] = -torch.inf
    said = logits[:, 11:-1].gather(2, sequence[:, 12:, None]).squeeze(2)
    assert float((logits[:, 11:-1].amax(-1) - said).max()) <= (CLOSE if options else 0.5)
