"""What a model must be to be divided among tensor-parallel ranks, said before a weight is read: Transformers itself finds out in the first pass, or not at all. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import transformers

from headrace.errors import InvalidSetting, ModelError, UnsupportedQuantization

_CUT = ("colwise", "packed_colwise")
"""Styles of Transformers' plans that leave each rank its part of a projection's outputs; what they gather again may be cut anywhere."""
_BY_HEADS = ("q_proj", "q_b_proj", "kv_b_proj", "qkv_proj", "query_key_value")
_BY_KEY_VALUE_HEADS = ("k_proj", "v_proj", "qkv_proj", "query_key_value")


def num_tensor_ranks(options: Mapping[str, Any]) -> int:
    """Return among how many ranks ``from_pretrained``'s ``options`` divide each layer by Transformers' own plan: 1 where they do not, or bring a plan of their own."""
    config = options.get("distributed_config")
    if config is None:
        plan, size = options.get("tp_plan"), options.get("tp_size")
    elif isinstance(config, Mapping):
        plan, size = config.get("tp_plan"), config.get("tp_size")
    else:
        plan, size = config.tp_plan, config.tp_size
    return size if isinstance(size, int) and not isinstance(plan, Mapping) else 1


def check_kinds(options: Mapping[str, Any], *, source: str) -> None:
    """Raise `InvalidSetting` where ``from_pretrained``'s ``options`` ask for a pipeline whose stages are divided among ranks themselves."""
    config = options.get("distributed_config")
    sizes = config if isinstance(config, Mapping) else vars(config) if config is not None else {}
    if all((sizes.get(name) or 1) > 1 for name in ("tp_size", "pp_size")):
        raise InvalidSetting(
            f"{source} cannot be divided by layers and within layers at once (pp_size and tp_size).",
            f"Transformers {transformers.__version__} looks for the layers of all stages on each of them. No weight byte was read.",
            "Take one of the two.",
        )


def check_parallel(model_class: Any, config: Any, num_ranks: int, *, source: str) -> None:
    """Raise `ModelError` where Transformers has no plan for the model, and `InvalidSetting` where its attention heads cannot be shared equally among ``num_ranks``."""
    plan = _plan_of(model_class, config)
    if not plan:
        raise ModelError(
            f"{source} cannot be divided among {num_ranks} ranks: {model_class.__name__} has no tensor-parallel plan.",
            f"Transformers {transformers.__version__} says of none of its layers how ranks share it. No weight byte was read.",
            "Use one process for this model (--tp 1, or no distributed_config).",
        )
    counts = list(_head_counts(config, plan))
    odd = next(((what, count) for what, count in counts if count % num_ranks), None)
    if odd is None:
        return
    most = math.gcd(*(count for _, count in counts))
    possible = ", ".join(str(number) for number in range(1, most + 1) if most % number == 0)
    raise InvalidSetting(
        f"{source} cannot be divided among {num_ranks} ranks.",
        f"Each rank computes whole heads, and the number of its {odd[0]}, {odd[1]}, is no multiple of {num_ranks}. No weight byte was read.",
        f"Possible for this model: {possible}.",
    )


def check_stages(model: Any, num_stages: int) -> None:
    """Raise `ModelError` where Transformers cannot make the stages of a pipeline of ``model``, and `InvalidSetting` where a stage would have no layer. ``model`` is on the meta device."""
    layers = getattr(model.base_model, "layers", None)
    if layers is None:
        raise ModelError(
            f"{type(model).__name__} cannot be divided into {num_stages} stages of a pipeline.",
            f"Transformers {transformers.__version__} cuts models whose decoder layers are `layers` of the base model, and {type(model.base_model).__name__} has none. No weight byte was read.",
            "Divide each layer instead (tp_size), or use one process for this model.",
        )
    if len(layers) < num_stages:
        raise InvalidSetting(
            f"{type(model).__name__} cannot be divided into {num_stages} stages of a pipeline.",
            f"Each stage computes at least one decoder layer, and there are {len(layers)}. No weight byte was read.",
            f"Take pp_size {len(layers)} at most.",
        )


def refuse_packed(path: str, packing: str, num_ranks: int, why: str) -> UnsupportedQuantization:
    """Return the error for the layer at ``path``, packed by the scheme ``packing``, which would have to be divided in a way that is not done."""
    return UnsupportedQuantization(
        f"{path} cannot be divided among {num_ranks} ranks as it is packed: {packing}.",
        f"{why} No weight byte was read.",
        "Expand the weights as they arrive (--dequantize, dequantize=True), use another number of ranks, or the unquantized form of the model.",
    )


def _plan_of(model_class: Any, config: Any) -> dict[str, str]:
    """Return the rules that Transformers has for the class, its base and their parts; the names are patterns."""
    plan: dict[str, str] = dict(getattr(model_class, "_tp_plan", None) or {})
    nested = [getattr(config, name, None) for name in getattr(config, "sub_configs", None) or ()]
    for one in (config, *nested):
        plan.update(getattr(one, "base_model_tp_plan", None) or {})
    return plan


def _head_counts(config: Any, plan: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """Yield how many heads of each kind the layers have, where the plan cuts the projections that make them."""
    cut = {name.rpartition(".")[2] for name, style in plan.items() if style in _CUT}
    text = config.get_text_config(decoder=True)
    for layer in getattr(text, "per_layer_config", None) or [text]:
        num_heads = getattr(layer, "num_attention_heads", None)
        num_key_value_heads = getattr(layer, "num_key_value_heads", None)
        if isinstance(num_heads, int) and cut.intersection(_BY_HEADS):
            yield "attention heads", num_heads
        if isinstance(num_key_value_heads, int) and cut.intersection(_BY_KEY_VALUE_HEADS):
            yield "key-value heads", num_key_value_heads
