"""Where a uri leads with the settings, and which variable each of them came from. Real stores, which open no connection for this."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.doctor.finding import State
from headrace.doctor.whereabouts import find_whereabouts, judge_settings
from headrace.doctor.world import World
from headrace.errors import InvalidSetting, MissingDependency
from headrace.settings import Settings, TransportSettings
from headrace.storage import parse_uri


def look(uri: str, monkeypatch: pytest.MonkeyPatch, **environment: str) -> tuple[Any, Any]:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    settings = Settings.from_environment(environment)
    parsed = parse_uri(uri)
    found = find_whereabouts(parsed, settings, World(environment=environment))
    return found, judge_settings(parsed, found, settings, environment)


def test_amazon(monkeypatch: pytest.MonkeyPatch) -> None:
    found, finding = look("s3://models/llama", monkeypatch, AWS_DEFAULT_REGION="eu-west-1")
    assert (found.kind, found.by_path, found.is_anonymous) == ("s3", False, False)
    assert (found.origin.host, found.origin.port) == ("models.s3.eu-west-1.amazonaws.com", 443)
    details = dict(finding.details)
    assert details["endpoint"] == "https://models.s3.eu-west-1.amazonaws.com (Amazon)"
    assert details["region"] == "eu-west-1 (AWS_DEFAULT_REGION)"
    assert details["connections"] == f"{TransportSettings().num_connections} (default)"
    assert finding.state is State.OK


def test_an_endpoint_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found, finding = look(
        "s3://Models_of_old/llama",
        monkeypatch,
        AWS_ENDPOINT_URL="http://127.0.0.1:9000",
        HEADRACE_CONNECTIONS="32",
        HEADRACE_S3_ANONYMOUS="1",
    )
    assert (found.endpoint, found.by_path, found.is_anonymous) == ("http://127.0.0.1:9000", True, True)
    details = dict(finding.details)
    assert details["endpoint"] == "http://127.0.0.1:9000 (AWS_ENDPOINT_URL)"
    assert details["connections"] == "32 (HEADRACE_CONNECTIONS)"
    assert finding.state is State.OK, "other stores have other rules for names"


def test_a_vpc_endpoint_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = "https://bucket.vpce-0a1b-2c.s3.eu-west-1.vpce.amazonaws.com"
    _, finding = look("s3://models/llama", monkeypatch, AWS_ENDPOINT_URL_S3=endpoint, AWS_DEFAULT_REGION="eu-west-1")
    details = dict(finding.details)
    assert details["endpoint is"] == "the interface VPC endpoint vpce-0a1b-2c for s3 in eu-west-1"


def test_an_access_point_and_who_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    uri = "s3://arn:aws:s3:eu-west-1:123456789012:accesspoint/reader/llama"
    found, finding = look(uri, monkeypatch, HEADRACE_S3_REQUEST_PAYER="requester")
    assert found.origin.host == "reader-123456789012.s3-accesspoint.eu-west-1.amazonaws.com"
    details = dict(finding.details)
    assert details["endpoint is"] == "the endpoint of an access point"
    assert details["region"] == "eu-west-1 (the access point's ARN)"
    assert details["who pays"] == "the reader (HEADRACE_S3_REQUEST_PAYER)"


def test_the_region_of_a_vpc_endpoint_is_in_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = "https://bucket.vpce-0a1b-2c.s3.eu-west-1.vpce.amazonaws.com"
    _, finding = look("s3://models/llama", monkeypatch, AWS_ENDPOINT_URL_S3=endpoint)
    assert dict(finding.details)["region"] == "eu-west-1 (the endpoint's name)"


def test_a_variable_that_is_not_read_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.doctor.whereabouts import Whereabouts

    found, _ = look("s3://models/llama", monkeypatch)
    rows = (("region", "us-east-1 (nothing names one)"),)
    elsewhere = Whereabouts(kind="s3", endpoint=found.endpoint, origin=found.origin, rows=rows)
    finding = judge_settings(parse_uri("s3://models/llama"), elsewhere, Settings(), {"AWS_REGION": "eu-west-1"})
    assert (finding.state, finding.what) == (
        State.WARNING,
        "The region is us-east-1, although AWS_REGION is eu-west-1.",
    )
    assert "AWS_DEFAULT_REGION=eu-west-1" in finding.mend


def test_a_name_that_no_bucket_of_amazons_has(monkeypatch: pytest.MonkeyPatch) -> None:
    _, finding = look("s3://My_Models/llama", monkeypatch)
    assert finding.state is State.WARNING
    assert "capital letters" in finding.why
    assert "AWS_ENDPOINT_URL" in finding.mend


def test_proxies_and_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"HTTPS_PROXY": "http://user:pass-word@proxy.example:3128", "HEADRACE_HTTP_TOKEN": "abc-token"}
    _, finding = look("https://host/m", monkeypatch, **environment)
    details = dict(finding.details)
    assert details["proxy"] == "proxy.example:3128 (HTTPS_PROXY)"
    assert details["trusts"] == "the certificates of the system"
    assert "pass-word" not in repr(finding)
    assert "abc-token" not in repr(finding)
    _, finding = look("https://host/m", monkeypatch, **environment, NO_PROXY="host")
    assert dict(finding.details)["proxy"] == "none for this host (NO_PROXY)"


def test_a_proxy_that_cannot_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidSetting, match="socks5"):
        look("https://host/m", monkeypatch, HTTPS_PROXY="socks5://proxy:1080")


@pytest.mark.parametrize(
    ("uri", "kind", "endpoint", "variable"),
    [
        ("gs://models/llama", "gs", "http://127.0.0.1:4443", "HEADRACE_GCS_ENDPOINT"),
        ("az://models@acct/llama", "az", "https://acct.blob.core.windows.net", ""),
        ("https://acct.blob.core.windows.net/models/llama", "az", "https://acct.blob.core.windows.net", ""),
        ("http://127.0.0.1:8000/llama", "http", "http://127.0.0.1:8000", ""),
    ],
)
def test_other_stores(uri: str, kind: str, endpoint: str, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, finding = look(uri, monkeypatch, **({variable: endpoint} if variable else {}))
    assert (found.kind, found.endpoint) == (kind, endpoint)
    assert finding.what == f"Requests go to {endpoint}."
    if variable:
        assert dict(finding.details)["endpoint"] == f"{endpoint} ({variable})"


def test_files(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found, finding = look(str(tmp_path), monkeypatch, HEADRACE_BANDWIDTH_LIMIT="10MB")
    assert (found.kind, found.origin) == ("file", None)
    assert finding.what == "Files are read from this machine."
    assert dict(finding.details)["bandwidth"] == "10,000,000 bytes/s (HEADRACE_BANDWIDTH_LIMIT)"


def test_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "https://mirror.example")
    found, finding = look("hf://org/name", monkeypatch, HF_ENDPOINT="https://mirror.example")
    assert (found.kind, found.origin.host) == ("hf", "mirror.example")
    assert dict(finding.details)["endpoint"] == "https://mirror.example (HF_ENDPOINT)"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    _, finding = look("hf://org/name", monkeypatch)
    assert "HF_HUB_OFFLINE" in finding.what


def test_a_package_that_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "headrace.storage.hub_access", None)
    with pytest.raises(MissingDependency, match=r"headrace\[hub\]"):
        look("hf://org/name", monkeypatch)
