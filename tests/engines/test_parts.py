"""Parts of models: language models and encoders of multimodal families, some layers, some experts; each against the whole model that Transformers loads from the same files."""

from __future__ import annotations

import inspect
import itertools
import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto import modeling_auto

import headrace
from headrace.checkpoint import Entry
from headrace.cli import serve as command
from headrace.cli.serve import ServeOptions
from headrace.engines.conversion import build_skeleton
from headrace.engines.parts import PartWishes, plan_part
from headrace.engines.parts_account import describe_left_out, left_out_groups
from headrace.engines.parts_leftout import LeftOut
from headrace.errors import InvalidSetting, ModelError, PlacementError
from headrace.quantization.linear import QuantizedLinear
from headrace.settings import Settings
from headrace.streaming import LoadReport
from tests.engines.models import edit_config, rewrite, save_model
from tests.engines.multimodal import FAMILIES, image_inputs, save_multimodal
from tests.support.closeness import assert_computed_alike
from tests.support.quantized import QuantizedCheckpoints
from tests.support.weight_files import StoredTensor, WeightFile, edit_json, read_tensors

QUIET = Settings.from_environment({}, progress=False)
PROMPT = torch.tensor([[1, 5, 9, 200, 7]])
Saved = Callable[[str], Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Return the folder of a saved random model of a multimodal family, or of one of the plain ones (``gemma3-text`` is one); made once, copied before it is changed."""
    root = tmp_path_factory.mktemp("parts")
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            save = save_multimodal if name in FAMILIES else save_model
            made[name] = save(name.removesuffix("-text"), root / name, dtype=torch.float32)
        return made[name]

    return get


@pytest.fixture(scope="module")
def gptoss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small gpt-oss with four experts in MXFP4: blocks and scales of all of them in one tensor each."""
    folder = tmp_path_factory.mktemp("gpt-oss")
    config = transformers.GptOssConfig(
        hidden_size=64, intermediate_size=96, num_local_experts=4, num_experts_per_tok=2, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=320, pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    transformers.GptOssForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)

    def pack(tensors: dict[str, torch.Tensor]) -> None:
        generator = torch.Generator().manual_seed(1)
        for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
            num_experts, columns, rows = tensors.pop(name).shape
            sizes = (num_experts, rows, columns // 32)
            tensors[f"{name}_blocks"] = torch.randint(0, 256, (*sizes, 16), dtype=torch.uint8, generator=generator)
            tensors[f"{name}_scales"] = torch.randint(118, 125, sizes, dtype=torch.uint8, generator=generator)

    rewrite(folder, pack)
    left_alone = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    edit_config(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": left_alone})
    return folder


def load(source: Any, **options: Any) -> tuple[Any, LoadReport]:
    reports: list[LoadReport] = []
    model = headrace.load_model(source, settings=QUIET, on_report=reports.append, **options)
    return model, reports[0]


def whole(folder: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(folder)


def logits(model: Any, **inputs: Any) -> torch.Tensor:
    given = inputs or {"input_ids": PROMPT}
    found: list[torch.Tensor] = []
    if type(model).__name__ != "Llama4ForConditionalGeneration":
        with torch.no_grad():
            result: torch.Tensor = model(**given).logits
        return result
    # In Transformers 5.24 that class fails after it has computed everything, where it puts its answer together.
    hook = model.language_model.register_forward_hook(lambda module, inputs, output: found.append(output.logits))
    with torch.no_grad(), pytest.raises(AttributeError, match="image_outputs"):
        model(**given)
    hook.remove()
    return found[0]


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [tensor for item in items for tensor in tensors_in(item)]


def assert_held_by(part: Any, reference: Any) -> None:
    """Every parameter of ``part`` is one of ``reference``, under the same name or within its language model."""
    state = reference.state_dict()
    for name, value in part.state_dict().items():
        spellings = (name, name.replace("model.", "model.language_model.", 1), f"language_model.{name}")
        assert any(other in state and torch.equal(state[other], value) for other in spellings), name


# -- multimodal families


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_the_language_model_is_the_whole_models(saved: Saved, name: str) -> None:
    reference, family = whole(saved(name)), FAMILIES[name]
    model, report = load(saved(name), language_only=True)
    assert type(model).__name__ == (family.alone or type(reference).__name__)
    assert_held_by(model, reference)
    language = [it for it in reference.state_dict() if "language_model." in it or it.startswith("lm_head.")]
    assert len(model.state_dict()) == len(language)
    assert_computed_alike(logits(model), logits(reference))
    assert report.bytes_wanted + report.bytes_skipped == report.bytes_checkpoint
    tied = reference.state_dict()["lm_head.weight"].nbytes if reference.all_tied_weights_keys else 0
    assert report.bytes_wanted == sum(reference.state_dict()[it].nbytes for it in language) - tied
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    assert model.generate(PROMPT, **options).shape == (1, 9)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_the_encoder_is_the_whole_models(saved: Saved, name: str) -> None:
    reference, inputs = whole(saved(name)), image_inputs(FAMILIES[name])
    model, report = load(saved(name), encoder_only=True)
    assert type(model) is type(reference)
    assert_held_by(model, reference)
    assert not [it for it in model.state_dict() if "language_model" in it or "lm_head" in it]
    given = {key: inputs[key] for key in ("pixel_values", "image_grid_thw", "image_sizes") if key in inputs}
    with torch.no_grad():
        found, expected = (tensors_in(it.get_image_features(**given)) for it in (model, reference))
    assert expected and all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    assert report.bytes_wanted == sum(value.nbytes for value in model.state_dict().values())
    assert report.bytes_skipped == report.bytes_checkpoint - report.bytes_wanted > 0
    with pytest.raises(ModelError, match=r"loaded without language_model.*get_image_features"):
        model(input_ids=PROMPT)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_the_whole_model_sees_images_as_transformers_does(saved: Saved, name: str) -> None:
    inputs = image_inputs(FAMILIES[name])
    model, _ = load(saved(name))
    assert_computed_alike(logits(model, **inputs), logits(whole(saved(name)), **inputs))


def test_a_model_without_its_encoder_says_so_when_it_is_given_an_image(saved: Saved) -> None:
    model, _ = load(saved("qwen3_vl"), language_only=True)
    assert isinstance(model.model.visual, LeftOut)
    with pytest.raises((ModelError, AttributeError), match="loaded without visual"):
        logits(model, **image_inputs(FAMILIES["qwen3_vl"]))
    with pytest.raises(ModelError, match=r"without visual.*Ask with text alone"):
        model.model.visual(torch.ones(1))


def test_names_that_look_like_the_decoders_do_not_lead_there(saved: Saved) -> None:
    """Llama 4's vision layers end in the names of decoder layers."""
    stored = read_tensors(saved("llama4"))
    alike = "self_attn.q_proj.weight"
    assert f"vision_model.model.layers.0.{alike}" in stored and f"language_model.model.layers.0.{alike}" in stored
    model, _ = load(saved("llama4"), language_only=True)
    expected = stored[f"language_model.model.layers.0.{alike}"].tensor()
    assert torch.equal(model.model.layers[0].self_attn.q_proj.weight, expected)


def test_a_language_model_can_be_saved_and_loaded_again(saved: Saved, tmp_path: Path) -> None:
    model, _ = load(saved("gemma3"), language_only=True)
    model.save_pretrained(tmp_path / "text")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "text")
    assert type(again) is type(model)
    assert_computed_alike(logits(again), logits(model))


def test_language_only_of_a_language_model_is_all_of_it(saved: Saved, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="headrace"):
        model, report = load(saved("llama"), language_only=True)
    assert "a language model and nothing else" in caplog.text
    assert report.bytes_skipped == 0
    assert_computed_alike(logits(model), logits(AutoModelForCausalLM.from_pretrained(saved("llama"))))


def test_encoder_only_of_a_language_model_is_refused(saved: Saved) -> None:
    with pytest.raises(InvalidSetting, match="has no encoder"):
        load(saved("llama"), encoder_only=True)


@pytest.mark.parametrize("load_format", ["safetensors", "runai_streamer"])
def test_other_ways_of_reading_leave_out_the_same(saved: Saved, load_format: str) -> None:
    if load_format == "runai_streamer":
        pytest.importorskip("runai_model_streamer")
    model, report = load(saved("gemma3"), language_only=True, load_format=load_format)
    expected, ours = load(saved("gemma3"), language_only=True)
    assert_computed_alike(logits(model), logits(expected))
    assert report.bytes_wanted == ours.bytes_wanted


def test_random_weights_have_parts_too(saved: Saved) -> None:
    model, _ = load(saved("gemma3"), language_only=True, load_format="dummy")
    assert type(model).__name__ == "Gemma3ForCausalLM"
    encoder, _ = load(saved("gemma3"), encoder_only=True, load_format="dummy")
    assert {name.split(".")[1] for name in encoder.state_dict()} == {"vision_tower", "multi_modal_projector"}


def test_serve_language_only(saved: Saved, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved("gemma3"), tmp_path / "gemma"))
    words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(320)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    settings = Settings.from_environment(progress=False, cache_dir=tmp_path / "cache")
    server = command._make_server(ServeOptions(uri=str(folder), port=0, settings=settings, language_only=True))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while server.address is None:
            assert thread.is_alive()
            time.sleep(0.02)
        with httpx.Client(base_url=f"http://127.0.0.1:{server.address[1]}", trust_env=False, timeout=120) as client:
            while client.get("/ready").status_code != 200:
                assert thread.is_alive()
                time.sleep(0.05)
            body = {"prompt": "w1 w5 w9 w200 w7", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
            said = client.post("/v1/completions", json=body).json()["choices"][0]["text"].split()
            metrics = client.get("/metrics").text
    finally:
        server.request_stop()
        thread.join(60)
    model, report = load(folder, language_only=True)
    tokens = model.generate(PROMPT, max_new_tokens=4, min_new_tokens=4, do_sample=False, eos_token_id=None)
    assert said == [f"w{token}" for token in tokens[0, 5:].tolist()]
    assert "headrace" in metrics and report.bytes_skipped > 0


# -- layers


@pytest.mark.parametrize("name", ["llama", "llama-tied", "gemma3-text", "qwen3_moe"])
def test_stages_one_after_the_other_are_the_whole_model(saved: Saved, name: str) -> None:
    reference = AutoModelForCausalLM.from_pretrained(saved(name))
    total = reference.config.num_hidden_layers
    cuts = [0, total // 2, total]
    (first, one), (last, two) = (
        load(saved(name), layers=range(start, stop)) for start, stop in itertools.pairwise(cuts)
    )
    assert first.config.num_hidden_layers + last.config.num_hidden_layers == total
    assert len(first.model.layers) == first.config.num_hidden_layers
    with torch.no_grad():
        states = first.model(input_ids=PROMPT).last_hidden_state
    assert_computed_alike(logits(last, inputs_embeds=states), logits(reference))
    shared = reference.model.embed_tokens.weight.nbytes if reference.all_tied_weights_keys else 0
    assert one.bytes_wanted + two.bytes_wanted == one.bytes_checkpoint + shared


def test_stages_generate_with_caches_of_their_own(saved: Saved) -> None:
    """Token by token, past the sliding window, with kinds of layers that differ."""
    reference = AutoModelForCausalLM.from_pretrained(saved("gemma3-text"))
    stages = [load(saved("gemma3-text"), layers=range(start, start + 4))[0] for start in (0, 4, 8)]
    kinds = [kind for stage in stages for kind in stage.config.layer_types]
    assert kinds == reference.config.layer_types and len(set(kinds)) == 2
    said: list[int] = []
    caches: list[Any] = [None] * 3
    with torch.no_grad():
        given: dict[str, Any] = {"input_ids": PROMPT}
        for _ in range(40):
            for number, stage in enumerate(stages):
                runs = stage if number == 2 else stage.model
                found = runs(**given, cache=caches[number], use_cache=True)
                caches[number] = found.cache
                given = {"inputs_embeds": found.last_hidden_state} if number < 2 else {}
            said.append(int(found.logits[0, -1].argmax()))
            given = {"input_ids": torch.tensor([[said[-1]]])}
    options = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False, "eos_token_id": None}
    assert said == reference.generate(PROMPT, **options)[0, 5:].tolist()


def test_layers_in_the_middle_have_nothing_but_layers(saved: Saved, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="headrace"):
        model, report = load(saved("llama"), layers=range(3, 5))
    assert {name.split(".")[1] for name in model.state_dict()} == {"layers"}
    stored = read_tensors(saved("llama"))
    state = {name: StoredTensor.of(value) for name, value in model.state_dict().items()}
    for old, new in ((3, 0), (4, 1)):
        for name in [it for it in stored if it.startswith(f"model.layers.{old}.")]:
            assert state[name.replace(f"layers.{old}.", f"layers.{new}.")] == stored[name]
    assert report.bytes_wanted == sum(len(it.content) for it in state.values())
    assert "other layers (90 tensors, " in caplog.text
    with pytest.raises(ModelError, match=r"without embeddings: it holds layers 3 to 4 of 12"):
        model.model(input_ids=PROMPT)
    with pytest.raises(ModelError, match=r"without head.*last_hidden_state"):
        model(inputs_embeds=torch.ones(1, 2, 64))


def test_layers_of_a_multimodal_model_want_language_only(saved: Saved) -> None:
    with pytest.raises(InvalidSetting, match="language_only"):
        load(saved("mistral3"), layers=range(1))
    model, _ = load(saved("mistral3"), language_only=True, layers=range(3))
    assert_computed_alike(logits(model), logits(whole(saved("mistral3"))))
    # Where the language model is built with its family's own class, that class does not stand in a row.
    with pytest.raises(InvalidSetting, match="cannot be loaded by themselves"):
        load(saved("qwen3_vl"), language_only=True, layers=range(1))


def test_a_class_that_scales_what_it_is_given_has_no_stages(tmp_path: Path) -> None:
    fields = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "vocab_size": 64}
    for multiplier, works in ((1.0, True), (12.0, False)):
        config = transformers.GraniteConfig(**fields, num_hidden_layers=2, embedding_multiplier=multiplier)
        folder = tmp_path / str(multiplier)
        transformers.GraniteForCausalLM(config).save_pretrained(folder)
        if works:
            load(folder, layers=range(1, 2))
        else:
            with pytest.raises(InvalidSetting, match="GraniteModel changes hidden states outside its layers"):
                load(folder, layers=range(1, 2))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64),
            "None of its modules holds all its layers in one list",
        ),
        (
            transformers.Gemma3nTextConfig(
                hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1,
                head_dim=16, vocab_size=64, vocab_size_per_layer_input=64, hidden_size_per_layer_input=8, laurel_rank=4,
                layer_types=["full_attention"] * 4, num_kv_shared_layers=2, activation_sparsity_pattern=[0.0] * 4,
                pad_token_id=0,
            ),
            "Beside layers, embeddings and head it has|keys and values of other layers",
        ),
        (
            transformers.NemotronHConfig(
                hidden_size=32, intermediate_size=48, num_attention_heads=2, num_key_value_heads=1, head_dim=16, vocab_size=64,
                layers_block_type=["attention", "mlp"], pad_token_id=0,
            ),
            "counts layers by a list",
        ),
    ],
    ids=["GPT-2", "Gemma 3n", "Nemotron-H"],
)  # fmt: skip
def test_classes_that_do_not_stand_in_a_row_are_refused(config: Any, said: str) -> None:
    model_class = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with pytest.raises(InvalidSetting, match=said):
        plan_part(model_class, config, PartWishes.of(layers=range(1)), source="a model")


