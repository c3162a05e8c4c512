"""Whole loads from servers that speak S3 in their own way, and from buckets that want more than a signature."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import headrace
from headrace.errors import AccessDenied
from headrace.settings import Settings
from headrace.streaming.report import LoadReport
from tests.support.checkpoints import assert_equal, make_files, make_tensors
from tests.support.scripted_s3 import BUCKET, Asked, ScriptedS3

TENSORS = make_tensors(8, rows=40)
URI = f"s3://{BUCKET}/llama"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedS3]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AK")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SK")
    files = {f"llama/{key}": body for key, body in make_files(TENSORS, folder="more/").items()}
    others = {f"llama-v2/{number}": b"x" for number in range(3)}
    with ScriptedS3({**files, **others}, page_keys=2) as one:
        for name, value in one.environment().items():
            monkeypatch.setenv(name, value)
        yield one


@pytest.mark.parametrize("refuses", [False, True])
def test_a_server_that_knows_only_the_old_listing(server: ScriptedS3, s3_settings: Settings, refuses: bool) -> None:
    """Whether it refuses the new one or takes it for the old: nothing is missing, though every page has two keys."""
    server.knows_new_listing = False
    if refuses:
        server.refuse = lambda asked: (501, "NotImplemented") if "list-type" in asked.query else None
    assert_equal(headrace.load_state_dict(URI, settings=s3_settings), TENSORS)
    assert [asked for asked in server.asked if "list-type" in asked.query] == server.asked[:1]


def test_a_bucket_whose_readers_pay(server: ScriptedS3, s3_settings: Settings) -> None:
    def refuse(asked: Asked) -> tuple[int, str] | None:
        return None if asked.headers.get("x-amz-request-payer") == "requester" else (403, "AccessDenied")

    server.refuse = refuse
    with pytest.raises(AccessDenied):
        headrace.load_state_dict(URI, settings=s3_settings)
    settings = Settings.from_environment(
        {"HEADRACE_S3_REQUEST_PAYER": "requester"}, cache_dir=s3_settings.cache_dir, progress=False
    )
    assert_equal(headrace.load_state_dict(URI, settings=settings), TENSORS)


def test_the_variables_of_run_ai_s_users_lead_to_the_server(
    server: ScriptedS3, s3_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the report says which of them counted."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    environment = {
        "RUNAI_STREAMER_S3_ENDPOINT": f"{server.url}/",
        "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
        "RUNAI_STREAMER_CONCURRENCY": "3",
        "HEADRACE_CONNECTIONS": "2",
        "RUNAI_STREAMER_MEMORY_LIMIT": "-1",
        "RUNAI_STREAMER_CHUNK_BYTESIZE": "65536",
    }
    settings = Settings.from_environment(environment, cache_dir=s3_settings.cache_dir, progress=False)
    reports: list[LoadReport] = []
    assert_equal(headrace.load_state_dict(URI, settings=settings, on_report=reports.append), TENSORS)
    report = reports[0]
    assert report.num_connections == 2
    assert report.settings_from == {
        "s3_endpoint": "RUNAI_STREAMER_S3_ENDPOINT",
        "s3_addressing_style": "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING",
        "num_connections": "HEADRACE_CONNECTIONS",
        "memory_limit_bytes": "RUNAI_STREAMER_MEMORY_LIMIT",
        "read_bytes": "RUNAI_STREAMER_CHUNK_BYTESIZE",
    }
    assert report.to_dict()["settings_from"] == report.settings_from
    assert (
        "settings",
        ", ".join(f"{name} from {source}" for name, source in report.settings_from.items()),
    ) in report.rows()
