"""Ranks that load together, as real processes over gloo, against a server that counts every byte: the same tensors, read once; one failure, raised by all."""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load, save
from transformers import AutoModelForCausalLM

import headrace
from headrace.checkpoint import Checkpoint, open_checkpoint
from headrace.compat.sglang import runai_safetensors_weights_iterator
from headrace.errors import CheckpointError, ObjectNotFound, PlacementError, RankFailed, StreamError
from headrace.settings import Settings
from headrace.storage import StoredObject
from headrace.streaming import DistributedStream, Lockstep, Scope, agreement
from headrace.streaming.processgroup import GroupLink
from headrace.streaming.ranks import Exchange
from headrace.transport.file import FileReader
from tests.engines.models import edit_config, save_model
from tests.support.fault_server import FaultServer, Script, refuse
from tests.support.rank_processes import Outcome, RankProcesses
from tests.support.stub_store import StubStore

KEY = "model.safetensors"
NUM_RANKS = 3
SOON_S = 5.0
"""Within how many seconds one rank's failure must have reached every other."""

LARGE_BYTES = 80 << 20
"""More than the 64 MiB of addresses that glibc has in hand for each thread."""

Digests = dict[str, str]


@dataclass(frozen=True, slots=True)
class Place:
    """A `FaultServer` as another process sees it: its address, and what it held when this was made."""

    url: str
    port: int
    payloads: dict[str, bytes]
    etags: dict[str, str]

    def objects(self) -> dict[str, bytes]:
        return self.payloads

    def etag(self, key: str) -> str:
        return self.etags[key]


def place_of(server: FaultServer) -> Place:
    objects = server.objects()
    return Place(server.url, server.port, objects, {key: server.etag(key) for key in objects})


def make_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    weights = {
        f"model.layers.{layer}.weight": torch.randn(256, 300, generator=generator).to(torch.bfloat16)
        for layer in range(12)
    }
    fp8 = torch.randint(0, 255, (1000, 1700), generator=generator, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return {
        "embed": torch.randn(900, 1024, generator=generator),
        **weights,
        "fp8": fp8,
        "scale": torch.tensor(0.5),
        "empty": torch.empty(0, 4),
    }


def digest(tensor: torch.Tensor) -> str:
    raw = tensor.contiguous().flatten().view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(raw.numpy().tobytes()).hexdigest()}"


# -- what the ranks do


def settings_of(**more: Any) -> Settings:
    quick = {"num_connections": 2, "read_bytes": 512 << 10, "backoff_first_s": 0.01, "max_attempts": 2}
    return Settings.from_environment({}, progress=False, **{**quick, **more})


def opened(place: Place, **more: Any) -> Checkpoint:
    store: Any = StubStore(place)  # type: ignore[arg-type]  Only what a `Place` has is used.
    return open_checkpoint(store, settings=settings_of(**more))


def load_together(
    rank: int, place: Place, memory_limit_bytes: int = 0, exchange: Exchange = "auto"
) -> tuple[Digests, int, tuple[int, ...]]:
    settings = settings_of(memory_limit_bytes=memory_limit_bytes)
    with (
        opened(place) as checkpoint,
        DistributedStream(checkpoint, lockstep=Lockstep(GroupLink()), settings=settings, exchange=exchange) as stream,
    ):
        assert stream.exchange == ("shared" if exchange == "auto" else exchange)
        found = {name: digest(tensor) for name, tensor in stream}
        return found, stream.report.bytes_read, stream.bytes_read_by_rank


def load_on_several_machines(
    rank: int, machine: str, place: Place, scope: Scope
) -> tuple[Digests, str, int, tuple[int, ...], list[int]]:
    """Load as if this rank were on ``machine``."""
    with (
        patch.object(agreement, "_host", lambda: machine),
        opened(place) as checkpoint,
        headrace.stream(checkpoint, distributed=True, scope=scope, settings=settings_of()) as stream,
    ):
        assert isinstance(stream, DistributedStream)
        found = {name: digest(tensor) for name, tensor in stream}
        received = [row.bytes_received for row in stream.report.ranks]
        return found, stream.exchange, stream.report.bytes_read, stream.bytes_read_by_rank, received


def load_in_subgroup(rank: int, place: Place, members: list[int]) -> Digests | None:
    group = dist.new_group(members)
    try:
        if rank not in members:
            return None
        with opened(place) as checkpoint, headrace.stream(checkpoint, process_group=group) as stream:
            assert isinstance(stream, DistributedStream)
            return {name: digest(tensor) for name, tensor in stream}
    finally:
        if rank in members:
            dist.destroy_process_group(group)


