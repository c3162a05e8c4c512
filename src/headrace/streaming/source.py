"""What every stream of tensors can do, whichever way the bytes come. Engines and commands need no more of it."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Protocol, Self

import torch

from headrace.streaming.report import LoadReport


class TensorSource(Protocol):
    """An iterator of ``(name, tensor)`` and a context manager. Each tensor is handed out once, and stays valid for as long as anything refers to its storage."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what has not been handed out yet, in order; the end closes the stream."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

    def take(self, name: str) -> torch.Tensor:
        """Wait for one tensor and hand it out, in any order. Raises the load's first error, `StreamClosed`, or `StreamError` for a name that is not to be had."""

    @property
    def names_left(self) -> list[str]:
        """The names that have not been handed out, in order."""

    @property
    def report(self) -> LoadReport:
        """The account so far; final after the end or `close`."""

    def close(self) -> None:
        """Stop all reads and free what was not handed out. May be called twice, from any thread."""
