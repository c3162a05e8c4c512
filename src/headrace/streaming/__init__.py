"""Entries wanted become tensors in memory: selection, plan, memory, stream, progress, report. Knows no engine."""

from typing import TYPE_CHECKING

from headrace.lazynames import lazy_names
from headrace.progress import LoadProgress
from headrace.streaming.formats import ExtraConfig, LoadFormat, parse_extra_config
from headrace.streaming.plan import Piece, Plan, PlannedRead, plan_reads
from headrace.streaming.report import LoadReport
from headrace.streaming.selection import Wanted, select_entries

if TYPE_CHECKING:
    from headrace.streaming.display import ProgressDisplay
    from headrace.streaming.loading import Source, load_state_dict, open
    from headrace.streaming.lockstep import Lockstep
    from headrace.streaming.memory import (
        Memory,
        PrivateMemory,
        SharedMemory,
        available_memory_bytes,
        default_memory_limit,
    )
    from headrace.streaming.opening import open_source
    from headrace.streaming.processgroup import Distributed, find_link
    from headrace.streaming.ranks import DistributedStream, Scope
    from headrace.streaming.source import TensorSource
    from headrace.streaming.stream import StreamOptions, TensorStream
    from headrace.streaming.tensors import torch_dtype, torch_shape

__all__ = [
    "Distributed",
    "DistributedStream",
    "ExtraConfig",
    "LoadFormat",
    "LoadProgress",
    "LoadReport",
    "Lockstep",
    "Memory",
    "Piece",
    "Plan",
    "PlannedRead",
    "PrivateMemory",
    "ProgressDisplay",
    "Scope",
    "SharedMemory",
    "Source",
    "StreamOptions",
    "TensorSource",
    "TensorStream",
    "Wanted",
    "available_memory_bytes",
    "default_memory_limit",
    "find_link",
    "load_state_dict",
    "open",
    "open_source",
    "parse_extra_config",
    "plan_reads",
    "select_entries",
    "torch_dtype",
    "torch_shape",
]

# A plan on paper needs no torch; what moves tensors imports it, so it is imported when it is first used. The function `headrace.stream` is not among the names: a module here has its name.
_HOMES = {
    "Distributed": "processgroup",
    "DistributedStream": "ranks",
    "Lockstep": "lockstep",
    "Memory": "memory",
    "PrivateMemory": "memory",
    "ProgressDisplay": "display",
    "Scope": "ranks",
    "SharedMemory": "memory",
    "Source": "loading",
    "StreamOptions": "stream",
    "TensorSource": "source",
    "TensorStream": "stream",
    "available_memory_bytes": "memory",
    "default_memory_limit": "memory",
    "find_link": "processgroup",
    "load_state_dict": "loading",
    "open": "loading",
    "open_source": "opening",
    "torch_dtype": "tensors",
    "torch_shape": "tensors",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES, __all__)
