"""Simulates a fleet that starts at once from one bucket prefix: seconds until the last node has its weights, for four ways to divide the reading. Measures nothing.

    python benchmarks/fleet.py                       # both models, 1 to 1000 nodes; prints a Markdown result
    python benchmarks/fleet.py --write               # the same, and writes it to benchmarks/results/
    python benchmarks/fleet.py --store-gbits 200 --requests 20000 --nodes 1 10 100

It is a discrete-event model. An event is a node that begins, a reader that has all its bytes, or a piece that has reached a node from another; between events every reader of the store
goes at one rate: its own limit, or an equal share of what the store gives. What is assumed is in `Fleet`, each number with where it is from, and in the result. The same model, given the
speed of one process that `benchmarks/ranks.py` measured, is compared with what that measured of two and four.
"""

from __future__ import annotations

import argparse
import datetime
import heapq
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from headrace.checkpoint import Entry
from headrace.engines.readings import Region, plain_reading
from headrace.settings import Settings

RESULTS = Path(__file__).resolve().parent / "results"
GAP_BYTES = Settings().transport.gap_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The assumptions. Bytes and seconds."""

    ranks_per_node: int = 8
    node_bytes_per_s: float = 100e9 / 8
    """A node's network card: 100 Gbit/s."""
    process_bytes_per_s: float = 1.35e9
    """What one process takes from the store, however many connections it has: measured with client and server on the same two cores."""
    connection_bytes_per_s: float = 100e6
    """What large stores give one connection."""
    connections_per_process: int = 16
    first_byte_s: float = 0.05
    """From a request to its first byte; S3 states 0.1 to 0.2 s for small objects, within a region it is less."""
    read_bytes: int = 16 << 20
    """Of one request."""
    store_bytes_per_s: float = 200e9 / 8
    """All that the bucket gives: 200 Gbit/s, Google's quota for a project in a region before anybody asks for more."""
    store_requests_per_s: float = 5500.0
    """S3's least for one prefix that has not been partitioned further."""
    start_spread_s: float = 5.0
    """Nodes begin within so many seconds, evenly."""
    cpu_s_per_byte: float = 1.5e-9
    """CPU seconds of the node for each byte read over TLS, measured here; 1.0e-9 over plain HTTP."""
    cores_per_node: int = 96
    pieces: int = 256
    """Into how many pieces a model is cut to be passed from node to node."""
    seed: int = 0

    @property
    def reader_bytes_per_s(self) -> float:
        """The most that one rank reads, while all ranks of its node read."""
        request_s = self.first_byte_s + self.read_bytes / self.connection_bytes_per_s
        own = min(self.process_bytes_per_s, self.connections_per_process * self.read_bytes / request_s)
        node = min(self.node_bytes_per_s, self.cores_per_node / self.cpu_s_per_byte)
        return min(own, node / self.ranks_per_node)

    @property
    def store_rate(self) -> float:
        """Bytes per second of the store for everybody; refused requests are asked again and cost it nothing."""
        return min(self.store_bytes_per_s, self.store_requests_per_s * self.read_bytes)


# -- how the reading is divided


@dataclass(frozen=True, slots=True)
class Matrix:
    """Stored tensors of one shape, and what each rank of a node keeps of them."""

    shape: tuple[int, ...]
    count: int
    split: str
    """``rows``, ``columns``, ``whole`` (every rank has all), ``experts`` (each whole, on one rank)."""
    item_bytes: int = 2

    @property
    def size_bytes(self) -> int:
        size = self.item_bytes * self.count
        for length in self.shape:
            size *= length
        return size