@pytest.mark.parametrize(
    "config",
    [transformers.GitConfig(), transformers.UdopConfig(), transformers.T5Gemma2Config()],
    ids=["GIT", "UDOP", "T5Gemma 2"],
)
@pytest.mark.parametrize("options", [{"language_only": True}, {"encoder_only": True}], ids=str)
def test_models_that_do_not_hold_their_language_model_apart_are_refused(config: Any, options: dict[str, Any]) -> None:
    model_class = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    with pytest.raises(InvalidSetting, match="cannot be taken apart"):
        plan_part(model_class, config, PartWishes.of(**options), source="a model")


# -- experts


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "qwen3_vl_moe"])
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_experts_of_all_ranks_sum_up_to_the_whole_models(saved: Saved, name: str, implementation: str) -> None:
    """Experts that are stored one by one, and such as a layer has in one tensor."""
    options = {"experts_implementation": implementation}
    reference, all_of_it = load(saved(name), **options)
    paths = [
        path
        for path, module in reference.named_modules()
        if hasattr(module, "gate_up_proj") and path.endswith("experts")
    ]
    total = reference.get_submodule(paths[0]).num_experts
    ranges = [range(1), range(1, total - 1), range(total - 1, total)]
    parts = [load(saved(name), experts=chosen, **options) for chosen in ranges]
    generator = torch.Generator().manual_seed(3)
    states = torch.randn(9, 64, generator=generator)
    index = torch.stack([torch.randperm(total, generator=generator)[:2] for _ in range(9)])
    weights = torch.rand(9, 2, generator=generator)
    for path in paths:
        with torch.no_grad():
            expected = reference.get_submodule(path)(states, index, weights)
            found = sum(part.get_submodule(path)(states, index, weights) for part, _ in parts)
        assert torch.allclose(found, expected, atol=1e-5)
    held = sum(value.nbytes for key, value in reference.state_dict().items() if ".experts." in key)
    for chosen, (part, report) in zip(ranges, parts, strict=True):
        assert report.bytes_skipped == held * (total - len(chosen)) // total
        assert part.get_submodule(paths[0]).num_experts == len(chosen)
    assert all_of_it.bytes_skipped == 0


