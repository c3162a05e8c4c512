"""The switch that stops a reader: it wakes a thread that waits for a socket or for time to pass. Knows no HTTP.

A blocked ``recv`` is woken by ``socket.socket.shutdown`` on the descriptor: ``close`` does not wake it, and ``SSLSocket.shutdown`` drops the TLS layer
under the reading thread, so that ciphertext could land in the caller's memory.
"""

from __future__ import annotations

import contextlib
import socket
import threading

from headrace.errors import Cancelled


class StopSwitch:
    """Stops one reader for good. `throw` may be called from any thread; the rest belongs to the reader's own."""

    def __init__(self) -> None:
        self.event = threading.Event()
        """Set when the switch is thrown: what a wait for time to pass waits on."""
        self._lock = threading.Lock()
        self._watched: socket.socket | None = None

    def throw(self) -> None:
        """Stop the reader: whatever it waits for ends at once, and `check` raises from now on."""
        self.event.set()
        with self._lock:
            if self._watched is not None:
                with contextlib.suppress(OSError):  # Not connected any more: nobody waits for it.
                    socket.socket.shutdown(self._watched, socket.SHUT_RDWR)

    def check(self) -> None:
        """Raise `Cancelled` if the switch was thrown."""
        if self.event.is_set():
            raise Cancelled("The read was stopped.", "Its owner closed the stream, or another read had failed.")

    def watch(self, sock: socket.socket) -> None:
        """Name the socket that the reader is about to wait for. Raises `Cancelled` if the switch was thrown."""
        with self._lock:
            self._watched = sock
        self.check()  # After the lock: either `throw` sees the socket, or this sees the event.

    def close(self, sock: socket.socket) -> None:
        """Close a socket, under the lock, so that `throw` cannot shut down another one that got the same descriptor."""
        with self._lock:
            if self._watched is sock:
                self._watched = None
            sock.close()
