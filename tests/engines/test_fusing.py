"""Parameters that Transformers makes of several stored tensors, through ``load_model``: whatever order and files the parts come in, with the least memory, plain and packed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import headrace
from headrace.engines import weights as streamed_weights
from headrace.errors import UnsupportedQuantization
from headrace.quantization.layouts import scheme_of
from headrace.quantization.linear import QuantizedLinear
from headrace.quantization.scheme import Role, StoredPart
from headrace.quantization.slices import WeightSlice, slice_weight
from headrace.quantization.stack import PackedStack
from headrace.settings import Settings
from headrace.streaming import StreamOptions
from tests.engines.models import edit_config
from tests.support.code_definitions import assert_same
from tests.support.fusing import (
    FORMATS,
    LAYOUTS,
    BlockFp8,
    Format,
    ModeloptFp8,
    ModeloptNvfp4,
    Tensors,
    save_checkpoint,
)
from tests.support.weight_files import read_tensors

_COMMON = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
MODELS: Mapping[str, Callable[[], Any]] = {
    # q, k and v of a convolution become one.
    "olmo_hybrid": lambda: transformers.OlmoHybridConfig(**_COMMON, intermediate_size=96, num_hidden_layers=4),
    # Gate and up become one, in a dense layer, in shared experts, and in a stack of experts.
    "minimax_m3_vl": lambda: transformers.MiniMaxM3VLConfig(
        text_config={
            **_COMMON,
            "head_dim": 16,
            "rotary_dim": 8,
            "num_hidden_layers": 2,
            "intermediate_size": 144,
            "dense_intermediate_size": 160,
            "shared_intermediate_size": 144,
            "num_local_experts": 3,
            "num_experts_per_tok": 2,
            "mlp_layer_types": ["dense", "sparse"],
        },
        vision_config={**_VISION, "image_size": 16, "patch_size": 4},
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **_COMMON,
        head_dim=16,
        num_hidden_layers=2,
        intermediate_size=96,
        moe_intermediate_size=144,
        num_experts=3,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
    ),
}
CLASSES = {
    "olmo_hybrid": "OlmoHybridForCausalLM",
    "minimax_m3_vl": "MiniMaxM3SparseForConditionalGeneration",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
SECTIONS: Mapping[str, dict[str, Any]] = {
    BlockFp8.name: {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    ModeloptFp8.name: {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
    ModeloptNvfp4.name: {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]},
}
PACKED = [format_ for format_ in FORMATS if format_.name in SECTIONS]
LAST_NAMES = ("gate_proj", "up_proj", "down_proj", "q_proj", "k_proj", "v_proj", "o_proj", "w1", "w2", "w3")
SETTINGS = Settings.from_environment({}, progress=False, memory_limit_bytes=0, read_bytes=4096, debug_poison=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Tensors, Tensors]]:
    """Return the folder of a random model, its tensors by stored name, and its state dict; made once."""
    root = tmp_path_factory.mktemp("models")
    made: dict[str, tuple[Path, Tensors, Tensors]] = {}

    def get(name: str) -> tuple[Path, Tensors, Tensors]:
        if name not in made:
            torch.manual_seed(0)
            model = getattr(transformers, CLASSES[name])._from_config(MODELS[name](), dtype=torch.bfloat16)
            with torch.no_grad():
                for value in model.state_dict().values():
                    if value.is_floating_point():
                        value.copy_(torch.randn(value.shape) * 0.05)
            model.save_pretrained(root / name)
            stored = {key: it.tensor() for key, it in read_tensors(root / name).items()}
            made[name] = root / name, stored, dict(model.state_dict())
        return made[name]

    return get


Saved = Callable[[str], tuple[Path, Tensors, Tensors]]


@pytest.fixture(params=["owned", "leased"])
def ownership(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Memory of its own for each tensor; or memory that is used again, as for models on another device, with what comes back poisoned."""
    if request.param == "leased":
        monkeypatch.setattr(streamed_weights, "_stream_options", lambda *_: StreamOptions(ownership="leased"))
    return str(request.param)