def test_experts_need_not_follow_each_other_where_they_are_stored_one_by_one(saved: Saved) -> None:
    reference, _ = load(saved("qwen3_moe"))
    model, _ = load(saved("qwen3_moe"), experts=[11, 0, 5])
    for layer, part in zip(reference.model.layers, model.model.layers, strict=True):
        assert torch.equal(part.mlp.experts.gate_up_proj, layer.mlp.experts.gate_up_proj[[0, 5, 11]])
        assert torch.equal(part.mlp.experts.down_proj, layer.mlp.experts.down_proj[[0, 5, 11]])
        assert torch.equal(part.mlp.gate.weight, layer.mlp.gate.weight)


def test_experts_in_one_tensor_can_be_cut_as_a_range_only(saved: Saved) -> None:
    for options in ({"experts": [0, 2]}, {"experts": [1], "load_format": "safetensors"}):
        with pytest.raises(InvalidSetting, match=r"gate_up_proj.*in one tensor|down_proj.*in one tensor"):
            load(saved("qwen3_vl_moe"), **options)


@pytest.mark.parametrize("dequantize", [False, True])
def test_a_stack_of_packed_experts_is_read_in_part(gptoss: Path, dequantize: bool) -> None:
    """gpt-oss's blocks hold all experts of a layer, and its router speaks otherwise."""
    options = {"dtype": torch.float32, "dequantize": dequantize}
    reference, all_of_it = load(gptoss, **options)
    parts = [load(gptoss, experts=chosen, **options) for chosen in (range(1), range(1, 4))]
    states, weights = torch.randn(5, 64), torch.rand(5, 2)
    index = torch.tensor([[0, 1], [2, 3], [3, 0], [1, 2], [0, 2]])
    path = "model.layers.1.mlp.experts"
    with torch.no_grad():
        expected = reference.get_submodule(path)(states, index, weights)
        found = sum(part.get_submodule(path)(states, index, weights) for part, _ in parts)
    assert torch.allclose(found, expected, atol=1e-4)
    stored = read_tensors(gptoss)
    held = sum(len(it.content) for name, it in stored.items() if ".experts." in name)
    assert [report.bytes_skipped for _, report in parts] == [held * 3 // 4, held // 4]
    assert all_of_it.bytes_skipped == 0


def test_experts_that_are_not_there_are_refused(saved: Saved) -> None:
    with pytest.raises(InvalidSetting, match="Expert 12 was chosen"):
        load(saved("qwen3_moe"), experts=range(8, 13))
    with pytest.raises(InvalidSetting, match="has none"):
        load(saved("llama"), experts=[0])
    with pytest.raises(InvalidSetting, match="Llama4TextExperts is not told which token"):
        load(saved("llama4"), experts=[0])


def test_experts_and_layers_together(saved: Saved) -> None:
    reference, _ = load(saved("deepseek_v3"))
    model, report = load(saved("deepseek_v3"), layers=range(1, 3), experts=range(2, 4))
    assert torch.equal(
        model.model.layers[1].mlp.experts.down_proj, reference.model.layers[2].mlp.experts.down_proj[2:4]
    )
    assert report.bytes_wanted == sum(value.nbytes for value in model.state_dict().values())


# -- what is used of Transformers beyond its documentation


def test_the_private_names_are_there() -> None:
    """A new release that changes one fails here, by name."""
    names = list(inspect.signature(transformers.PreTrainedModel.get_init_context).parameters)
    assert names == ["dtype", "is_quantized", "_is_ds_init_called", "allow_all_kernels"]
    config = transformers.Qwen3MoeConfig(
        hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_experts=2, num_experts_per_tok=1, vocab_size=64, tie_word_embeddings=True,
    )  # fmt: skip
    model = build_skeleton(transformers.Qwen3MoeForCausalLM, config)
    assert model.all_tied_weights_keys == {"lm_head.weight": "model.embed_tokens.weight"}
    assert model.get_decoder() is model.model and model.model.layers[0].self_attn.layer_idx == 0
    experts = model.model.layers[0].mlp.experts
    assert experts.num_experts == 2 and experts._is_expert_parallel is False
    assert list(inspect.signature(type(experts).forward).parameters)[1:] == [
        "hidden_states",
        "top_k_index",
        "top_k_weights",
    ]


# -- what makes no sense


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"encoder_only": True, "language_only": True}, "cannot be joined"),
        ({"encoder_only": True, "layers": range(2)}, "cannot be joined"),
        ({"encoder_only": True, "experts": [0]}, "cannot be joined"),
        ({"layers": [0, 1]}, "must be a range"),
        ({"layers": range(0, 4, 2)}, "follow each other"),
        ({"layers": range(0)}, "follow each other"),
        ({"layers": range(-1, 2)}, "follow each other"),
        ({"experts": []}, "at least one"),
        ({"experts": [-1, 0]}, "at least one"),
        ({"layers": range(8, 13)}, "has 12 decoder layers"),
    ],
)
def test_wishes_that_make_no_sense(saved: Saved, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidSetting, match=said) as caught:
        load(saved("llama"), **options)
    assert caught.value.mend or caught.value.why


