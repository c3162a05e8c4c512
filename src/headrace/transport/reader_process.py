"""The main program of a reader process: carries out the reads of one load into memory that both see, a thread for each connection. Knows no store and no tensors.

    python -m headrace.transport.reader_process DESCRIPTOR

DESCRIPTOR is a socket: the control channel. The load sends over it how to read, the memory to fill, and a channel for each connection. Requests are described, and
refusals judged, by the load: credentials, their renewal and the dialect of the store stay there. The process ends when the control channel does, or its parent.

It imports neither torch nor an SDK, so that it starts in a tenth of a second.
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

from headrace.errors import HeadraceError
from headrace.settings import TransportSettings
from headrace.storage import FileRange, HttpRange, ObjectStore, Refusal, StoredObject, Verdict
from headrace.transport.bandwidth import Bandwidth
from headrace.transport.channel import Channel, ChannelClosed
from headrace.transport.failure import clear_frames
from headrace.transport.http import HttpReader
from headrace.transport.pace import Pace
from headrace.transport.reader import RangeRead
from headrace.transport.sharing import StatusPage
from headrace.transport.surroundings import Surroundings, dial
from headrace.transport.told import error_of, range_of, tell_error, tell_refusal

_LOOK_FOR_PARENT_EVERY_S = 0.5
"""The end of the channel says it at once, unless a fork of the parent has it open, too."""


class _Regions:
    """The memory to fill: files by their number, each mapped once. Thread safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._mapped: dict[int, mmap.mmap] = {}

    def add(self, number: int, descriptor: int, size_bytes: int) -> None:
        mapped = mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED)
        os.close(descriptor)
        with self._changed:
            self._mapped[number] = mapped
            self._changed.notify_all()

    def views(self, pieces: Sequence[Sequence[int]]) -> list[memoryview]:
        """Return the memory of pieces, each a number, an offset and a size; a number below 0 stands for memory whose bytes are sent back."""
        views = []
        for number, offset, size_bytes in pieces:
            if number < 0:
                views.append(memoryview(bytearray(size_bytes)))
                continue
            with self._changed:  # The file was sent before the read, over the other channel.
                self._changed.wait_for(partial(self._mapped.__contains__, number))
                views.append(memoryview(self._mapped[number])[offset : offset + size_bytes])
        return views


class _AskingStore:
    """The part of an `ObjectStore` that a reader needs, answered by the load. Belongs to one connection's thread."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.facts: dict[str, Any] = {}
        self.described: HttpRange | None = None
        """The first request of a read, which came with it."""

    @property
    def endpoint(self) -> str:
        return str(self.facts["endpoint"])

    def uri_of(self, key: str) -> str:
        return str(self.facts["uri"])

    def describe_range(self, stored: StoredObject, start: int, stop: int) -> FileRange | HttpRange:
        described, self.described = self.described, None
        if described is not None:
            return described
        return range_of(self._ask({"kind": "describe", "start": start, "stop": stop})["range"])

    def judge(self, stored: StoredObject, refusal: Refusal) -> Verdict:
        answer = self._ask({"kind": "judge", **tell_refusal(refusal)}, refusal.body)
        error = cast(HeadraceError, error_of(answer["error"], number=answer["number"]))
        return Verdict(error, retry=answer["retry"], wait_s=answer["wait_s"])

    def _ask(self, message: Mapping[str, Any], body: bytes = b"") -> dict[str, Any]:
        self._channel.send(message, body)
        answer = self._channel.receive()[0]
        if answer["kind"] == "raised":
            raise error_of(answer["error"], number=answer["number"])
        return answer


class _TellingPace(Pace):
    """Tells the load that the store throttles: how many reads are under way is decided there."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(1, time.monotonic)
        self._channel = channel

    def refused(self, wait_s: float | None = None) -> None:
        self._channel.send({"kind": "refused", "wait_s": wait_s})


