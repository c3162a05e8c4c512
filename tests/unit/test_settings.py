"""Settings: what is given in code wins over the environment, which wins over the defaults; nonsense is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.errors import InvalidSetting
from headrace.settings import Settings, TransportSettings


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
