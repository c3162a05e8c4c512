"""How workers open a source together: one snapshot, and the reading shared only where that is right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.support.thread_ranks import ThreadGroup, ThreadLink, on_every_rank

from headrace.checkpoint import open_checkpoint
from headrace.engines.engine_ranks import Opened, StreamTerms, check_snapshots, open_stream, shares_reading
from headrace.errors import HeadraceError, RankFailed, StreamError
from headrace.progress import LoadProgress
from headrace.settings import Settings
from headrace.streaming import DistributedStream, StreamOptions, TensorStream
from headrace.streaming.agreement import Facts


def facts(*, snapshot: int = 1, entries: int = 2, host: int = 3) -> Facts:
    return Facts(snapshot=snapshot, entries=entries, limit_bytes=1 << 30, local_ranks=2, host=host)


@pytest.mark.parametrize(
    ("distributed", "is_remote", "others", "shares"),
    [
        (None, True, facts(), True),
        (None, False, facts(), False),  # the page cache serves every rank
        (None, True, facts(host=9), False),  # another machine has a network of its own
        (None, True, facts(entries=9), False),  # experts: each needs others
        (True, False, facts(), True),
        (True, True, facts(host=9), True),
        (True, True, facts(entries=9), False),
        (False, True, facts(), False),
    ],
)
def test_who_shares(distributed: bool | None, is_remote: bool, others: Facts, shares: bool) -> None:
    assert shares_reading([facts(), others], distributed=distributed, is_remote=is_remote) is shares


def test_neighbours_share_where_a_group_spans_machines() -> None:
    told = [facts(host=1), facts(host=1), facts(host=2), facts(host=2)]
    assert shares_reading(told, distributed=None, is_remote=True)
    assert not shares_reading(told, distributed=None, is_remote=False)


def test_snapshots_must_be_one() -> None:
    check_snapshots([facts(), facts()], uri="s3://b/m", is_remote=True)
    with pytest.raises(StreamError, match="Worker 1 opened snapshot 000000000005 of s3://b/m, worker 0 000000000001"):
        check_snapshots([facts(), facts(snapshot=5)], uri="s3://b/m", is_remote=True)
    copies = [facts(), facts(snapshot=5, host=8), facts(snapshot=5, host=8)]
    check_snapshots(copies, uri="/models/m", is_remote=False)  # inodes of two machines
    with pytest.raises(StreamError, match=r"Worker 3 .* worker 1 "):
        check_snapshots([*copies, facts(snapshot=6, host=8)], uri="/models/m", is_remote=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file({f"w{number}": torch.full((1000,), float(number)) for number in range(4)}, tmp_path / "model.safetensors")
    return tmp_path


def opening(folder: Path, names: tuple[str, ...] = ("w0", "w1", "w2", "w3")) -> Callable[[], Opened]:
    def prepare() -> Opened:
        checkpoint = open_checkpoint(str(folder), settings=Settings(progress=False))
        return Opened(checkpoint, tuple(checkpoint.entries[name] for name in names))

    return prepare


def terms(distributed: bool | None = None) -> StreamTerms:
    return StreamTerms(
        options=StreamOptions(ownership="leased"),
        settings=Settings(progress=False),
        progress=LoadProgress(),
        distributed=distributed,
    )


def test_a_worker_alone_streams_for_itself(folder: Path) -> None:
    stream = open_stream(opening(folder), None, terms())
    assert isinstance(stream, TensorStream)
    assert [name for name, _ in stream] == ["w0", "w1", "w2", "w3"]
    assert open_stream(opening(folder, ()), None, terms()) is None


@pytest.mark.parametrize(("distributed", "kind"), [(True, DistributedStream), (None, TensorStream)])
def test_two_workers(folder: Path, distributed: bool | None, kind: type) -> None:
    def rank(link: ThreadLink) -> dict[str, float]:
        stream = open_stream(opening(folder), link, terms(distributed))
        assert isinstance(stream, kind)
        with stream:
            return {name: float(tensor[-1]) for name, tensor in stream}

    assert on_every_rank(ThreadGroup(2).links(), rank) == [{f"w{number}": float(number) for number in range(4)}] * 2


def test_workers_with_different_wishes_read_their_own(folder: Path) -> None:
    def rank(link: ThreadLink) -> list[str]:
        names = (("w0", "w1"), ("w0", "w2"))[link.rank]
        stream = open_stream(opening(folder, names), link, terms(distributed=True))
        assert isinstance(stream, TensorStream)
        return [name for name, _ in stream]

    assert on_every_rank(ThreadGroup(2).links(), rank) == [["w0", "w1"], ["w0", "w2"]]


def test_what_one_cannot_open_fails_on_both(folder: Path) -> None:
    def rank(link: ThreadLink) -> type[HeadraceError]:
        prepare = opening(folder) if link.rank == 0 else opening(folder / "absent")
        with pytest.raises(HeadraceError) as caught:
            open_stream(prepare, link, terms())
        return caught.type

    mine, theirs = on_every_rank(ThreadGroup(2).links(), rank)
    assert mine is RankFailed
    assert theirs is not RankFailed
