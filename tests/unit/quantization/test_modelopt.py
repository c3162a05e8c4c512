"""ModelOpt's algorithms: one by one, by layer, and where the tensors are of another."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.stored_entries import PLACE, fp8, make_entries, nvfp4, plain, section

from headrace.errors import UnsupportedQuantization
from headrace.quantization import CheckpointQuantization, InputQuantization, WeightQuantization, detect
from headrace.quantization.fp4 import Nvfp4
from headrace.quantization.fp8 import Fp8Block, Fp8Channel, Fp8Tensor
from headrace.quantization.inputs import (
    FP8_PER_TOKEN,
    FP8_STATIC,
    INT8_PER_TOKEN,
    INT8_STATIC,
    MXFP4_GROUPS,
    MXFP8_GROUPS,
)
from headrace.quantization.int8 import Int8Channel
from headrace.quantization.modelopt import ALGORITHMS
from headrace.quantization.modelopt_int4 import ModeloptInt4
from headrace.quantization.mx import Mxfp4, Mxfp8
from headrace.quantization.scheme import Scheme

NAME = "model.layers.0.mlp.down_proj"
NVFP4_INPUTS = InputQuantization(format="nvfp4", granularity="group", group_size=16, is_dynamic=False)
INT4 = {f"{NAME}.weight": "U8 64 256", f"{NAME}.weight_scale": "F32 128 2"}
INT8 = {f"{NAME}.weight": "I8 128 256", f"{NAME}.weight_scale": "F32 128"}
MXFP4 = {f"{NAME}.weight": "U8 128 128", f"{NAME}.weight_scale": "U8 128 8"}
MXFP8 = {f"{NAME}.weight": "F8_E4M3 128 256", f"{NAME}.weight_scale": "U8 128 8"}
PRE_SCALE = {f"{NAME}.pre_quant_scale": "BF16 256"}
INPUT_SCALE = {f"{NAME}.input_scale": "F32"}


def read(tensors: dict[str, str], **raw: Any) -> CheckpointQuantization:
    answer = detect(section("modelopt", **raw), make_entries(tensors))
    assert answer is not None
    return answer


def only(tensors: dict[str, str], **raw: Any) -> WeightQuantization:
    answer = read(tensors, **raw)
    assert answer.warnings == ()
    return answer.modules[NAME].weight


@pytest.mark.parametrize(
    ("algorithm", "tensors", "scheme", "inputs"),
    [
        ("FP8", fp8(NAME, 128, inputs=True), Fp8Tensor(), FP8_STATIC),
        ("FP8_PER_CHANNEL_PER_TOKEN", fp8(NAME, 128, scale="F32 128"), Fp8Channel(), FP8_PER_TOKEN),
        ("fp8_pb_wo", fp8(NAME, 128, scale="F32 1 1 2 1"), Fp8Block(block=(128, 128)), None),
        ("FP8_PB_WO", fp8(NAME, 128, scale="F32 2 1 4 1"), Fp8Block(block=(64, 64)), None),
        ("fp8_pb_real", fp8(NAME, 128, scale="F32 1 2"), Fp8Block(block=(128, 128)), None),
        ("NVFP4", nvfp4(NAME, 128, 256), Nvfp4(), NVFP4_INPUTS),
        ("nvfp4_static", nvfp4(NAME, 128, 256), Nvfp4(), NVFP4_INPUTS),
        ("NVFP4_AWQ", {**nvfp4(NAME, 128, 256), **PRE_SCALE}, Nvfp4(), NVFP4_INPUTS),
        ("W4A16_NVFP4", nvfp4(NAME, 128, 256, inputs=False), Nvfp4(), None),
        ("W4A8_NVFP4_FP8", nvfp4(NAME, 128, 256, group=32), Nvfp4(group_size=32), FP8_STATIC),
        ("W4A16_AWQ", {**INT4, **PRE_SCALE}, ModeloptInt4(group_size=128), None),
        ("W4A8_AWQ", {**INT4, **PRE_SCALE, **INPUT_SCALE, f"{NAME}.weight_scale_2": "F32"}, ModeloptInt4(group_size=128, fp8_scale=True), FP8_STATIC),
        ("W8A16", INT8, Int8Channel(), None),
        ("W8A8_SQ_PER_CHANNEL", {**INT8, **PRE_SCALE, **INPUT_SCALE}, Int8Channel(), INT8_STATIC),
        ("W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN", INT8, Int8Channel(), INT8_PER_TOKEN),
        ("MXFP8", MXFP8, Mxfp8(), MXFP8_GROUPS),
        ("mxfp4", MXFP4, Mxfp4(), MXFP4_GROUPS),
        ("W4A8_MXFP4_FP8", {**MXFP4, **INPUT_SCALE}, Mxfp4(), FP8_STATIC),
        ("W4A16_MXFP4", MXFP4, Mxfp4(), None),
    ],
)  # fmt: skip
def test_an_algorithm_says_how_weights_and_inputs_are_rounded(
    algorithm: str, tensors: dict[str, str], scheme: Scheme, inputs: InputQuantization | None
) -> None:
    weight = only(tensors, quant_algo=algorithm)
    assert (weight.scheme, weight.shape, weight.inputs) == (scheme, (128, 256), inputs)
    assert {part.suffix for part in weight.parts.values()} == {name.rpartition(".")[2] for name in tensors}


def test_unknown_algorithms_are_refused_with_what_is_known() -> None:
    with pytest.raises(UnsupportedQuantization, match=r"quant_algo 'NVFP5'.*Known are FP8, .*MIXED_PRECISION"):
        read(fp8(NAME), quant_algo="NVFP5")
    with pytest.raises(UnsupportedQuantization, match=f"quant_algo of {NAME} 'INT3'"):
        read(fp8(NAME), quant_algo="MIXED_PRECISION", quantized_layers={NAME: {"quant_algo": "INT3"}})


def test_svdquant_is_refused_with_what_to_do() -> None:
    for raw in (
        {"quant_algo": "NVFP4_SVD"},
        {"quant_algo": "MIXED_PRECISION", "quantized_layers": {NAME: {"quant_algo": "nvfp4_svdquant"}}},
    ):
        with pytest.raises(UnsupportedQuantization, match=r"low-rank branch.*Export the model with NVFP4 or NVFP4_AWQ"):
            read(nvfp4(NAME), **raw)


@pytest.mark.parametrize(
    ("algorithm", "tensors", "scheme", "inputs"),
    [
        ("FP8", nvfp4(NAME), Nvfp4(), NVFP4_INPUTS),
        ("NVFP4", fp8(NAME, inputs=True), Fp8Tensor(), FP8_STATIC),
        ("NVFP4", {**INT8, **INPUT_SCALE}, Int8Channel(), INT8_STATIC),
        ("NVFP4", MXFP8, Mxfp8(), None),
    ],
)
def test_the_tensors_count_where_they_are_of_another_algorithm(
    algorithm: str, tensors: dict[str, str], scheme: Scheme, inputs: InputQuantization | None
) -> None:
    answer = read(tensors, quant_algo=algorithm)
    weight = answer.modules[NAME].weight
    assert (weight.scheme, weight.inputs) == (scheme, inputs)
    assert answer.warnings == (
        f"{PLACE} says {algorithm}, but the tensors are {scheme.describe()}, and are taken as such: {NAME}.",
    )


def test_static_inputs_without_a_scale_are_left_alone_with_a_warning() -> None:
    answer = read(nvfp4(NAME, inputs=False), quant_algo="NVFP4")
    assert answer.modules[NAME].weight.inputs is None
    assert answer.warnings == (
        f"{PLACE} says NVFP4, but there is no input_scale; inputs are left as they are: {NAME}.",
    )


def test_a_group_size_that_the_scales_contradict_is_warned_of() -> None:
    groups = {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 32}, "targets": ["Linear"]}}
    for raw in ({"group_size": 32}, {"config_groups": groups}):
        answer = read(nvfp4(NAME), quant_algo="NVFP4", **raw)
        assert answer.modules[NAME].weight.scheme == Nvfp4()
        assert answer.warnings == (
            f"{PLACE} says groups of 32, but the scales are for groups of 16, and are taken so: {NAME}.",
        )


@pytest.mark.parametrize("extra", [{}, {"ignore": []}, {"exclude_modules": None}])
def test_mixed_precision_goes_by_layer(extra: dict[str, Any]) -> None:
    experts = "model.layers.1.mlp.experts"
    entries = {
        **fp8("model.layers.0.self_attn.q_proj", inputs=True),
        **nvfp4(f"{experts}.0.up_proj"),
        **nvfp4(f"{experts}.0.down_proj"),
        **nvfp4("model.layers.1.mlp.shared_experts.up_proj", inputs=False),
        **plain("lm_head", "model.layers.0.self_attn.o_proj"),
    }
    layers = {
        "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
        experts: {"quant_algo": "NVFP4", "group_size": 16},
        "model.layers.1.mlp.shared_experts.up_proj": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
    }
    answer = read(entries, quant_algo="MIXED_PRECISION", quantized_layers=layers, **extra)
    found = {name: (module.weight.scheme, module.weight.inputs) for name, module in answer.modules.items()}
    assert found == {
        "model.layers.0.self_attn.q_proj": (Fp8Tensor(), FP8_STATIC),
        f"{experts}.0.up_proj": (Nvfp4(), NVFP4_INPUTS),
        f"{experts}.0.down_proj": (Nvfp4(), NVFP4_INPUTS),
        "model.layers.1.mlp.shared_experts.up_proj": (Nvfp4(), None),
    }
    assert answer.warnings == ()


def test_mixed_precision_that_the_tensors_contradict() -> None:
    entries = {**nvfp4("model.layers.0.up_proj"), **plain("model.layers.1.up_proj", "lm_head")}
    answer = read(
        entries, quant_algo="MIXED_PRECISION", quantized_layers={"model.layers.1.up_proj": {"quant_algo": "FP8"}}
    )
    assert answer.modules["model.layers.0.up_proj"].weight.inputs == NVFP4_INPUTS
    assert answer.warnings == (
        f"{PLACE} says nothing of modules that are stored as NVFP4; they are taken as such: model.layers.0.up_proj.",
        f"Modules that {PLACE} means to be quantized have plain weights, and are taken as plain: model.layers.1.up_proj.",
    )


def test_mixed_precision_needs_its_layers_from_one_of_the_files() -> None:
    flat = section("modelopt", quant_algo="MIXED_PRECISION")
    nested = section("modelopt", quant_algo="MIXED_PRECISION", quantized_layers={NAME: {"quant_algo": "W4A16_NVFP4"}})
    answer = detect(flat, make_entries(nvfp4(NAME, inputs=False)), modelopt_section=nested)
    assert answer is not None and answer.warnings == () and answer.modules[NAME].weight.inputs is None
    with pytest.raises(UnsupportedQuantization, match="has no quantized_layers"):
        detect(flat, make_entries(nvfp4(NAME)))


@pytest.mark.parametrize(
    ("group", "tensors", "inputs"),
    [
        ({"weights": {"num_bits": 8, "type": "float"}, "input_activations": {"num_bits": 8}}, fp8(NAME, inputs=True), FP8_STATIC),
        ({"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}, fp8(NAME, scale="F32 256"), FP8_PER_TOKEN),
        ({"weights": {"num_bits": 4, "type": "float", "group_size": 16}}, nvfp4(NAME), None),
        ({"weights": {"num_bits": 4, "type": "float", "group_size": 16}, "input_activations": {"num_bits": 4}}, nvfp4(NAME), NVFP4_INPUTS),
        ({"weights": {"num_bits": 8, "type": "int"}}, INT8, None),
        ({"weights": {"num_bits": 8, "type": "int"}, "input_activations": {"num_bits": 8}}, {**INT8, **INPUT_SCALE}, INT8_STATIC),
        ({"weights": {"num_bits": 4, "type": "int", "group_size": 128}}, INT4, None),
        ({"weights": {"num_bits": 8, "type": "float", "group_size": 32}}, MXFP8, MXFP8_GROUPS),
    ],
)  # fmt: skip
def test_config_groups_stand_in_for_an_algorithm_that_is_not_named(
    group: dict[str, Any], tensors: dict[str, str], inputs: InputQuantization | None
) -> None:
    assert only(tensors, config_groups={"group_0": {**group, "targets": ["Linear"]}}).inputs == inputs


def test_every_algorithm_that_is_known_has_a_test() -> None:
    parameters = test_an_algorithm_says_how_weights_and_inputs_are_rounded.pytestmark[0].args[1]  # type: ignore[attr-defined]
    assert set(ALGORITHMS) - {name.upper() for name, *_ in parameters} == {"FP8_BLOCK_SCALES", "W4A8_MXFP4_MXFP8"}
