"""Processes of one machine that load together: what comes back, and how they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from headrace.cli.main import app
from headrace.cli.ranks import on_ranks
from headrace.errors import ObjectNotFound, RankFailed


def place(word: str) -> tuple[int, int, str, str]:
    return dist.get_rank(), dist.get_world_size(), os.environ["LOCAL_RANK"], word


def fail_on(failing: int) -> None:
    if dist.get_rank() == failing:
        raise ObjectNotFound("There is no such object.", "It went away.", "Look for it.")
    raise RankFailed(f"Rank {failing} failed while loading weights.", rank=failing)


def fall_over(failing: int) -> None:
    if dist.get_rank() == failing:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def fall_over_first(failing: int) -> None:
    if dist.get_rank() == failing:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()  # raises what gloo says of a connection that closed


def break_down() -> None:
    raise ValueError("of another library")


def test_every_rank_knows_its_place() -> None:
    assert on_ranks(2, place, "word") == [(0, 2, "0", "word"), (1, 2, "1", "word")]


def test_the_error_of_the_rank_that_failed_is_raised() -> None:
    with pytest.raises(ObjectNotFound) as caught:
        on_ranks(2, fail_on, 1)
    assert (caught.value.why, caught.value.mend) == ("It went away.", "Look for it.")
    with pytest.raises(RuntimeError, match="ValueError: of another library"):
        on_ranks(1, break_down)


def test_a_rank_that_is_killed_is_named_and_ends_the_others() -> None:
    start = time.monotonic()
    with pytest.raises(RankFailed, match="Rank 1 ended without a word") as caught:
        on_ranks(2, fall_over, 1)
    assert "SIGKILL" in caught.value.why and caught.value.rank == 1
    assert time.monotonic() - start < 50, "the other one sleeps for a minute, and was ended"


def test_a_rank_that_is_killed_is_named_whatever_the_others_say_of_it() -> None:
    with pytest.raises(RankFailed, match="Rank 1 ended without a word"):
        on_ranks(2, fall_over_first, 1)


def test_ranks_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    (tmp_path / "napping.py").write_text(
        "import os, sys, time\ndef nap(folder):\n    open(f'{folder}/{os.getpid()}.pid', 'w').close()\n    time.sleep(120)\n"
        "if __name__ == '__main__':\n    from napping import nap\n    from headrace.cli.ranks import on_ranks\n    on_ranks(2, nap, sys.argv[1])\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    parent = subprocess.Popen([sys.executable, str(tmp_path / "napping.py"), str(tmp_path)], env=environment)
    deadline = time.monotonic() + 60
    while len(found := list(tmp_path.glob("*.pid"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    children = [int(path.stem) for path in found]
    assert len(children) == 2
    while any(_is_alive(child) for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_load_with_ranks_reads_each_byte_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({f"t{number}": torch.randn(300, 1000) for number in range(5)}, tmp_path / "model.safetensors")
    app(["load", str(tmp_path), "--ranks", "2", "--no-progress", "--json"], standalone_mode=False)
    report = json.loads(capsys.readouterr().out)
    assert report["bytes_read"] == report["bytes_wanted"] == 5 * 300 * 1000 * 4
    assert report["exchange"] == "shared" and [one["rank"] for one in report["ranks"]] == [0, 1]
    assert sum(one["bytes_read"] for one in report["ranks"]) == report["bytes_read"]
    for one in report["ranks"]:
        assert one["bytes_read"] + one["bytes_received"] == report["bytes_wanted"]
    app(["load", str(tmp_path), "--ranks", "2", "--no-progress"], standalone_mode=False)
    shown = capsys.readouterr().out
    assert "through memory that all ranks map" in shown and "rank 1" in shown


def test_a_failure_with_ranks_reads_as_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        app(["load", str(tmp_path / "absent"), "--ranks", "2", "--no-progress"], standalone_mode=False)
    assert caught.value.code == 1
    assert "ObjectNotFound" in capsys.readouterr().err