def load_under_a_short_timeout(rank: int, place: Place, timeout_s: float) -> Digests:
    group = dist.new_group(timeout=timedelta(seconds=timeout_s))
    try:
        with (
            opened(place) as checkpoint,
            headrace.stream(checkpoint, process_group=group, settings=settings_of()) as stream,
        ):
            return {name: digest(tensor) for name, tensor in stream}
    finally:
        dist.destroy_process_group(group)


def load_folder(rank: int, folder: str) -> Digests:
    loaded = headrace.load_state_dict(folder, distributed=True, settings=settings_of())
    return {name: digest(tensor) for name, tensor in loaded.items()}


def load_with_a_consumer_that_fails(rank: int, place: Place, failing: int) -> None:
    settings = settings_of(memory_limit_bytes=0)
    with opened(place) as checkpoint, headrace.stream(checkpoint, distributed=True, settings=settings) as stream:
        for number, _ in enumerate(stream):
            if rank == failing and number == 3:
                raise ValueError("the consumer's own")


def load_what_each_wants(rank: int, place: Place) -> None:
    with (
        opened(place) as checkpoint,
        headrace.stream(checkpoint, distributed=True, include=["embed", "fp8"][: 1 + rank]) as stream,
    ):
        dict(stream)


def load_model_together(rank: int, folder: str) -> Digests:
    model = headrace.load_model(folder, distributed=True, settings=settings_of())
    return {name: digest(value) for name, value in model.state_dict().items()}


def load_model_from_a_bucket(rank: int, cache_dir: str, place: Place) -> tuple[Digests, list[str]]:
    """Also return which objects this rank read itself, other than ranges of weights."""
    read: list[str] = []

    class Noting(StubStore):
        def read_object(self, stored: StoredObject, *, start: int = 0, stop: int | None = None) -> bytes:
            read.append(stored.key)
            return super().read_object(stored, start=start, stop=stop)

    settings = settings_of(cache_dir=Path(cache_dir))
    store: Any = Noting(place)  # type: ignore[arg-type]
    with open_checkpoint(store, settings=settings) as checkpoint:
        model = headrace.load_model(checkpoint, distributed=True, settings=settings)
        return {name: digest(value) for name, value in model.state_dict().items()}, read


def iterate_as_sglang(rank: int, files: list[str], is_distributed: bool) -> tuple[Digests, list[str]]:
    streams: list[str] = []
    for kind in (DistributedStream, headrace.TensorStream):
        original = kind.__init__

        def noted(self: Any, *args: Any, _kind: type = kind, _original: Any = original, **options: Any) -> None:
            streams.append(_kind.__name__)
            _original(self, *args, **options)

        kind.__init__ = noted  # type: ignore[method-assign]
    weights = runai_safetensors_weights_iterator(files, is_distributed, settings=settings_of())
    return {name: digest(tensor) for name, tensor in weights}, streams


def load_from_a_disk_that_fails(rank: int, folder: str, failing: int) -> Digests:
    """On one rank reads of the file's tensors come to an error of the device, as those of a bad disk or a lost network disk do."""
    whole = os.preadv

    def preadv(descriptor: int, rooms: Any, position: int) -> int:
        if rank == failing and position > 1 << 20:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return whole(descriptor, rooms, position)

    with patch.dict(FileReader.__init__.__kwdefaults__, preadv=preadv):
        return load_folder(rank, folder)


def load_with_little_memory(rank: int, place: Place, failing: int) -> Digests:
    """One rank may have only a little more memory than it has when the load begins."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    try:
        with opened(place) as checkpoint:
            if rank == failing:
                in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (in_use + (4 << 20), before[1]))
            loaded = headrace.load_state_dict(checkpoint, distributed=True, settings=settings_of())
            return {name: digest(tensor) for name, tensor in loaded.items()}
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def load_until_told_to_end(rank: int, place: Place) -> Digests:
    """As a program that ends in order when it is told to."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit("told to end by SIGTERM"))
    try:
        return load_together(rank, place)[0]
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def sum_over_ranks(rank: int) -> int:
    value = torch.tensor([rank + 1])
    dist.all_reduce(value)
    return int(value)


# -- what they must come to


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    """Three ranks that all tests share. Leaving shows that each of them ended by itself and in time."""
    with RankProcesses(NUM_RANKS, tmp_path_factory.mktemp("group")) as processes:
        yield processes


