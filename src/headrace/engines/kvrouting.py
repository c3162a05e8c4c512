"""Lets an attention module of Transformers reach its attention function by way of one that rounds keys and values. Uses Transformers' registry of attention functions."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from headrace.errors import UnsupportedQuantization
from headrace.quantization.attention import rounding_attention

_PREFIX = "headrace_rounded_"


def route_attention(attention: Any) -> None:
    """Have ``attention``, which `install_kv` has prepared, round keys and values before it attends.

    It gets a copy of its configuration that names the rounding function; the model's own names the plain one as before, by which masks are made. Raises `UnsupportedQuantization`
    where the module does not choose its function as Transformers' models do.
    """
    config = getattr(attention, "config", None)
    implementation = getattr(config, "_attn_implementation", None) or "eager"
    plain = _attention_function(attention, implementation)
    if config is None or plain is None:
        raise UnsupportedQuantization(
            f"{type(attention).__name__} cannot round keys and values as the checkpoint asks for.",
            f"It does not take its attention function ({implementation}) from where models of Transformers do.",
            "Load it with weight_only=True (--weight-only), or dequantize=True.",
        )
    # The eager function is each model's own.
    name = f"{_PREFIX}{implementation}" if implementation != "eager" else f"{_PREFIX}{_module_of(attention)}"
    if name not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(name, rounding_attention(plain))
    attention.config = copy.copy(config)
    attention.config._attn_implementation_internal = name


def _attention_function(attention: Any, implementation: str) -> Callable[..., Any] | None:
    found: Any
    if implementation == "eager":
        found = getattr(sys.modules.get(_module_of(attention)), "eager_attention_forward", None)
    else:
        found = ALL_ATTENTION_FUNCTIONS.get(implementation)
    return found if callable(found) else None


def _module_of(attention: Any) -> str:
    return type(attention).__module__
