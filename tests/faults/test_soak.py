"""A short soak over a server whose every tenth read is cut, throttled or stalled and whose tokens expire every two seconds. ``benchmarks/soak.py`` is the long one."""

from __future__ import annotations

import hashlib
import http.client
import json
from pathlib import Path

import pytest
import torch

import headrace
from headrace.errors import AccessDenied
from headrace.settings import Settings
from tests.support.faulty_s3 import BUCKET, Faults, FaultyS3
from tests.support.soaking import Leftovers, Soak, alternate, hash_tensors, write_checkpoint

FAULTS = Faults(cut=0.08, throttled=0.05, stalled=0.03, seed=3)
KINDS = ("cut", "throttled", "throttled with Retry-After", "stalled", "expired")
MOST_LOADS = 60


def settings_for(folder: Path) -> Settings:
    """Reads so small that each load is many, and little patience: what is to be seen is that all is well afterwards, and not how long it takes."""
    return Settings.from_environment(
        {},
        cache_dir=folder / "cache",
        progress=False,
        read_bytes=1 << 20,
        idle_timeout_s=3.0,
        hedge_after_s=0.9,
        backoff_most_s=1.0,
        max_attempts=15,  # On a machine that is busy with other things, a token may end while it is on its way.
        memory_limit_bytes=8 << 20,
    )


@pytest.mark.slow
@pytest.mark.parametrize("leased", [False, True], ids=["owned", "leased"])
def test_every_load_is_right_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leased: bool) -> None:
    truth = write_checkpoint(tmp_path / "bucket" / "m", 24_000_000, num_files=2)
    (tmp_path / "cache").mkdir()
    with FaultyS3(tmp_path / "bucket", FAULTS, token_s=4.0) as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        soak = Soak(f"s3://{BUCKET}/m", truth, settings_for(tmp_path), watched=[tmp_path], leased=leased)

        def is_over(num_loads: int) -> bool:
            """After eight loads, if by then each kind of fault was met: in which load a token ends is a matter of luck."""
            counts = server.account()
            return num_loads >= MOST_LOADS or (num_loads >= 8 and all(counts.get(kind) for kind in KINDS))

        loads = list(alternate(server, soak, num_faulty=4, is_over=is_over))
        assert server.wait_until_idle()
        counts = server.account()
    assert [load for _, load in loads if not load.is_clean] == []
    assert {kind for kind in KINDS if counts.get(kind)} == set(KINDS), "each fault was met"
    reports = [load.report for is_faulty, load in loads if is_faulty and load.report is not None]
    assert sum(report.num_retries for report in reports) > 0


# -- what the proof rests on


def test_the_soak_sees_wrong_tensors_and_what_is_left(tmp_path: Path) -> None:
    truth = write_checkpoint(tmp_path / "m", 300_000)
    settings = settings_for(tmp_path / "elsewhere")
    soak = Soak(
        str(tmp_path / "m"), {**truth, "model.embed_tokens.weight": hashlib.sha256(b"other").hexdigest()}, settings
    )
    load = soak.load()
    assert (load.is_right, load.error, load.left) == (False, "", "")
    assert not load.is_clean

    before = Leftovers.now([tmp_path])
    with (tmp_path / "left").open("wb"):
        now = Leftovers.now([tmp_path])
        assert now.descriptors == before.descriptors + 1
        assert set(now.files) - set(before.files) == {str(tmp_path / "left")}
    connection = http.client.HTTPConnection("127.0.0.1")
    with FaultyS3(tmp_path, Faults(), token_s=2.0) as server:
        connection.port = server.port
        connection.connect()
        assert Leftovers.now().sockets == before.sockets + 1
        connection.close()


def test_the_truth_is_that_of_the_reference_reader(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    truth = write_checkpoint(tmp_path, 300_000, num_files=2)
    found = {name: tensor for path in tmp_path.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    assert hash_tensors(found) == truth


def test_the_server_checks_tokens_and_signatures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "bucket" / "m", 300_000)
    with FaultyS3(tmp_path / "bucket", Faults(), token_s=1000.0) as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        settings = settings_for(tmp_path)
        assert len(headrace.load_state_dict(f"s3://{BUCKET}/m", settings=settings)) > 5
        monkeypatch.delenv("AWS_CONTAINER_CREDENTIALS_FULL_URI")
        for secret, token, code in (("x", "0.forged", "InvalidToken"), ("x", "", "InvalidToken")):
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", f"ASIA{0:016d}")
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
            monkeypatch.setenv("AWS_SESSION_TOKEN", token)
            with pytest.raises(AccessDenied, match=code):
                headrace.load_state_dict(f"s3://{BUCKET}/m", settings=settings)
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        connection.request("GET", "/credentials")
        keys = json.loads(connection.getresponse().read())
        connection.close()
        monkeypatch.setenv("AWS_SESSION_TOKEN", keys["Token"])
        with pytest.raises(AccessDenied, match="does not match"):
            headrace.load_state_dict(f"s3://{BUCKET}/m", settings=settings)
