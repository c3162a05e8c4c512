"""Transport: moves one byte range of one object into given pieces of memory, with deadlines, retries and hedges. Knows no tensors."""

from headrace.transport.choice import Circumstances, ReaderChoice, choose_readers
from headrace.transport.file import FileReader
from headrace.transport.flight import PoolCounters, ReadJob
from headrace.transport.http import HttpReader
from headrace.transport.opening import fetch, is_local, open_pool, open_reader
from headrace.transport.pool import ReaderPool
from headrace.transport.processpool import ProcessPool
from headrace.transport.reader import RangeRead, RangeReader, ReadCounters
from headrace.transport.sharing import SharedPlace, SharedPlaces
from headrace.transport.surroundings import Surroundings, TlsContexts

__all__ = [
    "Circumstances",
    "FileReader",
    "HttpReader",
    "PoolCounters",
    "ProcessPool",
    "RangeRead",
    "RangeReader",
    "ReadCounters",
    "ReadJob",
    "ReaderChoice",
    "ReaderPool",
    "SharedPlace",
    "SharedPlaces",
    "Surroundings",
    "TlsContexts",
    "choose_readers",
    "fetch",
    "is_local",
    "open_pool",
    "open_reader",
]
