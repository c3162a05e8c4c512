"""Packed layers of tensor- and expert-parallel models: every rank holds its slices of the packed parts, asks for little else, and computes what one process does."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import headrace
from headrace.engines.quantizer import register_quantizers
from headrace.errors import UnsupportedQuantization
from headrace.quantization.linear import QuantizedLinear
from headrace.quantization.slices import slice_weight
from headrace.quantization.stack import PackedStack
from headrace.settings import Settings
from tests.engines.models import rewrite
from tests.engines.test_quantized_gptoss import save_gpt_oss
from tests.support.closeness import assert_computed_alike
from tests.support.packed_models import PACKINGS, save_packed
from tests.support.quantized import QuantizedCheckpoints
from tests.support.rank_processes import RankProcesses

from .test_tensor_parallel import TOKENS, bytes_of, distributed_config

LAYERS = [
    "ar-auto_awq-llama",
    "ar-auto_gptq-llama",
    "ct-fp8-block-llama",
    "ct-fp8-dynamic-llama",
    "ct-fp8-static-kvfp8-llama",
    "ct-mxfp4-llama",
    "ct-w4a16-asym-g128-llama",
    "ct-w8a8-int8-llama",
    "modelopt-fp8-kvfp8-llama",
    "modelopt-int8-sq-llama",
    "modelopt-mxfp8-llama",
    "modelopt-nvfp4-awqlite-llama",
    "modelopt-w4a8-awq-llama",
    "qwenfp8-qwen3",
]
EXPERTS = ["ct-nvfp4-deepseekv3", "dsfp8-mtp-sharded-deepseekv3", "kimi25-int4"]

UNEVEN = {
    "llama": LlamaConfig(
        hidden_size=96, intermediate_size=100, num_hidden_layers=2, vocab_size=320, num_attention_heads=6,
        num_key_value_heads=3, attention_bias=True, mlp_bias=True, tie_word_embeddings=False,
    ),
    "qwen3_moe": Qwen3MoeConfig(
        hidden_size=96, moe_intermediate_size=50, num_hidden_layers=2, vocab_size=320, num_attention_heads=6,
        num_key_value_heads=3, head_dim=16, num_experts=6, num_experts_per_tok=2,
    ),
}  # fmt: skip
"""For three ranks, which share equally only what they must: their boundaries cut groups of scales and of inputs."""

Slice = tuple[tuple[int, int], tuple[int, int], tuple[int, int], dict[str, str]]
"""Experts, rows and columns of a layer that a rank keeps, and the hashes of its parts."""


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(bytes_of(tensor.detach())).hexdigest()


def load_packed(
    rank: int, folder: str, kind: str, shared: bool, plan: dict[str, str] | None = None, weight_only: bool = False
) -> tuple[dict[str, Slice], list[float], Any, int]:
    """Load this rank's part; return what it keeps of each packed layer, the last logits, the report, and the bytes of its parameters."""
    reports: list[Any] = []
    parallel = distributed_config(kind)
    parallel.tp_plan = plan or parallel.tp_plan
    model = headrace.load_model(
        folder,
        dtype=torch.float32,
        distributed_config=parallel,
        distributed=shared,
        weight_only=weight_only,
        settings=Settings.from_environment({}, progress=False, gap_bytes=0),
        on_report=reports.append,
    )
    slices = {}
    for path, layer in model.named_modules():
        if isinstance(layer, QuantizedLinear | PackedStack) and layer.cut is not None:
            first, count = (layer.first_expert, layer.num_experts) if isinstance(layer, PackedStack) else (0, 1)
            hashes = {name: digest(layer.get_parameter(name)) for name in layer.fixed_names}
            slices[path] = (first, first + count), layer.cut.rows, layer.cut.columns, hashes
    with torch.no_grad():
        logits = model(TOKENS).logits[0, -1]
    memory = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in packed_parameters(model)}
    return slices, logits.tolist(), reports[0], sum(memory.values())


def packed_parameters(model: Any) -> Iterator[torch.Tensor]:
    for layer in model.modules():
        if isinstance(layer, QuantizedLinear | PackedStack):
            yield from (layer.get_parameter(name) for name in layer.fixed_names)


@lru_cache(maxsize=2)
def whole_model(folder: Path) -> tuple[Any, torch.Tensor]:
    """Return the model as one process has it, and its last logits."""
    model = headrace.load_model(folder, dtype=torch.float32, settings=Settings(progress=False))
    with torch.no_grad():
        return model, model(TOKENS).logits[0, -1]