def rearranged(tensors: Tensors, side_files: Path, target: Path, layout: str) -> Path:
    """Save ``tensors`` in a layout, with the side files of another folder."""
    save_checkpoint(target, tensors, LAYOUTS[layout])
    for path in side_files.glob("*.json"):
        if not path.name.endswith(".index.json"):
            (target / path.name).write_bytes(path.read_bytes())
    return target


layouts = pytest.mark.parametrize("layout", ["first parts first", "last parts first", "shuffled", "shuffled otherwise"])


@layouts
@pytest.mark.parametrize("name", MODELS)
def test_parts_are_concatenated_in_the_models_order(
    name: str, layout: str, ownership: str, saved: Saved, tmp_path: Path
) -> None:
    folder, stored, state = saved(name)
    assert stored.keys() != state.keys(), "this model stores nothing in parts"
    reports: list[headrace.LoadReport] = []
    model = headrace.load_model(
        rearranged(stored, folder, tmp_path / "model", layout), settings=SETTINGS, on_report=reports.append
    )
    assert reports[0].ownership == ownership and reports[0].bytes_wanted == reports[0].bytes_checkpoint
    found = model.state_dict()
    assert found.keys() == state.keys()
    assert [key for key, value in state.items() if not torch.equal(found[key], value)] == []


def quantized(format_: Format, stored: Tensors) -> tuple[Tensors, dict[str, Tensors]]:
    """Return ``stored`` with every projection of the language model packed, with random values, and these by module and suffix."""
    generator = torch.Generator().manual_seed(3)
    tensors: Tensors = {}
    packed: dict[str, Tensors] = {}
    for name, tensor in stored.items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in LAST_NAMES and tensor.dim() == 2 and "vision" not in name:
            packed[module] = format_.make(tensor.shape[0], generator, tensor.shape[1])
            tensors |= {f"{module}.{suffix}": it for suffix, it in packed[module].items()}
        else:
            tensors[name] = tensor
    return tensors, packed


def quantized_folder(
    format_: Format, saved: Saved, name: str, target: Path, layout: str
) -> tuple[Path, dict[str, Tensors]]:
    folder, stored, _ = saved(name)
    tensors, packed = quantized(format_, stored)
    made = rearranged(tensors, folder, target, layout)
    edit_config(made, quantization_config=SECTIONS[format_.name])
    return made, packed


def by_name(format_: Format) -> str:
    return format_.name


formats = pytest.mark.parametrize("format_", PACKED, ids=by_name)


@formats
@layouts
def test_expanded_parts_are_concatenated_each_by_its_own_scales(
    layout: str, format_: Format, ownership: str, saved: Saved, tmp_path: Path
) -> None:
    """In a dense layer, in shared experts and in each expert of a stack; 144 and 160 rows are no whole blocks."""
    folder, packed = quantized_folder(format_, saved, "minimax_m3_vl", tmp_path / "model", layout)
    model = headrace.load_model(folder, dequantize=True, dtype=torch.float32, settings=SETTINGS)
    state = model.state_dict()

    def concatenated(*modules: str) -> torch.Tensor:
        return torch.cat([format_.expand(packed[f"language_model.model.layers.{module}"]) for module in modules])

    path = "model.language_model.layers"
    dense = state[f"{path}.0.mlp.gate_up_proj.weight"]
    assert_same(dense, concatenated("0.mlp.gate_proj", "0.mlp.up_proj"))
    moe = "1.block_sparse_moe"
    shared = state[f"{path}.1.mlp.shared_experts.gate_up_proj.weight"]
    assert_same(shared, concatenated(f"{moe}.shared_experts.gate_proj", f"{moe}.shared_experts.up_proj"))
    for expert in range(3):
        fused = state[f"{path}.1.mlp.experts.gate_up_proj"][expert]
        assert_same(fused, concatenated(f"{moe}.experts.{expert}.w1", f"{moe}.experts.{expert}.w3"))
        assert_same(state[f"{path}.1.mlp.experts.down_proj"][expert], concatenated(f"{moe}.experts.{expert}.w2"))
    assert_same(state[f"{path}.1.self_attn.k_proj.weight"], concatenated("1.self_attn.k_proj"))