MODELS: dict[str, list[Matrix]] = {
    "Llama 3.1 70B, bfloat16, tensor parallel": [
        Matrix((128256, 8192), 2, "rows"),
        Matrix((8192, 8192), 80, "rows"),
        Matrix((1024, 8192), 160, "rows"),
        Matrix((28672, 8192), 160, "rows"),
        Matrix((8192, 8192), 80, "columns"),
        Matrix((8192, 28672), 80, "columns"),
        Matrix((8192,), 161, "whole"),
    ],
    "DeepSeek V3, FP8, experts parallel": [
        Matrix((2048, 7168), 58 * 256 * 3, "experts", 1),
        Matrix((16, 56), 58 * 256 * 3, "experts", 4),
        Matrix((129280, 7168), 2, "whole"),
        Matrix((1536, 7168), 61, "whole", 1),
        Matrix((24576, 1536), 61, "whole", 1),
        Matrix((576, 7168), 61, "whole", 1),
        Matrix((32768, 512), 61, "whole", 1),
        Matrix((7168, 16384), 61, "whole", 1),
        Matrix((2048, 7168), 58 * 3, "whole", 1),
        Matrix((18432, 7168), 9, "whole", 1),
    ],
}


def slice_bytes(model: Sequence[Matrix], num_ranks: int) -> float:
    """Return what one rank asks the store for, by Headrace's own rule for runs and gaps."""
    return sum(matrix.count * _asked(matrix, num_ranks) for matrix in model)


