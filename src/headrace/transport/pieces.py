"""Where the bytes of one read go: a cursor over pieces of memory that counts what has arrived. Pure; receives nothing itself."""

from __future__ import annotations

from collections.abc import Sequence


class PieceCursor:
    """The place in ``pieces`` (writable byte views, in file order) where the next byte of a read goes.

    Belongs to one thread. It refers to the memory for as long as it lives, so its owner drops it when the read ends.
    """

    __slots__ = ("_index", "_offset", "_pieces", "num_filled", "size_bytes")

    def __init__(self, pieces: Sequence[memoryview], size_bytes: int) -> None:
        self._pieces = [piece.cast("B") for piece in pieces if piece.nbytes]
        self._index = 0
        self._offset = 0
        self.num_filled = 0
        """Bytes that have arrived and stay: the next one is asked for at the read's start plus this."""
        self.size_bytes = size_bytes
        room = sum(len(piece) for piece in self._pieces)
        if room != size_bytes:
            raise ValueError(f"a read of {size_bytes} bytes was given {room} bytes of memory")
        if any(piece.readonly for piece in self._pieces):
            raise ValueError("a piece of memory is read-only")

    @property
    def num_left(self) -> int:
        return self.size_bytes - self.num_filled

    def room(self, most_bytes: int) -> memoryview:
        """Return where the next bytes go: up to ``most_bytes``, not beyond the end of the piece. Only while something is left."""
        piece = self._pieces[self._index]
        stop = self._offset + most_bytes
        return piece if not self._offset and stop >= len(piece) else piece[self._offset : stop]

    def rooms(self, most_pieces: int, most_bytes: int) -> list[memoryview]:
        """Return where the next bytes go, as a list for a scattered read."""
        rooms: list[memoryview] = []
        offset = self._offset
        for piece in self._pieces[self._index : self._index + most_pieces]:
            room = piece[offset : offset + most_bytes]
            rooms.append(room)
            most_bytes -= len(room)
            offset = 0
            if not most_bytes:
                break
        return rooms

    def advance(self, num_bytes: int) -> None:
        """Count ``num_bytes`` that have been written where `room` or `rooms` said."""
        self.num_filled += num_bytes
        self._offset += num_bytes
        while self._index < len(self._pieces) and self._offset >= len(self._pieces[self._index]):
            self._offset -= len(self._pieces[self._index])
            self._index += 1


def scatter(source: memoryview, pieces: Sequence[memoryview]) -> None:
    """Copy ``source`` over ``pieces``, which have its size in all."""
    start = 0
    for piece in pieces:
        piece.cast("B")[:] = source[start : start + piece.nbytes]
        start += piece.nbytes
