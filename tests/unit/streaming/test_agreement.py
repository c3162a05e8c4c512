"""What ranks settle before the first read."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.checkpoint.entry import Entry
from headrace.errors import StreamError
from headrace.settings import Settings
from headrace.streaming import agreement as module
from headrace.streaming.agreement import Agreement, Facts, agree, facts_of
from headrace.units import GIB, MIB, UNLIMITED

FACTS = Facts(snapshot=0xABC, entries=7, limit_bytes=GIB, local_ranks=1, host=1)
ENTRIES = [
    Entry("a", "F32", (2,), "model.safetensors", 100, 108),
    Entry("b", "U8", (4,), "model.safetensors", 108, 112),
]


def settle(*told: Facts) -> Agreement:
    return agree(told, uri="s3://bucket/llama", snapshot_id="000000000abc")


def test_the_limit_is_divided_by_the_ranks_of_a_machine() -> None:
    assert settle(FACTS, FACTS) == Agreement(256 * MIB, 256 * MIB, 2, (1, 1))
    assert settle(FACTS, replace(FACTS, host=2)) == Agreement(256 * MIB, 768 * MIB, 1, (1, 2))
    assert settle(FACTS, replace(FACTS, local_ranks=8)) == Agreement(64 * MIB, 64 * MIB, 8, (1, 1))


def test_the_least_limit_holds_for_all() -> None:
    """Two ranks that read 1 GiB and 100 MiB of free memory come to one conclusion, whichever asks."""
    poor = replace(FACTS, limit_bytes=100 * MIB)
    assert settle(FACTS, poor) == settle(poor, FACTS) == Agreement(25 * MIB, 25 * MIB, 2, (1, 1))
    assert settle(replace(FACTS, limit_bytes=UNLIMITED), poor) == settle(poor, poor)


def test_the_extremes_of_the_limit() -> None:
    endless = replace(FACTS, limit_bytes=UNLIMITED)
    assert settle(endless, endless) == Agreement(256 * MIB, UNLIMITED, 2, (1, 1))
    least = replace(FACTS, limit_bytes=0)
    assert settle(least, least) == Agreement(0, 0, 2, (1, 1))


def test_another_snapshot_is_an_error_that_names_the_rank_and_both() -> None:
    with pytest.raises(StreamError, match=r"Rank 2 opened snapshot 000000000def, rank 0 000000000abc") as caught:
        settle(FACTS, FACTS, replace(FACTS, snapshot=0xDEF))
    assert "distributed=False" in caught.value.mend


def test_other_entries_are_an_error_that_names_the_rank() -> None:
    with pytest.raises(StreamError, match="Rank 1 asked for other tensors of s3://bucket/llama than rank 0"):
        settle(FACTS, replace(FACTS, entries=8))


def facts(entries: list[Entry], monkeypatch: pytest.MonkeyPatch, **more: Any) -> Facts:
    monkeypatch.setattr(module, "available_memory_bytes", lambda: 16 * GIB)
    checkpoint: Any = SimpleNamespace(snapshot=SimpleNamespace(id="0123456789ab"))
    settings = Settings.from_environment({}, local_ranks=2)
    return facts_of(checkpoint, entries, settings, **{"raw": False, **more})


def test_facts_say_what_was_opened_and_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    known = facts(ENTRIES, monkeypatch)
    assert known.snapshot == 0x0123456789AB
    assert known.limit_bytes == 2 * GIB  # the node's: not divided yet
    assert known.local_ranks == 2
    assert known == facts(list(ENTRIES), monkeypatch)
    assert all(-(2**63) <= number < 2**63 for number in known.numbers())


@pytest.mark.parametrize(
    "others",
    [
        ENTRIES[::-1],
        ENTRIES[:1],
        [replace(ENTRIES[0], stop=104), ENTRIES[1]],
        [replace(ENTRIES[0], dtype="I32"), ENTRIES[1]],
    ],
    ids=["another order", "fewer", "another place", "another type"],
)
def test_whatever_differs_in_the_entries_shows(others: list[Entry], monkeypatch: pytest.MonkeyPatch) -> None:
    assert facts(others, monkeypatch).entries != facts(ENTRIES, monkeypatch).entries


def test_raw_bytes_are_something_else_than_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    assert facts(ENTRIES, monkeypatch, raw=True).entries != facts(ENTRIES, monkeypatch).entries
