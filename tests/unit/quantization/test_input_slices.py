"""Ranks that see some features each round them as the whole input would be rounded, and ask one another only where they must."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.support.shared_largest import SharedLargest

from headrace.quantization.inputs import (
    FP8_PER_TOKEN,
    FP8_STATIC,
    INT8_PER_TOKEN,
    MXFP4_GROUPS_NEAREST,
    MXFP8_GROUPS,
    fp8_groups,
    nvfp4_groups,
)
from headrace.quantization.rounding import describe_inputs, round_inputs
from headrace.quantization.scheme import InputQuantization

K = 320
ROUNDINGS = [
    FP8_STATIC,
    FP8_PER_TOKEN,
    replace(FP8_PER_TOKEN, granularity="tensor"),
    INT8_PER_TOKEN,
    replace(INT8_PER_TOKEN, symmetric=False),
    replace(INT8_PER_TOKEN, granularity="group", group_size=64),
    fp8_groups(128),
    fp8_groups(128, power_of_two="up"),
    nvfp4_groups(),
    nvfp4_groups(32, divisor=True),
    MXFP4_GROUPS_NEAREST,
    MXFP8_GROUPS,
]


@pytest.mark.parametrize("starts", [(0, 128), (0, 100, 200), (0, 7), (0, 160, 320 - 16)])
@pytest.mark.parametrize("inputs", ROUNDINGS, ids=describe_inputs)
def test_parts_are_rounded_as_the_whole_is(inputs: InputQuantization, starts: tuple[int, ...]) -> None:
    x = torch.randn(2, 5, K, generator=torch.Generator().manual_seed(1)) * torch.logspace(-2, 2, K)
    stored = None if inputs.is_dynamic else torch.tensor(0.03)
    whole = round_inputs(x, inputs, stored)
    ranks = SharedLargest(starts, K)
    parts = ranks.run(lambda part, features: round_inputs(x[..., features], inputs, stored, None, part))
    assert torch.cat(parts, dim=-1).equal(whole)
    size = inputs.group_size if inputs.granularity == "group" else None
    asks = inputs.is_dynamic if size is None else any(start % size for start in starts)
    assert ranks.num_asked == asks
    assert all(ranks.run(lambda part, _: part.asks_others(inputs) == asks))


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_ranks_ask_alike_when_there_are_few_tokens_or_none(num_tokens: int) -> None:
    x = torch.randn(num_tokens, K)
    parts = SharedLargest((0, 100), K).run(lambda part, at: round_inputs(x[..., at], FP8_PER_TOKEN, None, None, part))
    assert torch.cat(parts, dim=-1).equal(round_inputs(x, FP8_PER_TOKEN, None))
