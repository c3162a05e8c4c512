"""Kimi K2.5 under its real names: the whole model, its language model and its encoders, in bfloat16 and with experts in INT4; and what each load accounts for.

The reference is Transformers' own class on the same bfloat16 folder, and for INT4 on a folder of the expanded values. All of it in float32.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, DeepseekV3ForCausalLM, Kimi_K25ForConditionalGeneration

import headrace
from headrace.errors import HeadraceError, ModelError, ObjectChanged, PlacementError, UnsupportedQuantization
from headrace.quantization.stack import PackedStack
from headrace.settings import Settings
from headrace.streaming import LoadReport
from tests.support.closeness import assert_computed_alike
from tests.support.kimi import (
    NUM_EXPERTS,
    NUM_LAYERS,
    VISION,
    expanded_experts,
    image_inputs,
    is_expert,
    kimi_tensors,
    packed_experts,
    save_kimi,
)
from tests.support.weight_files import edit_json, read_tensors, remove_tensor

QUIET = Settings.from_environment({}, progress=False)
PROMPT = torch.tensor([[1, 5, 9, 200, 7]])
WQKV = "vision_tower.encoder.blocks.1.wqkv.weight"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_kimi(tmp_path_factory.mktemp("kimi") / "bf16", kimi_tensors())


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_kimi(tmp_path_factory.mktemp("kimi") / "int4", packed_experts(kimi_tensors()), is_packed=True)


@pytest.fixture(scope="module")
def reference(plain: Path) -> Any:
    """Transformers' own load of the bfloat16 folder."""
    return AutoModelForImageTextToText.from_pretrained(plain, dtype=torch.float32)


@pytest.fixture(scope="module")
def expanded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Transformers' own load of what the INT4 folder stands for."""
    folder = tmp_path_factory.mktemp("kimi") / "expanded"
    save_kimi(folder, expanded_experts(packed_experts(kimi_tensors())))
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)


def load(folder: Any, **options: Any) -> tuple[Any, LoadReport]:
    reports: list[LoadReport] = []
    model = headrace.load_model(
        folder, **{"dtype": torch.float32, "settings": QUIET, **options}, on_report=reports.append
    )
    return model, reports[0]


def in_whole(name: str) -> str:
    """Return what a parameter of the language model is called in the whole one."""
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


def assert_part_of(part: Any, whole: Any, rename: Callable[[str], str] = in_whole) -> None:
    state = whole.state_dict()
    for name, value in part.state_dict().items():
        assert torch.equal(value, state[rename(name)]), name


def bytes_of(folder: Path, *, language: bool) -> int:
    tensors = read_tensors(folder)
    return sum(len(it.content) for name, it in tensors.items() if name.startswith("language_model.") == language)


