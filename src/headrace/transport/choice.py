"""Who carries out a load's reads: threads of its own process, or reader processes, and how many. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.settings import TransportSettings


@dataclass(frozen=True, slots=True)
class ReaderChoice:
    """How many reader processes a load has, 0 for threads alone, and why; ``why`` is for people."""

    num_processes: int
    why: str


def choose_readers(settings: TransportSettings, *, endpoint: str, is_local: bool) -> ReaderChoice:
    """Return who reads from ``endpoint``: what ``settings.readers`` says, and threads where it says auto.

    Threads, by what was measured on two cores (2026-11, `benchmarks/readers.py`): two processes took 0.4 CPU seconds a gigabyte more over TLS, and were quicker at some
    numbers of connections and slower at others. One process of threads cannot use many cores for ever, but where it ends has not been measured.
    """
    if is_local:
        return ReaderChoice(0, "the files are on this machine")
    if settings.readers != "auto":
        return ReaderChoice(min(int(settings.readers), settings.num_connections), "as set")
    return ReaderChoice(0, "auto, TLS" if endpoint.startswith("https") else "auto, no TLS")
