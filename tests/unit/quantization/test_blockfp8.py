"""``quant_method: fp8``: blocks, single scales, and what goes with each for inputs."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.stored_entries import PLACE, block_fp8, fp8, make_entries, nvfp4, section

from headrace.errors import UnsupportedQuantization
from headrace.quantization import CheckpointQuantization, InputQuantization, detect
from headrace.quantization.fp8 import Fp8Block, Fp8Channel, Fp8Tensor
from headrace.quantization.inputs import FP8_PER_TOKEN, FP8_STATIC, MXFP8_GROUPS, fp8_groups
from headrace.quantization.mx import Mxfp8
from headrace.quantization.scheme import Scheme

NAME = "model.layers.0.mlp.up_proj"


def read(tensors: dict[str, str], method: str = "fp8", **raw: Any) -> CheckpointQuantization:
    answer = detect(section(method, **raw), make_entries(tensors))
    assert answer is not None
    return answer


@pytest.mark.parametrize(
    ("tensors", "raw", "scheme", "inputs"),
    [
        (block_fp8(NAME, 256, 320, grid="2 3"), {"weight_block_size": [128, 128]}, Fp8Block(block=(128, 128)), fp8_groups(128)),
        (block_fp8(NAME, 160, 256, grid="2 2"), {"weight_block_size": [128, 128]}, Fp8Block(block=(128, 128)), fp8_groups(128)),
        (block_fp8(NAME, 256, 256, grid="4 2"), {"weight_block_size": [64, 128]}, Fp8Block(block=(64, 128)), fp8_groups(128)),
        (block_fp8(NAME, 256, 256, grid="4 4"), {}, Fp8Block(block=(64, 64)), fp8_groups(64)),
        (block_fp8(NAME), {"weight_block_size": [128, 128], "scale_fmt": "ue8m0"}, Fp8Block(block=(128, 128)), fp8_groups(128, power_of_two="up")),
        ({**block_fp8(NAME, grid="2 2"), f"{NAME}.weight_scale_inv": "BF16 2 2"}, {"weight_block_size": [128, 128]}, Fp8Block(block=(128, 128)), fp8_groups(128)),
        (fp8(NAME, inputs=True), {"activation_scheme": "static"}, Fp8Tensor(), FP8_STATIC),
        ({f"{NAME}.weight": "F8_E4M3 64 64", f"{NAME}.weight_scale_inv": "BF16", f"{NAME}.activation_scale": "BF16"}, {"activation_scheme": "static", "weight_block_size": None}, Fp8Tensor(), FP8_STATIC),
        (fp8(NAME), {"activation_scheme": "dynamic"}, Fp8Tensor(), FP8_PER_TOKEN),
        (fp8(NAME, scale="F32 256 1"), {}, Fp8Channel(), FP8_PER_TOKEN),
        ({f"{NAME}.weight": "F8_E5M2 64 64", f"{NAME}.weight_scale": "F32"}, {"fmt": "e5m2"}, Fp8Tensor(), FP8_PER_TOKEN),
    ],
)  # fmt: skip
def test_a_section_says_how_inputs_are_rounded(
    tensors: dict[str, str], raw: dict[str, Any], scheme: Scheme, inputs: InputQuantization
) -> None:
    answer = read(tensors, **raw)
    weight = answer.modules[NAME].weight
    assert (weight.scheme, weight.inputs, answer.warnings) == (scheme, inputs, ())


def test_mxfp8_has_groups_of_32() -> None:
    tensors = {f"{NAME}.weight": "F8_E4M3 64 64", f"{NAME}.weight_scale_inv": "U8 64 2"}
    weight = read(tensors, "mxfp8", weight_block_size=[1, 32]).modules[NAME].weight
    assert (weight.scheme, weight.inputs) == (Mxfp8(), MXFP8_GROUPS)


def test_a_grid_that_does_not_fit_the_block_is_an_error() -> None:
    with pytest.raises(UnsupportedQuantization, match=rf"{NAME}.weight_scale_inv is float32 \[2, 2\]"):
        read(block_fp8(NAME, 320, 256, grid="2 2"), weight_block_size=[128, 128])


def test_static_inputs_without_a_scale_are_left_alone_with_a_warning() -> None:
    answer = read(fp8(NAME), activation_scheme="static")
    assert answer.modules[NAME].weight.inputs is None
    assert answer.warnings == (
        f"{PLACE} has static inputs, but there is no input_scale; inputs are left as they are: {NAME}.",
    )


def test_the_tensors_count_where_they_are_no_fp8() -> None:
    answer = read(nvfp4(NAME, inputs=False))
    assert answer.modules[NAME].weight.inputs is None
    assert answer.warnings == (f"{PLACE} says fp8, but the tensors are NVFP4, and are taken as such: {NAME}.",)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"weight_block_size": 128}, "128 as weight_block_size"),
        ({"weight_block_size": [128, 0]}, "as weight_block_size"),
        ({"activation_scheme": "sometimes"}, "activation_scheme 'sometimes'"),
        ({"modules_to_not_convert": "lm_head"}, "'lm_head' under modules_to_not_convert"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(raw: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedQuantization, match=said):
        read(fp8(NAME), **raw)