def check_slice(layer: QuantizedLinear | PackedStack, kept: Slice) -> int:
    """Assert that a rank's parts are, bit for bit, those of the slice of the whole ``layer``; return how many values it has of the weight."""
    (first, stop), rows, columns, hashes = kept
    weight = layer.quantization
    stored = {role: layer.get_parameter(part.suffix).detach() for role, part in weight.parts.items()}
    cuts = []
    for expert in range(first, stop):
        parts = {role: one[expert] for role, one in stored.items()} if isinstance(layer, PackedStack) else stored
        cuts.append(slice_weight(weight.scheme, parts, shape=weight.shape, rows=rows, columns=columns).parts)
    is_stack = isinstance(layer, PackedStack)
    found = {role: torch.stack([cut[role] for cut in cuts]) if is_stack else cuts[0][role] for role in cuts[0]}
    named = {(weight.parts[role].suffix if role in weight.parts else "g_idx"): one for role, one in found.items()}
    assert hashes == {name: digest(one) for name, one in named.items()}
    return (stop - first) * (rows[1] - rows[0]) * (columns[1] - columns[0])


def check_load(
    ranks: RankProcesses,
    num_ranks: int,
    folder: Path,
    kind: str,
    *,
    shared: bool = False,
    plan: dict[str, str] | None = None,
) -> list[Any]:
    """Load on all ranks; assert that together they have each packed weight that is divided once, and compute what one process does. Return the reports."""
    outcomes = ranks.run(load_packed, str(folder), kind, shared, plan)
    assert [outcome.error for outcome in outcomes] == [None] * num_ranks
    model, expected = whole_model(folder)
    kept_by_rank = [outcome.value[0] for outcome in outcomes]
    assert kept_by_rank[0]
    for path in kept_by_rank[0]:
        layer = model.get_submodule(path)
        num_experts = layer.num_experts if isinstance(layer, PackedStack) else 1
        total = num_experts * layer.in_features * layer.out_features
        assert len({kept[path][:3] for kept in kept_by_rank}) == num_ranks
        assert sum(check_slice(layer, kept[path]) for kept in kept_by_rank) == total
    for outcome in outcomes:
        assert_computed_alike(torch.tensor(outcome.value[1]), expected)
    return [outcome.value[2] for outcome in outcomes]


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> QuantizedCheckpoints:
    return QuantizedCheckpoints(tmp_path_factory.mktemp("quantized"))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    with RankProcesses(2, tmp_path_factory.mktemp("group")) as group:
        yield group


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    with RankProcesses(3, tmp_path_factory.mktemp("group")) as group:
        yield group


@pytest.mark.parametrize("name", LAYERS)
def test_ranks_keep_slices_of_packed_layers(two: RankProcesses, quantized: QuantizedCheckpoints, name: str) -> None:
    folder = quantized[name].folder
    reports = check_load(two, 2, folder, "tensor")
    stored_bytes = sum(parameter.nbytes for parameter in packed_parameters(whole_model(folder)[0]))
    rest_bytes = reports[0].bytes_checkpoint - stored_bytes
    # Each weight is cut; of the small parts some are whole on every rank, or are read whole to be packed anew.
    assert max(report.bytes_wanted for report in reports) <= rest_bytes + 0.54 * stored_bytes


@pytest.mark.parametrize("kind", ["tensor", "expert"])
@pytest.mark.parametrize("name", EXPERTS)
def test_ranks_keep_slices_of_packed_experts(
    two: RankProcesses, quantized: QuantizedCheckpoints, name: str, kind: str
) -> None:
    reports = check_load(two, 2, quantized[name].folder, kind)
    assert max(report.bytes_wanted for report in reports) < 0.75 * reports[0].bytes_checkpoint


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ct-w4a16-asym-g128-llama", "tensor"),
        ("ar-auto_gptq-llama", "tensor"),
        *((EXPERTS[0], kind) for kind in ("tensor", "expert")),
    ],
)
def test_ranks_that_read_each_byte_once_keep_the_same_slices(
    two: RankProcesses, quantized: QuantizedCheckpoints, name: str, kind: str
) -> None:
    for report in check_load(two, 2, quantized[name].folder, kind, shared=True):
        assert report.bytes_read == report.bytes_wanted


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize(("model", "kind"), [("llama", "tensor"), ("qwen3_moe", "tensor"), ("qwen3_moe", "expert")])
def test_three_ranks_that_cut_groups_round_inputs_as_one_process_does(
    three: RankProcesses, tmp_path: Path, model: str, kind: str, packing: str
) -> None:
    """Steps of inputs are found from the largest magnitude that any rank sees; biases are added once. Found by each rank alone, logits would be off by a hundredth."""
    check_load(three, 3, save_packed(UNEVEN[model], packing, tmp_path), kind)


