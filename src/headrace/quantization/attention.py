"""Rounds keys and values to the formats in which a checkpoint's maker meant them to be cached, without a cache of that format: after the positions are encoded, where attention uses them.

That gives the results of a packed cache and saves none of its memory: Transformers caches keys and values in the model's own dtype, and they are rounded at each use. A second
rounding changes nothing. Models that cache a latent (MLA) are rounded in the keys and values that it expands to, as their makers' references are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headrace.errors import UnsupportedQuantization
from headrace.quantization.parameters import FixedTypes
from headrace.quantization.rounding import round_kv

FORMATS = ("e4m3", "nvfp4")
SCALES = ("k_scale", "v_scale")


@dataclass(frozen=True, slots=True, kw_only=True)
class KvRounding:
    """How keys and values are rounded."""

    format: str
    """``e4m3``: by one scale; ``nvfp4``: by groups of features, each with an E4M3 scale of its own, times one scale."""
    group_size: int | None = None
    """Features per group of NVFP4 (16)."""

    def __post_init__(self) -> None:
        if self.format not in FORMATS or (self.format == "nvfp4") != bool(self.group_size):
            raise UnsupportedQuantization(
                f"Keys and values are to be cached as {self.format!r} with groups of {self.group_size}.",
                f"Known are {', '.join(FORMATS)}, nvfp4 with groups and e4m3 without.",
                "Load with weights only: keys and values then keep their precision.",
            )


def install_kv(
    attention: nn.Module,
    rounding: KvRounding,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
    shape: tuple[int, ...] = (),
) -> None:
    """Give ``attention`` the parameters ``k_scale`` and ``v_scale`` and note ``rounding`` on it, for `rounding_attention` to find.

    The scales are made as they are stored, of ``dtype`` and ``shape`` (one element, or one for each head that has keys), keep that type whatever the model is cast to, and are
    1 until they are loaded: that is what a checkpoint means that has none. The class of the module becomes a subclass of its own.
    """
    for name in SCALES:
        scale = torch.ones(shape, dtype=dtype, device=device)
        attention.register_parameter(name, nn.Parameter(scale, requires_grad=False))
    module: Any = attention
    module.kv_rounding, module.fixed_names = rounding, SCALES
    module.__class__ = _rounding_class(module.__class__)


def rounding_attention(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Return an attention function like ``attend`` (``module, query, key, value, …``, as Transformers registers them) that rounds keys and values first.

    It does so for modules that `install_kv` has seen; for all others it is ``attend``. Keys and values are ``[batch, num_heads, num_tokens, head_dim]``.
    """

    @functools.wraps(attend)
    def attend_rounded(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Any:
        rounding = getattr(module, "kv_rounding", None)
        if isinstance(rounding, KvRounding):
            key = round_kv(key, rounding.format, rounding.group_size, module.get_parameter("k_scale"))
            value = round_kv(value, rounding.format, rounding.group_size, module.get_parameter("v_scale"))
        return attend(module, query, key, value, *args, **options)

    return attend_rounded


@functools.cache
def _rounding_class(plain: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of ``plain`` whose scales keep their types: one for each class, under the same name and of the same module, for all else in it is."""
    return type(plain.__name__, (FixedTypes, plain), {"__module__": plain.__module__})