@pytest.fixture(scope="module")
def payload() -> bytes:
    return save(make_tensors())


@pytest.fixture(scope="module")
def wanted(payload: bytes) -> Digests:
    return {name: digest(tensor) for name, tensor in load(payload).items()}


@pytest.fixture
def server(payload: bytes) -> Iterator[FaultServer]:
    with FaultServer() as running:
        running.put(KEY, payload)
        yield running
        assert running.wait_until_idle()


@pytest.fixture
def bad_server(payload: bytes) -> Iterator[FaultServer]:
    """A second server with the same object, for the rank that shall fail."""
    with FaultServer() as running:
        running.put(KEY, payload)
        yield running


def assert_group_is_in_step(ranks: RankProcesses, outcomes: list[Outcome]) -> None:
    """After a load, however it ended, nothing of it is left, and the group does what it is asked next."""
    assert [outcome.threads for outcome in outcomes] == [()] * NUM_RANKS
    assert [outcome.value for outcome in ranks.run(sum_over_ranks)] == [6] * NUM_RANKS


def assert_all_end_soon(outcomes: list[Outcome]) -> None:
    """Between the first rank that raised and the last."""
    ended = [outcome.ended for outcome in outcomes]
    assert max(ended) - min(ended) < SOON_S


def assert_all_raise(outcomes: list[Outcome], *, failed: int, text: str, own: Callable[[BaseException], bool]) -> None:
    assert_all_end_soon(outcomes)
    for rank, outcome in enumerate(outcomes):
        error = outcome.error
        assert error is not None
        if rank == failed:
            assert own(error)
            continue
        assert type(error) is RankFailed
        assert error.rank == failed
        assert f"Rank {failed} failed" in str(error)
        assert text in str(error)


def body_ranges(server: FaultServer, payload: bytes) -> list[tuple[int, int]]:
    """Return the ranges of tensor bytes that were asked for, the header's left out, sorted."""
    start = 8 + int.from_bytes(payload[:8], "little")
    return sorted((sent.start, sent.stop) for sent in server.log if sent.start >= start and sent.status == 206)


@pytest.mark.parametrize("exchange", ["auto", "broadcast"])
@pytest.mark.parametrize("memory_limit_bytes", [0, 64 << 20])
def test_every_rank_gets_all_tensors_and_each_byte_is_read_once(
    ranks: RankProcesses, server: FaultServer, payload: bytes, wanted: Digests, memory_limit_bytes: int, exchange: str
) -> None:
    outcomes = ranks.run(load_together, place_of(server), memory_limit_bytes, exchange)
    assert [outcome.error for outcome in outcomes] == [None] * NUM_RANKS
    ranges = body_ranges(server, payload)
    at = 8 + int.from_bytes(payload[:8], "little")
    total = len(payload) - at
    for start, stop in ranges:
        assert start == at, "a byte was read twice, or not at all"
        at = stop
    assert at == len(payload)
    for outcome in outcomes:
        found, bytes_read, by_rank = outcome.value
        assert found == wanted
        assert list(found) == list(outcomes[0].value[0])
        assert bytes_read == sum(by_rank) == total
        assert min(by_rank) > total // 6
    assert_group_is_in_step(ranks, outcomes)


@pytest.mark.parametrize("machines", ["aab", "aba", "abc"])
@pytest.mark.parametrize("scope", ["node", "group"])
def test_each_machine_reads_every_byte_once_or_the_group_does(
    ranks: RankProcesses, server: FaultServer, payload: bytes, wanted: Digests, machines: str, scope: Scope
) -> None:
    outcomes = ranks.run(
        load_on_several_machines, place_of(server), scope, per_rank=[(machine,) for machine in machines]
    )
    assert [outcome.error for outcome in outcomes] == [None] * NUM_RANKS
    total = sum(tensor.numel() * tensor.element_size() for tensor in make_tensors().values())
    sharers = {rank: [other for other, one in enumerate(machines) if one == machines[rank]] for rank in range(3)}
    if scope == "group":
        sharers = {rank: [0, 1, 2] for rank in range(3)}
    for rank, outcome in enumerate(outcomes):
        found, exchange, bytes_read, by_rank, received = outcome.value
        assert found == wanted
        assert exchange == ("shared" if scope == "node" else "broadcast")
        assert bytes_read == sum(by_rank) == total * (len(set(machines)) if scope == "node" else 1)
        assert sum(by_rank[other] for other in sharers[rank]) == total
        assert received == [total - by_rank[other] for other in range(NUM_RANKS)]
    sent = sum(stop - start for start, stop in body_ranges(server, payload))
    assert sent == total * (len(set(machines)) if scope == "node" else 1)
    assert_group_is_in_step(ranks, outcomes)


