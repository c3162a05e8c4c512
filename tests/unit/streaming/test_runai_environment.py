"""Which variables Run:ai Model Streamer gets from our settings, and that the process has its own again afterwards."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

from headrace.errors import InvalidSetting, StreamError
from headrace.settings import Settings, TransportSettings
from headrace.storage.s3_keys import LentAccess, S3Keys
from headrace.streaming.runai_environment import EnvironmentLoan, client_variables, start_variables


def settings(**values: Any) -> Settings:
    return Settings.from_environment({}, **values)


def access(**values: Any) -> LentAccess:
    keys = {
        "access_key_id": "AK",
        "secret_access_key": "the secret",
        "session_token": None,
        "region_name": "eu-west-1",
        "endpoint": "http://127.0.0.1:1",
    }
    keys.update({name: values.pop(name) for name in list(values) if name in keys})
    return LentAccess(keys=S3Keys(**keys), **{"addresses_by_path": True, "ca_file": None, "verify_tls": True, **values})


@pytest.mark.parametrize(
    ("given", "largest", "expected"),
    [
        ({"num_connections": 12, "memory_limit_bytes": 1000}, 10, {"CONCURRENCY": "12", "MEMORY_LIMIT": "1000"}),
        (
            {"num_connections": 12, "local_ranks": 4, "memory_limit_bytes": 1000},
            10,
            {"CONCURRENCY": "3", "MEMORY_LIMIT": "250"},
        ),
        ({"memory_limit_bytes": 1000}, 4000, {"MEMORY_LIMIT": "4000"}),
        ({"memory_limit_bytes": -1}, 4000, {"MEMORY_LIMIT": "-1"}),
        ({"memory_limit_bytes": 0}, 4000, {"MEMORY_LIMIT": "0"}),
        ({"total_timeout_s": 1.5}, 1, {"S3_TIMEOUT": "2"}),
        ({"read_bytes": 1 << 25}, 1, {"CHUNK_BYTESIZE": str(1 << 25)}),
    ],
)
def test_settings_become_variables(given: dict[str, Any], largest: int, expected: dict[str, str]) -> None:
    values = start_variables(settings(**given), {}, largest_bytes=largest)
    assert {name: values[f"RUNAI_STREAMER_{name}"] for name in expected} == expected


def test_the_default_limit_is_ours_and_bounded() -> None:
    values = start_variables(settings(), {}, largest_bytes=1)
    assert 0 < int(values["RUNAI_STREAMER_MEMORY_LIMIT"] or 0) <= 8 << 30
    assert "RUNAI_STREAMER_CHUNK_BYTESIZE" not in values


def test_the_librarys_own_variables_stay_where_we_say_nothing() -> None:
    own = {
        "RUNAI_STREAMER_CONCURRENCY": "40",
        "RUNAI_STREAMER_MEMORY_LIMIT": "77",
        "RUNAI_STREAMER_S3_TIMEOUT": "9",
        "RUNAI_STREAMER_S3_REQUEST_TIMEOUT_MS": "99",
        "RUNAI_STREAMER_S3_MAX_RETRIES": "9",
        "AWS_EC2_METADATA_DISABLED": "false",
    }
    assert not start_variables(settings(), own, largest_bytes=1).keys() & own.keys()
    assert not client_variables(settings(), own, access(), keys_too=False).keys() & own.keys()
    said = settings(num_connections=5, memory_limit_bytes=6000, total_timeout_s=7, idle_timeout_s=8, max_attempts=1)
    started = start_variables(said, own, largest_bytes=1)
    assert (started["RUNAI_STREAMER_CONCURRENCY"], started["RUNAI_STREAMER_MEMORY_LIMIT"]) == ("5", "6000")
    assert started["RUNAI_STREAMER_S3_TIMEOUT"] == "7"
    client = client_variables(said, own, access(), keys_too=False)
    assert client["RUNAI_STREAMER_S3_REQUEST_TIMEOUT_MS"] == "8000"
    assert client["RUNAI_STREAMER_S3_MAX_RETRIES"] == "1"


def test_where_both_are_set_ours_win_even_with_the_value_that_is_the_default() -> None:
    theirs = {
        "RUNAI_STREAMER_CONCURRENCY": "40",
        "RUNAI_STREAMER_MEMORY_LIMIT": "77",
        "RUNAI_STREAMER_CHUNK_BYTESIZE": "5242880",
    }
    default = TransportSettings()
    ours = {
        "HEADRACE_CONNECTIONS": str(default.num_connections),
        "HEADRACE_MEMORY_LIMIT": "-1",
        "HEADRACE_READ_BYTES": str(default.read_bytes),
    }
    values = start_variables(Settings.from_environment(theirs | ours), theirs | ours, largest_bytes=1)
    assert {name: values[name] for name in theirs} == {
        "RUNAI_STREAMER_CONCURRENCY": str(default.num_connections),
        "RUNAI_STREAMER_MEMORY_LIMIT": "-1",
        "RUNAI_STREAMER_CHUNK_BYTESIZE": str(default.read_bytes),
    }
    values = start_variables(Settings.from_environment(theirs), theirs, largest_bytes=1)
    assert {name: values[name] for name in theirs} == theirs


def test_local_files_need_no_client() -> None:
    assert client_variables(settings(), {}, None, keys_too=True) == {}


def test_a_server_of_ones_own_is_addressed_by_path() -> None:
    values = client_variables(settings(), {}, access(ca_file="/ca.pem"), keys_too=False)
    assert values == {
        "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
        "RUNAI_STREAMER_S3_UNSIGNED": None,
        "RUNAI_STREAMER_S3_REQUEST_TIMEOUT_MS": "20000",
        "RUNAI_STREAMER_S3_MAX_RETRIES": "5",
        "AWS_CA_BUNDLE": "/ca.pem",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def test_amazons_own_server_gets_no_endpoint() -> None:
    values = client_variables(settings(), {}, access(endpoint=None, addresses_by_path=False), keys_too=False)
    assert values["RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING"] == "1"
    assert values["AWS_ENDPOINT_URL"] is None
    assert "AWS_EC2_METADATA_DISABLED" not in values


def test_keys_are_variables_for_versions_that_know_no_others() -> None:
    values = client_variables(settings(), {}, access(session_token="tok"), keys_too=True)
    assert values["AWS_ACCESS_KEY_ID"] == "AK"
    assert values["AWS_SECRET_ACCESS_KEY"] == "the secret"
    assert values["AWS_SESSION_TOKEN"] == "tok"
    assert client_variables(settings(), {}, access(), keys_too=True)["AWS_SESSION_TOKEN"] is None
    assert not [name for name in client_variables(settings(), {}, access(), keys_too=False) if "KEY" in name]


def test_anonymous_requests_are_asked_for() -> None:
    values = client_variables(settings(), {}, access(access_key_id=None, secret_access_key=None), keys_too=True)
    assert values["RUNAI_STREAMER_S3_UNSIGNED"] == "1"
    assert values["AWS_ACCESS_KEY_ID"] is values["AWS_PROFILE"] is None
    assert values["AWS_SHARED_CREDENTIALS_FILE"] == os.devnull


def test_unchecked_certificates_are_refused() -> None:
    with pytest.raises(InvalidSetting, match="always checks certificates"):
        client_variables(settings(), {}, access(verify_tls=False), keys_too=False)


def test_a_bandwidth_limit_is_refused_rather_than_ignored() -> None:
    limited = settings(bandwidth_bytes_per_s=1 << 20)
    with pytest.raises(InvalidSetting, match="cannot be held to one"):
        client_variables(limited, {}, access(), keys_too=False)
    assert client_variables(limited, {}, None, keys_too=False) == {}


# -- lending

SET, UNSET = "HEADRACE_TEST_SET", "HEADRACE_TEST_UNSET"


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SET, "before")
    monkeypatch.delenv(UNSET, raising=False)


def look() -> tuple[str | None, str | None]:
    return os.environ.get(SET), os.environ.get(UNSET)


def test_variables_are_set_for_a_while() -> None:
    loan = EnvironmentLoan()
    with loan.held({SET: None, UNSET: "held"}):
        assert look() == (None, "held")
        with loan.briefly({SET: "short"}):
            assert look() == ("short", "held")
        assert look() == (None, "held")
    assert look() == ("before", None)


def test_they_come_back_after_an_error() -> None:
    loan = EnvironmentLoan()
    with pytest.raises(KeyboardInterrupt), loan.held({SET: "a"}), loan.briefly({UNSET: "b"}):
        raise KeyboardInterrupt
    assert look() == ("before", None)


def test_the_same_values_are_shared_until_the_last_holder_leaves() -> None:
    loan = EnvironmentLoan()
    with loan.held({SET: "a"}):
        first = loan.held({SET: "a"})
        first.__enter__()
    assert look() == ("a", None)
    first.__exit__(None, None, None)
    assert look() == ("before", None)


def test_other_values_at_the_same_time_are_an_error() -> None:
    loan = EnvironmentLoan()
    with loan.held({SET: "a"}):
        with pytest.raises(StreamError, match=r"Another stream.*other settings"), loan.held({SET: "b"}):
            pass
        assert look() == ("a", None)
    with loan.held({SET: "b"}):
        assert look() == ("b", None)
    assert look() == ("before", None)


def test_what_somebody_else_set_meanwhile_stays() -> None:
    loan = EnvironmentLoan()
    with loan.held({SET: "a", UNSET: "b"}):
        os.environ[SET] = "theirs"
    assert look() == ("theirs", None)


def test_short_loans_take_turns() -> None:
    loan = EnvironmentLoan()
    seen: list[str | None] = []
    inside = threading.Event()

    def second() -> None:
        inside.wait(10)
        with loan.briefly({SET: "second"}):
            seen.append(os.environ.get(SET))

    thread = threading.Thread(target=second)
    thread.start()
    with loan.briefly({SET: "first"}):
        inside.set()
        thread.join(0.1)
        assert thread.is_alive()
        assert look()[0] == "first"
    thread.join(10)
    assert seen == ["second"]
    assert look() == ("before", None)


def test_transport_defaults_are_those_that_count_as_unsaid() -> None:
    assert TransportSettings() == settings().transport
