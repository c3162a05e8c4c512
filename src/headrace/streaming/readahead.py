"""How far finished reads may be ahead of a consumer whose memory is used again. Pure: counts bytes.

Memory that a consumer has given back is at hand, and warm; memory that was never used has to be made by the system, for as much CPU time as reading from a disk's cache takes. So reads do not run on
to the memory limit before a consumer that is slower than they are. One that comes in bursts is another matter: where it had to wait although reads had been held back, more may wait for it.
"""

from __future__ import annotations

from headrace.units import MIB

FIRST_BYTES = 256 * MIB
"""A second of what one core copies would be more than this; a load of 2 GB from the page cache took 1.1 CPU seconds with it, and 1.8 without (2026-11, two cores)."""


class ReadAhead:
    """Counts what has arrived and was not handed out, and says whether to read on. Not thread safe; its stream locks.

    ``is_limited`` is False where memory is not used again: then only the memory limit holds reads back.
    """

    def __init__(self, *, is_limited: bool) -> None:
        self._is_limited = is_limited
        self._was_held = False
        self.most_bytes = FIRST_BYTES
        self.ready_bytes = 0

    def may_read_on(self) -> bool:
        """Say whether another read may begin, and remember where not."""
        if self._is_limited and self.ready_bytes >= self.most_bytes:
            self._was_held = True
            return False
        return True

    def arrived(self, num_bytes: int) -> None:
        """Count bytes that wait to be handed out."""
        self.ready_bytes += num_bytes

    def handed_out(self, num_bytes: int) -> None:
        """Count bytes that wait no longer."""
        self.ready_bytes -= num_bytes

    def consumer_waits(self) -> bool:
        """Note that the consumer waits for bytes, and say whether more may be read now than before: twice as much, where reads had been held back since it was last so."""
        if not self._was_held:
            return False
        self.most_bytes *= 2
        self._was_held = False
        return True