def test_a_failure_on_one_machine_reaches_the_others(
    ranks: RankProcesses, server: FaultServer, bad_server: FaultServer
) -> None:
    bad_server.script(KEY, Script())
    bad_server.always(KEY, refuse(403))
    places = [("a", place_of(server)), ("a", place_of(server)), ("b", place_of(bad_server))]
    outcomes = ranks.run(load_on_several_machines, "node", per_rank=places)
    assert_all_raise(outcomes, failed=2, text="403", own=lambda error: "403" in str(error))
    assert_group_is_in_step(ranks, outcomes)


def test_two_ranks_of_a_larger_world(
    ranks: RankProcesses, server: FaultServer, payload: bytes, wanted: Digests
) -> None:
    outcomes = ranks.run(load_in_subgroup, place_of(server), [0, 2])
    assert [outcome.error for outcome in outcomes] == [None] * NUM_RANKS
    assert [outcome.value for outcome in outcomes] == [wanted, None, wanted]
    assert sum(stop - start for start, stop in body_ranges(server, payload)) == sum(
        tensor.numel() * tensor.element_size() for tensor in make_tensors().values()
    )
    assert_group_is_in_step(ranks, outcomes)


def test_a_folder_is_loaded_together_without_a_word_about_it(
    ranks: RankProcesses, payload: bytes, wanted: Digests, tmp_path: Path
) -> None:
    (tmp_path / KEY).write_bytes(payload)
    outcomes = ranks.run(load_folder, str(tmp_path))
    assert [outcome.value for outcome in outcomes] == [wanted] * NUM_RANKS
    assert_group_is_in_step(ranks, outcomes)


def test_a_folder_that_one_rank_does_not_have(ranks: RankProcesses, payload: bytes, tmp_path: Path) -> None:
    (tmp_path / KEY).write_bytes(payload)
    folders = [(str(tmp_path),), (str(tmp_path),), (str(tmp_path / "absent"),)]
    outcomes = ranks.run(load_folder, per_rank=folders)
    assert_all_raise(outcomes, failed=2, text="absent", own=lambda error: isinstance(error, ObjectNotFound))
    assert_group_is_in_step(ranks, outcomes)


def test_sglangs_iterator_shares_the_reading_where_it_is_asked_to(payload: bytes, tmp_path: Path) -> None:
    (tmp_path / KEY).write_bytes(payload)
    expected = {name: digest(tensor) for name, tensor in load(payload).items()}
    with RankProcesses(2, tmp_path) as ranks:
        for is_distributed in (True, False):
            outcomes = ranks.run(iterate_as_sglang, [str(tmp_path / KEY)], is_distributed)
            for outcome in outcomes:
                assert outcome.error is None, outcome.error
                found, streams = outcome.value
                assert found == expected
                assert ("DistributedStream" in streams) is is_distributed


def test_a_model_is_loaded_together(ranks: RankProcesses, tmp_path: Path) -> None:
    folder = save_model("llama-tied", tmp_path / "model")
    expected = {
        name: digest(value) for name, value in AutoModelForCausalLM.from_pretrained(folder).state_dict().items()
    }
    outcomes = ranks.run(load_model_together, str(folder))
    assert [outcome.error for outcome in outcomes] == [None] * NUM_RANKS
    assert [outcome.value for outcome in outcomes] == [expected] * NUM_RANKS
    assert_group_is_in_step(ranks, outcomes)


def test_each_node_has_one_mirror_of_the_side_files(ranks: RankProcesses, tmp_path: Path) -> None:
    """Two ranks of one node have one cache, a third on another node, without a disk in common, has its own."""
    folder = save_model("llama-tied", tmp_path / "model")
    expected = {
        name: digest(value) for name, value in AutoModelForCausalLM.from_pretrained(folder).state_dict().items()
    }
    nodes = [tmp_path / "node 0", tmp_path / "node 0", tmp_path / "node 1"]
    with FaultServer() as server:
        for path in folder.iterdir():
            server.put(path.name, path.read_bytes())
        outcomes = ranks.run(load_model_from_a_bucket, place_of(server), per_rank=[(str(node),) for node in nodes])
        assert [outcome.error for outcome in outcomes] == [None] * NUM_RANKS
        assert [outcome.value[0] for outcome in outcomes] == [expected] * NUM_RANKS
        first, second, other = [outcome.value[1] for outcome in outcomes]
        for name in ("config.json", "generation_config.json"):
            assert (first + second).count(name) == other.count(name) == 1, f"{name} comes to each node once"
    for node in set(nodes):
        [mirror] = {path.parent for path in node.rglob("config.json")}
        assert {path.name for path in mirror.iterdir()} >= {"config.json", "generation_config.json"}
        assert not list(node.rglob("*.safetensors"))
    assert_group_is_in_step(ranks, outcomes)