def test_experts_that_the_file_stacks_are_divided_as_they_are_stored(two: RankProcesses, tmp_path: Path) -> None:
    """gpt-oss: blocks and scales of all experts in one tensor each, biases of experts beside them."""
    folder = save_gpt_oss(tmp_path)
    stored_bytes = sum(parameter.nbytes for parameter in packed_parameters(whole_model(folder)[0]))
    reports = check_load(two, 2, folder, "expert")
    assert max(report.bytes_wanted for report in reports) <= reports[0].bytes_checkpoint - stored_bytes / 2
    check_load(two, 2, folder, "expert", shared=True)


def test_nothing_of_other_ranks_stays_in_memory(two: RankProcesses, quantized: QuantizedCheckpoints) -> None:
    folder = quantized["ct-fp8-dynamic-llama"].folder
    stored_bytes = sum(parameter.nbytes for parameter in packed_parameters(whole_model(folder)[0]))
    for outcome in two.run(load_packed, str(folder), "tensor", False):
        assert outcome.value[3] < 0.6 * stored_bytes


OWN_PLAN = {
    **{f"model.layers.*.self_attn.{name}_proj": "colwise_gather_output" for name in "qkv"},
    "model.layers.*.self_attn.o_proj": "rowwise_split_input",
}


@pytest.mark.parametrize("plan", [None, OWN_PLAN], ids=["the model's plan", "a plan of the caller's"])
def test_a_packed_head_and_any_plan(three: RankProcesses, tmp_path: Path, plan: dict[str, str] | None) -> None:
    """Outputs that are gathered, 320 in three uneven parts, and inputs that are split first."""
    folder = save_packed(UNEVEN["llama"], "FP8, inputs per token", tmp_path, packs_head=True)
    check_load(three, 3, folder, "tensor", plan=plan)
    assert isinstance(whole_model(folder)[0].lm_head, QuantizedLinear)


def test_weights_only_are_divided_alike(three: RankProcesses, tmp_path: Path) -> None:
    folder = save_packed(UNEVEN["qwen3_moe"], "FP8, inputs per token", tmp_path)
    model = headrace.load_model(folder, dtype=torch.float32, weight_only=True, settings=Settings(progress=False))
    with torch.no_grad():
        expected = model(TOKENS).logits[0, -1]
    for outcome in three.run(load_packed, str(folder), "tensor", False, None, True):
        assert_computed_alike(torch.tensor(outcome.value[1]), expected)


def test_stages_of_a_pipeline_have_whole_packed_layers(two: RankProcesses, tmp_path: Path) -> None:
    folder = save_packed(UNEVEN["qwen3_moe"], "FP8 blocks", tmp_path)
    _, expected = whole_model(folder)
    outcomes = two.run(load_packed, str(folder), "pipeline", False)
    assert [outcome.error for outcome in outcomes] == [None, None]
    for outcome in outcomes:
        slices, logits, report, _ = outcome.value
        assert not slices and report.bytes_wanted < 0.6 * report.bytes_checkpoint
        assert_computed_alike(torch.tensor(logits), expected)


@pytest.mark.parametrize("name", ["ct-fp8-dynamic-llama", "ct-w4a16-asym-g128-llama"])
def test_stages_of_a_pipeline_pass_on_what_the_model_computes_in(
    two: RankProcesses, quantized: QuantizedCheckpoints, name: str
) -> None:
    """A later stage has a packed layer first, whose parts are bf16 scales and whole numbers here, and not the model's float32."""
    folder = quantized[name].folder
    _, expected = whole_model(folder)
    outcomes = two.run(load_packed, str(folder), "pipeline", False)
    assert [outcome.error for outcome in outcomes] == [None, None]
    for outcome in outcomes:
        assert_computed_alike(torch.tensor(outcome.value[1]), expected)


def refusals(ranks: RankProcesses, folder: Path, plan: dict[str, str] | None = None) -> set[str]:
    """Return what the ranks say, each of which must refuse to load."""
    return words_of([outcome.error for outcome in ranks.run(load_packed, str(folder), "tensor", False, plan)])


def words_of(errors: list[BaseException | None]) -> set[str]:
    """Return what ``errors`` say, which must be refusals that say how to load all the same."""
    assert all(isinstance(error, UnsupportedQuantization) for error in errors), errors
    assert all("No weight byte was read." in str(error) and "--dequantize" in str(error) for error in errors)
    return {str(error) for error in errors}


def test_several_parts_of_one_layer_are_refused(three: RankProcesses, tmp_path: Path) -> None:
    folder = save_packed(UNEVEN["llama"], "FP8 blocks", tmp_path)
    [words] = refusals(three, folder, {"model.layers.*.mlp.gate_proj": "packed_colwise"})
    assert "layers.0.mlp.gate_proj cannot be divided among 3 ranks as it is packed: FP8 block 16x16." in words
    assert "Its rule gives each rank several parts of it." in words


