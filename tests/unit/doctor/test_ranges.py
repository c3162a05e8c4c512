"""Which bytes are asked for, and which version nobody has. What servers answer is tested against one that misbehaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.doctor.finding import State
from headrace.doctor.ranges import examine_condition, examine_range, middle_of, other_version
from headrace.doctor.world import World
from headrace.settings import Settings, TransportSettings
from headrace.storage import Uri, open_store

from .fakes import FakeStore


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (1, (0, 1)),
        (2, (1, 2)),
        (3, (1, 3)),
        (4096, (1, 4096)),
        (5000, (452, 4548)),
        (10**9, (499_997_952, 500_002_048)),
    ],
)
def test_the_range_is_neither_the_whole_nor_the_beginning(size: int, expected: tuple[int, int]) -> None:
    start, stop = middle_of(size)
    assert (start, stop) == expected
    assert 0 <= start < stop <= size


@pytest.mark.parametrize(
    ("version", "other"),
    [
        ('"abc"', '"00000000000000000000000000000000"'),
        ('W/"abc"', 'W/"00000000000000000000000000000000"'),
        ("1700000000000000", "1"),
        ("modified Tue, 14 Nov 2023 22:13:20 GMT", "modified Thu, 01 Jan 1970 00:00:01 GMT"),
    ],
)
def test_a_version_that_nobody_has_is_of_the_same_kind(version: str, other: str) -> None:
    assert other_version(version) == other


def test_files_are_read_and_compared_by_their_numbers(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(bytes(range(200)) * 100)
    store = open_store(tmp_path, settings=Settings())
    stored = store.stat("m.safetensors")
    assert examine_range(store, stored, TransportSettings(), World()).state is State.OK
    assert examine_condition(store, stored, TransportSettings(), World()).state is State.OK
    (tmp_path / "m.safetensors").write_bytes(b"another")
    finding = examine_range(store, stored, TransportSettings(), World())
    assert finding.state is State.FAILED


def test_what_has_no_condition_is_not_asked() -> None:
    hub = FakeStore({"m.safetensors": 9}, uri=Uri("hf", "org/name", ""), version="sha")
    finding = examine_condition(hub, hub.stat("m.safetensors"), TransportSettings(), World())  # type: ignore[arg-type]
    assert (finding.state, "never change" in finding.what) == (State.SKIPPED, True)
    plain = FakeStore({"m.safetensors": 9}, version="")
    finding = examine_condition(plain, plain.stat("m.safetensors"), TransportSettings(), World())  # type: ignore[arg-type]
    assert finding.state is State.SKIPPED
