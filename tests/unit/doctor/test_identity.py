"""What the description of credentials means for a load."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.doctor.finding import State
from headrace.doctor.identity import describe_source, hints_for, judge_credentials, without_credentials
from headrace.errors import AccessDenied
from headrace.storage.credentials import CredentialSource

from .fakes import KEYS, NOW

SIGNED = CredentialSource(kind="signed address", source="the query of the uri")


def test_keys_and_where_they_come_from() -> None:
    finding = judge_credentials(KEYS, NOW)
    assert (finding.state, finding.what) == (State.OK, "The access key …MPLE comes from the variables.")
    assert describe_source(KEYS) == "the access key …MPLE from the variables"


def test_the_end_and_the_renewal_are_said() -> None:
    finding = judge_credentials(replace(KEYS, expires_s=NOW + 600, renews_itself=True), NOW)
    assert finding.state is State.OK
    assert finding.what.endswith("It is renewed before it ends.")
    assert finding.details == (("expires", "2023-11-14 22:23:20 UTC, in 10 min 00 s"),)
    far = judge_credentials(replace(SIGNED, expires_s=NOW + 30 * 86400), NOW)
    assert far.details == (("expires", "2023-12-14 22:13:20 UTC, in 30 days"),)


def test_credentials_that_end_soon_are_a_warning() -> None:
    finding = judge_credentials(replace(SIGNED, expires_s=NOW + 600), NOW)
    assert finding.state is State.WARNING
    assert "ends in 10 min" in finding.what
    assert finding.mend == "Make a new signed address."


@pytest.mark.parametrize(
    ("kind", "mend"), [("access key", "aws sso login"), ("shared access signature", "generate-sas")]
)
def test_credentials_that_have_ended_are_a_failure(kind: str, mend: str) -> None:
    finding = judge_credentials(replace(KEYS, kind=kind, identity="", expires_s=NOW - 10_000), NOW)
    assert finding.state is State.FAILED
    assert "has expired" in finding.what
    assert finding.why == "It was good until 2023-11-14 19:26:40 UTC."
    assert mend in finding.mend
    assert finding.details == (("expires", "2023-11-14 19:26:40 UTC, 3 hours ago"),)


def test_trouble_is_a_failure_and_notes_are_details() -> None:
    finding = judge_credentials(replace(KEYS, trouble="It is cut.", mend="Copy it.", notes=("So it is.",)), NOW)
    assert (finding.state, finding.what, finding.mend) == (State.FAILED, "It is cut.", "Copy it.")
    assert ("note", "So it is.") in finding.details


def test_nothing_is_shown() -> None:
    nobody = CredentialSource(kind="", source="HEADRACE_HTTP_TOKEN is not set")
    assert judge_credentials(nobody, NOW).what == "None are sent: HEADRACE_HTTP_TOKEN is not set."
    assert describe_source(nobody) == "nothing (HEADRACE_HTTP_TOKEN is not set)"


def test_where_credentials_were_looked_for() -> None:
    error = AccessDenied("s3://b/m cannot be read.", "The AWS SDK found no credentials.", "Set AWS_PROFILE.")
    environment = {"AWS_ACCESS_KEY_ID": " ", "AWS_SECRET_ACCESS_KEY": "value-that-is-secret"}
    finding = without_credentials(error, "s3", environment)
    assert (finding.what, finding.why) == ("No credentials could be had.", error.why)
    said = [value for _, value in finding.details]
    assert "AWS_ACCESS_KEY_ID is set, and empty." in said
    assert "AWS_SECRET_ACCESS_KEY is set." in said
    assert "AWS_PROFILE is not set." in said
    assert "value-that-is-secret" not in repr(finding)


def test_in_kubernetes_the_roles_of_pods_are_looked_for() -> None:
    said = " ".join(hints_for("s3", {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "AWS_EC2_METADATA_DISABLED": "true"}))
    for words in ("(IRSA): AWS_WEB_IDENTITY_TOKEN_FILE is not set", "Pod Identity", "hop limit", "METADATA_DISABLED"):
        assert words in said
    assert "IRSA" not in " ".join(hints_for("s3", {}))
    assert "AZURE_FEDERATED_TOKEN_FILE" in " ".join(hints_for("az", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}))
    assert "GOOGLE_APPLICATION_CREDENTIALS is not set." in hints_for("gs", {})
    assert hints_for("http", {}) == []
