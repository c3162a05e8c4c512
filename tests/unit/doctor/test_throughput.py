"""How fast bytes come: what is read, what the rates mean, and that a measurement ends."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from headrace.doctor.finding import State
from headrace.doctor.throughput import Bounds, Rate, cut, examine_throughput, judge_rates, measure
from headrace.doctor.world import World
from headrace.errors import HeadraceError
from headrace.settings import Settings, TransportSettings
from headrace.storage import StoredObject, open_store
from headrace.transport import RangeRead, Surroundings

from .fakes import Ticks


def rate(num_connections: int, megabytes: float, seconds: float = 1.0) -> Rate:
    return Rate(num_connections=num_connections, num_bytes=int(megabytes * 1e6), seconds=seconds)


def test_reads_are_cut_as_a_load_cuts_them() -> None:
    one, two = StoredObject("a", 25, "v"), StoredObject("b", 10, "v")
    assert cut([one, two], 10) == [
        RangeRead(one, 0, 10),
        RangeRead(one, 10, 20),
        RangeRead(one, 20, 25),
        RangeRead(two, 0, 10),
    ]


def test_the_time_of_a_load_is_told() -> None:
    finding = judge_rates([rate(1, 50), rate(8, 200)], 2 * 10**9)
    assert (finding.state, finding.what) == (State.OK, "200 MB/s over 8 connections.")
    assert ("1 connection", "50 MB/s (50 MB in 1.00 s)") in finding.details
    assert ("the load", "2 GB would take about 10.0 s") in finding.details


@pytest.mark.parametrize(
    ("many", "limit", "advice"),
    [
        (110, 0, "8 bring 1.1 times what 1 does: the network, or what the store gives to one client, is the limit"),
        (300, 0, "8 bring 3.0 times what 1 does"),
        (790, 0, "may bring more"),
        (110, 120_000_000, "the limit of 120 MB/s (HEADRACE_BANDWIDTH_LIMIT) is reached"),
    ],
)
def test_what_more_connections_bring(many: float, limit: int, advice: str) -> None:
    finding = judge_rates([rate(1, 100), rate(8, many)], 0, limit=limit)
    assert advice in dict(finding.details)["connections"]


def test_a_slow_store_is_a_warning_with_what_to_do() -> None:
    finding = judge_rates([rate(1, 1), rate(8, 2)], 10**9)
    assert (finding.state, finding.what) == (State.WARNING, "Weights come at 2 MB/s over 8 connections.")
    assert "same region" in finding.mend
    limited = judge_rates([rate(1, 2), rate(8, 2)], 0, limit=2_000_000)
    assert "HEADRACE_BANDWIDTH_LIMIT" in limited.why


def test_no_byte_at_all_is_a_failure() -> None:
    finding = judge_rates([rate(1, 0), rate(8, 0, 3.0)], 10**9)
    assert (finding.state, finding.what) == (State.FAILED, "No byte came in 3.00 s.")
    assert "MTU" in finding.mend


def test_of_little_nothing_can_be_said(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(bytes(1000))
    store = open_store(tmp_path, settings=Settings())
    objects = store.list_level().objects
    finding = examine_throughput(store, objects, TransportSettings(), World(), load_bytes=1000)
    assert (finding.state, finding.what) == (
        State.SKIPPED,
        "There are 1 kB to read, too few to tell how fast they come.",
    )


def test_real_files_are_read_within_the_bounds(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(bytes(3_000_000))
    store = open_store(tmp_path, settings=Settings())
    transport = TransportSettings(num_connections=3, read_bytes=500_000)
    bounds = Bounds(seconds=20.0, num_bytes=8_000_000)
    before = threading.active_count()
    finding = examine_throughput(
        store, store.list_level().objects, transport, World(), load_bytes=3_000_000, bounds=bounds
    )
    assert finding.state is State.OK
    assert [label for label, _ in finding.details] == [
        "1 connection",
        "3 connections",
        "the load",
        "note",
        "connections",
    ]
    assert threading.active_count() == before
    reads = cut(store.list_level().objects, 500_000)
    found = measure(store, reads, transport, World(), bounds)
    # What is under way when the bytes are up may still come in.
    assert 8_000_000 <= found.num_bytes <= 8_000_000 + 4 * 500_000


def test_a_measurement_ends_with_its_time(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(bytes(2_000_000))
    store = open_store(tmp_path, settings=Settings())
    reads = cut(store.list_level().objects, 1_000_000)
    # A second goes by whenever somebody looks at the clock.
    world = World(surroundings=Surroundings(clock=Ticks(1.0)))
    found = measure(store, reads, TransportSettings(), world, Bounds(seconds=200.0, num_bytes=10**15))
    assert 0 < found.num_bytes < 10**15


def test_a_read_that_fails_is_the_finding(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(bytes(2_000_000))
    store = open_store(tmp_path, settings=Settings())
    objects = store.list_level().objects
    path.write_bytes(bytes(1_500_000))
    finding = examine_throughput(store, objects, TransportSettings(num_connections=1), World(), load_bytes=1)
    assert finding.state is State.FAILED
    with pytest.raises(HeadraceError):
        measure(store, cut(objects, 10**6), TransportSettings(), World(), Bounds())
