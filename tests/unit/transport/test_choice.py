"""Who reads, by the setting and by what is known before the first byte: every case of the rule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.settings import TransportSettings
from headrace.transport import Circumstances, ReaderChoice, choose_readers

LARGE = Circumstances(endpoint="https://store", is_local=False, num_bytes=200_000_000_000, num_processors=32)
AUTO = TransportSettings(num_connections=64)


@pytest.mark.parametrize(
    ("readers", "endpoint", "is_local", "number", "why"),
    [
        (3, "https://a", False, 3, "as set"),
        (3, "http://a", False, 3, "as set"),
        (0, "https://a", False, 0, "as set"),
        (50, "https://a", False, 8, "as set"),
        (3, "this machine", True, 0, "the files are on this machine"),
        ("auto", "this machine", True, 0, "the files are on this machine"),
    ],
)
def test_what_is_set_is_done_from_the_start_whatever_the_machine(
    readers: int | str, endpoint: str, is_local: bool, number: int, why: str
) -> None:
    settings = TransportSettings(readers=readers, num_connections=8)
    for num_processors in (1, 64):
        given = replace(LARGE, endpoint=endpoint, is_local=is_local, num_processors=num_processors)
        assert choose_readers(settings, given) == ReaderChoice(number, why)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"endpoint": "http://store"}, "auto: no TLS"),
        ({"num_processors": 1}, "auto: TLS, 1 processor"),
        ({"num_processors": 7}, "auto: TLS, 7 processors"),
        ({"num_bytes": 6_500_000_000}, "auto: TLS, only 6.5 GB"),
    ],
)
def test_threads_alone_where_processes_could_not_pay(change: dict[str, object], why: str) -> None:
    assert choose_readers(AUTO, replace(LARGE, **change)) == ReaderChoice(0, why)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_processors", "num_connections", "number"), [(8, 64, 2), (31, 64, 7), (32, 64, 8), (256, 64, 8), (32, 8, 4)]
)
def test_processes_on_demand_where_they_may_pay(num_processors: int, num_connections: int, number: int) -> None:
    settings = TransportSettings(num_connections=num_connections)
    choice = choose_readers(settings, replace(LARGE, num_processors=num_processors))
    assert (choice.num_processes, choice.is_on_demand) == (number, True)
    assert choice.why == f"auto: TLS, {num_processors} processors; {number} processes once reading fills two"


def test_so_few_connections_are_not_spread() -> None:
    choice = choose_readers(TransportSettings(num_connections=3), LARGE)
    assert choice == ReaderChoice(0, "auto: TLS, 3 connections")