def logits(model: Any, **inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(**(inputs or {"input_ids": PROMPT})).logits
    return result


def features(model: Any) -> torch.Tensor:
    inputs = image_inputs()
    with torch.no_grad():
        found = model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"]).pooler_output
    return torch.cat(found)


# -- in bfloat16


def test_the_files_are_laid_out_as_the_repositorys(plain: Path) -> None:
    names = sorted(path.name for path in plain.glob("*.safetensors"))
    assert names[0] == "model-00001-of-000006.safetensors" and len(names) == NUM_LAYERS + 3
    tensors = list(read_tensors(plain))
    assert tensors[0] == "language_model.model.layers.0.input_layernorm.weight"
    assert tensors.index("language_model.lm_head.weight") < tensors.index("mm_projector.pre_norm.weight")
    assert tensors[-1] == "vision_tower.encoder.final_layernorm.bias"


def test_origin_b4_the_whole_model_is_transformers_own(plain: Path, reference: Any) -> None:
    """Vision and language weights reach their places under their mapped names, and text and images give the same answers."""
    model, report = load(plain)
    assert type(model) is Kimi_K25ForConditionalGeneration
    assert list(model.state_dict()) == list(reference.state_dict())
    assert_part_of(model, reference, rename=lambda name: name)
    assert report.bytes_wanted == report.bytes_checkpoint and report.bytes_skipped == 0
    assert_computed_alike(logits(model), logits(reference))
    inputs = image_inputs()
    assert_computed_alike(logits(model, **inputs), logits(reference, **inputs))
    options = {"max_new_tokens": 6, "do_sample": False}
    assert model.generate(**inputs, **options).tolist() == reference.generate(**inputs, **options).tolist()


def test_an_image_changes_the_answer(reference: Any) -> None:
    inputs = image_inputs()
    other = {**inputs, "pixel_values": inputs["pixel_values"].flip(0)}
    assert not torch.equal(logits(reference, **inputs), logits(reference, **other))


def test_origin_b4_stored_vision_names_are_mapped(plain: Path, reference: Any) -> None:
    model, _ = load(plain, encoder_only=True)
    stored = {name: it.tensor().float() for name, it in read_tensors(plain).items()}
    block = model.model.vision_tower.layers[1]
    assert torch.equal(block.attn.proj.weight, stored["vision_tower.encoder.blocks.1.wo.weight"])
    assert torch.equal(block.attn.v_proj.weight, stored[WQKV].chunk(3)[2])
    assert torch.equal(block.norm2.bias, stored["vision_tower.encoder.blocks.1.norm1.bias"])
    assert torch.equal(model.model.mm_projector.in_proj.weight, stored["mm_projector.proj.0.weight"])
    assert torch.equal(model.model.mm_projector.out_proj.bias, stored["mm_projector.proj.2.bias"])
    assert_part_of(model, reference, rename=lambda name: name)


def test_origin_b4_language_only_builds_the_language_model_and_asks_for_nothing_else(
    plain: Path, reference: Any
) -> None:
    model, report = load(plain, language_only=True)
    assert type(model) is DeepseekV3ForCausalLM
    assert model.config.architectures == ["DeepseekV3ForCausalLM"] and model.config.tie_word_embeddings is False
    assert_part_of(model, reference)
    assert {in_whole(name) for name in model.state_dict()} == {
        name for name in reference.state_dict() if not name.startswith(("model.vision_tower.", "model.mm_projector."))
    }
    assert_computed_alike(logits(model), logits(reference))
    assert report.bytes_wanted == report.bytes_read == bytes_of(plain, language=True)
    assert report.bytes_skipped == bytes_of(plain, language=False)
    assert report.to_dict()["bytes_skipped"] == report.bytes_skipped > 0


def test_origin_b4_encoder_only_fills_tower_and_projector_alone(plain: Path, reference: Any) -> None:
    model, report = load(plain, encoder_only=True)
    assert type(model) is Kimi_K25ForConditionalGeneration
    assert {name.split(".")[1] for name in model.state_dict()} == {"vision_tower", "mm_projector"}
    assert torch.equal(features(model), features(reference))
    assert report.bytes_wanted == report.bytes_read == bytes_of(plain, language=False)
    with pytest.raises(ModelError, match=r"loaded without language_model.*get_image_features"):
        model(input_ids=PROMPT)


@pytest.mark.parametrize("is_vision", [False, True])
def test_files_of_the_other_part_need_not_be_there_any_more(plain: Path, tmp_path: Path, is_vision: bool) -> None:
    """What is not asked for is not touched: the files are taken away after the checkpoint was opened."""
    folder = Path(shutil.copytree(plain, tmp_path / "kimi"))
    gone = [path for path in sorted(folder.glob("*.safetensors")) if (path.name[6:11] > "00004") is not is_vision]
    options = {"encoder_only": True} if is_vision else {"language_only": True}
    with headrace.open(str(folder), settings=QUIET) as checkpoint:
        for path in gone:
            path.unlink()
        load(checkpoint, **options)
        with pytest.raises(ObjectChanged):
            load(checkpoint)


def test_a_bucket_gives_what_the_disk_gives(packed: Path, bucket: str, s3_client: Any) -> None:
    for path in packed.iterdir():
        s3_client.put_object(Bucket=bucket, Key=f"kimi/{path.name}", Body=path.read_bytes())
    for options in ({"language_only": True}, {"encoder_only": True}):
        model, report = load(f"s3://{bucket}/kimi", **options)
        local, expected = load(packed, **options)
        assert_part_of(model, local, rename=lambda name: name)
        assert report.bytes_read == expected.bytes_wanted


# -- with experts in INT4


def test_int4_experts_stay_packed_and_everything_else_is_plain(packed: Path, expanded: Any) -> None:
    model, report = load(packed)
    stacks = {name for name, module in model.named_modules() if isinstance(module, PackedStack)}
    layers = range(1, NUM_LAYERS)
    assert stacks == {
        f"model.language_model.layers.{layer}.mlp.experts.{projection}_proj"
        for layer in layers
        for projection in ("gate", "up", "down")
    }
    assert report.bytes_skipped == 0
    state = expanded.state_dict()
    for layer in layers:
        experts = model.model.language_model.layers[layer].mlp.experts
        for expert in range(NUM_EXPERTS):
            gate, up = state[f"model.language_model.layers.{layer}.mlp.experts.gate_up_proj"][expert].chunk(2)
            down = state[f"model.language_model.layers.{layer}.mlp.experts.down_proj"][expert]
            for projection, value in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
                assert torch.equal(experts.get_submodule(projection).dequantized(expert), value)
    inputs = image_inputs()
    assert torch.allclose(logits(model, **inputs), logits(expanded, **inputs), atol=1e-4, rtol=0)
    assert torch.allclose(logits(model), logits(expanded), atol=1e-4, rtol=0)


def test_int4_language_only_has_the_language_models_own_names(packed: Path, expanded: Any) -> None:
    model, report = load(packed, language_only=True)
    assert type(model) is DeepseekV3ForCausalLM
    assert isinstance(model.model.layers[1].mlp.experts.gate_proj, PackedStack)
    assert torch.allclose(logits(model), logits(expanded), atol=1e-4, rtol=0)
    assert report.bytes_wanted == bytes_of(packed, language=True)
    whole, _ = load(packed)
    assert_part_of(model, whole)
    assert_computed_alike(logits(model), logits(whole))


def test_int4_language_only_can_be_expanded(packed: Path, expanded: Any) -> None:
    model, report = load(packed, language_only=True, dequantize=True)
    assert_part_of(model, expanded)
    assert_computed_alike(logits(model), logits(expanded))
    assert report.bytes_wanted == bytes_of(packed, language=True)


def test_int4_encoder_only_is_a_plain_model(packed: Path, expanded: Any) -> None:
    model, report = load(packed, encoder_only=True)
    assert getattr(model, "hf_quantizer", None) is None
    assert torch.equal(features(model), features(expanded))
    assert report.bytes_wanted == bytes_of(packed, language=False)


def test_int4_generation_with_an_image_is_that_of_the_expanded_model(packed: Path, expanded: Any) -> None:
    model, _ = load(packed)
    options = {"max_new_tokens": 6, "do_sample": False}
    ours, theirs = model.generate(**image_inputs(), **options), expanded.generate(**image_inputs(), **options)
    assert ours.tolist() == theirs.tolist()


def test_a_section_in_text_config_alone_counts(packed: Path, tmp_path: Path) -> None:
    """Without it the packed experts are refused, by name, whichever part of the language model is loaded."""
    folder = Path(shutil.copytree(packed, tmp_path / "kimi"))
    edit_json(folder / "config.json", lambda config: config["text_config"].pop("quantization_config"))
    for options in ({}, {"language_only": True}):
        with pytest.raises(UnsupportedQuantization, match=r"experts\.0\.gate_proj"):
            load(folder, **options)


@pytest.mark.parametrize("part", ["packed", "scale", "shape"])
def test_a_missing_part_of_an_expert_is_not_let_pass(packed: Path, tmp_path: Path, part: str) -> None:
    folder = Path(shutil.copytree(packed, tmp_path / "kimi"))
    remove_tensor(folder, f"language_model.model.layers.2.mlp.experts.3.up_proj.weight_{part}")
    for options in ({}, {"language_only": True}, {"language_only": True, "dequantize": True}):
        if part == "shape" and "dequantize" in options:
            load(folder, **options)  # the sizes of the packed weight say it, too
            continue
        with pytest.raises((UnsupportedQuantization, PlacementError)) as caught:
            load(folder, **options)
        assert "layers.2.mlp.experts" in str(caught.value)


# -- layers and experts of the language model


def test_layers_of_the_language_model_are_stages(packed: Path) -> None:
    whole, _ = load(packed)
    first, one = load(packed, language_only=True, layers=range(2))
    last, two = load(packed, language_only=True, layers=range(2, NUM_LAYERS))
    with torch.no_grad():
        states = first.model(input_ids=PROMPT).last_hidden_state
    assert_computed_alike(logits(last, inputs_embeds=states), logits(whole))
    language = bytes_of(packed, language=True)
    assert one.bytes_wanted + two.bytes_wanted == language
    assert one.bytes_skipped == two.bytes_wanted + bytes_of(packed, language=False)


def test_experts_of_ranks_sum_up_to_all(packed: Path) -> None:
    whole, _ = load(packed, language_only=True)
    chosen = ([0, 3], [1, 2])
    parts = [load(packed, language_only=True, experts=experts) for experts in chosen]
    states, weights = torch.randn(5, 64), torch.rand(5, 2)
    index = torch.tensor([[0, 1], [2, 3], [3, 0], [1, 2], [0, 2]])
    with torch.no_grad():
        expected = whole.model.layers[1].mlp.experts(states, index, weights)
        found = [part.model.layers[1].mlp.experts(states, index, weights) for part, _ in parts]
    assert torch.allclose(sum(found), expected, atol=1e-5)
    assert not torch.allclose(found[0], expected, atol=1e-2)
    size = sum(len(it.content) for name, it in read_tensors(packed).items() if is_expert(name))
    for _, report in parts:
        assert report.bytes_wanted == bytes_of(packed, language=True) - size // 2


# -- what does not fit


def change(folder: Path, tmp_path: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """Return a copy of ``folder``'s tensors, edited."""
    tensors = {name: it.tensor() for name, it in read_tensors(folder).items()}
    edit(tensors)
    return save_kimi(tmp_path / "changed", tensors)


def renamed(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


@pytest.mark.parametrize("options", [{}, {"language_only": True}, {"encoder_only": True}], ids=str)
@pytest.mark.parametrize(
    ("old", "new", "near"),
    [
        (WQKV, "vision_tower.encoder.blocks.1.wqkvs.weight", "model.vision_tower.layers.1.attn."),
        ("vision_tower.encoder.blocks.0.mlp.fc0.bias", "vision_tower.encoder.blocks.0.mlp.fc_0.bias", "mlp.fc1.bias"),
        ("mm_projector.proj.0.weight", "mm_projector.proj.1.weight", "model.mm_projector.in_proj.weight"),
    ],
)
def test_origin_b4_an_unknown_vision_weight_is_an_error_with_the_nearest_name(
    plain: Path, tmp_path: Path, options: Mapping[str, Any], old: str, new: str, near: str
) -> None:
    folder = change(plain, tmp_path, renamed(old, new))
    with pytest.raises(PlacementError) as caught:
        load(folder, **options)
    lines = [line for line in caught.value.why.splitlines() if f"{new} (near " in line]
    assert len(lines) == 1 and near in lines[0].partition(f"{new} (near ")[2]


def test_a_vision_weight_too_many_is_an_error_without_a_guess(plain: Path, tmp_path: Path) -> None:
    extra = "vision_tower.encoder.blocks.7.norm0.weight"
    folder = change(plain, tmp_path, lambda tensors: tensors.update({extra: torch.ones(32)}))
    for options in ({}, {"language_only": True}):
        with pytest.raises(PlacementError, match=r"unexpected \(1\)") as caught:
            load(folder, **options)
        assert extra in caught.value.why and "near" not in caught.value.why


def test_an_unknown_weight_may_be_left_out_knowingly(
    plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, reference: Any
) -> None:
    folder = change(plain, tmp_path, renamed(WQKV, "vision_tower.encoder.blocks.1.wqkvs.weight"))
    with caplog.at_level(logging.WARNING, logger="headrace"):
        model, _ = load(folder, language_only=True, strict=False)
    assert "wqkvs" in caplog.text
    assert_part_of(model, reference)


def test_two_names_for_one_parameter_are_an_error(plain: Path, tmp_path: Path) -> None:
    again = "model.language_model.norm.weight"
    folder = change(plain, tmp_path, lambda tensors: tensors.update({again: torch.ones(64)}))
    for options in ({}, {"language_only": True}):
        with pytest.raises(PlacementError, match="doubled") as caught:
            load(folder, **options)
        assert f"{again} and language_model.model.norm.weight" in caught.value.why or again in caught.value.why


def without_vision(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if name.startswith(VISION)]:
        del tensors[name]


def test_a_checkpoint_without_vision_says_so_in_one_line(
    plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, reference: Any
) -> None:
    folder = change(plain, tmp_path, without_vision)
    with pytest.raises(PlacementError) as caught:
        load(folder)
    assert "nothing is there of: mm_projector (6 parameters), vision_tower (37 parameters)" in caught.value.why
    assert "language_only=True" in caught.value.mend
    with caplog.at_level(logging.INFO, logger="headrace"):
        model, _ = load(folder, language_only=True)
    assert "not in the checkpoint, and not needed here: mm_projector, vision_tower" in caplog.text
    assert_part_of(model, reference)


def test_what_is_left_out_is_one_line_with_counts_and_bytes(plain: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="headrace"):
        load(plain, language_only=True)
    (line,) = [record.getMessage() for record in caplog.records if "not asked for" in record.getMessage()]
    assert "mm_projector (6 tensors, " in line and "vision_tower (29 tensors, " in line


def extra_layer(tensors: dict[str, torch.Tensor]) -> None:
    for name in list(tensors):
        if name.startswith("language_model.model.layers.2."):
            tensors[name.replace("layers.2.", "layers.3.")] = tensors[name].clone()
    tensors["language_model.model.layers.3.eh_proj.weight"] = torch.ones(64, 128)


@pytest.mark.parametrize("options", [{}, {"language_only": True}, {"encoder_only": True}], ids=str)
def test_a_layer_for_multi_token_prediction_is_left_out(
    plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, options: Mapping[str, Any], reference: Any
) -> None:
    folder = change(plain, tmp_path, extra_layer)
    with caplog.at_level(logging.INFO, logger="headrace"):
        model, report = load(folder, **options)
    assert "layers for multi-token prediction (27 tensors, " in caplog.text
    extra = sum(len(it.content) for name, it in read_tensors(folder).items() if ".layers.3." in name)
    rest = {"language_only": False, "encoder_only": True}
    skipped = [bytes_of(plain, language=rest[option]) for option in options]
    assert report.bytes_skipped == extra + sum(skipped)
    assert_part_of(model, reference, rename=in_whole if "language_only" in options else lambda name: name)


def test_an_export_that_lost_its_multi_token_prediction_says_so(
    plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(shutil.copytree(plain, tmp_path / "kimi"))
    edit_json(folder / "config.json", lambda config: config["text_config"].update(num_nextn_predict_layers=1))
    with caplog.at_level(logging.INFO, logger="headrace"):
        load(folder)
    assert "not in the checkpoint, and not needed here: layers for multi-token prediction" in caplog.text


def test_the_older_spelling_of_decoder_layers_is_read(plain: Path, tmp_path: Path, reference: Any) -> None:
    """Some quantized uploads name layers ``language_model.layers.N``, without ``model``."""

    def shorten(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("language_model.model.layers.")]:
            tensors[name.replace("language_model.model.", "language_model.")] = tensors.pop(name)

    tensors = {name: it.tensor() for name, it in read_tensors(plain).items()}
    shorten(tensors)
    assert "language_model.layers.2.mlp.experts.1.up_proj.weight" in tensors
    folder = save_kimi(tmp_path / "kimi", tensors)
    for options in ({}, {"language_only": True}):
        model, _ = load(folder, **options)
        assert_computed_alike(logits(model), logits(reference))


def test_a_part_of_a_model_that_another_quantizer_reads_is_refused(plain: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(plain, tmp_path / "kimi"))
    edit_json(
        folder / "config.json",
        lambda config: config.update(quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True}),
    )
    with pytest.raises(HeadraceError, match="bitsandbytes"):
        load(folder, language_only=True)
