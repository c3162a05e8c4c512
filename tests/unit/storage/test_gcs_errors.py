from __future__ import annotations

import ssl

import pytest
import requests
import urllib3
from google.api_core.exceptions import GoogleAPIError, NotFound
from google.auth import exceptions as auth
from google.resumable_media import DataCorruption

from headrace.errors import AccessDenied, HeadraceError, InvalidSetting, StorageError, StoreUnavailable
from headrace.storage.gcs_errors import SDK_EXCEPTIONS, judge_sdk_error
from headrace.storage.refusal import Place

PLACE = Place("gs://bucket/m/a", "https://storage.googleapis.com")
SECRET = "ya29." + "Ab1_" * 20


@pytest.mark.parametrize(
    ("error", "kind", "retry", "says"),
    [
        (
            auth.DefaultCredentialsError("Your default credentials were not found. See …"),
            AccessDenied,
            False,
            "found no",
        ),
        (auth.DefaultCredentialsError("File x was not found."), AccessDenied, False, "File x was not found"),
        (auth.MalformedError("No key could be detected."), AccessDenied, False, "No key could be detected"),
        (auth.RefreshError("invalid_grant: Bad", {"token": SECRET}), AccessDenied, False, "invalid_grant: Bad"),
        (auth.RefreshError("Unavailable", retryable=True), StoreUnavailable, True, "Unavailable"),
        (auth.ReauthFailError("Run it."), AccessDenied, False, "gcloud auth application-default login"),
        (auth.TransportError(requests.ConnectionError("down")), StoreUnavailable, True, "gives tokens"),
        (requests.exceptions.SSLError("bad certificate"), StoreUnavailable, False, "SSL_CERT_FILE"),
        (requests.exceptions.ProxyError("no"), StoreUnavailable, True, "HTTPS_PROXY"),
        (requests.ConnectTimeout("late"), StoreUnavailable, True, "HEADRACE_CONNECT_TIMEOUT"),
        (requests.ReadTimeout("late"), StoreUnavailable, True, "HEADRACE_IDLE_TIMEOUT"),
        (urllib3.exceptions.ReadTimeoutError(None, "", "late"), StoreUnavailable, True, "HEADRACE_IDLE_TIMEOUT"),  # type: ignore[arg-type]
        (urllib3.exceptions.ProtocolError("cut"), StoreUnavailable, True, "closed the connection: cut"),
        (requests.exceptions.ChunkedEncodingError("cut"), StoreUnavailable, True, "closed the connection: cut"),
        (ConnectionResetError("reset"), StoreUnavailable, True, "closed the connection: reset"),
        (DataCorruption(None, "differs"), StoreUnavailable, True, "checksum"),
        (requests.exceptions.JSONDecodeError("Expecting", "", 0), StorageError, False, "does not answer as"),
        (requests.exceptions.InvalidURL("no"), InvalidSetting, False, "GOOGLE_"),
        (ValueError("universe domains differ"), InvalidSetting, False, "universe domains differ"),
        (FileNotFoundError(2, "No such file", "x.pem"), StorageError, False, "x.pem"),
        (GoogleAPIError("odd"), StorageError, False, "GoogleAPIError"),
        (NotFound("without an answer"), StorageError, False, "NotFound"),
    ],
)
def test_every_exception_has_its_error(error: Exception, kind: type[HeadraceError], retry: bool, says: str) -> None:
    assert isinstance(error, SDK_EXCEPTIONS)
    verdict = judge_sdk_error(error, PLACE, now=0.0)
    assert type(verdict.error) is kind
    assert verdict.retry is retry
    assert says in str(verdict.error)
    assert "gs://bucket/m/a" in verdict.error.what
    assert verdict.error.mend
    assert SECRET not in str(verdict.error)


def test_the_system_s_own_words_are_taken() -> None:
    """The libraries wrap each other's errors, addresses and all."""
    try:
        try:
            try:
                raise ssl.SSLCertVerificationError("self-signed certificate")
            except OSError as error:
                raise urllib3.exceptions.MaxRetryError(None, "/o?token=x", error) from error  # type: ignore[arg-type]
        except urllib3.exceptions.MaxRetryError as error:
            raise requests.exceptions.SSLError(error) from error
    except requests.exceptions.SSLError as error:
        why = judge_sdk_error(error, PLACE, now=0.0).error.why
    assert "self-signed certificate" in why
    assert "/o?token" not in why
