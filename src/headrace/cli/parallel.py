"""The ranks of `headrace serve --tp N`: N processes of this machine that compute one model together. Where they come from, how they find each other, and how they end.

This process is rank 0, which serves. The others are its children, or, under a launcher such as torchrun, which has started all of them, its siblings. Either way each has a connection
to rank 0 over a Unix socket, whose closing ends it, however rank 0 ended; the group for tensors is on the loopback device.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from headrace.errors import InvalidSetting

if TYPE_CHECKING:
    from headrace.cli.serve import ServeOptions
    from headrace.serving.backend import LoadedModel
    from headrace.serving.engine import TextEngine
    from headrace.serving.followers import Followers
    from headrace.streaming.report import LoadReport

T = TypeVar("T")

_END_S = 5.0
"""How long a process may take to end once it was told to."""
_GONE_S = 2.0
"""How long a process may take to be gone once its connection has closed."""
_GROUP_TIMEOUT_S = 2 * 3600.0
"""For one collective: longer than a pass over any prompt. A rank that is gone is noticed at once, by its connection."""
_PROGRAM = (
    "import sys; root = sys.argv.pop(1); sys.path.insert(0, root); import headrace; sys.path.remove(root); "
    "from headrace.cli.follower import main; main()"
)
"""``python -m headrace.cli.follower``, with the folder that the package was imported from, on the path for that one import only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """This process among the ranks."""

    rank: int
    num_ranks: int
    is_launched: bool
    """Whether a launcher has started all ranks, and said so in the environment."""
    rendezvous: str = "env://"
    """Where ranks find each other, as `torch.distributed.init_process_group` takes it."""


def find_place(num_ranks: int, environment: Mapping[str, str]) -> Place:
    """Return this process's place: what a launcher says, else rank 0. Raises `InvalidSetting` for a launcher that started other ranks than ``num_ranks`` on this machine."""
    world = environment.get("WORLD_SIZE", "")
    if "RANK" not in environment or world in ("", "1"):
        return Place(rank=0, num_ranks=num_ranks, is_launched=False)
    rank, local = environment["RANK"], environment.get("LOCAL_WORLD_SIZE", world)
    if world != str(num_ranks) or local != world or not rank.isdigit():
        raise InvalidSetting(
            f"--tp {num_ranks} does not go with the launcher that started this process.",
            f"Its environment says rank {rank} of {world}, {local} on this machine; --tp wants {num_ranks} ranks, all on one machine.",
            f"Start it with torchrun --standalone --nproc-per-node {num_ranks}, or without a launcher.",
        )
    return Place(rank=int(rank), num_ranks=num_ranks, is_launched=True)


def parallel_options(options: ServeOptions) -> dict[str, Any]:
    """Return the keywords of `headrace.load_model` with which each rank gets its part. Ranks share the reading unless the extra config says otherwise or another library reads."""
    from transformers.distributed import DistributedConfig

    from headrace.streaming.formats import LoadFormat, parse_extra_config

    can_share = options.load_format in (LoadFormat.AUTO, LoadFormat.HEADRACE)
    shares = can_share and parse_extra_config(options.extra_config).distributed is not False
    return {"distributed_config": DistributedConfig(tp_size=options.num_ranks), "distributed": shares}


def threads_of_rank(num_ranks: int, environment: Mapping[str, str]) -> int:
    """Return how many threads a rank computes with: its share of the CPUs, at least one, unless OMP_NUM_THREADS says how many."""
    from headrace.serving.hardware import num_compute_threads

    said = environment.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(said) if said.isdigit() and int(said) else num_compute_threads(num_ranks=num_ranks)