def test_no_wish_is_the_whole_model() -> None:
    assert PartWishes.of().is_whole
    assert not PartWishes.of(experts=[3, 1, 3]).is_whole
    assert PartWishes.of(experts=[3, 1, 3]).experts == (1, 3)


# -- the account


def test_groups_are_counted_with_what_is_left_of_each_tensor() -> None:
    entries = {
        name: Entry(name, "U8", (size,), "a", 0, size) for name, size in (("x", 8), ("y", 100), ("z", 30), ("w", 5))
    }
    order = [entries["x"], Entry("z", "U8", (10,), "a", 10, 20)]
    groups = left_out_groups(entries, order, {"y": "vision_tower", "z": "other experts", "x": "never"})
    found = [(group.name, group.num_tensors, group.num_bytes) for group in groups]
    assert found == [
        ("vision_tower", 1, 100),
        ("other experts", 1, 20),
        ("what the model's class has no use for", 1, 5),
    ]
    line = describe_left_out(groups, ["mtp"], total_bytes=143)
    assert line is not None
    assert line.startswith(
        "125 B of 143 B are not asked for: vision_tower (1 tensors, 100 B), other experts (1 tensors, 20 B)"
    )
    assert line.endswith("; not in the checkpoint, and not needed here: mtp")
    assert describe_left_out([], [], total_bytes=1) is None


