"""The planner's rules, held over generated checkpoints."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.checkpoint.entry import Entry
from headrace.streaming.plan import Plan, plan_reads


def entry(name: str, start: int, stop: int, file: str = "a.safetensors") -> Entry:
    return Entry(name=name, dtype="U8", shape=(stop - start,), file=file, start=start, stop=stop)


@st.composite
def stored_entries(draw: st.DrawFn) -> list[Entry]:
    """Entries of up to three files, contiguous in each as the format demands, in any order of delivery, some left out."""
    entries: list[Entry] = []
    for file in range(draw(st.integers(1, 3))):
        at = draw(st.integers(8, 400))
        for place, size in enumerate(
            draw(st.lists(st.sampled_from([0, 1, 3, 64, 100, 1000, 5000, 20000]), max_size=12))
        ):
            entries.append(entry(f"{file}.{place}", at, at + size, f"{file}.safetensors"))
            at += size
    chosen = draw(st.lists(st.sampled_from(entries), unique=True) if entries else st.just([]))
    return draw(st.permutations(chosen))


def delivered(plan: Plan) -> list[dict[int, int]]:
    """For each entry: byte offset → how often it is read, by following the pieces as a transport would."""
    counts: list[dict[int, int]] = [{} for _ in plan.entries]
    for read in plan.reads:
        at = read.start
        for piece in read.pieces:
            if piece.entry >= 0:
                wanted = plan.entries[piece.entry]
                assert wanted.file == read.file
                assert at == wanted.start + piece.offset
                for offset in range(piece.offset, piece.offset + piece.size_bytes):
                    counts[piece.entry][offset] = counts[piece.entry].get(offset, 0) + 1
            at += piece.size_bytes
        assert at == read.stop
    return counts


@settings(max_examples=200, deadline=None)
@given(
    stored_entries(),
    st.sampled_from([4096, 8192, 10000]),
    st.sampled_from([0, 50, 1000]),
    st.sampled_from([1, 5000, 1 << 20]),
)
def test_every_wanted_byte_is_read_exactly_once_and_unwanted_ones_only_in_small_gaps(
    entries: list[Entry], read_bytes: int, gap_bytes: int, window_bytes: int
) -> None:
    plan = plan_reads(entries, read_bytes=read_bytes, gap_bytes=gap_bytes, window_bytes=window_bytes)
    assert plan.entries == tuple(entries)
    for wanted, counts in zip(plan.entries, delivered(plan), strict=True):
        assert counts == dict.fromkeys(range(wanted.size_bytes), 1)
    for read in plan.reads:
        assert 0 < read.size_bytes <= read_bytes
        assert read.pieces[0].entry >= 0 and read.pieces[-1].entry >= 0, "a read starts and ends with a wanted byte"
        assert all(piece.size_bytes <= gap_bytes for piece in read.pieces if piece.entry < 0)
        assert all(piece.size_bytes > 0 for piece in read.pieces)
        assert not any(
            plan.entries[piece.entry].size_bytes > read_bytes for piece in read.pieces[1:] if piece.entry >= 0
        )


@settings(max_examples=100, deadline=None)
@given(stored_entries(), st.sampled_from([0, 1000]), st.sampled_from([1, 30000]))
def test_reads_follow_the_order_of_delivery_within_the_window(
    entries: list[Entry], gap_bytes: int, window_bytes: int
) -> None:
    plan = plan_reads(entries, read_bytes=4096, gap_bytes=gap_bytes, window_bytes=window_bytes)
    firsts = [min(piece.entry for piece in read.pieces if piece.entry >= 0) for read in plan.reads]
    assert firsts == sorted(firsts)
    for place, reads in enumerate(plan.reads_of):
        assert [any(piece.entry == place for piece in plan.reads[index].pieces) for index in reads] == [True] * len(
            reads
        )
        for index in reads:
            before = [piece.entry for piece in plan.reads[index].pieces if piece.entry >= 0]
            early = plan.entries[min(before) : place]
            assert sum(item.size_bytes for item in early) <= max(
                window_bytes, max((item.size_bytes for item in early), default=0)
            )


def test_neighbours_in_another_order_share_reads() -> None:
    layers = [entry(f"layers.{layer}.w", 100 + 10 * at, 110 + 10 * at) for at, layer in enumerate([0, 1, 10, 11, 2])]
    natural = sorted(layers, key=lambda item: int(item.name.split(".")[1]))
    assert [(read.start, read.stop) for read in plan_reads(natural).reads] == [(100, 150)]


def test_a_long_tensor_is_cut_where_stores_cut_objects() -> None:
    plan = plan_reads([entry("w", 100, 20 << 20)], read_bytes=8 << 20)
    assert [(read.start, read.stop) for read in plan.reads] == [
        (100, 8 << 20),
        (8 << 20, 16 << 20),
        (16 << 20, 20 << 20),
    ]
    assert plan.reads_of == ((0, 1, 2),)


def test_nothing_is_read_for_empty_tensors() -> None:
    plan = plan_reads([entry("empty", 50, 50), entry("other", 50, 50)])
    assert plan.reads == () and plan.reads_of == ((), ())