class LocalRanks:
    """Rank 0's side. `start`, then `tell_order` once it is known what to load, `wait_ready`, `make_engine`, and `end` whatever happened. Not thread safe but for `end`."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._num_threads = 1
        self._children: _Children | None = None
        self._followers: Followers | None = None

    def start(self, options: ServeOptions) -> None:
        """Start the other ranks where no launcher has, and join them all in a group. Raises `InvalidSetting` for a device that not every rank can have."""
        from headrace.serving.followers import Followers

        place = self._place
        if place.is_launched:
            self._join(place, options.device)
            connections = _accept(place.num_ranks)
            self._followers = Followers(connections, end_processes=lambda at_once: None)
            return
        children = self._children = _Children(place.num_ranks, options.device)
        followers = self._followers = Followers(
            children.connections, how_ended=children.how_ended, end_processes=children.end
        )
        followers.during(lambda: self._join(replace(place, rendezvous=children.rendezvous), options.device))

    def during(self, work: Callable[[], T]) -> T:
        """Return what ``work`` returns; see `Followers.during`."""
        return self._others.during(work)

    def tell_order(self, options: ServeOptions) -> None:
        """Let the other ranks load what this one is about to: what could come out differently there is decided in ``options``. The key to the server is none of their business."""
        quiet = replace(options.settings, progress=False)
        self._others.tell(replace(options, api_key=None, settings=quiet))

    def wait_ready(self, report: LoadReport | None) -> LoadReport | None:
        """Wait until every rank has its part, and return ``report`` with a row for each. Raises what the first one to fail raised."""
        ready = self._others.wait_ready()
        if self._children is not None:
            forget_rendezvous(self._children.rendezvous)
        return None if report is None else with_ranks(report, [one.report for one in ready])

    def make_engine(self, loaded: LoadedModel) -> TextEngine:
        """Return the engine of all ranks. It ends them when it is closed."""
        from headrace.serving.parallel_engine import ParallelEngine
        from headrace.streaming.processgroup import GroupLink

        return ParallelEngine(
            loaded.model,
            loaded.tokenizer,
            followers=self._others,
            link=GroupLink(),
            leave=_leave_group,
            num_threads=self._num_threads,
        )

    def end(self) -> bool:
        """End what is left of the other ranks, and return whether no thread of this process waits for them any more."""
        if self._followers is None:
            if self._children is not None:
                self._children.end(at_once=True)
            return True
        self._followers.end(at_once=True)
        return not self._followers.has_left_work

    def _join(self, place: Place, device: str) -> None:
        self._num_threads = join_group(place, device)

    @property
    def _others(self) -> Followers:
        assert self._followers is not None, "start comes first"
        return self._followers


def with_ranks(report: LoadReport, others: list[LoadReport | None]) -> LoadReport:
    """Return rank 0's account with a row for each rank. Ranks that shared the reading have told each other; of those that each read its slices, the sums are taken here. Pure."""
    from headrace.streaming.report import RankReport

    accounts = [report, *(one for one in others if one is not None)]
    if report.ranks or not (report.num_files and report.knows_requests) or len(accounts) <= len(others):
        return report
    rows = tuple(
        RankReport(
            rank=rank,
            bytes_read=one.bytes_read,
            bytes_received=0,
            seconds_reading=one.seconds,
            seconds_waiting=0.0,
        )
        for rank, one in enumerate(accounts)
    )
    return replace(
        report,
        ranks=rows,
        bytes_wanted=sum(one.bytes_wanted for one in accounts),
        bytes_read=sum(one.bytes_read for one in accounts),
        num_requests=sum(one.num_requests for one in accounts),
        num_retries=sum(one.num_retries for one in accounts),
        num_hedges=sum(one.num_hedges for one in accounts),
        num_connections=sum(one.num_connections for one in accounts),
    )


