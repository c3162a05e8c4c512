"""Messages between a load and its reader processes, over a socket pair: JSON, bytes that belong to it, descriptors. Knows no reads.

A message is two lengths (little-endian, 32 bits each), then that much JSON and that many bytes. Nothing is pickled: a message can make nothing run. What is secret in a
message, a signed request or a proxy's password, passes between two processes of one user and is in no argument, environment or file.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.units import MIB

_LENGTHS = struct.Struct("<II")
_MOST_BYTES = 16 * MIB
"""A longer message is not one of ours. A read of 16 MiB that is cut into single tensors of a few bytes has some hundred KiB of pieces."""
_MOST_DESCRIPTORS = 4


class ChannelClosed(ConnectionError):
    """The other side is gone, or has closed the channel."""


class Channel:
    """One end of a socket pair. One thread receives; sends of several threads are their owner's to keep apart."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: Mapping[str, Any], body: bytes = b"", descriptors: Sequence[int] = ()) -> None:
        """Send a message; ``descriptors`` arrive as the other side's own. Raises `ChannelClosed`, TimeoutError."""
        text = json.dumps(message, separators=(",", ":")).encode()
        whole = _LENGTHS.pack(len(text), len(body)) + text + body
        try:
            num_sent = socket.send_fds(self._sock, [whole], list(descriptors)) if descriptors else 0
            self._sock.sendall(memoryview(whole)[num_sent:])
        except TimeoutError:
            raise
        except OSError as error:
            raise ChannelClosed(f"the channel is closed ({error.strerror})") from error

    def can_receive(self, timeout_s: float) -> bool:
        """Wait until something has come, the end included, for at most so long."""
        poll = select.poll()  # Not select: descriptors may have large numbers.
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def receive(self) -> tuple[dict[str, Any], bytes, list[int]]:
        """Return the next message, its bytes and its descriptors, which are the caller's. Raises `ChannelClosed`."""
        try:
            head, descriptors, _, _ = socket.recv_fds(self._sock, _LENGTHS.size, _MOST_DESCRIPTORS)
            for descriptor in descriptors:
                os.set_inheritable(descriptor, False)
            if not head:
                raise ChannelClosed("the other side has closed the channel")
            text_bytes, body_bytes = _LENGTHS.unpack(head + self._receive_all(_LENGTHS.size - len(head)))
            if text_bytes + body_bytes > _MOST_BYTES:
                raise ChannelClosed("what came is no message")
            message = json.loads(self._receive_all(text_bytes))
            return message, self._receive_all(body_bytes), descriptors
        except ChannelClosed:
            raise
        except OSError as error:
            raise ChannelClosed(f"the channel is closed ({error.strerror})") from error

    def close(self) -> None:
        """Close this end: the other side receives `ChannelClosed`, and so does a thread that waits at this one. May be called twice."""
        with contextlib.suppress(OSError):  # Closed already, here or there.
            self._sock.shutdown(socket.SHUT_RDWR)  # Closing alone would wait for a thread that polls.
        self._sock.close()

    def _receive_all(self, num_bytes: int) -> bytes:
        found = bytearray(num_bytes)
        view, filled = memoryview(found), 0
        while filled < num_bytes:
            more = self._sock.recv_into(view[filled:])
            if not more:
                raise ChannelClosed("the channel was closed within a message")
            filled += more
        return bytes(found)


def channel_pair(*, timeout_s: float | None = None) -> tuple[Channel, socket.socket]:
    """Return one end of a new channel, whose sends and receives wait for at most ``timeout_s`` a step, and the socket that becomes the other."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    ours.settimeout(timeout_s)
    return Channel(ours), theirs
