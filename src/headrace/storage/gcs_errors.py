"""What the exceptions of Google's libraries mean: our errors for all that they raise, in the words of the store's own refusals."""

from __future__ import annotations

import requests
import urllib3.exceptions
from google.api_core.exceptions import GoogleAPICallError, GoogleAPIError
from google.auth import exceptions as auth
from google.resumable_media import DataCorruption

from headrace.errors import AccessDenied, HeadraceError, InvalidSetting, StorageError, StoreUnavailable
from headrace.storage.gcs_refusal import GCS, read_gcs_complaint
from headrace.storage.refusal import Dialect, Place, clean, judge_complaint
from headrace.storage.store import Refusal, Verdict

SDK_EXCEPTIONS = (
    GoogleAPIError,
    auth.GoogleAuthError,
    DataCorruption,
    requests.RequestException,
    urllib3.exceptions.HTTPError,  # Raw bodies are read below requests.
    OSError,  # A body that ends early; a file of credentials or certificates.
    ValueError,  # An endpoint or a name that cannot be.
)
"""Everything that calls of the SDK raise; only such calls stand where these are caught."""

_LOGIN = "Check the credentials; gcloud auth application-default login gets new ones of a user."
_BROKEN = (
    requests.exceptions.ChunkedEncodingError,
    requests.exceptions.ContentDecodingError,
    requests.ConnectionError,
    urllib3.exceptions.HTTPError,
    ConnectionError,
)
_LATE = (requests.Timeout, urllib3.exceptions.TimeoutError, TimeoutError)
_WRONG_ADDRESS = (
    requests.exceptions.InvalidURL,
    requests.exceptions.InvalidSchema,
    requests.exceptions.MissingSchema,
)


def refusal_of(error: Exception) -> Refusal | None:
    """Return the store's own refusal that ``error`` wraps; None where it is about something else."""
    response = error.response if isinstance(error, GoogleAPICallError) else None
    if response is None:
        return None
    headers = {name.lower(): value for name, value in response.headers.items()}
    return Refusal(response.status_code, response.reason or "", headers, response.content)


def judge_sdk_error(error: Exception, place: Place, *, now: float, dialect: Dialect = GCS) -> Verdict:
    """Return what ``error``, one of `SDK_EXCEPTIONS`, means, and whether asking again can help; the caller raises its error from that one."""
    refusal = refusal_of(error)
    if refusal is not None:
        return judge_complaint(read_gcs_complaint(refusal), place, now=now, dialect=dialect)
    what = f"{place.uri} cannot be read."
    if isinstance(error, auth.GoogleAuthError):
        return _judge_auth_error(error, place, what)
    connection = _explain_connection(error, place, what)
    if connection is not None:
        return Verdict(connection, retry=not isinstance(error, requests.exceptions.SSLError))
    return Verdict(_explain_rest(error, place, what))


def no_credentials(place: Place) -> AccessDenied:
    """Return the error for a machine without credentials."""
    return AccessDenied(
        f"{place.uri} cannot be read.",
        "Google's library found no credentials on this machine.",
        "Run gcloud auth application-default login, or name a key file in GOOGLE_APPLICATION_CREDENTIALS; for a public bucket ask for anonymous access "
        "(HEADRACE_GCS_ANONYMOUS=1).",
    )


def _judge_auth_error(error: auth.GoogleAuthError, place: Place, what: str) -> Verdict:
    # Its other arguments are the whole answer of the service that gives tokens.
    said = clean(str(error.args[0]) if error.args else type(error).__name__).rstrip(".")
    if isinstance(error, auth.DefaultCredentialsError):
        if "default credentials were not found" in said:
            return Verdict(no_credentials(place))
        return Verdict(AccessDenied(what, f"The credentials cannot be used: {said}.", _LOGIN))
    if isinstance(error, auth.TransportError) or error.retryable:
        failure = StoreUnavailable(
            what,
            f"The service that gives tokens could not be reached: {_root_of(error)}.",
            "Try again; check the network, and REQUESTS_CA_BUNDLE where a private authority signs.",
        )
        return Verdict(failure, retry=True)
    return Verdict(AccessDenied(what, f"No token was given for the credentials: {said}.", _LOGIN))


def _explain_connection(error: Exception, place: Place, what: str) -> StoreUnavailable | None:
    said = _root_of(error)
    if isinstance(error, (requests.exceptions.SSLError, urllib3.exceptions.SSLError)):
        return StoreUnavailable(
            what,
            f"The TLS connection to {place.endpoint} failed: {said}.",
            "Name the certificate bundle of a private authority in REQUESTS_CA_BUNDLE or SSL_CERT_FILE; check that the endpoint speaks TLS.",
        )
    if isinstance(error, requests.exceptions.ProxyError):
        return StoreUnavailable(
            what, f"The proxy in front of {place.endpoint} could not be reached.", "Check HTTPS_PROXY and NO_PROXY."
        )
    if isinstance(error, _LATE):
        return StoreUnavailable(
            what,
            f"No connection to {place.endpoint}, or no answer of it, came in time.",
            "Check the endpoint and the network; HEADRACE_CONNECT_TIMEOUT and HEADRACE_IDLE_TIMEOUT allow more time.",
        )
    if isinstance(error, _BROKEN):
        return StoreUnavailable(
            what,
            f"{place.endpoint} could not be reached, or closed the connection: {said}.",
            "Try again; check the network, and the endpoint where that is one of your own (STORAGE_EMULATOR_HOST, HEADRACE_GCS_ENDPOINT).",
        )
    if isinstance(error, DataCorruption):
        return StoreUnavailable(what, "What came does not have the checksum that the store keeps of it.", "Try again.")
    return None


def _root_of(error: Exception) -> str:
    """Return what the system said, below the layers that each quote the one beneath."""
    found: BaseException = error
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OSError):
            found = link
        link = link.__cause__ or link.__context__
    return clean(str(found)).rstrip(".") or type(found).__name__


def _explain_rest(error: Exception, place: Place, what: str) -> HeadraceError:
    said = clean(str(error)).rstrip(".")
    if isinstance(error, requests.exceptions.InvalidJSONError):
        return StorageError(
            what, f"{place.endpoint} does not answer as Google Cloud Storage does.", "Check the endpoint."
        )
    if isinstance(error, _WRONG_ADDRESS) or (isinstance(error, ValueError) and not isinstance(error, OSError)):
        return InvalidSetting(
            what,
            f"The configuration of Google's library is not usable: {said}.",
            "Check the endpoint, the bucket's name and the GOOGLE_* variables.",
        )
    return StorageError(
        what, f"Google's library failed ({type(error).__name__}): {said}.", "Check its configuration and the endpoint."
    )
