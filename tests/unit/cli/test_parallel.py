"""Ranks of `headrace serve --tp`: which rank a process is, which device and how many threads it has, and the account of all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.cli.parallel import Place, check_rank_device, find_place, parallel_options, threads_of_rank, with_ranks
from headrace.cli.serve import ServeOptions
from headrace.errors import InvalidSetting
from headrace.streaming.report import LoadReport, RankReport


def launched(rank: int, world: int, local: int | None = None) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world if local is None else local)}


def test_a_process_is_rank_0_unless_a_launcher_says_otherwise() -> None:
    assert find_place(2, {}) == Place(rank=0, num_ranks=2, is_launched=False)
    assert find_place(2, {"RANK": "0", "WORLD_SIZE": "1"}) == Place(rank=0, num_ranks=2, is_launched=False)
    assert find_place(2, launched(1, 2)) == Place(rank=1, num_ranks=2, is_launched=True)
    assert find_place(2, {"RANK": "1", "WORLD_SIZE": "2"}).is_launched


@pytest.mark.parametrize("environment", [launched(0, 4), launched(1, 2, 1), {**launched(0, 2), "RANK": "x"}])
def test_a_launcher_of_other_ranks_is_refused(environment: dict[str, str]) -> None:
    with pytest.raises(InvalidSetting, match="--nproc-per-node 2"):
        find_place(2, environment)


@pytest.mark.parametrize(
    ("device", "num_devices", "words"),
    [
        ("cuda:1", 4, "--device cuda:1 does not go with --tp 2"),
        ("cuda", 1, "wants 2 CUDA devices, and this machine shows 1"),
        ("cuda", 0, "shows 0"),
        ("auto", 1, "shows 1"),
    ],
)
def test_every_rank_has_a_device_or_none_starts(device: str, num_devices: int, words: str) -> None:
    with pytest.raises(InvalidSetting, match=words):
        check_rank_device(device, 2, num_devices=num_devices)


@pytest.mark.parametrize(("device", "num_devices"), [("auto", 0), ("auto", 2), ("cpu", 1), ("cuda", 2)])
def test_devices_that_do(device: str, num_devices: int) -> None:
    check_rank_device(device, 2, num_devices=num_devices)


def test_ranks_share_the_cpus_unless_the_user_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.serving.hardware.num_compute_threads", lambda *, num_ranks: 7 // num_ranks)
    assert [threads_of_rank(number, {}) for number in (2, 7)] == [3, 1]
    assert threads_of_rank(2, {"OMP_NUM_THREADS": "5"}) == 5
    assert threads_of_rank(2, {"OMP_NUM_THREADS": "4,2"}) == 4
    assert threads_of_rank(2, {"OMP_NUM_THREADS": ""}) == 3


@pytest.mark.parametrize(
    ("load_format", "extra", "shares"),
    [
        ("auto", None, True),
        ("headrace", '{"distributed": true}', True),
        ("auto", '{"distributed": false}', False),
        ("safetensors", None, False),
    ],
)
def test_ranks_share_the_reading_where_they_can(load_format: str, extra: str | None, shares: bool) -> None:
    options = parallel_options(ServeOptions(uri="x", load_format=load_format, extra_config=extra, num_ranks=2))
    assert options["distributed"] is shares
    assert options["distributed_config"].tp_size == 2


REPORT = LoadReport(
    uri="m", snapshot_id="1", num_files=1, num_tensors=3, bytes_checkpoint=100, bytes_wanted=60, bytes_read=70,
    num_requests=4, num_retries=1, num_connections=2, seconds=2.0, peak_staging_bytes=9,
)  # fmt: skip


def test_the_accounts_of_ranks_that_read_for_themselves_are_added_up() -> None:
    report = with_ranks(REPORT, [replace(REPORT, bytes_read=80, seconds=3.0)])
    assert (report.bytes_read, report.bytes_wanted, report.num_requests, report.num_retries) == (150, 120, 8, 2)
    assert [(one.rank, one.bytes_read, one.bytes_received, one.seconds_reading) for one in report.ranks] == [
        (0, 70, 0, 2.0),
        (1, 80, 0, 3.0),
    ]
    assert [label for label, _ in report.rows() if label.startswith("rank")] == ["rank 0", "rank 1"]


def test_an_account_of_all_ranks_is_left_as_it_is() -> None:
    row = RankReport(rank=0, bytes_read=1, bytes_received=1, seconds_reading=0.0, seconds_waiting=0.0)
    shared, empty = replace(REPORT, ranks=(row, row)), replace(REPORT, num_files=0)
    assert with_ranks(shared, [shared]) is shared
    assert with_ranks(empty, [empty]) is empty
    foreign = replace(REPORT, knows_requests=False)
    assert with_ranks(foreign, [foreign]) is foreign
    assert with_ranks(REPORT, [None]) is REPORT
