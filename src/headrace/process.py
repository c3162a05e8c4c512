"""The process that something was made in. Threads, connections and collectives do not survive a fork, and a lock that one of them held stays locked in the child."""

from __future__ import annotations

import os

from headrace.errors import UsageError


class HomeProcess:
    """The process that made this object. What has locks asks it before it takes one, and gives up nothing in a child but its own references."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether the caller runs in that process."""
        return os.getpid() == self._pid

    def check(self, what: str) -> None:
        """Raise `UsageError` in any other process; ``what`` begins the message: ``A stream``."""
        if not self.is_here:
            raise UsageError(
                f"{what} was made in process {self._pid} and is used in its child {os.getpid()}.",
                "Threads and connections do not survive a fork.",
                "Open the checkpoint in the process that reads it.",
            )
