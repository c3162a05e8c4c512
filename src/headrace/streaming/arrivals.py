"""Tensors that come in an order of somebody else's choosing, until they are asked for by name. A thread of its own waits for them; knows no library."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import closing

import torch

from headrace.errors import ReadFailed, ReadStalled, StreamClosed

Bringer = Generator[tuple[str, torch.Tensor], None, None]
"""Brings each tensor once. It runs, and is closed, in the thread of `Arrivals`; it must not refer to who asks for them."""


class Arrivals:
    """Takes from ``bring()`` in a thread, which goes on only while somebody waits for a tensor that has not come: what comes too early is held until it is asked for.

    The waiting itself is here and not in the library's own calls, so that Ctrl-C, `close` from another thread and a limit on waiting work whatever those calls do.
    After ``num_expected`` tensors the bringer runs to its end by itself. Nothing starts before the first `fetch`.
    """

    def __init__(
        self,
        bring: Callable[[], Bringer],
        *,
        num_expected: int,
        longest_wait_s: float,
        describe: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``longest_wait_s`` is how long nothing may come while somebody waits; ``describe`` says what is waited for then."""
        self._bring = bring
        self._num_expected = num_expected
        self._longest_wait_s = longest_wait_s
        self._describe = describe
        self._clock = clock
        self._changed = threading.Condition()
        self._here: dict[str, torch.Tensor] = {}
        self._num_come = 0
        self._waited_for: set[str] = set()
        self._error: BaseException | None = None
        self._is_closed = False
        self._is_over = False
        self._held_bytes = 0
        self.peak_bytes = 0
        """Most bytes that had come and were not asked for yet."""
        self.bytes_come = 0
        self._thread = threading.Thread(target=self._run, name="headrace-arrivals", daemon=True)

    def fetch(self, name: str) -> torch.Tensor:
        """Wait for the tensor called ``name`` and return it. Raises what the bringer raised, `ReadStalled`, `ReadFailed` where it ended without that tensor, `StreamClosed`."""
        with self._changed:
            if self._thread.ident is None and not self._is_closed:
                self._thread.start()
            self._waited_for.add(name)
            self._changed.notify_all()
            try:
                while name not in self._here:
                    self._check(name)
                    self._wait_for_change()
            finally:
                self._waited_for.discard(name)
            tensor = self._here.pop(name)
            self._held_bytes -= tensor.nbytes
            return tensor

    def close(self, *, patience_s: float) -> bool:
        """End the thread, drop what was not asked for, and return whether the thread has ended within ``patience_s``."""
        with self._changed:
            self._is_closed = True
            self._here.clear()
            self._held_bytes = 0
            self._changed.notify_all()
        if self._thread.ident is None:
            return True
        if self._thread is not threading.current_thread():
            self._thread.join(patience_s)
        return not self._thread.is_alive()

    # -- both sides hold the lock here

    def _check(self, name: str) -> None:
        if self._error is not None:
            raise self._error
        if self._is_closed:
            raise StreamClosed(f"Tensor {name!r} was waited for when the stream was closed.")
        if self._is_over:
            self._error = ReadFailed(
                f"Tensor {name!r} did not come.", f"The transport ended without it: {self._describe()}."
            )
            raise self._error

    def _wait_for_change(self) -> None:
        num_come, deadline = self._num_come, self._clock() + self._longest_wait_s
        while not self._changed.wait(max(deadline - self._clock(), 0.0)):
            if self._num_come != num_come or self._error is not None or self._is_closed or self._is_over:
                return
            if self._clock() >= deadline:
                self._error = ReadStalled(
                    f"No tensor has come for {self._longest_wait_s:g} s.",
                    f"The load stands: {self._describe()}.",
                    "Check the store and the network; HEADRACE_TOTAL_TIMEOUT allows more time.",
                )
                self._changed.notify_all()
                return

    # -- the thread

    def _run(self) -> None:
        try:
            with closing(self._bring()) as brought:
                while self._may_go_on():
                    item = next(brought, None)
                    if item is None:
                        break
                    self._put(*item)
                    del item  # or it would be held while nobody waits
        except BaseException as error:  # noqa: BLE001  It is raised in the consumer.
            with self._changed:
                if self._error is None and not self._is_closed:
                    self._error = error
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()

    def _may_go_on(self) -> bool:
        with self._changed:
            while True:
                if self._is_closed or self._error is not None:
                    return False
                if self._num_come >= self._num_expected or any(name not in self._here for name in self._waited_for):
                    return True
                self._changed.wait()

    def _put(self, name: str, tensor: torch.Tensor) -> None:
        with self._changed:
            self._num_come += 1
            self.bytes_come += tensor.nbytes
            if not self._is_closed:
                self._here[name] = tensor
                self._held_bytes += tensor.nbytes
                self.peak_bytes = max(self.peak_bytes, self._held_bytes)
            self._changed.notify_all()
