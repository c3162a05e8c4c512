"""Settings: what is given in code wins over the environment, which wins over the defaults; nonsense is refused by name."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import InvalidSetting
from headrace.processors import usable_processors
from headrace.settings import AzureSettings, Settings, TransportSettings, connections_for, known_variables
from headrace.units import UNLIMITED


def test_defaults_need_no_environment() -> None:
    settings = Settings.from_environment({})
    assert settings.transport == TransportSettings() and settings.memory_limit_bytes is None


def test_the_environment_is_read_with_units() -> None:
    environment = {
        "HEADRACE_CACHE_DIR": "/tmp/somewhere",
        "HEADRACE_MEMORY_LIMIT": "2GiB",
        "HEADRACE_CONNECTIONS": "32",
        "HEADRACE_READ_BYTES": "16MiB",
        "HEADRACE_IDLE_TIMEOUT": "2.5",
        "HEADRACE_PROGRESS": "no",
    }
    settings = Settings.from_environment(environment)
    assert (settings.cache_dir, settings.memory_limit_bytes, settings.progress) == (
        Path("/tmp/somewhere"),
        2 << 30,
        False,
    )
    assert (settings.transport.num_connections, settings.transport.read_bytes, settings.transport.idle_timeout_s) == (
        32,
        16 << 20,
        2.5,
    )


def test_code_wins_over_the_environment_and_none_means_not_given() -> None:
    environment = {"HEADRACE_CONNECTIONS": "32", "HEADRACE_MEMORY_LIMIT": "1GiB"}
    settings = Settings.from_environment(environment, num_connections=3, memory_limit_bytes=None)
    assert (settings.transport.num_connections, settings.memory_limit_bytes) == (3, 1 << 30)


def test_google_s_and_run_ai_s_names_are_read_and_ours_win() -> None:
    environment = {
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE": "https://other.example",
        "RUNAI_STREAMER_GCS_CREDENTIAL_FILE": "/keys/other.json",
    }
    settings = Settings.from_environment(environment)
    assert (settings.gcs_endpoint, settings.gcs_credentials_file) == ("https://other.example", Path("/keys/other.json"))
    ours = {"HEADRACE_GCS_ENDPOINT": "https://ours.example", "HEADRACE_GCS_CREDENTIALS_FILE": "/keys/ours.json"}
    settings = Settings.from_environment(ours | environment | {"HEADRACE_GCS_ANONYMOUS": "1"})
    assert (settings.gcs_endpoint, settings.gcs_credentials_file) == ("https://ours.example", Path("/keys/ours.json"))
    assert settings.gcs_anonymous


RUNAI = {
    "RUNAI_STREAMER_CONCURRENCY": "24",
    "RUNAI_STREAMER_MEMORY_LIMIT": "4000000000",
    "RUNAI_STREAMER_CHUNK_BYTESIZE": "8388608",
    "RUNAI_STREAMER_S3_ENDPOINT": "https://minio.example:9000",
    "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
    "RUNAI_STREAMER_S3_UNSIGNED": "1",
    "RUNAI_STREAMER_GCS_CREDENTIAL_FILE": "/keys/theirs.json",
}


def test_the_variables_of_run_ai_s_users_work_and_are_named() -> None:
    settings = Settings.from_environment(RUNAI)
    assert (settings.transport.num_connections, settings.transport.read_bytes) == (24, 8 << 20)
    assert settings.memory_limit_bytes == 4_000_000_000
    assert (settings.s3_endpoint, settings.s3_addressing_style) == ("https://minio.example:9000", "path")
    assert settings.s3_anonymous and settings.gcs_credentials_file == Path("/keys/theirs.json")
    assert settings.sources == {
        "num_connections": "RUNAI_STREAMER_CONCURRENCY",
        "memory_limit_bytes": "RUNAI_STREAMER_MEMORY_LIMIT",
        "read_bytes": "RUNAI_STREAMER_CHUNK_BYTESIZE",
        "s3_endpoint": "RUNAI_STREAMER_S3_ENDPOINT",
        "s3_addressing_style": "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING",
        "s3_anonymous": "RUNAI_STREAMER_S3_UNSIGNED",
        "gcs_credentials_file": "RUNAI_STREAMER_GCS_CREDENTIAL_FILE",
    }


@pytest.mark.parametrize(("text", "limit"), [("-1", UNLIMITED), ("0", 0), ("1073741824", 1 << 30)])
def test_run_ai_s_memory_limit_means_the_same_here(text: str, limit: int) -> None:
    assert Settings.from_environment({"RUNAI_STREAMER_MEMORY_LIMIT": text}).memory_limit_bytes == limit


def test_virtual_addressing_is_asked_for_as_theirs() -> None:
    settings = Settings.from_environment({"RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "1"})
    assert settings.s3_addressing_style == "virtual"


def test_ours_win_over_run_ai_s_and_code_over_both() -> None:
    ours = {
        "HEADRACE_CONNECTIONS": "3",
        "HEADRACE_MEMORY_LIMIT": "1GiB",
        "HEADRACE_READ_BYTES": "1MiB",
        "HEADRACE_S3_ENDPOINT": "https://ours.example",
        "HEADRACE_S3_ADDRESSING_STYLE": "auto",
        "HEADRACE_S3_ANONYMOUS": "0",
        "HEADRACE_GCS_CREDENTIALS_FILE": "/keys/ours.json",
    }
    settings = Settings.from_environment(RUNAI | ours)
    assert settings == Settings.from_environment(ours)
    assert set(settings.sources.values()) == set(ours)
    settings = Settings.from_environment(RUNAI | ours, num_connections=5)
    assert settings.transport.num_connections == 5
    assert "num_connections" not in settings.sources


def test_what_is_not_asked_for_is_not_looked_at() -> None:
    """A variable that code wins over need not even be readable."""
    settings = Settings.from_environment({"RUNAI_STREAMER_CONCURRENCY": "many"}, num_connections=5)
    assert settings.transport.num_connections == 5


def test_sources_are_kept_but_are_no_part_of_what_settings_are() -> None:
    settings = Settings.from_environment({"HEADRACE_CONNECTIONS": "3"})
    assert settings == Settings.from_environment({}, num_connections=3)
    changed = settings.changed("a file", num_connections=7, memory_limit_bytes=5)
    assert (changed.transport.num_connections, changed.memory_limit_bytes) == (7, 5)
    assert changed.sources == {"num_connections": "a file", "memory_limit_bytes": "a file"}
    assert pickle.loads(pickle.dumps(changed)) == changed
    assert Settings().sources == {}


@pytest.mark.parametrize(("text", "pays"), [("requester", True), ("1", True), ("no", False)])
def test_who_pays(text: str, pays: bool) -> None:
    assert Settings.from_environment({"HEADRACE_S3_REQUEST_PAYER": text}).s3_request_payer is pays


def test_a_rate_may_say_that_it_is_one() -> None:
    settings = Settings.from_environment({"HEADRACE_BANDWIDTH_LIMIT": "100MB/s"})
    assert settings.transport.bandwidth_bytes_per_s == 100_000_000


def test_the_variables_of_a_setting_are_told_in_their_order() -> None:
    known = known_variables()
    assert known["num_connections"] == ("HEADRACE_CONNECTIONS", "RUNAI_STREAMER_CONCURRENCY")
    assert known["ca_file"] == ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
    assert known["azure.account_key"][0] == "AZURE_STORAGE_KEY"


def test_an_empty_variable_is_as_none() -> None:
    assert (
        Settings.from_environment({"HEADRACE_CONNECTIONS": ""}).transport.num_connections
        == TransportSettings().num_connections
    )


@pytest.mark.parametrize(
    ("environment", "given", "message"),
    [
        ({"HEADRACE_CONNECTIONS": "many"}, {}, "HEADRACE_CONNECTIONS is 'many'"),
        ({"HEADRACE_MEMORY_LIMIT": "4 stones"}, {}, "'4 stones' is not a size"),
        ({"HEADRACE_PROGRESS": "maybe"}, {}, "HEADRACE_PROGRESS is 'maybe'"),
        ({}, {"num_conections": 3}, r"Unknown setting num_conections. Known are: .*num_connections"),
        ({}, {"num_connections": 0}, "num_connections is 0"),
        ({}, {"num_connections": True}, "num_connections is True"),
        ({}, {"num_connections": 2.0}, "num_connections is 2.0"),
        ({}, {"idle_timeout_s": -1}, "idle_timeout_s is -1"),
        ({}, {"read_bytes": 10}, "read_bytes is 10"),
        ({"RUNAI_STREAMER_CONCURRENCY": "many"}, {}, "RUNAI_STREAMER_CONCURRENCY is 'many'"),
        ({"RUNAI_STREAMER_MEMORY_LIMIT": "-2"}, {}, "RUNAI_STREAMER_MEMORY_LIMIT: '-2' is not a size"),
        (
            {"RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "path"},
            {},
            "USE_VIRTUAL_ADDRESSING is 'path'. It must be 0 or 1",
        ),
        ({"HEADRACE_S3_REQUEST_PAYER": "me"}, {}, "REQUEST_PAYER is 'me'. It must be requester, 0 or 1"),
        ({}, {"sources": {}}, "Unknown setting sources"),
        ({"HEADRACE_IDLE_TIMEOUT": "nan"}, {}, "idle_timeout_s is nan"),
        ({"HEADRACE_IDLE_TIMEOUT": "inf"}, {}, "idle_timeout_s is inf"),
        ({"HEADRACE_CONNECT_TIMEOUT": "1e300"}, {}, r"connect_timeout_s is 1e\+300"),
        ({"HEADRACE_TOTAL_TIMEOUT": "0"}, {}, r"total_timeout_s is 0.0"),
        ({"HEADRACE_MEMORY_LIMIT": "lots"}, {}, "HEADRACE_MEMORY_LIMIT: 'lots' is not a size"),
    ],
)
def test_nonsense_is_refused_by_name(environment: dict[str, str], given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSetting, match=message):
        Settings.from_environment(environment, **given)


def test_a_slip_in_a_variables_name_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        Settings.from_environment({"HEADRACE_CONECTIONS": "3", "HEADRACE_API_KEY": "x", "OTHER": "1"})
    assert (
        caplog.text.count(
            "HEADRACE_CONECTIONS is set and means nothing to Headrace. Did you mean HEADRACE_CONNECTIONS?"
        )
        == 1
    )
    assert "API_KEY" not in caplog.text


def test_a_switch_that_others_read_is_known_and_may_have_been_meant(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="headrace"):
        Settings.from_environment({"HEADRACE_AS_RUNAI": "1", "HEADRACE_AS_RUN_AI": "1"})
    assert [one.getMessage() for one in caplog.records] == [
        "The variable HEADRACE_AS_RUN_AI is set and means nothing to Headrace. Did you mean HEADRACE_AS_RUNAI?"
    ]


def test_the_variables_for_azure_are_named_but_not_their_values() -> None:
    environment = {"AZURE_STORAGE_ACCOUNT_NAME": "acct", "AZURE_STORAGE_KEY": "a2V5", "AZURE_STORAGE_ACCESS_KEY": "b"}
    named = {"azure.account": "AZURE_STORAGE_ACCOUNT_NAME", "azure.account_key": "AZURE_STORAGE_KEY"}
    assert Settings.from_environment(environment).sources == named
    assert Settings.from_environment(environment, azure=AzureSettings(account="other")).sources == {}


def test_machines_with_more_processors_have_more_connections() -> None:
    assert [connections_for(processors) for processors in (0.5, 4, 4.5, 16, 32, 192)] == [8, 8, 10, 32, 64, 64]
    assert TransportSettings().num_connections == connections_for(usable_processors())
    assert Settings.from_environment({"HEADRACE_CONNECTIONS": "3"}).transport.num_connections == 3
