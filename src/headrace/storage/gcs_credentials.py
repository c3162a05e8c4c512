"""Where the credentials for Google Cloud Storage come from, for people. Names google-auth's kinds of credentials; shows no token and no key."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC
from typing import Any

from headrace.storage.credentials import CredentialSource
from headrace.storage.gcs_access import GcsOptions

_KINDS = {
    "google.oauth2.service_account": "the key file of a service account",
    "google.oauth2.credentials": "the login of gcloud auth application-default login",
    "google.oauth2.gdch_credentials": "a service identity of Google Distributed Cloud",
    "google.auth.compute_engine.credentials": "the metadata service of this machine or pod",
    "google.auth.identity_pool": "workload identity federation",
    "google.auth.aws": "workload identity federation from AWS",
    "google.auth.pluggable": "workload identity federation through a program",
    "google.auth.external_account_authorized_user": "workforce identity federation",
    "google.auth.impersonated_credentials": "a service account that another one stands in for (impersonation)",
}
"""Module of a class of credentials to what it is (google-auth 2)."""


def describe_google_credentials(
    credentials: Any, options: GcsOptions, environment: Mapping[str, str]
) -> CredentialSource:
    """Return where ``credentials`` come from and when their token ends; it should have been fetched."""
    module = type(credentials).__module__
    source = _KINDS.get(module, f"google-auth's {module}.{type(credentials).__name__}")
    named_by = _named_by(options, environment)
    email = getattr(credentials, "service_account_email", "") or ""
    expiry = getattr(credentials, "expiry", None)  # In UTC, without saying so.
    return CredentialSource(
        kind="token",
        source=f"{source} ({named_by})" if named_by else source,
        identity="" if email == "default" else str(email),
        expires_s=None if expiry is None else expiry.replace(tzinfo=UTC).timestamp(),
        renews_itself=True,
    )


def _named_by(options: GcsOptions, environment: Mapping[str, str]) -> str:
    if options.credentials_file is not None:
        return f"{options.credentials_file}, which the settings name"
    file = environment.get("GOOGLE_APPLICATION_CREDENTIALS", "")
    return f"{file}, which GOOGLE_APPLICATION_CREDENTIALS names" if file else ""
