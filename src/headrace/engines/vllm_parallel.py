"""What vLLM knows of its ranks, as far as loading needs it. Written against vLLM 0.32.0."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.parallel_state import (
    get_node_count,
    get_pp_group,
    get_tp_group,
    get_world_group,
    model_parallel_is_initialized,
)
from vllm.model_executor.models.utils import PPMissingLayer

from headrace.streaming.processgroup import GroupLink


def find_link() -> GroupLink | None:
    """Return the link to the other ranks of this one's tensor-parallel group, over gloo; None where it is alone."""
    if not model_parallel_is_initialized():
        return None
    group = get_tp_group()
    return GroupLink(group.cpu_group) if group.world_size > 1 else None


def num_local_ranks(parallel: Any) -> int:
    """Return how many workers of this machine load at the same time."""
    if parallel is not None:
        return int(parallel.local_world_size * max(parallel.data_parallel_size_local, 1))
    if not model_parallel_is_initialized():
        return 1
    return int(-(-get_world_group().world_size // get_node_count()))


def layers_of_other_stages(model: torch.nn.Module | None) -> tuple[str, ...]:
    """Return the prefixes, in the model's names, of what other pipeline stages hold."""
    if model is None or not model_parallel_is_initialized() or get_pp_group().world_size == 1:
        return ()
    return tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, PPMissingLayer))
