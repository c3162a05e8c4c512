"""Entries wanted become tensors in memory: selection, plan, memory, stream, progress, report. Knows no engine."""

from headrace.progress import LoadProgress
from headrace.streaming.display import ProgressDisplay
from headrace.streaming.formats import ExtraConfig, LoadFormat, parse_extra_config
from headrace.streaming.loading import Source, load_state_dict, open, stream
from headrace.streaming.lockstep import Lockstep
from headrace.streaming.memory import Memory, PrivateMemory, SharedMemory, available_memory_bytes, default_memory_limit
from headrace.streaming.opening import open_source
from headrace.streaming.plan import Piece, Plan, PlannedRead, plan_reads
from headrace.streaming.processgroup import Distributed, find_link
from headrace.streaming.ranks import DistributedStream, Scope
from headrace.streaming.report import LoadReport
from headrace.streaming.selection import Wanted, select_entries
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
    "stream",
    "torch_dtype",
    "torch_shape",
]