class _Connection:
    """One connection: carries out the reads that come over its channel, one after the other, until the channel ends."""

    def __init__(self, process: ReaderProcess, channel: Channel, slot: int) -> None:
        self._process, self._channel, self._slot = process, channel, slot
        self._store = _AskingStore(channel)
        self.reader = HttpReader(
            cast(ObjectStore, self._store),
            process.settings,
            replace(process.surroundings, wait=self._wait),
            pace=_TellingPace(channel),
            bandwidth=process.bandwidth,
            on_bytes=self._note,
        )

    def run(self) -> None:
        try:
            while True:
                self._read_once()
        except ChannelClosed:  # The load has no more reads for this connection, or is gone.
            pass
        finally:
            self.reader.close()
            self._channel.close()
            self._process.forget(self._slot)

    def _read_once(self) -> None:
        asked, _, _ = self._channel.receive()
        self._store.facts = asked
        self._store.described = None if asked["range"] is None else range_of(asked["range"])
        pieces = self._process.regions.views(asked["pieces"])
        sent_back = [view for view, piece in zip(pieces, asked["pieces"], strict=True) if piece[0] < 0]
        stored = StoredObject(asked["key"], asked["size_bytes"], asked["version"])
        answer: dict[str, Any] = {"kind": "done"}
        try:
            self.reader.read(RangeRead(stored, asked["start"], asked["stop"]), pieces)
        except ChannelClosed:
            raise
        except BaseException as error:  # noqa: BLE001 (every error is the load's to hear)
            clear_frames(error)
            answer, sent_back = {"kind": "failed", "error": tell_error(error)}, []
        body = b"".join(sent_back)
        for piece in pieces:
            piece.release()  # From here on nothing in this process can write there.
        self._note(0)
        self._channel.send(answer, body)

    def _note(self, num_bytes: int) -> None:
        self._process.status.write(self._slot, self.reader.counters)

    def _wait(self, event: threading.Event, seconds: float) -> bool:
        self._note(0)
        return event.wait(seconds)


class ReaderProcess:
    """The process: what its connections share, and the loop over the control channel."""

    def __init__(self, control: Channel) -> None:
        self._control = control
        self._connections: dict[int, _Connection] = {}
        self._parent = os.getppid()
        self.regions = _Regions()

    def run(self) -> None:
        """Begin as the load says, and do what it says until the channel or the parent ends; returns then."""
        try:
            begin, _, descriptors = self._control.receive()
            self._begin(begin, descriptors[0])
            self._control.send({"kind": "ready"})
            while self._parent_lives():
                if self._control.can_receive(_LOOK_FOR_PARENT_EVERY_S):
                    self._obey(*self._control.receive())
        except ChannelClosed:
            pass

    def forget(self, slot: int) -> None:
        """Note that a connection has ended."""
        self._connections.pop(slot, None)

    def _begin(self, begin: Mapping[str, Any], status: int) -> None:
        if begin["cpus"]:
            os.sched_setaffinity(
                0, begin["cpus"]
            )  # Memory comes from the node of the processor that first writes to it.
        self.settings = TransportSettings(**begin["settings"])
        connect = partial(dial, interface=begin["interface"]) if begin["interface"] else dial
        self.surroundings = Surroundings(connect=connect)
        limit = self.settings.bandwidth_bytes_per_s
        self.bandwidth = Bandwidth(limit, time.monotonic) if limit else None
        self.status = StatusPage(status)
        os.close(status)

    def _parent_lives(self) -> bool:
        return os.getppid() == self._parent

    def _obey(self, message: Mapping[str, Any], _: bytes, descriptors: Sequence[int]) -> None:
        kind, slot = message["kind"], message.get("slot", -1)
        if kind == "region":
            self.regions.add(message["number"], descriptors[0], message["size_bytes"])
        elif kind == "connection":
            channel = Channel(socket.socket(fileno=descriptors[0]))
            self._connections[slot] = connection = _Connection(self, channel, slot)
            threading.Thread(target=connection.run, name=f"headrace-connection-{slot}", daemon=True).start()
        elif kind == "cancel":
            cancelled = self._connections.get(slot)
            if cancelled is not None:
                cancelled.reader.cancel()


def main() -> None:
    """Run a reader process over the descriptor that the arguments name."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # A terminal sends it to the parent, too, which decides.
    ReaderProcess(Channel(socket.socket(fileno=int(sys.argv[1])))).run()
    os._exit(0)  # Whatever the connections' threads are at: nobody waits for them any more.


if __name__ == "__main__":
    main()
