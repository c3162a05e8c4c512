"""``load_model`` gives what ``from_pretrained`` gives, from a uri, without copies and with an account of every name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

import headrace
from headrace.engines import transformers as engine
from headrace.errors import HeadraceError, InvalidSetting, ModelError, PlacementError, UnknownArchitecture
from headrace.settings import Settings
from headrace.streaming import TensorStream
from tests.engines.models import CONFIGS, edit_config, rewrite, save_model
from tests.support.closeness import assert_computed_alike

QUIET = Settings.from_environment({}, progress=False)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a saved random model, made once per session; copy it before changing it."""
    root = tmp_path_factory.mktemp("models")
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = save_model(name, root / name)
        return made[name]

    return get


@pytest.fixture
def copied(saved: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    def get(name: str) -> Path:
        return Path(shutil.copytree(saved(name), tmp_path / name))

    return get


@pytest.fixture
def handed_out(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Record the address of every tensor that a stream hands out, by stored name."""
    addresses: dict[str, int] = {}
    original = TensorStream.take

    def take(self: TensorStream, name: str) -> torch.Tensor:
        tensor = original(self, name)
        addresses[name] = tensor.data_ptr()
        return tensor

    monkeypatch.setattr(TensorStream, "take", take)
    return addresses


def assert_same(model: Any, reference: Any) -> None:
    ours, theirs = model.state_dict(), reference.state_dict()
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype and torch.equal(ours[name], value), name


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_the_result_is_from_pretraineds(name: str, saved: Callable[[str], Path]) -> None:
    folder = saved(name)
    reference = AutoModelForCausalLM.from_pretrained(folder)
    model, info = headrace.load_model(folder, settings=QUIET, output_loading_info=True)
    assert type(model) is type(reference)
    assert_same(model, reference)
    assert not any(info.values())
    assert model.generation_config.to_dict() == reference.generation_config.to_dict()
    assert model.generation_config.max_new_tokens == 7
    assert model.config.to_dict() == reference.config.to_dict() and model.training is False
    assert {key: value.requires_grad for key, value in model.named_parameters()} == {
        key: value.requires_grad for key, value in reference.named_parameters()
    }
    tokens = torch.tensor([[1, 5, 9, 200]])
    with torch.inference_mode():
        assert_computed_alike(model(tokens).logits, reference(tokens).logits)


def test_the_comparison_notices_one_changed_value(saved: Callable[[str], Path]) -> None:
    model = headrace.load_model(saved("llama"), settings=QUIET)
    with torch.no_grad():
        model.model.layers[3].mlp.up_proj.weight[1, 1] += 0.5
    with pytest.raises(AssertionError, match=r"layers\.3\.mlp\.up_proj"):
        assert_same(model, AutoModelForCausalLM.from_pretrained(saved("llama")))


def test_parameters_are_the_streamed_tensors(saved: Callable[[str], Path], handed_out: dict[str, int]) -> None:
    model = headrace.load_model(saved("llama"), settings=QUIET)
    parameters = dict(model.named_parameters())
    assert len(parameters) == 12 * 9 + 3
    assert {name: value.data_ptr() for name, value in parameters.items()} == handed_out
    assert all(value.data_ptr() % 64 == 0 for value in parameters.values())


def test_a_cast_is_made_where_it_is_asked_for(saved: Callable[[str], Path]) -> None:
    model = headrace.load_model(saved("llama"), dtype=torch.float32, settings=QUIET)
    assert_same(model, AutoModelForCausalLM.from_pretrained(saved("llama"), dtype=torch.float32))
    assert {value.dtype for value in model.parameters()} == {torch.float32}


def test_the_streams_order_is_the_order_in_which_transformers_asks(
    saved: Callable[[str], Path], handed_out: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a small budget would read everything out of turn."""
    planned: list[list[str]] = []
    original = TensorStream.__init__

    def keep(self: TensorStream, checkpoint: Any, entries: Any = None, **options: Any) -> None:
        planned.append([entry.name for entry in entries])
        original(self, checkpoint, entries, **options)

    monkeypatch.setattr(TensorStream, "__init__", keep)
    for name in ("llama", "deepseek_v3"):
        handed_out.clear()
        headrace.load_model(saved(name), settings=Settings.from_environment({}, progress=False, memory_limit_bytes=0))
        assert list(handed_out) == planned.pop(), name


def test_a_report_accounts_for_every_byte(saved: Callable[[str], Path]) -> None:
    reports: list[headrace.LoadReport] = []
    headrace.load_model(saved("llama"), settings=QUIET, on_report=reports.append)
    (report,) = reports
    with headrace.open(saved("llama")) as checkpoint:
        assert report.bytes_wanted == report.bytes_checkpoint == report.bytes_read == checkpoint.total_bytes
        assert report.num_tensors == len(checkpoint.entries) and report.bytes_skipped == 0
    assert {"opening", "side files", "planning", "weights", "finishing"} <= set(report.phases)


def test_it_is_named_after_its_uri_and_can_be_saved_again(saved: Callable[[str], Path], tmp_path: Path) -> None:
    model = headrace.load_model(saved("llama-tied"), settings=QUIET)
    assert model.name_or_path == str(headrace.parse_uri(saved("llama-tied")))
    model.save_pretrained(tmp_path / "again")
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "again"), model)