# -- tied heads


def with_head(folder: Path, kind: str) -> None:
    """Store a head beside tied embeddings: none, the same, another, or another one in FP8."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        embeddings = tensors["model.embed_tokens.weight"]
        if kind == "packed":
            values = embeddings.flip(0)
            scale = values.abs().max() / 448
            tensors["lm_head.weight"] = (values / scale).to(torch.float8_e4m3fn)
            tensors["lm_head.weight_scale"] = scale.reshape(1)
        elif kind != "none":
            tensors["lm_head.weight"] = embeddings.clone() if kind == "same" else embeddings * 2

    rewrite(folder, change)
    if kind == "packed":
        weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
        edit_config(
            folder,
            quantization_config={
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "ignore": ["re:.*layers.*", "lm_head*"],
                "config_groups": {"group_0": group},
            },
        )


@pytest.mark.parametrize("kind", ["none", "same", "other", "packed"])
def test_a_tied_head_is_tied_where_it_is_the_embeddings(saved: Saved, tmp_path: Path, kind: str) -> None:
    folder = Path(shutil.copytree(saved("llama-tied"), tmp_path / "model"))
    with_head(folder, kind)
    for dequantize in (False, True) if kind == "packed" else (False,):
        model, _ = load(folder, dtype=torch.float32, dequantize=dequantize)
        embeddings, head = model.model.embed_tokens.weight, model.lm_head
        if kind in ("none", "same"):
            assert head.weight is embeddings
        elif kind == "other":
            assert head.weight is not embeddings and torch.equal(head.weight, embeddings * 2)
        else:
            values = head.dequantized() if isinstance(head, QuantizedLinear) else head.weight
            assert isinstance(head, QuantizedLinear) is not dequantize
            assert torch.allclose(values, embeddings.flip(0), rtol=0.07)
    if kind == "packed":
        packed, _ = load(folder, dtype=torch.float32)
        assert packed.config.tie_word_embeddings is False
        packed.tie_weights()
        assert isinstance(packed.lm_head, QuantizedLinear) and packed.lm_head.weight.dtype is torch.float8_e4m3fn


def test_a_head_that_nothing_fills_is_an_error(saved: Saved, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved("llama-tied"), tmp_path / "model"))
    edit_config(folder, tie_word_embeddings=False)
    with pytest.raises(PlacementError, match=r"missing \(1\): lm_head.weight"):
        load(folder)


def test_the_outer_models_flag_decides_whether_a_language_models_head_is_tied(saved: Saved, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved("qwen3_vl"), tmp_path / "model"))
    model, _ = load(folder, language_only=True)
    assert model.lm_head.weight is model.model.language_model.embed_tokens.weight
    gemma = Path(shutil.copytree(saved("gemma3"), tmp_path / "gemma"))
    edit_json(gemma / "config.json", lambda config: config["text_config"].update(tie_word_embeddings=False))
    alone, _ = load(gemma, language_only=True)
    assert alone.config.tie_word_embeddings is True and alone.lm_head.weight is alone.model.embed_tokens.weight
    edit_config(gemma, tie_word_embeddings=False)
    with pytest.raises(PlacementError, match=r"missing \(1\): lm_head.weight"):
        load(gemma, language_only=True)


# -- a quantized language model inside a multimodal one


def wrapped(checkpoint: Any, saved: Saved, target: Path, *, outer: str, listed: str) -> Path:
    """Return a folder that holds a quantized Llama as LLaVA's language model: its tensors under ``outer``, its lists of modules under ``listed``, beside a plain vision tower."""
    folder = checkpoint.copied(target)
    vision = {name: it for name, it in read_tensors(saved("llava")).items() if not name.startswith("language_model.")}
    width = {"multi_modal_projector.linear_2.weight": (256, 256), "multi_modal_projector.linear_1.weight": (256, 32)}
    for name in [name for name in vision if name.startswith("multi_modal_projector.")]:
        vision[name] = StoredTensor.of(torch.ones(width.get(name, (256,))))
    language = {f"{outer}{name}": it for name, it in read_tensors(folder).items()}
    for path in folder.glob("*.safetensors"):
        path.unlink()
    (folder / "model.safetensors").write_bytes(WeightFile({**vision, **language}).encode())
    config = checkpoint.config()
    section = config.pop("quantization_config")
    section["ignore"] = [f"{listed}{name}" for name in section["ignore"]]

    def put_inside(outside: dict[str, Any]) -> None:
        outside.clear()
        outside |= {
            "architectures": ["LlavaForConditionalGeneration"],
            "model_type": "llava",
            "text_config": config,
            "vision_config": {**FAMILIES["llava"].vision},
            "image_token_index": 1000,
            "vision_feature_layer": -1,
            "dtype": "bfloat16",
            "tie_word_embeddings": False,
            "quantization_config": section,
        }

    edit_json(folder / "config.json", put_inside)
    edit_json(
        folder / "hf_quant_config.json",
        lambda content: content["quantization"].update(
            exclude_modules=[f"{listed}{name}" for name in content["quantization"]["exclude_modules"]]
        ),
    )
    return folder