def join_group(place: Place, device: str) -> int:
    """Join the ranks' process group, on the device that is this rank's, and return how many threads it computes with.

    Raises `InvalidSetting` where ``device`` is none that each rank can have one of. With CUDA, rank n has device n, and NCCL for what is there; not yet run on GPUs.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    # Transformers finds the rank's device by it.
    os.environ["LOCAL_RANK"] = str(place.rank)
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Transformers would take a device that is there.
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    check_rank_device(device, place.num_ranks, num_devices=torch.cuda.device_count())
    num_threads = threads_of_rank(place.num_ranks, os.environ)
    torch.set_num_threads(num_threads)
    on_cuda = device != "cpu" and torch.cuda.is_available()
    if on_cuda:
        torch.cuda.set_device(place.rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
        init_method=place.rendezvous,
        rank=place.rank,
        world_size=place.num_ranks,
        timeout=timedelta(seconds=_GROUP_TIMEOUT_S),
    )
    return num_threads


def forget_rendezvous(rendezvous: str) -> None:
    """Remove the file over which ranks have found each other, and the folder that was made for it."""
    shutil.rmtree(Path(rendezvous.removeprefix("file://")).parent, ignore_errors=True)


def check_rank_device(device: str, num_ranks: int, *, num_devices: int) -> None:
    """Raise `InvalidSetting` where not every rank can have a device of its own: of one that is named, or more ranks than the ``num_devices`` CUDA devices. Pure."""
    if device not in ("auto", "cpu", "cuda"):
        raise InvalidSetting(
            f"--device {device} does not go with --tp {num_ranks}.",
            "Each rank has a device of its own: rank 0 the first, rank 1 the second.",
            "Give --device cuda or cpu; CUDA_VISIBLE_DEVICES says which devices there are.",
        )
    if device != "cpu" and num_ranks > num_devices and (device == "cuda" or num_devices):
        raise InvalidSetting(
            f"--tp {num_ranks} wants {num_ranks} CUDA devices, and this machine shows {num_devices}.",
            "Each rank computes on a device of its own.",
            "Give a smaller --tp, or --device cpu.",
        )


def follow_launched(place: Place, device: str) -> NoReturn:
    """Be one of the other ranks of a launcher until rank 0 needs it no more, and end the process. What is wrong rank 0 says."""
    from headrace.cli.follower import end_process, follow_rank_0, quieten

    quieten()
    num_threads = join_group(place, device)
    end_process(follow_rank_0(_connect(place.rank), lambda: num_threads))


class _Children:
    """The processes of ranks from 1 on, started here, and the connections to them."""

    def __init__(self, num_ranks: int, device: str) -> None:
        self.rendezvous = f"file://{tempfile.mkdtemp(prefix='headrace-ranks-')}/rendezvous"
        self.connections: dict[int, Connection] = {}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        try:
            for rank in range(1, num_ranks):
                place = Place(rank=rank, num_ranks=num_ranks, is_launched=False, rendezvous=self.rendezvous)
                self._start(place, device)
        except BaseException:
            self.end(at_once=True)
            raise

    def how_ended(self, rank: int) -> str:
        """Return in a sentence how the process of a rank ended, whose connection has closed."""
        try:
            code = self._processes[rank].wait(_GONE_S)
        except subprocess.TimeoutExpired:
            return "Its process has closed its connection, and hangs."
        return (
            f"Its process was killed by {signal.Signals(-code).name}."
            if code < 0
            else f"Its process exited with {code}."
        )

    def end(self, at_once: bool) -> None:
        """Return when no process is left. May be called twice."""
        for process in self._processes.values():
            if not at_once:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_END_S)
            process.kill()
        for process in self._processes.values():
            process.wait()
        forget_rendezvous(self.rendezvous)

    def _start(self, place: Place, device: str) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable or "python3", "-P", "-c", _PROGRAM, str(Path(__file__).parents[2])]
            # A session of its own: Ctrl-C is for rank 0, which lets requests end.
            self._processes[place.rank] = subprocess.Popen(
                [*command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        connection = self.connections[place.rank] = Connection(ours.detach())
        connection.send((place, device))


def _accept(num_ranks: int) -> dict[int, Connection]:
    """Return a connection to every rank that a launcher has started; each calls `_connect`. In the abstract namespace no file is left behind, and a key keeps others out."""
    address, key = f"\0headrace-{os.getpid()}-{secrets.token_hex(8)}", secrets.token_bytes(32)
    connections: dict[int, Connection] = {}
    with Listener(address, "AF_UNIX", backlog=num_ranks, authkey=key) as listener:
        _tell_all((address, key))
        while len(connections) < num_ranks - 1:
            connection = listener.accept()
            connections[connection.recv()] = connection
    return connections


def _connect(rank: int) -> Connection:
    address, key = _tell_all(None)
    connection = Client(address, "AF_UNIX", authkey=key)
    connection.send(rank)
    return connection


def _tell_all(value: Any) -> Any:
    """Return rank 0's value on every rank."""
    import torch.distributed as dist

    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def _leave_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
