"""The private names of Transformers that we use. A new release that changes one fails here, with its name, and not in somebody's load."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    PreTrainedModel,
    conversion_mapping,
    core_model_loading,
    modeling_utils,
)
from transformers.distributed import pipeline_parallel, sharding_utils, tensor_parallel
from transformers.models.auto import modeling_auto
from transformers.models.llama import modeling_llama
from transformers.models.mixtral import modeling_mixtral
from transformers.quantizers import auto as quantizers
from transformers.quantizers.base import HfQuantizer

from headrace.engines.conversion import synchronous_loading
from headrace.engines.values import LazyValue


def parameters_of(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_the_conversion_takes_a_model_a_state_dict_and_a_configuration() -> None:
    assert parameters_of(core_model_loading.convert_and_load_state_dict_in_model)[:3] == [
        "model",
        "state_dict",
        "load_config",
    ]


def test_renaming_takes_what_we_pass() -> None:
    assert parameters_of(core_model_loading.rename_source_key)[:5] == [
        "source_key",
        "weight_renamings",
        "weight_converters",
        "base_model_prefix",
        "meta_state_dict",
    ]


def test_the_class_fills_its_meta_model_in_one_overridable_step() -> None:
    assert parameters_of(PreTrainedModel._load_pretrained_model) == [
        "model",
        "state_dict",
        "checkpoint_files",
        "load_config",
        "expected_keys",
    ]
    assert "cls._load_pretrained_model(" in inspect.getsource(PreTrainedModel.from_pretrained.__func__)
    assert "model = cls(config" in inspect.getsource(PreTrainedModel.from_pretrained.__func__)


def test_the_loading_configuration_has_our_fields() -> None:
    assert {"weight_mapping", "device_map", "disk_offload_folder", "hf_quantizer", "dtype"} <= {
        item.name for item in fields(modeling_utils.LoadStateDictConfig)
    }


@pytest.mark.parametrize(
    "name",
    ["_keys_to_ignore_on_load_unexpected", "_keys_to_ignore_on_load_missing", "base_model_prefix", "name_or_path"],
)
def test_the_model_has_our_attributes(name: str) -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(num_hidden_layers=1, hidden_size=8, intermediate_size=8, num_attention_heads=1, vocab_size=8)
        )
    assert hasattr(model, name) and isinstance(model.all_tied_weights_keys, dict)


@pytest.mark.parametrize(
    "name",
    [
        "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
        "MODEL_FOR_CAUSAL_LM_MAPPING",
        "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
        "MODEL_MAPPING",
    ],
)
def test_the_mappings_exist(name: str) -> None:
    assert len(list(getattr(modeling_auto, name).keys())) > 3


def test_synchronous_loading_is_what_the_conversion_looks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_DEACTIVATE_ASYNC_LOAD", raising=False)
    assert 'is_env_variable_true("HF_DEACTIVATE_ASYNC_LOAD")' in inspect.getsource(
        core_model_loading.convert_and_load_state_dict_in_model
    )
    with synchronous_loading():
        assert modeling_utils.os.environ["HF_DEACTIVATE_ASYNC_LOAD"] == "1"
    assert "HF_DEACTIVATE_ASYNC_LOAD" not in modeling_utils.os.environ


def test_a_value_is_asked_for_only_through_what_a_lazy_value_has() -> None:
    source = inspect.getsource(core_model_loading._materialize_copy)
    assert "tensor = tensor[...]" in source
    assert {"dtype", "shape", "get_shape", "get_dtype", "is_floating_point", "__getitem__"} <= set(dir(LazyValue))


def test_quantizers_are_looked_up_by_method_in_two_tables() -> None:
    for method in ("fp8", "gptq", "awq", "compressed-tensors", "mxfp4", "bitsandbytes_4bit", "bitsandbytes_8bit"):
        assert method in quantizers.AUTO_QUANTIZER_MAPPING and method in quantizers.AUTO_QUANTIZATION_CONFIG_MAPPING
    assert '"modelopt"' not in inspect.getsource(quantizers)


def test_a_method_without_a_quantizer_is_skipped_and_only_logged() -> None:
    """Which is why it is refused before Transformers sees it."""
    assert quantizers.AutoHfQuantizer.supports_quant_method({"quant_method": "nonesuch"}) is False
    assert "model.hf_quantizer = hf_quantizer" in inspect.getsource(PreTrainedModel.from_pretrained.__func__)


def test_the_quantization_is_taken_from_the_top_of_the_configuration() -> None:
    source = inspect.getsource(quantizers.get_hf_quantizer)
    assert 'getattr(config, "quantization_config", None)' in source
    assert quantizers.__name__.startswith("transformers.quantizers.")


def test_conversions_are_asked_for_by_model_and_by_name() -> None:
    assert parameters_of(conversion_mapping.get_model_conversion_mapping)[:3] == [
        "model",
        "key_mapping",
        "hf_quantizer",
    ]
    assert parameters_of(core_model_loading.apply_renamings) == ["source_key", "weight_renamings"]
    merge, concatenate = core_model_loading.MergeModulelist(), core_model_loading.Concatenate(dim=1)
    assert (merge.dim, concatenate.dim) == (0, 1)


def test_a_quantizer_has_the_hooks_that_ours_fills() -> None:
    source = inspect.getsource(PreTrainedModel.from_pretrained.__func__)
    assert "hf_quantizer.preprocess_model(" in source and "checkpoint_files=checkpoint_files" in source
    assert parameters_of(HfQuantizer.update_weight_conversions) == ["self", "weight_conversions", "model"]
    assert parameters_of(HfQuantizer.get_new_dtype) == ["self", "converter", "param", "dtype"]
    assert "_process_model_before_weight_loading" in dir(HfQuantizer)


def test_packed_layers_are_there_when_a_model_is_divided_which_comes_before_it_is_filled() -> None:
    source = inspect.getsource(PreTrainedModel.from_pretrained.__func__)
    steps = (
        "hf_quantizer.preprocess_model(",
        "cls.maybe_distribute_model(model, distributed_config, mesh_manager)",
        "cls._load_pretrained_model(",
    )
    places = [source.index(step) for step in steps]
    assert places == sorted(places)
    assert parameters_of(PreTrainedModel.maybe_distribute_model) == ["model", "distributed_config", "mesh_manager"]


def test_a_divided_parameter_says_which_parts_of_it_a_rank_keeps() -> None:
    assert parameters_of(sharding_utils.DtensorShardOperation) == ["param"]
    assert parameters_of(sharding_utils.DtensorShardOperation.shard_tensor)[:2] == ["self", "source"]
    parts = [sharding_utils._local_shard_size_and_offset(100, 3, rank) for rank in range(3)]
    assert parts == [(34, 0), (34, 34), (32, 68)]


def test_a_layer_that_computes_with_its_part_alone_says_so_to_the_parallel_styles() -> None:
    packed, plain = torch.nn.Module(), torch.nn.Module()
    packed._hf_quantized_needs_local_tp = True  # type: ignore[assignment]
    for name in ("colwise", "rowwise"):
        style = tensor_parallel.ALL_PARALLEL_STYLES[name]
        assert style.should_use_local_tensors(packed) and not style.should_use_local_tensors(plain)


def test_stages_of_a_pipeline_send_in_the_type_of_their_first_parameter() -> None:
    source = inspect.getsource(pipeline_parallel.pipeline_parallel_naive_forward)
    assert "stage = model._pp_stage" in source
    assert "dtype = next(model.parameters()).dtype" in source
    assert 'stage.communicate("send_forward", device=device, dtype=dtype' in source


def test_attention_functions_are_looked_up_by_the_modules_own_configuration() -> None:
    source = inspect.getsource(modeling_llama.LlamaAttention.forward)
    assert "self.config._attn_implementation, eager_attention_forward" in source
    assert "sdpa" in modeling_utils.ALL_ATTENTION_FUNCTIONS


def test_experts_say_how_they_are_built() -> None:
    config = MixtralConfig(hidden_size=8, intermediate_size=8, num_local_experts=2)
    experts = modeling_mixtral.MixtralExperts(config)
    flags = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm")
    assert [getattr(experts, flag) for flag in flags] == [True, False, False, True, False]
    assert callable(experts._apply_gate)