@pytest.mark.parametrize("listed", ["language_model.", "", "model.language_model."])
def test_a_wrapped_quantized_model_is_the_one_inside(
    quantized: QuantizedCheckpoints, saved: Saved, tmp_path: Path, listed: str
) -> None:
    """FP8 with scales of inputs, keys and values. However the lists spell what is left out, the tensors decide; the section that the model keeps is in its own names."""
    checkpoint = quantized["modelopt-fp8-kvfp8-llama"]
    inside, _ = load(checkpoint.folder, dtype=torch.float32)
    folder = wrapped(checkpoint, saved, tmp_path, outer="language_model.", listed=listed)
    model, report = load(folder, dtype=torch.float32, language_only=True)
    assert type(model) is type(inside)
    ours, theirs = model.state_dict(), inside.state_dict()
    assert list(ours) == list(theirs)
    assert all(StoredTensor.of(ours[name]) == StoredTensor.of(value) for name, value in theirs.items())
    assert any(name.endswith("k_scale") for name in ours)
    assert_computed_alike(logits(model), logits(inside))
    assert report.bytes_wanted == sum(len(it.content) for it in read_tensors(checkpoint.folder).values())
    if listed == "language_model.":
        assert (
            model.config.quantization_config.to_dict()["ignore"] == checkpoint.config()["quantization_config"]["ignore"]
        )
    encoder, _ = load(folder, dtype=torch.float32, encoder_only=True)
    assert not [module for module in encoder.modules() if isinstance(module, QuantizedLinear)]


def test_a_wrapped_quantized_model_can_be_expanded_and_cut(
    quantized: QuantizedCheckpoints, saved: Saved, tmp_path: Path
) -> None:
    checkpoint = quantized["modelopt-fp8-kvfp8-llama"]
    folder = wrapped(checkpoint, saved, tmp_path, outer="language_model.", listed="language_model.")
    inside, _ = load(checkpoint.folder, dtype=torch.float32, dequantize=True)
    model, _ = load(folder, dtype=torch.float32, language_only=True, dequantize=True)
    assert_computed_alike(logits(model), logits(inside))
    packed, _ = load(checkpoint.folder, dtype=torch.float32)
    first, _ = load(folder, dtype=torch.float32, language_only=True, layers=range(1))
    last, _ = load(folder, dtype=torch.float32, language_only=True, layers=range(1, 2))
    with torch.no_grad():
        states = first.model(input_ids=PROMPT).last_hidden_state
    assert_computed_alike(logits(last, inputs_embeds=states), logits(packed))
    listed = checkpoint.config()["quantization_config"]["ignore"]
    assert all(stage.config.quantization_config.to_dict()["ignore"] == listed for stage in (first, last))
