"""compressed-tensors: formats, groups by target, inputs, and what is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.support.stored_entries import PLACE, fp8, make_entries, packed_int4, packed_nvfp4, plain, section

from headrace.errors import UnsupportedQuantization
from headrace.quantization import CheckpointQuantization, InputQuantization, detect
from headrace.quantization.fp4 import Nvfp4
from headrace.quantization.fp8 import Fp8Block, Fp8Channel, Fp8Tensor
from headrace.quantization.inputs import (
    FP8_PER_TOKEN,
    FP8_STATIC,
    INT8_PER_TOKEN,
    INT8_STATIC,
    MXFP4_GROUPS_NEAREST,
    MXFP8_GROUPS_NEAREST,
    fp8_groups,
    nvfp4_groups,
)
from headrace.quantization.int4 import PackedInt
from headrace.quantization.int8 import Int8Channel
from headrace.quantization.mx import Mxfp4, Mxfp8
from headrace.quantization.scheme import Scheme

NAME = "model.layers.0.mlp.up_proj"
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
MX4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
MX8 = {**MX4, "num_bits": 8}
TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
INT8_CODES = {f"{NAME}.weight": "I8 64 64", f"{NAME}.weight_scale": "BF16 64 1"}
INPUT_SCALE = {f"{NAME}.input_scale": "BF16 1"}
MX8_CODES = {f"{NAME}.weight": "F8_E4M3 64 64", f"{NAME}.weight_scale": "U8 64 2"}
MX4_CODES = {f"{NAME}.weight_packed": "U8 64 32", f"{NAME}.weight_scale": "U8 64 2"}


def group(weights: dict[str, Any] | None, inputs: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"targets": ["Linear"], "weights": weights, "input_activations": inputs, **more}


def read(tensors: dict[str, str], *groups: dict[str, Any], **raw: Any) -> CheckpointQuantization:
    named = {f"group_{number}": content for number, content in enumerate(groups)}
    raw = {"format": "pack-quantized", "config_groups": named, **raw}
    answer = detect(section("compressed-tensors", **raw), make_entries(tensors))
    assert answer is not None
    return answer


@pytest.mark.parametrize(
    ("format", "tensors", "content", "scheme", "inputs"),
    [
        ("pack-quantized", packed_int4(NAME), group(INT4), PackedInt(bits=4, group_size=32), None),
        (
            "pack-quantized",
            {f"{NAME}.weight_packed": "I32 64 16", f"{NAME}.weight_scale": "BF16 64 1", f"{NAME}.weight_shape": "I64 2"},
            group({**INT8}),
            PackedInt(bits=8, group_size=None),
            None,
        ),
        (
            "pack-quantized",
            {**packed_int4(NAME), f"{NAME}.weight_zero_point": "I32 8 2"},
            group({**INT4, "symmetric": False}),
            PackedInt(bits=4, group_size=32, symmetric=False),
            None,
        ),
        ("pack-quantized", packed_int4(NAME), group(INT4, TOKEN), PackedInt(bits=4, group_size=32), FP8_PER_TOKEN),
        ("int-quantized", INT8_CODES, group(INT8, {**TOKEN, "type": "int"}), Int8Channel(), INT8_PER_TOKEN),
        ("int-quantized", {**INT8_CODES, **INPUT_SCALE}, group(INT8, {**STATIC, "type": "int"}), Int8Channel(), INT8_STATIC),
        ("float-quantized", fp8(NAME, scale="BF16 256 1"), group(FP8, TOKEN), Fp8Channel(), FP8_PER_TOKEN),
        ("naive-quantized", fp8(NAME, scale="BF16 256 1"), group(FP8), Fp8Channel(), None),
        ("float-quantized", {**fp8(NAME, scale="BF16 1"), **INPUT_SCALE}, group({**FP8, "strategy": "tensor"}, STATIC), Fp8Tensor(), FP8_STATIC),
        (
            "float-quantized",
            fp8(NAME, 256, 320, scale="BF16 2 3"),
            group({**FP8, "strategy": "block", "block_structure": [128, 128]}, {**TOKEN, "strategy": "group", "group_size": 128}),
            Fp8Block(block=(128, 128)),
            fp8_groups(128),
        ),
        ("float-quantized", fp8(NAME, 256, 256, scale="F32 4 2"), group({**FP8, "strategy": "block", "block_structure": "64x128"}), Fp8Block(block=(64, 128)), None),
        ("float-quantized", fp8(NAME, 256, 256, scale="F32 256 4"), group({**FP8, "strategy": "group", "group_size": 64}), Fp8Block(block=(1, 64)), None),
        ("nvfp4-pack-quantized", packed_nvfp4(NAME), group(FP4, {**FP4, "dynamic": "local"}), Nvfp4(global_is_divisor=True), nvfp4_groups(16, divisor=True)),
        ("nvfp4-pack-quantized", packed_nvfp4(NAME), group(FP4), Nvfp4(global_is_divisor=True), None),
        ("mxfp4-pack-quantized", MX4_CODES, group(MX4, {**MX4, "dynamic": True}), Mxfp4(), MXFP4_GROUPS_NEAREST),
        ("mxfp8-quantized", MX8_CODES, group(MX8, {**MX8, "dynamic": True}), Mxfp8(), MXFP8_GROUPS_NEAREST),
    ],
)  # fmt: skip
def test_a_format_says_how_weights_and_inputs_are_rounded(
    format: str, tensors: dict[str, str], content: dict[str, Any], scheme: Scheme, inputs: InputQuantization | None
) -> None:
    for raw, more in (({"format": format}, {}), ({"format": "mixed-precision"}, {"format": format})):
        answer = read(tensors, {**content, **more}, **raw)
        weight = answer.modules[NAME].weight
        assert (weight.scheme, weight.inputs, answer.warnings) == (scheme, inputs, ())


def test_zero_points_are_required_where_the_group_is_not_symmetric() -> None:
    with pytest.raises(UnsupportedQuantization, match=f"{NAME}.weight_zero_point is missing"):
        read(packed_int4(NAME), group({**INT4, "symmetric": False}))


def test_each_module_goes_by_the_group_that_means_it() -> None:
    tensors = {
        **packed_int4("model.layers.0.mlp.experts.0.up_proj"),
        **fp8("model.layers.0.self_attn.q_proj", scale="BF16 256 1"),
        **packed_int4("lm_head", group=16),
        **plain("model.layers.0.mlp.gate", "model.embed_tokens"),
    }
    answer = read(
        tensors,
        group(FP8, TOKEN),
        {"targets": ["re:.*experts.*"], "weights": INT4, "format": "pack-quantized"},
        {"targets": ["lm_head"], "weights": {**INT4, "group_size": 16}, "format": "pack-quantized"},
        format="mixed-precision",
        ignore=["re:.*mlp.gate$"],
    )
    found = {name: (module.weight.scheme, module.weight.inputs) for name, module in answer.modules.items()}
    assert found == {
        "model.layers.0.mlp.experts.0.up_proj": (PackedInt(bits=4, group_size=32), None),
        "model.layers.0.self_attn.q_proj": (Fp8Channel(), FP8_PER_TOKEN),
        "lm_head": (PackedInt(bits=4, group_size=16), None),
    }
    assert answer.warnings == ()


def test_a_module_that_no_target_means_is_read_as_the_one_group_that_fits() -> None:
    groups = [{"targets": ["re:.*self_attn.*"], "weights": FP8}, {"targets": ["re:.*experts.*"], "weights": INT4}]
    answer = read(packed_int4(NAME), *groups)
    assert answer.modules[NAME].weight.scheme == PackedInt(bits=4, group_size=32)
    assert answer.warnings == (
        f"No target in {PLACE} means these modules, which are packed as group_1 has it, and are taken so: {NAME}.",
    )
    with pytest.raises(UnsupportedQuantization, match=f"{NAME} is packed, but no group .*fit 2 of 3 groups"):
        read(packed_int4(NAME), *groups, {"targets": ["re:.*other"], "weights": {**INT4, "symmetric": True}})
    with pytest.raises(UnsupportedQuantization, match=f"{NAME} is packed, but no group .*fit 0 of 2 groups"):
        read(packed_int4(NAME, group=8), *groups)


def test_targets_that_name_plain_modules_are_warned_of() -> None:
    tensors = {**packed_int4(NAME), **plain("model.layers.0.mlp.down_proj", "model.layers.0.self_attn.o_proj")}
    answer = read(tensors, {"targets": ["re:.*mlp.*"], "weights": INT4})
    assert answer.warnings == (
        f"Modules that {PLACE} means to be quantized have plain weights, and are taken as plain: model.layers.0.mlp.down_proj.",
    )


@pytest.mark.parametrize(
    ("inputs", "scale", "found"),
    [
        ({**TOKEN, "strategy": "tensor"}, {}, replace(FP8_PER_TOKEN, granularity="tensor")),
        ({**TOKEN, "type": "int", "symmetric": False}, {}, replace(INT8_PER_TOKEN, symmetric=False)),
        ({**STATIC, "type": "int", "symmetric": False}, INPUT_SCALE, replace(INT8_STATIC, symmetric=False)),
        ({**TOKEN, "num_bits": 16}, {}, None),
    ],
)
def test_inputs_in_all_their_ways(
    inputs: dict[str, Any], scale: dict[str, str], found: InputQuantization | None
) -> None:
    assert read({**INT8_CODES, **scale}, group(INT8, inputs)).modules[NAME].weight.inputs == found


def test_static_inputs_without_a_scale_are_left_alone_with_a_warning() -> None:
    answer = read(fp8(NAME, scale="BF16 1"), group({**FP8, "strategy": "tensor"}, STATIC))
    assert answer.modules[NAME].weight.inputs is None
    assert answer.warnings == (
        f"{PLACE}: group_0 has static inputs, but there is no input_scale; inputs are left as they are: {NAME}.",
    )


def test_what_is_not_done_is_said() -> None:
    answer = read(
        packed_int4(NAME), group(INT4, output_activations=STATIC), {"targets": ["Attention"], "weights": None}
    )
    assert answer.warnings == (
        f"{PLACE} rounds the outputs of group_0; outputs are left as they are.",
        f"{PLACE} quantizes no weights in group_1; the group is left out.",
    )


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"format": "zip"}, "format 'zip', .*Known are dense, int-quantized"),
        ({"format": "marlin-24"}, "compressed as marlin-24"),
        ({"sparsity_config": {"format": "sparse-24-bitmask", "targets": []}}, "compressed as sparse-24-bitmask"),
        ({"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}}, "transform_config.*not applied"),
        ({"config_groups": []}, None),
        ({"config_groups": [1]}, r"\[1\] as config_groups"),
        ({"config_groups": {"W4A16": ["Linear"]}}, r"\['Linear'\] as config_groups.W4A16"),
        ({"config_groups": {"g": {"weights": INT4, "targets": "Linear"}}}, "'Linear' as config_groups.g.targets"),
        ({"config_groups": {"g": group({**INT4, "strategy": "diagonal"})}}, "strategy of config_groups.g.weights 'diagonal'"),
        ({"config_groups": {"g": group({**INT4, "type": "posit"})}}, "type of config_groups.g.weights 'posit'"),
        ({"config_groups": {"g": group({**INT4, "num_bits": "4"})}}, "'4' as num_bits"),
        ({"config_groups": {"g": group({**FP8, "block_structure": [128]})}}, r"\[128\] as config_groups.g.weights.block_structure"),
        ({"config_groups": {"g": group({**FP4})}}, "holds 32-bit words, but g says 4-bit float"),
        ({"config_groups": {"g": group(INT4, {**TOKEN, "num_bits": 4, "type": "int"})}}, "g rounds inputs to 4-bit int values by token"),
        ({"ignore": "lm_head"}, "'lm_head' under ignore"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_by_name(raw: dict[str, Any], said: str | None) -> None:
    said = said or "no group of .* says how"
    with pytest.raises(UnsupportedQuantization, match=said):
        read(packed_int4(NAME), **{"config_groups": {"g": group(INT4)}, **raw})


@pytest.mark.parametrize(
    "raw",
    [{"sparsity_config": {}}, {"sparsity_config": {"format": "dense"}}, {"transform_config": {"config_groups": {}}}],
)
def test_empty_extras_are_none(raw: dict[str, Any]) -> None:
    assert NAME in read(packed_int4(NAME), group(INT4), **raw).modules


def test_a_strategy_that_is_not_named_is_told_from_the_group_size() -> None:
    weights = {"num_bits": 4, "type": "int", "group_size": -1}
    tensors = {f"{NAME}.weight_packed": "I32 64 8", f"{NAME}.weight_scale": "BF16 64 1"}
    assert read(tensors, group(weights)).modules[NAME].weight.scheme == PackedInt(bits=4, group_size=None)
    assert read(packed_int4(NAME), group({**weights, "group_size": 32})).modules[NAME].weight.scheme == PackedInt(
        bits=4, group_size=32
    )
