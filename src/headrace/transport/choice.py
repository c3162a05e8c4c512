"""Who carries out a load's reads: threads of its own process, or reader processes, how many, and from when on. Pure.

What the numbers are made of was measured on two cores (2026-11, `benchmarks/readers.py` and `benchmarks/interpreter.py`). Over TLS a gigabyte takes threads 1.2 to 1.4 CPU seconds and
two processes half a second more; all but a tenth of that is decryption, for which no thread needs the interpreter's lock. But where more than four threads decrypt at a time, they wait for that lock, and one
interpreter hands on less, not more (`headrace.transport.turns`). So few processors are full before one interpreter is at its end; many are not, and a quick network would then leave them idle.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.settings import TransportSettings
from headrace.units import format_bytes

LEAST_PROCESSORS = 8
"""With fewer, a machine is at its end when one interpreter is, which fills four with decryption."""
LEAST_BYTES = 8_000_000_000
"""A load of less is over in four seconds at the rate where processes begin to be worth their start."""
PROCESSORS_EACH = 4
"""A reader process that is given what it can take fills so many: 2 GB/s at 1.9 CPU seconds each."""
MOST_PROCESSES = 8
CONNECTIONS_EACH = 2
"""A process with one connection alone saves nobody a lock."""


@dataclass(frozen=True, slots=True)
class ReaderChoice:
    """How many reader processes a load has, 0 for threads alone, and why; ``why`` is for people."""

    num_processes: int
    why: str
    is_on_demand: bool = False
    """Whether threads begin, and the processes are started once threads are seen to fill processors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """What decides where ``readers`` is auto."""

    endpoint: str
    is_local: bool
    num_bytes: int
    """To be read in all."""
    num_processors: int
    """For this load: a rank has its share of those that its process may use."""


def choose_readers(settings: TransportSettings, given: Circumstances) -> ReaderChoice:
    """Return who reads: what ``settings.readers`` says, and where it says auto, what the circumstances do.

    How quick the network is nobody knows before the weights come: headers are too short to tell. So auto never begins with processes. Where processors are many, bytes are many and come over TLS, it
    begins with threads, into memory that processes can fill, too, and leaves the rest to what is measured then (`headrace.transport.busyness`).
    """
    if given.is_local:
        return ReaderChoice(0, "the files are on this machine")
    if settings.readers != "auto":
        return ReaderChoice(min(int(settings.readers), settings.num_connections), "as set")
    if not given.endpoint.startswith("https"):
        return ReaderChoice(0, "auto: no TLS")
    if given.num_processors < LEAST_PROCESSORS:
        return ReaderChoice(0, f"auto: TLS, {_processors(given.num_processors)}")
    if given.num_bytes < LEAST_BYTES:
        return ReaderChoice(0, f"auto: TLS, only {format_bytes(given.num_bytes)}")
    most = min(MOST_PROCESSES, given.num_processors // PROCESSORS_EACH, settings.num_connections // CONNECTIONS_EACH)
    if most < 2:
        return ReaderChoice(0, f"auto: TLS, {settings.num_connections} connections")
    why = f"auto: TLS, {_processors(given.num_processors)}; {most} processes once reading fills two"
    return ReaderChoice(most, why, is_on_demand=True)


def _processors(number: int) -> str:
    return "1 processor" if number == 1 else f"{number} processors"
