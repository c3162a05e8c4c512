"""The reader processes of one load, seen from the load: starts them, lends their connections, notices when one dies, ends them. Knows no reads.

They are started as programs of their own (no fork of this process runs on), and find the load's memory by descriptors that they are sent. One that dies is replaced,
as often as there are processes; what its connections were at is done again by whoever lent them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from headrace.errors import InvalidSetting
from headrace.settings import TransportSettings
from headrace.transport.channel import Channel, ChannelClosed, channel_pair
from headrace.transport.sharing import NUM_SLOTS, SharedPlace, StatusPage

logger = logging.getLogger("headrace")

_SEND_TIMEOUT_S = 5.0
"""A process that takes no message from its control channel for so long is stuck, and is ended."""
_END_TIMEOUT_S = 5.0
_START_TIMEOUT_S = 20.0
"""A process that has not begun by then is not waited for any longer."""
_READS_BEFORE_START = 4
"""So many reads are carried out by the load itself while its processes start, which hides their start; with more, a load over many connections would have few left for them."""
_PROGRAM = (
    "import sys; root = sys.argv.pop(1); sys.path.insert(0, root); import headrace; sys.path.remove(root); "
    "from headrace.transport.reader_process import main; main()"
)
"""``python -m headrace.transport.reader_process``, with the folder that the package was imported from, on the path for that one import only."""
_NODES = Path("/sys/devices/system/node")


class ReaderProcess:
    """One process, and the control channel to it. Thread safe."""

    def __init__(self, settings: TransportSettings, place: str = "") -> None:
        interface, cpus = parse_place(place)
        self._lock = threading.Lock()
        self._control, theirs = channel_pair(timeout_s=_SEND_TIMEOUT_S)
        self.num_lent = 0
        """Connections that are lent; guarded by the owner's lock."""
        self._is_ready = False
        self._is_gone = False
        self._started = time.monotonic()
        self._known: set[int] = set()
        self._num_slots = 0
        status = StatusPage.make_file()
        try:
            self.status = StatusPage(status)
            self._process = _start(theirs)
            begin = {"kind": "begin", "settings": asdict(settings), "interface": interface, "cpus": cpus}
            self._send(begin, status)
        except BaseException:
            self._control.close()
            raise
        finally:
            theirs.close()
            os.close(status)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_gone(self) -> bool:
        """Whether the process is known to have ended."""
        return self._is_gone

    @property
    def is_starting(self) -> bool:
        """Whether the process may be ready soon."""
        return not self._is_ready and not self._is_gone and time.monotonic() - self._started < _START_TIMEOUT_S

    def wait_for_news(self, timeout_s: float) -> bool:
        """Wait until `is_ready` may have another answer, and say whether it may."""
        try:
            return self._control.can_receive(timeout_s)
        except ValueError:  # The channel was closed.
            return True

    def is_ready(self) -> bool:
        """Whether the process has begun and lives, as far as is known. Waits for nothing."""
        with self._lock:
            if self._is_gone or self._is_ready:
                return not self._is_gone
            try:
                if not self._control.can_receive(0):
                    return False
                self._is_ready = self._control.receive()[0]["kind"] == "ready"
            except (ChannelClosed, ValueError):
                self._end_now()
            return self._is_ready and not self._is_gone

    def open_connection(self) -> ReaderConnection:
        """Return a new connection of this process; close it after use. Raises `ChannelClosed` where the process is gone."""
        channel, theirs = channel_pair()
        try:
            with self._lock:
                slot = self._num_slots % NUM_SLOTS
                self._num_slots += 1
                self._send({"kind": "connection", "slot": slot}, theirs.fileno())
        except BaseException:
            channel.close()
            raise
        finally:
            theirs.close()
        return ReaderConnection(self, channel, slot)

    def show(self, places: Sequence[SharedPlace | None]) -> None:
        """Send the descriptors of files that this process has not been sent yet. Raises `ChannelClosed`."""
        with self._lock:
            for place in places:
                if place is not None and place.number not in self._known:
                    self._known.add(place.number)
                    message = {"kind": "region", "number": place.number, "size_bytes": place.size_bytes}
                    self._send(message, place.descriptor)

    def cancel(self, slot: int) -> None:
        """Stop the read that a connection is at."""
        with self._lock:
            if not self._is_gone:
                with contextlib.suppress(ChannelClosed):  # The process has ended, so it reads nothing.
                    self._send({"kind": "cancel", "slot": slot})

    def kill(self) -> None:
        """End the process at once and return when it has ended: nothing that it was given is written to from then on."""
        with self._lock:
            self._end_now()

    def end(self) -> None:
        """Let the process end, by its own will if it has one."""
        with self._lock:
            self._control.close()
            if not self._is_gone:
                try:
                    self._process.wait(_END_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    self._process.kill()
                    self._process.wait()
                self._is_gone = True

    @property
    def returncode(self) -> int | None:
        """How the process ended: below 0, the signal that ended it."""
        return self._process.returncode

    def _send(self, message: Mapping[str, Any], *descriptors: int) -> None:
        try:
            self._control.send(message, descriptors=descriptors)
        except OSError as error:
            self._end_now()  # It is gone, or stuck.
            raise ChannelClosed("the reader process took no message") from error

    def _end_now(self) -> None:
        if not self._is_gone:
            self._process.kill()
            self._process.wait()
            self._is_gone = True


class ReaderConnection:
    """A connection of a reader process: the channel to the thread that has it, and its place on the status page."""

    def __init__(self, process: ReaderProcess, channel: Channel, slot: int) -> None:
        self.process, self.channel, self.slot = process, channel, slot

    def close(self) -> None:
        """Let the thread end. May be called twice."""
        self.channel.close()


class Fleet:
    """The reader processes of a pool: ``num_processes`` of them, started at once, or by `start` where they are ``on_demand``. Thread safe."""

    def __init__(self, settings: TransportSettings, num_processes: int, *, on_demand: bool = False) -> None:
        self._settings = _share_of(settings, num_processes)
        self._places = [place.strip() for place in settings.reader_places.split(",")]
        self._num_processes = num_processes
        self._changed = threading.Condition(threading.Lock())
        self._processes: list[ReaderProcess] = []
        # Those who read already when processes are asked for need not wait for them.
        self._num_reads_left_here = sys.maxsize if on_demand else _READS_BEFORE_START
        self._num_started = 0
        self._is_over = False
        self.num_lost = 0
        """Processes that died before they were told to."""
        self.why_started = ""
        """Why processes were started that had been on demand, for people."""
        for place in self._places:
            parse_place(place)
        if not on_demand:
            self._start_missing()

    def start(self, why: str) -> None:
        """Start processes that were on demand. Waits for none of them."""
        with self._changed:
            if not self._is_over and not self.has_started:
                self.why_started = why
                self._start_missing()

    @property
    def has_started(self) -> bool:
        """Whether processes have been started, though all may have died since."""
        return self._num_started > 0

    @property
    def num_processes(self) -> int:
        """How many there are to be."""
        return self._num_processes

    def lend(self, is_cancelled: Callable[[], bool]) -> ReaderConnection | None:
        """Return a connection of the process with the fewest lent; None where the caller is to carry out a read itself: no process is left, or all are still starting.

        While they start, all but a few callers wait; none where they were started on demand.
        """
        if not self.has_started:
            return None
        with self._changed:
            while not self._is_over and not is_cancelled():
                self._bury()
                connection = self._try_to_lend()
                if connection is not None or not any(process.is_starting for process in self._processes):
                    return connection
                if self._num_reads_left_here:
                    self._num_reads_left_here -= 1
                    return None
                self._changed.wait(0.25)
            return None

    def _try_to_lend(self) -> ReaderConnection | None:
        ready = [process for process in self._processes if process.is_ready()]
        is_starting = any(process.is_starting for process in self._processes)
        for process in sorted(ready, key=lambda one: one.num_lent):
            if process.num_lent >= self._settings.num_connections and is_starting:
                continue  # The next to be ready takes its share.
            try:
                connection = process.open_connection()
            except ChannelClosed:
                continue
            process.num_lent += 1
            return connection
        return None

    def take_back(self, connection: ReaderConnection) -> None:
        """Close a connection that was lent."""
        connection.close()
        with self._changed:
            connection.process.num_lent -= 1

    def end(self) -> None:
        """End all processes and return when they have ended. Connections that are still lent find their channel closed. May be called twice."""
        with self._changed:
            self._is_over = True
            processes, self._processes = self._processes, []
            self._changed.notify_all()
        for process in processes:
            process.end()

    @property
    def pids(self) -> list[int]:
        """The processes that are thought to live."""
        with self._changed:
            return [process.pid for process in self._processes if not process.is_gone]

    def _bury(self) -> None:
        """Forget the processes that are gone, and start others in their place while that may help."""
        for process in [one for one in self._processes if one.is_gone]:
            self._processes.remove(process)
            process.end()
            self.num_lost += 1
            logger.warning(
                "Reader process %d ended by itself (%s); its reads are done again.",
                process.pid,
                _how(process.returncode),
            )
        self._start_missing()

    def _start_missing(self) -> None:
        while len(self._processes) < self._num_processes and self._num_started < 2 * self._num_processes:
            place = self._places[self._num_started % len(self._places)]
            self._num_started += 1
            try:
                process = ReaderProcess(self._settings, place)
                self._processes.append(process)
                threading.Thread(target=self._await, args=(process,), name="headrace-reader-start", daemon=True).start()
            except OSError as error:  # No more processes, descriptors or memory, or no Python program: threads read.
                logger.warning(
                    "A reader process could not be started (%s); threads of this process read instead.", error
                )

    def _await(self, process: ReaderProcess) -> None:
        """Wake those who wait for a process when it is ready, or never will be."""
        while process.is_starting:
            if process.wait_for_news(0.25):
                process.is_ready()
        with self._changed:
            self._changed.notify_all()


def parse_place(place: str) -> tuple[str, list[int]]:
    """Return the interface and the processors of ``INTERFACE``, ``@NODE``, ``INTERFACE@NODE`` or nothing. Raises `InvalidSetting` for what is not there."""
    interface, _, node = place.partition("@")
    if interface and interface not in {name for _, name in socket.if_nameindex()}:
        names = ", ".join(name for _, name in socket.if_nameindex())
        raise InvalidSetting(
            f"reader_places names the interface {interface!r}, which is absent.", f"There are {names}."
        )
    if not node:
        return interface, []
    try:
        text = (_NODES / f"node{int(node)}" / "cpulist").read_text()
    except (OSError, ValueError) as error:
        raise InvalidSetting(
            f"reader_places names the NUMA node {node!r}, which is absent.", f"Nodes are folders in {_NODES}."
        ) from error
    allowed = os.sched_getaffinity(0)
    return interface, [number for number in _numbers(text) if number in allowed]


def _numbers(text: str) -> list[int]:
    """Return the numbers of a list as the kernel writes it: ``0-3,8``."""
    found: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found += range(int(first), int(last or first) + 1)
    return found


def _share_of(settings: TransportSettings, num_processes: int) -> TransportSettings:
    """Return what one process of ``num_processes`` may use."""
    return replace(
        settings,
        num_connections=-(-settings.num_connections // num_processes),
        bandwidth_bytes_per_s=-(-settings.bandwidth_bytes_per_s // num_processes),
        readers=0,
        reader_places="",
    )


def _start(control: socket.socket) -> subprocess.Popen[bytes]:
    """Start the program, which finds this package where this process did. Raises OSError."""
    descriptor = control.fileno()
    command = [sys.executable or "python3", "-P", "-c", _PROGRAM, str(Path(__file__).parents[2])]
    return subprocess.Popen([*command, str(descriptor)], pass_fds=[descriptor], stdin=subprocess.DEVNULL)


def _how(returncode: int | None) -> str:
    if returncode is not None and returncode < 0:
        return f"signal {-returncode}"
    return f"status {returncode}"