def test_a_scale_of_keys_for_each_head_is_refused(
    two: RankProcesses, quantized: QuantizedCheckpoints, tmp_path: Path
) -> None:
    folder = quantized["ct-fp8-static-kvfp8-llama"].copied(tmp_path)

    def of_heads(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith((".k_scale", ".v_scale"))]:
            tensors[name] = tensors[name].reshape(1).expand(4).clone()

    rewrite(folder, of_heads)
    [words] = refusals(two, folder)
    assert "layers.0.self_attn cannot be divided among 2 ranks as it is packed: e4m3 keys and values." in words
    assert "a scale for each head" in words


@pytest.mark.parametrize(
    ("model", "fields", "layer"),
    [
        ("llama", {"intermediate_size": 4}, "model.layers.0.mlp.gate_proj"),
        ("qwen3_moe", {"moe_intermediate_size": 4}, "model.layers.0.mlp.experts"),
    ],
)
def test_a_rank_without_any_features_is_refused(
    three: RankProcesses, tmp_path: Path, model: str, fields: dict[str, int], layer: str
) -> None:
    config = type(UNEVEN[model])(**{**UNEVEN[model].to_dict(), **fields})
    [words] = refusals(three, save_packed(config, "FP8, inputs per token", tmp_path))
    assert words.startswith(f"{layer} cannot be divided among 3 ranks as it is packed: FP8 per channel. There are 4")


def load_with_flags(rank: int, folder: str, flags: dict[str, bool]) -> None:
    """Load experts of Qwen3 as if their class were built otherwise, as those of other models are."""
    build = Qwen3MoeExperts.__init__

    def build_otherwise(experts: Any, *arguments: Any) -> None:
        build(experts, *arguments)
        vars(experts).update(flags)

    with mock.patch.object(Qwen3MoeExperts, "__init__", build_otherwise):
        load_packed(rank, folder, "tensor", False)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"is_concatenated": False}, "In the model gate and up alternate, row by row, and in the checkpoint they are apart."),
        ({"has_bias": True}, "Its experts have biases, which every rank would add."),
    ],
    ids=["rows that alternate", "biases"],
)  # fmt: skip
def test_experts_whose_inner_features_cannot_be_divided_are_refused(
    three: RankProcesses, tmp_path: Path, flags: dict[str, bool], why: str
) -> None:
    folder = save_packed(UNEVEN["qwen3_moe"], "FP8, inputs per token", tmp_path)
    [words] = words_of([outcome.error for outcome in three.run(load_with_flags, str(folder), flags)])
    assert words.startswith("model.layers.0.mlp.experts cannot be divided among 3 ranks as it is packed: FP8")
    assert why in words


def save_stacked(folder: Path) -> Path:
    """Write a small Qwen3 with the experts' gate and up in one stack of MXFP4 blocks, as gpt-oss has them, and return the folder."""
    experts, hidden, inner = 4, 64, 96
    config = Qwen3MoeConfig(
        hidden_size=hidden, moe_intermediate_size=inner, num_hidden_layers=1, vocab_size=128, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, num_experts=experts, num_experts_per_tok=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)

    def of_blocks(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            del tensors[name]
        for projection, rows, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
            name = f"model.layers.0.mlp.experts.{projection}"
            blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
            tensors[f"{name}_blocks"] = blocks
            tensors[f"{name}_scales"] = torch.randint(118, 125, blocks.shape[:3], dtype=torch.uint8)

    rewrite(folder, of_blocks)
    content = json.loads((folder / "config.json").read_text())
    section = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (folder / "config.json").write_text(json.dumps({**content, "quantization_config": section}))
    return folder


def test_experts_whose_gate_and_up_are_stored_as_one_are_refused(two: RankProcesses, tmp_path: Path) -> None:
    """Each process alone holds them, and with expert parallelism each rank has whole ones."""
    folder = save_stacked(tmp_path)
    check_load(two, 2, folder, "expert")
    [words] = refusals(two, folder)
    assert words.startswith("model.layers.0.mlp.experts cannot be divided among 2 ranks as it is packed: MXFP4")
    assert "Each rank would have rows of gate and of up, which the checkpoint stores as one." in words


def load_by_transformers(rank: int, folder: str) -> None:
    register_quantizers()
    AutoModelForCausalLM.from_pretrained(folder, distributed_config=distributed_config("tensor"))


def test_what_transformers_reads_itself_is_refused(two: RankProcesses, quantized: QuantizedCheckpoints) -> None:
    for outcome in two.run(load_by_transformers, str(quantized["modelopt-fp8-kvfp8-llama"].folder)):
        assert isinstance(outcome.error, UnsupportedQuantization)
        assert "Load it with headrace.load_model" in str(outcome.error)
