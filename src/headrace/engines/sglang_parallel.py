"""What SGLang knows of its ranks and of its arguments, as far as loading needs it. Written against SGLang 0.5.23."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sglang.srt.distributed.parallel_state import model_parallel_is_initialized
from sglang.srt.runtime_context import get_context, get_model, get_parallel

from headrace.streaming.processgroup import GroupLink


def find_link(load_group: object) -> GroupLink | None:
    """Return the link to the other ranks of this one's tensor-parallel group, over gloo; None where it is alone, or is to load alone (``load_group`` None)."""
    if load_group is None or not model_parallel_is_initialized():
        return None
    group = get_parallel().tp_group
    return GroupLink(group.cpu_group) if group.world_size > 1 else None


def num_local_ranks() -> int:
    """Return how many ranks of this machine load at the same time."""
    if not model_parallel_is_initialized():
        return 1
    parallel = get_parallel()
    return int(-(-parallel.world_group.world_size * max(parallel.dp_size, 1) // max(parallel.nnodes, 1)))


def published_extra_config(load_formats: frozenset[str]) -> Mapping[str, Any]:
    """Return the extra configuration that SGLang was started with; empty where it was started with another load format, or there is none."""
    if not get_context().is_config_namespace_published("model"):
        return {}
    model = get_model()
    if str(model.load_format).lower() not in load_formats:
        return {}
    text = model.model_loader_extra_config
    found: Any = json.loads(text) if isinstance(text, str) else text
    return found if isinstance(found, Mapping) else {}


def published_checksum() -> str | None:
    """Return what ``--model-checksum`` says; None where nothing."""
    if not get_context().is_config_namespace_published("model"):
        return None
    found: str | None = get_model().model_checksum
    return found