def test_tied_weights_are_one_tensor(saved: Callable[[str], Path]) -> None:
    model = headrace.load_model(saved("llama-tied"), settings=QUIET)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_tied_flag_beside_a_head_of_its_own_keeps_the_head(copied: Callable[[str], Path]) -> None:
    folder = copied("llama-tied")
    head = torch.randn(320, 64).to(torch.bfloat16)
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": head}))
    model = headrace.load_model(folder, settings=QUIET)
    assert torch.equal(model.lm_head.weight, head) and not torch.equal(model.model.embed_tokens.weight, head)


def test_a_head_that_is_missing_and_not_tied_is_an_error_before_the_first_weight_byte(
    copied: Callable[[str], Path], handed_out: dict[str, int]
) -> None:
    folder = copied("llama")
    rewrite(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(PlacementError, match=r"No weight byte was read[\s\S]*missing \(1\): lm_head\.weight"):
        headrace.load_model(folder, settings=QUIET)
    assert handed_out == {}


def test_missing_and_unexpected_names_are_listed_with_what_they_resemble(copied: Callable[[str], Path]) -> None:
    folder = copied("llama")

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.4.mlp.up_projection.weight"] = tensors.pop("model.layers.4.mlp.up_proj.weight")

    rewrite(folder, rename)
    with pytest.raises(PlacementError) as caught:
        headrace.load_model(folder, settings=QUIET)
    assert "missing (1): model.layers.4.mlp.up_proj.weight (near model.layers.4.mlp.up_projection.weight)" in str(
        caught.value
    )
    assert "unexpected (1): model.layers.4.mlp.up_projection.weight" in str(caught.value)


def test_a_wrong_shape_is_an_error_that_gives_both(copied: Callable[[str], Path]) -> None:
    folder = copied("llama")
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(63, dtype=torch.bfloat16)}))
    with pytest.raises(
        PlacementError, match=r"mismatched \(1\): model\.norm\.weight is stored as \[63\], the model wants \[64\]"
    ):
        headrace.load_model(folder, settings=QUIET)


def test_two_stored_names_for_one_parameter_are_an_error(copied: Callable[[str], Path]) -> None:
    folder = copied("llama")
    rewrite(folder, lambda tensors: tensors.update({"norm.weight": torch.zeros(64, dtype=torch.bfloat16)}))
    with pytest.raises(
        PlacementError,
        match=r"doubled \(1\): model\.norm\.weight from (model\.)?norm\.weight and (model\.)?norm\.weight",
    ):
        headrace.load_model(folder, settings=QUIET)


def test_an_expert_that_is_missing_from_a_stack_is_an_error(copied: Callable[[str], Path]) -> None:
    folder = copied("qwen3_moe")
    rewrite(folder, lambda tensors: tensors.pop("model.layers.1.mlp.experts.7.up_proj.weight"))
    with pytest.raises(PlacementError, match=r"model\.layers\.1\.mlp\.experts\.gate_up_proj"):
        headrace.load_model(folder, settings=QUIET)


