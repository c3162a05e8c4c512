"""Entries wanted become tensors in memory: selection, plan, memory, stream, progress, report. Knows no engine."""

from headrace.progress import LoadProgress
from headrace.streaming.display import ProgressDisplay
from headrace.streaming.loading import Source, load_state_dict, open, stream
from headrace.streaming.memory import Memory, PrivateMemory, SharedMemory, available_memory_bytes, default_memory_limit
from headrace.streaming.plan import Piece, Plan, PlannedRead, plan_reads
from headrace.streaming.report import LoadReport
from headrace.streaming.selection import Wanted, select_entries
from headrace.streaming.stream import StreamOptions, TensorStream
from headrace.streaming.tensors import torch_dtype, torch_shape

__all__ = [
    "LoadProgress",
    "LoadReport",
    "Memory",
    "Piece",
    "Plan",
    "PlannedRead",
    "PrivateMemory",
    "ProgressDisplay",
    "SharedMemory",
    "Source",
    "StreamOptions",
    "TensorStream",
    "Wanted",
    "available_memory_bytes",
    "default_memory_limit",
    "load_state_dict",
    "open",
    "plan_reads",
    "select_entries",
    "stream",
    "torch_dtype",
    "torch_shape",
]