def test_a_model_that_does_not_fit_on_one_rank_fails_on_all(ranks: RankProcesses, tmp_path: Path) -> None:
    folder = save_model("llama-tied", tmp_path / "model")
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    edit_config(other, intermediate_size=100)
    outcomes = ranks.run(load_model_together, per_rank=[(str(folder),), (str(other),), (str(folder),)])
    assert_all_raise(outcomes, failed=1, text="mismatched", own=lambda error: isinstance(error, PlacementError))
    assert_group_is_in_step(ranks, outcomes)


def test_an_object_that_one_rank_is_refused(ranks: RankProcesses, server: FaultServer, bad_server: FaultServer) -> None:
    bad_server.script(KEY, Script())  # the header is read
    bad_server.always(KEY, refuse(403))
    places = [(place_of(server),), (place_of(bad_server),), (place_of(server),)]
    outcomes = ranks.run(load_together, per_rank=places)
    assert_all_raise(outcomes, failed=1, text="403", own=lambda error: "403" in str(error))
    assert_group_is_in_step(ranks, outcomes)


def test_a_rank_whose_read_stands_still_hears_of_anothers_failure(
    ranks: RankProcesses, server: FaultServer, bad_server: FaultServer
) -> None:
    with FaultServer() as stalling:
        stalling.put(KEY, bad_server.objects()[KEY])
        for bad, script in ((bad_server, refuse(403)), (stalling, Script(stall_after=1000))):
            bad.script(KEY, Script())  # the header is read
            bad.always(KEY, script)
        places = [(place_of(stalling),), (place_of(server),), (place_of(bad_server),)]
        outcomes = ranks.run(load_together, per_rank=places)
        assert_all_raise(outcomes, failed=2, text="403", own=lambda error: "403" in str(error))
        assert stalling.wait_until_idle()  # the read was stopped, not waited for
    assert_group_is_in_step(ranks, outcomes)


def test_a_consumer_that_fails_on_one_rank(ranks: RankProcesses, server: FaultServer) -> None:
    outcomes = ranks.run(load_with_a_consumer_that_fails, place_of(server), 0)
    assert_all_raise(
        outcomes, failed=0, text="ValueError: the consumer's own", own=lambda error: isinstance(error, ValueError)
    )
    assert_group_is_in_step(ranks, outcomes)


def test_ranks_that_see_different_versions(
    ranks: RankProcesses, server: FaultServer, bad_server: FaultServer, payload: bytes
) -> None:
    bad_server.put(KEY, payload[:-1] + bytes([payload[-1] ^ 1]))
    places = [(place_of(server),), (place_of(server),), (place_of(bad_server),)]
    outcomes = ranks.run(load_together, per_rank=places)
    assert_all_end_soon(outcomes)
    for outcome in outcomes:
        assert type(outcome.error) is StreamError
        assert "Rank 2 opened snapshot" in str(outcome.error)
    assert body_ranges(server, payload) == body_ranges(bad_server, payload) == []
    assert_group_is_in_step(ranks, outcomes)


def test_ranks_that_want_different_tensors(ranks: RankProcesses, server: FaultServer, payload: bytes) -> None:
    outcomes = ranks.run(load_what_each_wants, place_of(server))
    assert_all_end_soon(outcomes)
    for outcome in outcomes:
        assert type(outcome.error) is StreamError
        assert "Rank 1 asked for other tensors" in str(outcome.error)
    assert body_ranges(server, payload) == []
    assert_group_is_in_step(ranks, outcomes)