def test_not_strict_initialises_what_is_missing_and_leaves_out_what_is_unexpected(
    copied: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = copied("llama")

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors.pop("lm_head.weight")
        tensors["extra.weight"] = torch.zeros(5)

    rewrite(folder, change)
    model = headrace.load_model(folder, strict=False, settings=QUIET)
    assert not model.lm_head.weight.is_meta and "extra.weight" not in model.state_dict()
    assert (
        "missing, initialised by the class: lm_head.weight" in caplog.text
        and "unexpected, left out: extra.weight" in caplog.text
    )


def test_what_a_class_does_not_need_is_never_read(copied: Callable[[str], Path], handed_out: dict[str, int]) -> None:
    folder = copied("llama")
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    reports: list[headrace.LoadReport] = []
    headrace.load_model(folder, settings=QUIET, on_report=reports.append)
    assert "model.layers.0.self_attn.rotary_emb.inv_freq" not in handed_out and reports[0].bytes_skipped == 32


def test_a_base_model_loads_from_a_head_models_checkpoint_when_asked(saved: Callable[[str], Path]) -> None:
    model = headrace.load_model(saved("llama"), auto_class=transformers.AutoModel, strict=False, settings=QUIET)
    assert type(model).__name__ == "LlamaModel"
    assert_same(model, transformers.AutoModel.from_pretrained(saved("llama")))


def test_options_reach_the_configuration_and_the_construction(saved: Callable[[str], Path]) -> None:
    model = headrace.load_model(
        saved("llama"),
        attn_implementation="eager",
        rms_norm_eps=0.25,
        output_attentions=True,
        device_map="cpu",
        settings=QUIET,
    )
    assert model.config._attn_implementation == "eager"
    assert model.config.rms_norm_eps == 0.25 and model.model.norm.variance_epsilon == 0.25
    assert model(torch.tensor([[1, 2]])).attentions is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gguf_file": "x.gguf"}, "gguf_file cannot be used"),
        ({"state_dict": {"a": 1}}, "state_dict cannot be used"),
        ({"revision": "v2"}, "revision 'v2' cannot be used with this uri"),
    ],
)
def test_options_that_mean_something_else_here_are_refused(
    options: dict[str, Any], message: str, saved: Callable[[str], Path]
) -> None:
    with pytest.raises(InvalidSetting, match=message):
        headrace.load_model(saved("llama"), settings=QUIET, **options)


def test_an_unknown_model_type_is_named(copied: Callable[[str], Path]) -> None:
    folder = copied("llama")
    edit_config(folder, model_type="llamma")
    with pytest.raises(UnknownArchitecture, match=r"cannot be used by Transformers 5[\s\S]*llamma"):
        headrace.load_model(folder, settings=QUIET)


def test_an_unknown_class_of_a_known_type_falls_to_the_types_own(copied: Callable[[str], Path]) -> None:
    folder = copied("llama")
    edit_config(folder, architectures=["LlammaForCausalLM"])
    assert type(headrace.load_model(folder, settings=QUIET)).__name__ == "LlamaForCausalLM"


def test_a_folder_without_config_is_an_error_that_says_so(copied: Callable[[str], Path]) -> None:
    folder = copied("llama")
    (folder / "config.json").unlink()
    with pytest.raises(UnknownArchitecture, match=r"holds no config\.json"):
        headrace.load_model(folder, settings=QUIET)


