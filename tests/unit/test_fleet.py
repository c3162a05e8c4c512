"""The model of a fleet: where one thing limits it, its seconds are those of a division; and nobody has a byte before it could have come."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.fleet import MODELS, Fleet, Matrix, SharedStore, read_all, relay, simulate, slice_bytes, ways

ONE = Fleet(start_spread_s=0.0)
MODEL = [Matrix((4096, 4096), 100, "rows"), Matrix((4096, 4096), 50, "columns"), Matrix((4096,), 10, "whole")]
TOTAL = sum(matrix.size_bytes for matrix in MODEL)


def test_one_node_reads_as_fast_as_its_ranks_do() -> None:
    [end] = read_all(ONE, [3.0], 8, TOTAL / 8)
    assert end == pytest.approx(3.0 + TOTAL / 8 / ONE.reader_bytes_per_s)


def test_many_nodes_share_what_the_store_gives() -> None:
    nodes = 100
    seconds = simulate(ONE, nodes, ways()["once per node"], MODEL)
    assert seconds == pytest.approx(nodes * TOTAL / ONE.store_rate)
    few_requests = replace(ONE, store_requests_per_s=100.0)
    assert few_requests.store_rate == 100 * few_requests.read_bytes
    assert simulate(few_requests, nodes, ways()["once per node"], MODEL) == pytest.approx(
        nodes * TOTAL / few_requests.store_rate
    )
    assert simulate(ONE, nodes, ways()["every rank reads all"], MODEL) == pytest.approx(8 * seconds)


def test_a_reader_that_comes_later_has_its_share_from_then_on() -> None:
    store = SharedStore(rate=10.0, limit=8.0)
    store.begin(0, 20.0)
    store.advance(1.0)  # eight bytes, at its own limit
    store.begin(1, 10.0)
    assert store.next_end() == pytest.approx(1.0 + 10 / 5)
    store.advance(store.next_end())
    assert store.end() == 1
    assert store.next_end() == pytest.approx(3.0 + 2 / 8)


def test_a_chain_hands_on_piece_by_piece() -> None:
    fleet = replace(ONE, pieces=10)
    first = TOTAL / (8 * fleet.reader_bytes_per_s)
    ends = relay(fleet, [0.0] * 5, TOTAL, 1)
    hop = TOTAL / fleet.pieces / fleet.node_bytes_per_s
    assert ends == pytest.approx([first + number * hop for number in range(5)])
    two = relay(fleet, [0.0] * 7, TOTAL, 2)
    assert max(two) == pytest.approx(two[6]) and min(two[1:]) > first


def test_a_node_that_begins_late_gets_nothing_before() -> None:
    assert relay(ONE, [0.0, 1000.0], TOTAL, 1)[1] == pytest.approx(1000 + TOTAL / ONE.node_bytes_per_s)


def test_slices_follow_the_rule_of_reads() -> None:
    """Columns of 8 KiB rows are nearer to each other than the gap that is worth a request, so their rows are read."""
    rows, columns, whole = (matrix.size_bytes for matrix in MODEL)
    assert slice_bytes(MODEL, 8) == rows / 8 + columns + whole
    far = [Matrix((16, 1 << 20), 1, "columns")]
    assert slice_bytes(far, 8) == far[0].size_bytes / 8


@pytest.mark.parametrize("name", MODELS)
def test_the_models_are_as_large_as_they_are_published(name: str) -> None:
    published = {"Llama": 141.1e9, "DeepSeek": 671.0e9}[name.split()[0]]
    assert sum(matrix.size_bytes for matrix in MODELS[name]) == pytest.approx(published, rel=0.01)
