"""Which parts of a buffer are free. Pure: counts bytes, touches none."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort


class ExtentMap:
    """The free extents of a buffer of ``capacity_bytes``, joined with their neighbours as they come back. Not thread safe; its owner locks.

    The lowest free extent that is long enough is taken, so that a buffer of which little is used has little of it touched.
    """

    def __init__(self, capacity_bytes: int, *, alignment: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._alignment = alignment
        self._starts = [0] if capacity_bytes else []
        self._stops = {0: capacity_bytes} if capacity_bytes else {}
        self.used_bytes = 0

    def take(self, num_bytes: int) -> int | None:
        """Return the start of a free extent of ``num_bytes``, rounded up to the alignment, and mark it used; None where none is long enough."""
        size = self.rounded(num_bytes)
        for start in self._starts:
            stop = self._stops[start]
            if stop - start >= size:
                self._remove(start)
                if start + size < stop:
                    self._add(start + size, stop)
                self.used_bytes += size
                return start
        return None

    def give_back(self, start: int, num_bytes: int) -> None:
        """Mark an extent free that `take` gave."""
        stop = start + self.rounded(num_bytes)
        self.used_bytes -= stop - start
        after = bisect_right(self._starts, start)
        if after < len(self._starts) and self._starts[after] == stop:
            stop = self._stops[stop]
            self._remove(self._starts[after])
        if after and self._stops[self._starts[after - 1]] == start:
            start = self._starts[after - 1]
            self._remove(start)
        self._add(start, stop)

    def free_extents(self) -> list[tuple[int, int]]:
        """Return the free extents, half open, in order."""
        return [(start, self._stops[start]) for start in self._starts]

    def rounded(self, num_bytes: int) -> int:
        """Return what an extent of ``num_bytes`` takes of the buffer."""
        return -(-num_bytes // self._alignment) * self._alignment

    def _add(self, start: int, stop: int) -> None:
        insort(self._starts, start)
        self._stops[start] = stop

    def _remove(self, start: int) -> None:
        del self._starts[bisect_left(self._starts, start)]
        del self._stops[start]