REMOTE_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def own_code(folder: Path) -> Path:
    (folder / "own.py").write_text(REMOTE_CODE)
    edit_config(
        folder,
        model_type="own",
        architectures=["OwnModel"],
        auto_map={"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
    )
    return folder


def test_code_of_the_checkpoint_runs_only_when_it_is_trusted(
    copied: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = own_code(copied("llama"))
    with pytest.raises(UnknownArchitecture, match="trust_remote_code"):
        headrace.load_model(folder, settings=QUIET)
    model = headrace.load_model(folder, trust_remote_code=True, settings=QUIET)
    assert type(model).__name__ == "OwnModel"
    reference = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert_same(model, reference)


def test_a_failure_in_the_load_ends_it_and_its_threads(
    saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Exception):
        pass

    asked: list[str] = []
    streams: list[TensorStream] = []
    original = TensorStream.take

    def take(self: TensorStream, name: str) -> torch.Tensor:
        asked.append(name)
        streams.append(self)
        if len(asked) == 20:
            raise Broken(name)
        return original(self, name)

    monkeypatch.setattr(TensorStream, "take", take)
    with pytest.raises(Broken):
        headrace.load_model(saved("llama"), settings=QUIET)
    assert streams[0]._closed and not streams[0]._destinations


@pytest.mark.parametrize(
    "architectures", [["AutoTokenizer"], ["AutoModel"], ["PreTrainedModel"], ["GPT2LMHeadModel"], [7]]
)
def test_config_json_cannot_choose_what_is_no_model_for_it(
    copied: Callable[[str], Path], architectures: list[Any]
) -> None:
    folder = copied("llama")
    edit_config(folder, architectures=architectures)
    assert type(headrace.load_model(folder, settings=QUIET)).__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("content", "words"),
    [("null", "is not a configuration"), ('{"model_type": "llama", "hidden_size": "x"}', "cannot be used")],
)
def test_a_configuration_of_nonsense_is_one_clear_error(
    copied: Callable[[str], Path], content: str, words: str
) -> None:
    folder = copied("llama")
    (folder / "config.json").write_text(content)
    with pytest.raises(HeadraceError, match=words):
        headrace.load_model(folder, settings=QUIET)


def test_a_broken_generation_config_is_named(copied: Callable[[str], Path]) -> None:
    folder = copied("llama")
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        headrace.load_model(folder, settings=QUIET)


def test_a_configuration_may_be_given(saved: Callable[[str], Path]) -> None:
    config = transformers.AutoConfig.from_pretrained(saved("llama"))
    config.rms_norm_eps = 0.5
    assert headrace.load_model(saved("llama"), config=config, settings=QUIET).model.norm.variance_epsilon == 0.5


def test_an_empty_state_dict_is_refused_too(saved: Callable[[str], Path]) -> None:
    with pytest.raises(InvalidSetting, match="state_dict cannot be used"):
        headrace.load_model(saved("llama"), state_dict={}, settings=QUIET)


def test_loads_in_several_threads_give_the_right_dtypes_and_leave_torchs_alone(saved: Callable[[str], Path]) -> None:
    """Transformers swaps torch's default dtype while it builds; two at once would leave the wrong one behind."""
    names = ["llama", "llama-tied", "gemma3", "qwen3_moe"] * 3
    with ThreadPoolExecutor(4) as executor:
        models = list(executor.map(lambda name: headrace.load_model(saved(name), settings=QUIET), names))
    assert torch.get_default_dtype() == torch.float32
    for name, model in zip(names, models, strict=True):
        assert {value.dtype for value in model.parameters()} == {torch.bfloat16}, name
    assert models[1].lm_head.weight is models[1].model.embed_tokens.weight


def test_what_is_left_out_is_in_the_loading_info(saved: Callable[[str], Path]) -> None:
    _, info = headrace.load_model(
        saved("llama"), num_hidden_layers=11, strict=False, output_loading_info=True, settings=QUIET
    )
    assert len(info["unexpected_keys"]) == 9 and all("layers.11" in name for name in info["unexpected_keys"])


def test_the_mend_names_the_flag_that_helps(copied: Callable[[str], Path]) -> None:
    folder = copied("llama")
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(63, dtype=torch.bfloat16)}))
    with pytest.raises(PlacementError) as caught:
        headrace.load_model(folder, settings=QUIET)
    assert "ignore_mismatched_sizes=True" in caught.value.mend and "strict" not in caught.value.mend


def test_a_tokenizer_that_is_not_there_is_an_error_and_not_an_empty_one(copied: Callable[[str], Path]) -> None:
    """Transformers makes an empty tokenizer for some classes; every prompt would then be nothing."""
    folder = copied("llama")
    edit_config(folder, model_type="gpt2", architectures=["GPT2LMHeadModel"])
    with headrace.open(folder, settings=QUIET) as checkpoint, pytest.raises(ModelError, match="tokenizer"):
        engine.load_tokenizer(checkpoint)
