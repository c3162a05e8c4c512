"""One stored tensor, as a file's header describes it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored tensor.

    ``dtype`` is the safetensors spelling (``"BF16"``, ``"F8_E4M3"``, ``"F4"``); ``shape`` counts logical values, as the header does. ``file`` is the
    object's key relative to the checkpoint's root; ``start`` and ``stop`` are absolute in that file, half open.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        return self.stop - self.start
