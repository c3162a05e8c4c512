"""GPTQ, AWQ and auto-round: layouts by shape, versions by configuration, and exceptions by module."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.stored_entries import PLACE, awq, fp8, gptq, make_entries, packed_int4, packed_nvfp4, plain, section

from headrace.errors import UnsupportedQuantization
from headrace.quantization import CheckpointQuantization, InputQuantization, detect
from headrace.quantization.awq import Awq
from headrace.quantization.fp8 import Fp8Tensor
from headrace.quantization.gptq import Gptq
from headrace.quantization.inputs import (
    FP8_PER_TOKEN,
    FP8_STATIC,
    INT8_PER_TOKEN,
    MXFP4_GROUPS,
    MXFP8_GROUPS,
    nvfp4_groups,
)
from headrace.quantization.int4 import PackedInt
from headrace.quantization.scheme import Scheme

NAME = "model.layers.0.mlp.up_proj"
OTHER = "model.layers.1.mlp.up_proj"
GPTQ = {"bits": 4, "group_size": 64, "sym": True, "desc_act": False}
AWQ = {"bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}


def read(method: str, tensors: dict[str, str], **raw: Any) -> CheckpointQuantization:
    answer = detect(section(method, **raw), make_entries(tensors))
    assert answer is not None
    return answer


@pytest.mark.parametrize(
    ("method", "raw", "tensors", "scheme"),
    [
        ("gptq", GPTQ, gptq(NAME), Gptq(bits=4, group_size=64, version=1, symmetric=True)),
        ("gptq", {**GPTQ, "checkpoint_format": "gptq"}, gptq(NAME), Gptq(bits=4, group_size=64, version=1)),
        ("gptq", {**GPTQ, "checkpoint_format": "gptq_v2", "sym": False}, gptq(NAME), Gptq(bits=4, group_size=64, version=2, symmetric=False)),
        ("gptq", {**GPTQ, "bits": 8}, gptq(NAME, bits=8), Gptq(bits=8, group_size=64)),
        ("gptq", {**GPTQ, "group_size": -1}, gptq(NAME, group=128), Gptq(bits=4, group_size=None)),
        ("awq", AWQ, awq(NAME), Awq(bits=4, group_size=64, has_zero_point=True)),
        ("awq", {"w_bit": 4, "q_group_size": 64, "zero_point": True}, awq(NAME), Awq(bits=4, group_size=64, has_zero_point=True)),
        ("awq", {**AWQ, "zero_point": False}, {name: text for name, text in awq(NAME).items() if "qzeros" not in name}, Awq(bits=4, group_size=64, has_zero_point=False)),
        ("auto-round", {**GPTQ, "packing_format": "auto_round:auto_gptq"}, gptq(NAME), Gptq(bits=4, group_size=64, version=1)),
        ("auto-round", {**GPTQ, "packing_format": "auto_round:gptqmodel", "sym": False}, gptq(NAME), Gptq(bits=4, group_size=64, version=2, symmetric=False)),
        ("auto-round", {**GPTQ, "packing_format": "auto_round", "sym": False}, gptq(NAME), Gptq(bits=4, group_size=64, version=2, symmetric=False)),
        ("auto-round", {**GPTQ, "packing_format": "auto_round:auto_awq", "sym": False}, awq(NAME), Awq(bits=4, group_size=64, has_zero_point=True)),
        ("auto-round", {**GPTQ, "group_size": 32}, packed_int4(NAME), PackedInt(bits=4, group_size=32)),
    ],
)  # fmt: skip
def test_a_section_says_how_words_are_packed(
    method: str, raw: dict[str, Any], tensors: dict[str, str], scheme: Scheme
) -> None:
    answer = read(method, {**tensors, **plain("lm_head")}, **raw)
    weight = answer.modules[NAME].weight
    assert (weight.scheme, weight.inputs, answer.warnings) == (scheme, None, ())


@pytest.mark.parametrize(("method", "tensors", "said", "stored"), [("gptq", awq(NAME), "GPTQ", "AWQ"), ("awq", gptq(NAME), "AWQ", "GPTQ")])  # fmt: skip
def test_the_shape_tells_the_layout(method: str, tensors: dict[str, str], said: str, stored: str) -> None:
    answer = read(method, tensors, bits=4, group_size=64)
    assert type(answer.modules[NAME].weight.scheme).__name__.upper() == stored
    assert answer.warnings == (
        f"{PLACE} says {said}, but qweight has the shape of {stored}, and is taken as such: {NAME}.",
    )


def test_missing_zero_points_are_an_error_where_the_range_is_not_symmetric() -> None:
    tensors = {name: text for name, text in awq(NAME).items() if "qzeros" not in name}
    with pytest.raises(UnsupportedQuantization, match=f"{NAME}.qzeros is missing"):
        read("awq", tensors, **AWQ)


@pytest.mark.parametrize(
    ("method", "raw", "said"),
    [
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'.*Known are gptq, gptq_v2"),
        ("gptq", {"is_marlin_format": True}, "checkpoint_format 'marlin'"),
        ("awq", {"version": "gemv"}, "version of AWQ 'gemv'.*Known are gemm"),
        ("gptq", {"bits": "4"}, "'4' as bits"),
        ("gptq", {"dynamic": {"+:.*up_proj": 8}}, "8 under dynamic"),
    ],
)
def test_packings_of_single_kernels_are_refused_by_name(method: str, raw: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedQuantization, match=said):
        read(method, gptq(NAME), **raw)


def test_exceptions_go_by_module() -> None:
    tensors = {
        **gptq(NAME, bits=8),
        **gptq(OTHER),
        **plain("model.layers.1.mlp.down_proj", "model.layers.0.mlp.gate_proj"),
    }
    for method, raw in (
        ("gptq", {"dynamic": {r"+:.*\.0\..*up_proj": {"bits": 8}, r"-:.*gate_proj": {}, r"-:.*\.1\..*down": {}}}),
        ("auto-round", {"extra_config": {NAME: {"bits": 8}, ".*gate_proj": {"bits": 16}, "model.layers.1.mlp.down_proj": {"bits": 16}}}),
    ):  # fmt: skip
        answer = read(method, tensors, **{**GPTQ, **raw})
        schemes = {name: module.weight.scheme for name, module in answer.modules.items()}
        assert schemes == {NAME: Gptq(bits=8, group_size=64), OTHER: Gptq(bits=4, group_size=64)}
        assert answer.warnings == ()


def test_names_of_other_modules_are_not_taken_for_scales() -> None:
    tensors = {**fp8("model.q_proj"), "model.rope.scales": "F32 4", "model.norm.scales": "F32 4", **plain("model.norm")}
    assert read("modelopt", tensors).unused == ()
    with pytest.raises(UnsupportedQuantization, match=r"model\.rope has scales, but no weight"):
        read("gptq", {**gptq(NAME), "model.rope.scales": "F32 4"}, **GPTQ)


@pytest.mark.parametrize(
    ("raw", "tensors", "inputs"),
    [
        ({"act_bits": 16}, gptq(NAME), None),
        ({"act_bits": 8, "act_data_type": "int", "act_dynamic": True}, gptq(NAME), INT8_PER_TOKEN),
        ({"act_bits": 8, "act_data_type": "fp8", "act_dynamic": True}, fp8(NAME), FP8_PER_TOKEN),
        ({"act_bits": 8, "act_data_type": "fp", "act_dynamic": False}, fp8(NAME, inputs=True), FP8_STATIC),
        ({"act_bits": 4, "act_data_type": "nv_fp4_with_static_gs"}, packed_nvfp4(NAME), nvfp4_groups(16, divisor=True)),
        ({"act_bits": 4, "act_data_type": "mx_fp"}, packed_nvfp4(NAME), MXFP4_GROUPS),
        ({"act_bits": 8, "act_data_type": "mx_fp"}, packed_nvfp4(NAME), MXFP8_GROUPS),
    ],
)
def test_auto_round_says_how_inputs_are_rounded(
    raw: dict[str, Any], tensors: dict[str, str], inputs: InputQuantization | None
) -> None:
    assert read("auto-round", tensors, **{**GPTQ, **raw}).modules[NAME].weight.inputs == inputs


def test_auto_rounds_other_inputs_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedQuantization, match="rounds inputs to 4-bit int values"):
        read("auto-round", gptq(NAME), **GPTQ, act_bits=4, act_data_type="int")


def test_auto_rounds_fp8_is_told_from_its_tensors() -> None:
    assert read("auto-round", fp8(NAME), bits=8, data_type="fp").modules[NAME].weight.scheme == Fp8Tensor()