def _asked(matrix: Matrix, num_ranks: int) -> float:
    size = matrix.size_bytes // matrix.count
    if matrix.split == "whole":
        return size
    if matrix.split == "experts":
        return size / num_ranks
    dtype = {1: "F8_E4M3", 2: "BF16", 4: "F32"}[matrix.item_bytes]
    cut = 0 if matrix.split == "rows" else len(matrix.shape) - 1
    bounds = tuple((0, length // num_ranks if place == cut else length) for place, length in enumerate(matrix.shape))
    reading = plain_reading(
        Entry("w", dtype, matrix.shape, "f", 0, size), "w", [Region(bounds, 0, ())], gap_bytes=GAP_BYTES
    )
    assert reading is not None
    return sum(piece.size_bytes for piece in reading.pieces)


# -- the events


@dataclass(slots=True)
class SharedStore:
    """Readers that share what a store gives: each goes at ``limit``, or at an equal part of ``rate`` where that is less. All have gone equally far since any event."""

    rate: float
    limit: float
    now: float = 0.0
    _each: float = 0.0
    """Bytes that a reader would have which had been there from the start."""
    _ends: list[tuple[float, int]] = field(default_factory=list)
    """For each reader where `_each` will be when it has all its bytes, and who it is."""

    @property
    def _speed(self) -> float:
        return min(self.limit, self.rate / len(self._ends)) if self._ends else 0.0

    def next_end(self) -> float:
        """Return when the next reader has all its bytes; infinity where nobody reads."""
        return self.now + (self._ends[0][0] - self._each) / self._speed if self._ends else float("inf")

    def advance(self, time: float) -> None:
        self._each += self._speed * (time - self.now)
        self.now = time

    def begin(self, who: int, num_bytes: float) -> None:
        heapq.heappush(self._ends, (self._each + num_bytes, who))

    def end(self) -> int:
        return heapq.heappop(self._ends)[1]


def read_all(fleet: Fleet, starts: Sequence[float], readers_per_node: int, bytes_each: float) -> list[float]:
    """Return when each node's last reader has all its bytes."""
    store = SharedStore(rate=fleet.store_rate, limit=fleet.reader_bytes_per_s)
    waiting = sorted(range(len(starts)), key=starts.__getitem__, reverse=True)
    left, ends = [readers_per_node] * len(starts), [0.0] * len(starts)
    for _ in range(len(starts) * (readers_per_node + 1)):
        if waiting and starts[waiting[-1]] <= store.next_end():
            node = waiting.pop()
            store.advance(starts[node])
            for _ in range(readers_per_node):
                store.begin(node, bytes_each)
            continue
        store.advance(store.next_end())
        node = store.end()
        left[node] -= 1
        if not left[node]:
            ends[node] = store.now
    return ends


def relay(fleet: Fleet, starts: Sequence[float], total: float, fan_out: int) -> list[float]:
    """Return when each node has the model, where the first reads it from the store and every node passes each piece to ``fan_out`` others as soon as it has it."""
    piece = total / fleet.pieces
    order = sorted(range(len(starts)), key=starts.__getitem__)
    from_store = min(fleet.ranks_per_node * fleet.reader_bytes_per_s, fleet.store_rate)
    send_s = piece / fleet.node_bytes_per_s
    free = [0.0] * len(order)  # when a node's card has sent what it had to send
    ends = list(starts)
    events = [(starts[order[0]] + (number + 1) * piece / from_store, 0, number) for number in range(fleet.pieces)]
    heapq.heapify(events)
    while events:
        time, place, number = heapq.heappop(events)
        ends[order[place]] = max(ends[order[place]], time)
        for child in range(place * fan_out + 1, min(place * fan_out + fan_out + 1, len(order))):
            free[place] = max(free[place], time, starts[order[child]]) + send_s
            heapq.heappush(events, (free[place], child, number))
    return ends


Way = Callable[[Fleet, Sequence[float], Sequence[Matrix]], list[float]]


def ways() -> dict[str, Way]:
    """Return the ways to divide the reading, by name: each gives when every node has its weights."""

    def total(model: Sequence[Matrix]) -> float:
        return sum(matrix.size_bytes for matrix in model)

    return {
        "every rank reads all": lambda fleet, starts, model: read_all(
            fleet, starts, fleet.ranks_per_node, total(model)
        ),
        "each rank its slices": lambda fleet, starts, model: read_all(
            fleet, starts, fleet.ranks_per_node, slice_bytes(model, fleet.ranks_per_node)
        ),
        "once per node": lambda fleet, starts, model: read_all(
            fleet, starts, fleet.ranks_per_node, total(model) / fleet.ranks_per_node
        ),
        "once, passed on in a chain": lambda fleet, starts, model: relay(fleet, starts, total(model), 1),
        "once, passed on to two each": lambda fleet, starts, model: relay(fleet, starts, total(model), 2),
    }


def simulate(fleet: Fleet, num_nodes: int, way: Way, model: Sequence[Matrix]) -> float:
    """Return the seconds from the first node's start until the last node has its weights."""
    random_source = random.Random(fleet.seed)
    starts = [0.0, *(random_source.uniform(0, fleet.start_spread_s) for _ in range(num_nodes - 1))]
    return max(way(fleet, starts, model))


# -- against what was measured


@dataclass(frozen=True, slots=True)
class Measured:
    """One row of a result of `benchmarks/ranks.py`."""

    name: str
    seconds: float
    cpu_s: float


def measured_rows(path: Path) -> list[Measured]:
    """Return the rows of the table that begins ``from S3 (nginx``."""
    text = path.read_text().partition("| from S3 (nginx")[2].partition("\n\n")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]
    return [Measured(row[0], float(row[1].split()[0]), float(row[3])) for row in cells]


def compare(path: Path) -> Iterator[str]:
    """Yield a table: what the model says of two and four ranks on the machine of ``path``, and what was measured.

    Of the measured, the model is given the one process, the CPU seconds that two ranks took in addition to share (by broadcast, by memory that both map), and the server's CPU
    seconds (0.15 for a gigabyte, as benchmarks/results/readers has them).
    """
    rows = {row.name: row for row in measured_rows(path)}
    size, one = 2.0e9, rows["one process"]
    cpu_s_per_byte = one.cpu_s / size + 0.15e-9
    shared = (rows["2 ranks, each byte once, memory that both map"].cpu_s - one.cpu_s) / size
    broadcast = (rows["2 ranks, each byte once, broadcast over gloo"].cpu_s - one.cpu_s) / size
    yield "| two cores, 2 GB | the model | measured |"
    yield "|---|---|---|"
    for name, count, share, extra in (
        ("2 ranks, each reads all", 2, 1, 0.0),
        ("4 ranks, each reads all", 4, 1, 0.0),
        ("2 ranks, each byte once, memory that both map", 2, 2, shared),
        ("4 ranks, each byte once, memory that all map", 4, 4, shared),
        ("2 ranks, each byte once, broadcast over gloo", 2, 2, broadcast),
        ("4 ranks, each byte once, broadcast over gloo", 4, 4, broadcast),
    ):
        received = extra * (count - 1) * share / count  # for each byte that is read
        machine = Fleet(
            ranks_per_node=count,
            cores_per_node=2,
            cpu_s_per_byte=cpu_s_per_byte + received,
            node_bytes_per_s=1e12,
            process_bytes_per_s=size / one.seconds / share,
            connection_bytes_per_s=1e12,
            first_byte_s=0.0,
            store_bytes_per_s=1e12,
            store_requests_per_s=1e9,
        )
        said = max(read_all(machine, [0.0], count, size / share))
        yield f"| {name} | {said:.2f} s | {rows[name].seconds:.2f} s |"


# -- the result


def result(fleet: Fleet, nodes: Sequence[int]) -> str:
    """Return the whole result as Markdown."""
    lines = [
        f"# A fleet that starts at once, simulated {datetime.date.today():%Y-%m-%d}",
        "",
        f"`{' '.join(['python', *sys.argv])}`. Seconds from the first node's start until the last node has its weights; nodes of {fleet.ranks_per_node} ranks. Nothing here was measured but"
        " what the last table says.",
        "",
        "Assumed: a bucket that gives "
        f"{fleet.store_bytes_per_s * 8 / 1e9:.0f} Gbit/s and {fleet.store_requests_per_s:.0f} requests a second, of {fleet.read_bytes >> 20} MiB; {fleet.connection_bytes_per_s / 1e6:.0f} MB/s a connection,"
        f" {fleet.connections_per_process} connections a process, {fleet.first_byte_s * 1000:.0f} ms to the first byte; {fleet.process_bytes_per_s / 1e9:.1f} GB/s a process and"
        f" {fleet.node_bytes_per_s * 8 / 1e9:.0f} Gbit/s a node both ways; nodes begin within {fleet.start_spread_s:.0f} s. Where the numbers are from: `Fleet` in the script.",
    ]
    for title, model in MODELS.items():
        total = sum(matrix.size_bytes for matrix in model)
        part = slice_bytes(model, fleet.ranks_per_node) * fleet.ranks_per_node / total
        lines += [
            "",
            f"## {title}: {total / 1e9:.0f} GB",
            "",
            f"The slices of a node's ranks are {part:.2f} × the model together.",
            "",
            f"| nodes | {' | '.join(ways())} |",
            f"|---|{'---|' * len(ways())}",
        ]
        for count in nodes:
            cells = [f"{simulate(fleet, count, way, model):.0f}" for way in ways().values()]
            lines.append(f"| {count} | {' | '.join(cells)} |")
    sources = sorted(RESULTS.glob("ranks_*.md"))
    if sources:
        lines += ["", f"## The same model beside measured ranks ({sources[-1].name})", "", *compare(sources[-1])]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4, 10, 30, 100, 300, 1000])
    parser.add_argument("--store-gbits", type=float, default=200.0)
    parser.add_argument("--requests", type=float, default=5500.0, help="requests a second that the prefix takes")
    parser.add_argument("--node-gbits", type=float, default=100.0)
    parser.add_argument("--write", action="store_true", help="write the result to benchmarks/results/")
    arguments = parser.parse_args()
    fleet = replace(
        Fleet(),
        store_bytes_per_s=arguments.store_gbits * 1e9 / 8,
        store_requests_per_s=arguments.requests,
        node_bytes_per_s=arguments.node_gbits * 1e9 / 8,
    )
    text = result(fleet, arguments.nodes)
    print(text)
    if arguments.write:
        (RESULTS / f"fleet_simulated_{datetime.date.today():%Y-%m-%d}.md").write_text(text)


if __name__ == "__main__":
    main()
