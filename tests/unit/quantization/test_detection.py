"""Detection as a whole: the tensors decide, contradictions are warned of by name, and what cannot be read is an error by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.stored_entries import PLACE, block_fp8, fp8, make_entries, nvfp4, packed_int4, plain, section

from headrace.errors import UnsupportedQuantization
from headrace.quantization import detect
from headrace.quantization.fp8 import Fp8Block
from headrace.quantization.int4 import PackedInt
from headrace.quantization.matching import _Alternatives
from headrace.quantization.modules import CheckpointQuantization, SchemeCount
from headrace.quantization.mx import Mxfp4Blocks
from headrace.quantization.scheme import Role, Scheme, StoredPart

KIMI_IGNORE = [
    "lm_head",
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
]
INT4_GROUP = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
LAYER = "language_model.model.layers.1"


def kimi_section(**more: Any) -> Any:
    groups = {"group_0": {"targets": ["Linear"], "weights": INT4_GROUP, "input_activations": None}}
    return section(
        "compressed-tensors", format="pack-quantized", config_groups=groups, ignore=KIMI_IGNORE, future_key=[1], **more
    )


def found(answer: CheckpointQuantization | None) -> CheckpointQuantization:
    assert answer is not None
    return answer


def test_the_answer_names_every_part_as_it_is_stored() -> None:
    entries = make_entries({**packed_int4(f"{LAYER}.mlp.experts.7.up_proj"), **plain(f"{LAYER}.mlp.gate", "lm_head")})
    answer = found(detect(kimi_section(), entries))
    assert answer.section.raw["future_key"] == [1]
    assert list(answer.modules) == [f"{LAYER}.mlp.experts.7.up_proj"]
    module = answer.modules[f"{LAYER}.mlp.experts.7.up_proj"]
    assert module.name == f"{LAYER}.mlp.experts.7.up_proj" and module.num_experts is None
    assert module.weight.scheme == PackedInt(bits=4, group_size=32, symmetric=True)
    assert module.weight.shape == (64, 64) and module.weight.inputs is None
    assert module.weight.parts == {
        Role.CODES: StoredPart("weight_packed", torch.int32, (64, 8)),
        Role.SCALE: StoredPart("weight_scale", torch.bfloat16, (64, 2)),
        Role.SHAPE: StoredPart("weight_shape", torch.int64, (2,)),
    }
    assert {role: entry.name for role, entry in module.entries.items()} == {
        Role.CODES: f"{module.name}.weight_packed",
        Role.SCALE: f"{module.name}.weight_scale",
        Role.SHAPE: f"{module.name}.weight_shape",
    }
    assert answer.entry_names() == {name for name in entries if "up_proj" in name}
    assert answer.warnings == () and answer.unused == ()


def test_counts_tell_schemes_from_plain_weights_and_add_up() -> None:
    entries = make_entries(
        {
            **nvfp4("layers.0.up_proj"),
            **nvfp4("layers.0.down_proj"),
            **nvfp4("layers.0.o_proj", inputs=False),
            "layers.0.up_proj.bias": "BF16 64",
            **plain("embed_tokens", "norm"),
            "norm.eps": "F32",
        }
    )
    answer = found(detect(section("modelopt", quant_algo="NVFP4"), entries))
    size = 64 * 32 + 64 * 4 + 4
    assert answer.counts == (
        SchemeCount(scheme="NVFP4", inputs="NVFP4", num_modules=2, num_bytes=2 * (size + 4)),
        SchemeCount(scheme="NVFP4", inputs="as they are", num_modules=1, num_bytes=size),
        SchemeCount(scheme="plain BF16", inputs="as they are", num_modules=2, num_bytes=2 * 64 * 64 * 2 + 128),
        SchemeCount(scheme="plain F32", inputs="as they are", num_modules=1, num_bytes=4),
    )
    assert sum(row.num_bytes for row in answer.counts) == sum(entry.size_bytes for entry in entries.values())


@pytest.mark.parametrize("method", ["bitsandbytes", "hqq", "quanto", "torchao", "fbgemm_fp8", "something-new"])
def test_methods_of_others_are_left_to_them(method: str) -> None:
    entries = make_entries({"a.weight": "U8 64 1", "a.weight.absmax": "F32 4", "b.weight": "F8_E4M3 4 4"})
    assert detect(section(method), entries) is None


def test_a_plain_checkpoint_has_no_quantization() -> None:
    assert detect(None, make_entries({**plain("lm_head"), "scales": "F32 4", "ids": "I64 4"})) is None


@pytest.mark.parametrize(
    "tensors",
    [packed_int4("a.up_proj"), block_fp8("a.up_proj"), nvfp4("a.up_proj"), {"a.up_proj.weight": "F8_E4M3 4 4"}],
)
def test_packed_weights_that_nothing_explains_are_an_error(tensors: dict[str, str]) -> None:
    with pytest.raises(UnsupportedQuantization, match=r"s3://m holds packed weights, but no side file.*a\.up_proj"):
        detect(None, make_entries(tensors), source="s3://m")


def test_float8_values_are_plain_only_where_the_configuration_says_so() -> None:
    entries = make_entries({"a.up_proj.weight": "F8_E4M3 64 64", **fp8("a.down_proj")})
    assert detect(None, make_entries({"a.up_proj.weight": "F8_E4M3 64 64"}), dtype="torch.float8_e4m3fn") is None
    with pytest.raises(UnsupportedQuantization, match=r"a\.up_proj has packed values.*no scale"):
        detect(section("fp8"), entries)
    for answer in (
        detect(section("fp8", modules_to_not_convert=["a.up_proj"]), entries),
        detect(section("fp8"), entries, dtype="float8_e4m3fn"),
    ):
        assert list(found(answer).modules) == ["a.down_proj"]


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"a.up_proj.weight": "U8 64 32"}, "a.up_proj has packed values in weight .*but no scale"),
        ({"a.up_proj.weight_packed": "I32 64 8"}, "a.up_proj has packed values in weight_packed .*but no scale"),
        ({"a.up_proj.weight_scale": "F32"}, "a.up_proj has weight_scale, but no weight"),
        ({"a.up_proj.weight_scale_inv": "F32 2 2", "a.up_proj.bias": "BF16 4"}, "a.up_proj has weight_scale_inv, but no weight"),
        ({"a.up_proj.weight_scale_2": "F32", "a.up_proj.input_scale": "F32"}, "input_scale, weight_scale_2, but no weight"),
        ({"a.up_proj.weight_shape": "I64 2"}, "a.up_proj has weight_shape, but no weight"),
        ({**plain("a.o_proj"), "a.o_proj.pre_quant_scale": "BF16 64"}, "a.o_proj has a plain weight .*pre_quant_scale"),
        ({**fp8("a.q_proj"), "a.q_proj.weight_scale_inv": "F32 2 2"}, "a.q_proj has both weight_scale and weight_scale_inv"),
        ({**plain("a.q_proj"), **packed_int4("a.q_proj")}, "a.q_proj has both weight and weight_packed"),
        ({"a.q_proj.weight": "F6_E2M3 64 64", "a.q_proj.weight_scale": "F32"}, "a.q_proj.weight has dtype F6_E2M3"),
        ({**nvfp4("a.q_proj"), "a.q_proj.weight_scale": "F8_E4M3 64 3"}, r"a\.q_proj\.weight_scale is float8_e4m3fn \[64, 3\]"),
        ({**fp8("a.q_proj", scale="F32 7")}, r"a\.q_proj\.weight_scale is float32 \[7\]"),
        ({**nvfp4("a.q_proj"), "a.q_proj.weight_scale_2": "F16"}, r"a\.q_proj\.weight_scale_2 is float16"),
        ({**fp8("a.q_proj"), "a.q_proj.weight_scale": "I32"}, r"a\.q_proj\.weight_scale is int32"),
        ({"a.q_proj.weight": "U8 64 32", "a.q_proj.weight_scale": "F8_E4M3 64 4"}, "a.q_proj.weight_scale_2 is missing"),
    ],
)  # fmt: skip
def test_parts_that_make_no_weight_are_an_error_that_names_them(tensors: dict[str, str], said: str) -> None:
    with pytest.raises(UnsupportedQuantization, match=said):
        detect(section("modelopt"), make_entries({**tensors, **plain("lm_head")}))


def test_what_is_excluded_but_packed_is_quantized_with_a_warning() -> None:
    entries = make_entries({**nvfp4("lm_head"), **nvfp4("model.layers.0.mlp.up_proj")})
    answer = found(detect(section("modelopt", quant_algo="NVFP4", ignore=["lm_head*"]), entries))
    assert set(answer.modules) == {"lm_head", "model.layers.0.mlp.up_proj"}
    assert answer.warnings == (f"{PLACE} excludes modules that are stored quantized, and they are taken so: lm_head.",)


def test_what_no_list_excludes_but_is_plain_is_plain_with_a_warning() -> None:
    towers = [f"vision_tower.blocks.{block}.wqkv" for block in range(5)]
    entries = make_entries(
        {
            **packed_int4(f"{LAYER}.mlp.experts.0.up_proj"),
            **plain(*towers, f"{LAYER}.mlp.gate", f"{LAYER}.self_attn.q_a_proj", "language_model.lm_head"),
            **plain("language_model.model.embed_tokens"),
            **plain("language_model.model.norm", sizes="64"),
        }
    )
    answer = found(detect(kimi_section(), entries))
    assert list(answer.modules) == [f"{LAYER}.mlp.experts.0.up_proj"]
    assert answer.warnings == (
        f"Modules that {PLACE} means to be quantized have plain weights, and are taken as plain: {', '.join(towers[:3])} and 2 more.",
    )


def test_a_configuration_without_a_list_expects_nothing() -> None:
    entries = make_entries({**block_fp8("model.layers.0.up_proj"), **plain("model.layers.0.down_proj", "lm_head")})
    assert found(detect(section("fp8", weight_block_size=[128, 128]), entries)).warnings == ()
    (warning,) = found(detect(section("fp8", ignored_layers=["a"]), entries)).warnings
    assert warning.endswith("taken as plain: model.layers.0.down_proj.")


def test_a_configuration_without_a_packed_weight_is_warned_of() -> None:
    entries = make_entries({**plain("lm_head"), "mask": "U8 2 4 4"})
    answer = found(detect(section("awq", modules_to_not_convert=["visual"]), entries))
    assert answer.modules == {} and answer.kv is None
    assert answer.warnings == (f"{PLACE} says awq, but no weight is packed; all are taken as plain.",)


def test_scales_beside_plain_weights_are_unused_and_named() -> None:
    entries = make_entries(
        {**plain("a.up_proj"), "a.up_proj.weight_scale": "F32", "a.up_proj.input_scale": "F32", **fp8("a.q_proj")}
    )
    answer = found(detect(section("modelopt"), entries))
    assert list(answer.modules) == ["a.q_proj"]
    assert answer.unused == ("a.up_proj.weight_scale", "a.up_proj.input_scale")
    assert (
        "Scales that belong to no packed weight are not used: a.up_proj.weight_scale, a.up_proj.input_scale."
        in answer.warnings
    )


def test_a_fused_module_that_is_excluded_in_part_is_an_error() -> None:
    entries = make_entries(nvfp4("model.layers.0.self_attn.qkv_proj"))
    ignore = ["model.layers.0.self_attn.q_proj"]
    with pytest.raises(
        UnsupportedQuantization, match=r"names q_proj of model\.layers\.0\.self_attn, but not k_proj, v_proj"
    ):
        detect(section("modelopt", quant_algo="NVFP4", ignore=ignore), entries)
    whole = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
    assert len(found(detect(section("modelopt", quant_algo="NVFP4", ignore=whole), entries)).warnings) == 1


@pytest.mark.parametrize("prefix", ["", "model.", "language_model.model.", "model.language_model."])
def test_a_wrapper_in_front_of_the_tensors_changes_nothing(prefix: str) -> None:
    entries = make_entries(
        {**packed_int4(f"{prefix}layers.1.mlp.experts.0.up_proj"), **plain(f"{prefix}layers.1.mlp.up_proj")}
    )
    answer = found(detect(kimi_section(), entries))
    assert list(answer.modules) == [f"{prefix}layers.1.mlp.experts.0.up_proj"] and answer.warnings == ()


def test_experts_in_one_tensor_are_described_as_one_of_them() -> None:
    experts = "model.layers.0.mlp.experts"
    entries = make_entries(
        {
            f"{experts}.gate_up_proj_blocks": "U8 4 64 3 16",
            f"{experts}.gate_up_proj_scales": "U8 4 64 3",
            f"{experts}.gate_up_proj_bias": "BF16 4 64",
            f"{experts}.down_proj_blocks": "U8 4 96 1 16",
            f"{experts}.down_proj_scales": "U8 4 96 1",
            **plain("model.layers.0.mlp.router", "lm_head"),
        }
    )
    listed = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    answer = found(detect(section("mxfp4", modules_to_not_convert=listed), entries))
    assert list(answer.modules) == [f"{experts}.gate_up_proj", f"{experts}.down_proj"]
    module = answer.modules[f"{experts}.gate_up_proj"]
    assert (module.num_experts, module.weight.shape) == (4, (64, 96))
    assert module.weight.scheme == Mxfp4Blocks() and module.weight.inputs is None
    assert module.weight.parts == {
        Role.CODES: StoredPart("_blocks", torch.uint8, (64, 3, 16)),
        Role.SCALE: StoredPart("_scales", torch.uint8, (64, 3)),
    }
    assert answer.counts[0].num_bytes == 4 * (64 * 3 * 17 + 96 * 17)
    assert answer.warnings == ()


def test_fp8_experts_in_one_tensor_and_their_blocks() -> None:
    entries = make_entries(
        {"mlp.experts.down_proj": "F8_E4M3 8 256 320", "mlp.experts.down_proj_scale_inv": "F32 8 2 3"}
    )
    module = found(detect(section("fp8", weight_block_size=[128, 128]), entries)).modules["mlp.experts.down_proj"]
    assert (module.num_experts, module.weight.shape, module.weight.scheme) == (
        8,
        (256, 320),
        Fp8Block(block=(128, 128)),
    )
    assert [part.suffix for part in module.weight.parts.values()] == ["", "_scale_inv"]


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"e.down_proj": "F8_E4M3 8 64 64", "e.down_proj_weight_scale": "F32"}, "holds nothing for each of 8 experts"),
        (
            {"e.down_proj_blocks": "U8 8 64 2 16", "e.down_proj_scales": "U8 4 64 2"},
            "e.down_proj_scales has shape .*8 experts",
        ),
        ({"e.down_proj_blocks": "U8 8 64 2 16"}, "e.down_proj has packed values in _blocks .*no scale"),
        ({"e.down_proj_scales": "U8 8 64 2"}, "e.down_proj has scales, but no weight"),
        ({"e.down_proj": "F8_E4M3 8 64 64"}, "e.down_proj has packed values in its own tensor"),
    ],
)
def test_stacked_experts_that_cannot_be_told_apart_are_an_error(tensors: dict[str, str], said: str) -> None:
    with pytest.raises(UnsupportedQuantization, match=said):
        detect(section("mxfp4"), make_entries(tensors))


@pytest.mark.parametrize("prefix", ["weight_quantizer._", ""])
def test_low_rank_branches_are_refused_whatever_the_algorithm(prefix: str) -> None:
    entries = make_entries({**nvfp4("a.q_proj"), f"a.q_proj.{prefix}svdquant_lora_a": "BF16 4 64"})
    with pytest.raises(UnsupportedQuantization, match=r"SVDQuant.*a\.q_proj.*Export the model with NVFP4"):
        detect(section("modelopt", quant_algo="NVFP4"), entries)


@pytest.mark.parametrize("num_experts", [4, 64])
def test_the_work_depends_on_the_kinds_of_modules_and_not_on_their_number(
    num_experts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: list[str] = []
    questions: list[str] = []
    check, find = PackedInt.check, _Alternatives.find

    def counted_check(self: Scheme, parts: Any, *, module: str) -> tuple[int, int]:
        checks.append(module)
        return check(self, parts, module=module)  # type: ignore[arg-type]

    def counted_find(self: _Alternatives, name: str) -> str | None:
        questions.append(name)
        return find(self, name)

    monkeypatch.setattr(PackedInt, "check", counted_check)
    monkeypatch.setattr(_Alternatives, "find", counted_find)
    tensors: dict[str, str] = {}
    for layer in range(1, 9):
        for expert in range(num_experts):
            for projection in ("gate_proj", "up_proj", "down_proj"):
                tensors |= packed_int4(f"language_model.model.layers.{layer}.mlp.experts.{expert}.{projection}")
    answer = found(detect(kimi_section(), make_entries(tensors)))
    assert len(answer.modules) == 8 * num_experts * 3
    assert len(checks) == 1
    # Three projections, numbers of one and of two digits, and the fused names of two projections.
    assert len(questions) <= 2 * (3 + 2)
    assert len({id(module.weight) for module in answer.modules.values()}) == 1