@formats
@layouts
def test_packed_experts_keep_every_scale_of_gate_and_of_up(
    layout: str, format_: Format, ownership: str, saved: Saved, tmp_path: Path
) -> None:
    folder, packed = quantized_folder(format_, saved, "qwen3_moe", tmp_path / "model", layout)
    model = headrace.load_model(folder, dtype=torch.float32, settings=SETTINGS)
    for module, tensors in packed.items():
        parent, _, last = module.rpartition(".")
        path, _, number = parent.rpartition(".")
        if not number.isdecimal() or not path.endswith("experts"):
            layer = model.get_submodule(module)
            assert isinstance(layer, QuantizedLinear)
            held: Tensors = {suffix: layer.get_parameter(suffix) for suffix in tensors}
            values = layer.dequantized()
        else:
            stack = model.get_submodule(f"{path}.{last}")
            assert isinstance(stack, PackedStack)
            held = {suffix: stack.get_parameter(suffix)[int(number)] for suffix in tensors}
            values = stack.dequantized(int(number))
        for suffix, tensor in tensors.items():
            same = torch.equal(held[suffix].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
            assert same, f"{module}.{suffix}"
        assert_same(values, format_.expand(tensors))


@formats
def test_a_dense_layer_that_fuses_packed_parts_is_refused_and_says_what_helps(
    format_: Format, saved: Saved, tmp_path: Path
) -> None:
    """Their scales differ, and one plain layer has one scheme: nothing is read, and nothing is rounded to a common scale."""
    folder, _ = quantized_folder(format_, saved, "minimax_m3_vl", tmp_path / "model", "shuffled")
    with pytest.raises(
        UnsupportedQuantization, match=r"(gate|up)_proj is packed.*gate_up_proj\.weight is made of.*dequantize=True"
    ):
        headrace.load_model(folder, settings=SETTINGS)


# -- a rank's part of a fused layer


def cut_rows(format_: Format, tensors: Tensors, rows: tuple[int, int]) -> WeightSlice:
    """Return rows of one part, cut by Headrace."""
    roles = {
        "weight": Role.CODES,
        "weight_scale": Role.SCALE,
        "weight_scale_inv": Role.SCALE,
        "weight_scale_2": Role.GLOBAL_SCALE,
    }
    parts = {roles[suffix]: tensor for suffix, tensor in tensors.items() if suffix in roles}
    stored = {
        roles[suffix]: StoredPart(suffix, it.dtype, tuple(it.shape))
        for suffix, it in tensors.items()
        if suffix in roles
    }
    scheme = scheme_of("part", stored)
    shape = scheme.check(stored, module="part")
    return slice_weight(scheme, parts, shape=shape, rows=rows)


@hypothesis_settings(max_examples=30, deadline=None)
@given(data=st.data())
@formats
def test_a_ranks_rows_of_fused_parts_are_those_of_the_expanded_parts(format_: Format, data: st.DataObject) -> None:
    """Each rank of a tensor-parallel group takes its rows of every part: none need begin or end with a block, of the part or of the fused weight."""
    num_ranks = data.draw(st.sampled_from([1, 2, 4, 8]))
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=2, max_size=3))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    parts = [format_.make(size * num_ranks, generator, 144) for size in sizes]
    expanded = [format_.expand(tensors) for tensors in parts]
    for rank in range(num_ranks):
        cuts = [
            cut_rows(format_, tensors, (rank * size, (rank + 1) * size))
            for size, tensors in zip(sizes, parts, strict=True)
        ]
        fused = torch.cat([cut.scheme.dequantize(cut.parts, shape=cut.shape) for cut in cuts])
        wanted = torch.cat(
            [values[rank * size : (rank + 1) * size] for size, values in zip(sizes, expanded, strict=True)]
        )
        assert_same(fused, wanted)
