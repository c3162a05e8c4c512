"""Pauses Python's cyclic garbage collector while hundreds of thousands of small objects are made that all stay.

Measured with a checkpoint of 208,000 tensors (2026-11-30, 2 cores): opening and planning took 9 CPU seconds with the collector paused, 17 to 20 without.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the collector; what was so before is so again afterwards."""
    with _collector(enabled=False):
        yield


@contextmanager
def collector_running() -> Iterator[None]:
    """Let the collector run within a pause."""
    with _collector(enabled=True):
        yield


@contextmanager
def _collector(*, enabled: bool) -> Iterator[None]:
    was_enabled = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        yield
    finally:
        (gc.enable if was_enabled else gc.disable)()
