"""Transport: moves one byte range of one object into given pieces of memory, with deadlines, retries and hedges. Knows no tensors."""

from headrace.transport.file import FileReader
from headrace.transport.flight import PoolCounters, ReadJob
from headrace.transport.http import HttpReader
from headrace.transport.opening import fetch, open_pool, open_reader
from headrace.transport.pool import ReaderPool
from headrace.transport.reader import RangeRead, RangeReader, ReadCounters
from headrace.transport.surroundings import Surroundings, TlsContexts

__all__ = [
    "FileReader",
    "HttpReader",
    "PoolCounters",
    "RangeRead",
    "RangeReader",
    "ReadCounters",
    "ReadJob",
    "ReaderPool",
    "Surroundings",
    "TlsContexts",
    "fetch",
    "open_pool",
    "open_reader",
]
