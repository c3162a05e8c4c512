"""Keys and values reach an attention function rounded where a checkpoint wants that, and untouched elsewhere."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headrace.errors import UnsupportedQuantization
from headrace.quantization.attention import KvRounding, install_kv, rounding_attention
from headrace.quantization.rounding import round_kv

E4M3 = KvRounding(format="e4m3")
NVFP4 = KvRounding(format="nvfp4", group_size=16)
Q, K, V = torch.randn(3, 1, 2, 5, 32, generator=torch.Generator().manual_seed(6)).unbind()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.o_proj = nn.Linear(2, 2)


def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> tuple[Any, ...]:
    """Return what it was given."""
    return query, key, value, mask, options


@pytest.mark.parametrize("rounding", [E4M3, NVFP4])
def test_keys_and_values_are_rounded_by_their_own_scales(rounding: KvRounding) -> None:
    attention = Attention()
    install_kv(attention, rounding)
    attention.get_parameter("k_scale").data.fill_(0.03)
    attention.get_parameter("v_scale").data.fill_(0.01)
    query, key, value, mask, options = rounding_attention(attend)(attention, Q, K, V, "mask", scaling=2)
    assert query is Q and mask == "mask" and options == {"scaling": 2}
    assert torch.equal(key, round_kv(K, rounding.format, rounding.group_size, torch.tensor(0.03)))
    assert torch.equal(value, round_kv(V, rounding.format, rounding.group_size, torch.tensor(0.01)))
    assert not torch.equal(key, K) and not torch.equal(value, V)
    # A cache that holds rounded values is rounded again at the next token.
    again = rounding_attention(attend)(attention, Q, key, value, None)
    assert torch.equal(again[1], key) and torch.equal(again[2], value)


def test_scales_that_are_not_loaded_are_one() -> None:
    attention = Attention()
    install_kv(attention, E4M3)
    _, key, _, _, _ = rounding_attention(attend)(attention, Q, K, V, None)
    assert torch.equal(key, K.to(torch.float8_e4m3fn).float())


def test_other_modules_are_left_alone() -> None:
    _, key, value, _, _ = rounding_attention(attend)(Attention(), Q, K, V, None)
    assert key is K and value is V
    assert rounding_attention(attend).__name__ == "attend"


def test_scales_are_made_as_they_are_stored_and_never_cast() -> None:
    attention = Attention()
    install_kv(attention, E4M3, device="meta", dtype=torch.float32, shape=(2, 1, 1))
    attention.to_empty(device="cpu")
    scales = torch.tensor([0.03, 0.07]).reshape(2, 1, 1)
    attention.load_state_dict({"k_scale": scales, "v_scale": scales}, strict=False)
    attention.half()
    assert torch.equal(attention.get_parameter("k_scale"), scales)
    assert attention.o_proj.weight.dtype == torch.float16
    assert isinstance(attention, Attention)
    assert (type(attention).__name__, type(attention).__module__) == ("Attention", Attention.__module__)
    copied = copy.deepcopy(attention)
    copied.get_parameter("k_scale").data.fill_(9)
    assert torch.equal(attention.get_parameter("k_scale"), scales) and type(copied) is type(attention)
    assert set(attention.state_dict()) == {"k_scale", "v_scale", "o_proj.weight", "o_proj.bias"}


@pytest.mark.parametrize(("format", "group_size"), [("int8", None), ("nvfp4", None), ("e4m3", 16)])
def test_what_is_not_known_is_refused(format: str, group_size: int | None) -> None:
    with pytest.raises(UnsupportedQuantization, match=f"{format!r} with groups of {group_size}"):
        KvRounding(format=format, group_size=group_size)