def test_a_slow_rank_is_not_killed_by_the_groups_timeout(
    ranks: RankProcesses, server: FaultServer, bad_server: FaultServer, wanted: Digests
) -> None:
    """One rank's bytes drip for longer than the group waits for one collective."""
    bad_server.script(KEY, Script())
    bad_server.always(KEY, Script(drip=(64 << 10, 0.15)))
    places = [(place_of(server),), (place_of(bad_server),), (place_of(server),)]
    started = time.monotonic()
    outcomes = ranks.run(load_under_a_short_timeout, 2.0, per_rank=places)
    assert [outcome.error for outcome in outcomes] == [None] * NUM_RANKS
    assert [outcome.value for outcome in outcomes] == [wanted] * NUM_RANKS
    assert time.monotonic() - started > 2.5  # or nothing was slow
    assert_group_is_in_step(ranks, outcomes)


def test_an_interrupt_on_one_rank(ranks: RankProcesses, server: FaultServer, bad_server: FaultServer) -> None:
    bad_server.script(KEY, Script())
    bad_server.always(KEY, Script(stall_after=1000))
    ranks.start(load_together, per_rank=[(place_of(server),), (place_of(bad_server),), (place_of(server),)])
    wait_until(lambda: len(bad_server.log) > 1)
    ranks.send_signal(1, signal.SIGINT)
    outcomes = [ranks.outcome(rank) for rank in range(NUM_RANKS)]
    assert_all_raise(
        outcomes, failed=1, text="KeyboardInterrupt", own=lambda error: isinstance(error, KeyboardInterrupt)
    )
    assert_group_is_in_step(ranks, outcomes)


def test_a_rank_that_is_told_to_end(ranks: RankProcesses, server: FaultServer, bad_server: FaultServer) -> None:
    bad_server.script(KEY, Script())
    bad_server.always(KEY, Script(stall_after=1000))
    places = [(place_of(server),), (place_of(server),), (place_of(bad_server),)]
    ranks.start(load_until_told_to_end, per_rank=places)
    wait_until(lambda: len(bad_server.log) > 1)
    ranks.send_signal(2, signal.SIGTERM)
    outcomes = [ranks.outcome(rank) for rank in range(NUM_RANKS)]
    assert_all_raise(outcomes, failed=2, text="told to end", own=lambda error: isinstance(error, SystemExit))
    assert_group_is_in_step(ranks, outcomes)


def test_a_rank_that_runs_out_of_memory(ranks: RankProcesses) -> None:
    with FaultServer() as large:
        large.put(KEY, save({"large": torch.zeros(LARGE_BYTES, dtype=torch.uint8)}))
        outcomes = ranks.run(load_with_little_memory, place_of(large), 1)
        assert_all_raise(outcomes, failed=1, text="memory", own=lambda error: "memory" in str(error))
    assert_group_is_in_step(ranks, outcomes)


def test_a_disk_that_fails_under_one_rank(ranks: RankProcesses, payload: bytes, tmp_path: Path) -> None:
    (tmp_path / KEY).write_bytes(payload)
    outcomes = ranks.run(load_from_a_disk_that_fails, str(tmp_path), 2)
    assert_all_raise(outcomes, failed=2, text="Input/output error", own=lambda error: "Input/output" in str(error))
    assert_group_is_in_step(ranks, outcomes)


def test_a_file_that_is_cut_short_on_one_rank(ranks: RankProcesses, payload: bytes, tmp_path: Path) -> None:
    folders = [tmp_path / str(rank) for rank in range(NUM_RANKS)]
    for rank, folder in enumerate(folders):
        folder.mkdir()
        (folder / KEY).write_bytes(payload[:-5] if rank == 0 else payload)
    outcomes = ranks.run(load_folder, per_rank=[(str(folder),) for folder in folders])
    assert_all_raise(outcomes, failed=0, text=KEY, own=lambda error: isinstance(error, CheckpointError))
    assert_group_is_in_step(ranks, outcomes)


def test_a_rank_that_is_killed(server: FaultServer, bad_server: FaultServer, tmp_path: Path) -> None:
    bad_server.script(KEY, Script())
    bad_server.always(KEY, Script(stall_after=1000))
    processes = RankProcesses(2, tmp_path)
    processes.start(load_together, per_rank=[(place_of(server),), (place_of(bad_server),)])
    wait_until(lambda: len(bad_server.log) > 1)
    killed = time.monotonic()
    processes.kill(1)
    outcome = processes.outcome(0)
    assert time.monotonic() - killed < SOON_S
    assert type(outcome.error) is RankFailed
    assert outcome.error.rank == -1
    assert "vanished while loading weights" in str(outcome.error)
    assert outcome.threads == ()
    codes = processes.end()
    assert codes[0] is not None


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
