"""What the Azure SDK's exceptions mean: our errors for all that azure-core, azure-storage-blob and azure-identity raise."""

from __future__ import annotations

import re

from azure.core import exceptions
from azure.core.exceptions import AzureError

from headrace.errors import AccessDenied, HeadraceError, StorageError, StoreUnavailable
from headrace.storage.azure_refusal import AZURE
from headrace.storage.refusal import Complaint, Place, clean, judge_complaint, make_complaint

SDK_EXCEPTIONS = (
    AzureError,
    OSError,  # A program that gives tokens and cannot be started, a certificate file that cannot be read.
    ValueError,  # An answer that lacks what every answer has, and what cannot be deserialized.
)
"""Everything that calls of the SDK raise; only such calls stand where these are caught."""

BROKEN = (exceptions.ServiceResponseError, exceptions.IncompleteReadError)
"""What the SDK raises where an answer breaks off; newer ones wrap it once they have repeated the request in vain."""

_TIMEOUTS = (exceptions.ServiceRequestTimeoutError, exceptions.ServiceResponseTimeoutError)
_QUERY = re.compile(r"\?[^\s'\")]*")
_TLS = re.compile(r"\bSSL|certificate", re.IGNORECASE)


class ScrubbedError(Exception):
    """Stands for an exception of the SDK whose text may hold a signed URL: its kind and its words, cleaned."""


def scrub(error: BaseException) -> ScrubbedError:
    """Return what may be shown of ``error`` as the cause of one of ours."""
    return ScrubbedError(f"{type(error).__name__}: {_said(error)}")


def complaint_of(error: Exception, endpoint: str) -> Complaint | None:
    """Return what the store said; None where it was not the store at ``endpoint`` that answered."""
    response = getattr(error, "response", None)
    url = str(getattr(getattr(response, "request", None), "url", ""))
    if response is None or response.status_code in (200, 206) or not url.startswith(endpoint):
        return None
    headers = {str(name).lower(): str(value) for name, value in response.headers.items()}
    code = getattr(error, "error_code", None) or headers.get("x-ms-error-code", "")
    more: dict[str, str] = getattr(error, "additional_info", None) or {}
    words = str(getattr(error, "message", "")).partition("\nErrorCode:")[0]
    if words.startswith("Operation returned an invalid status"):
        words = str(
            response.reason or ""
        )  # What the SDK makes up where there is no body; Azure's reasons are sentences.
    detail = more.get("authenticationerrordetail") or ""
    message = f"{detail} {words}"
    return make_complaint(response.status_code, str(getattr(code, "value", code)), message, "", headers)


def explain_sdk_error(error: Exception, place: Place) -> HeadraceError:
    """Return our error for ``error``, one of `SDK_EXCEPTIONS`, which holds no signed URL."""
    complaint = complaint_of(error, place.endpoint)
    if complaint is not None:
        return judge_complaint(complaint, place, now=0.0, dialect=AZURE).error
    what, said = f"{place.uri} cannot be read.", _said(error)
    if isinstance(error, exceptions.ClientAuthenticationError):
        return AccessDenied(
            what,
            f"azure-identity got no token for it: {said}.",
            "Sign in (az login), set AZURE_CLIENT_ID, AZURE_TENANT_ID and AZURE_CLIENT_SECRET, or give a key or a SAS (AZURE_STORAGE_KEY, AZURE_STORAGE_SAS_TOKEN).",
        )
    broken = _explain_connection(error, place, what, said)
    if broken is not None:
        return broken
    if isinstance(error, OSError):
        return StorageError(what, f"The Azure SDK failed ({type(error).__name__}): {said}.", "Check the configuration.")
    return StorageError(
        what, f"{place.endpoint} does not answer as an Azure storage account does.", "Check the endpoint."
    )


def _explain_connection(error: Exception, place: Place, what: str, said: str) -> StoreUnavailable | None:
    # A body that broke off again and again comes wrapped.
    inner = getattr(error, "inner_exception", None)
    if isinstance(error, _TIMEOUTS) or isinstance(inner, _TIMEOUTS):
        kind = "connection" if isinstance(error, exceptions.ServiceRequestTimeoutError) else "answer"
        return StoreUnavailable(
            what,
            f"No {kind} came from {place.endpoint} in time.",
            "Check the endpoint and the network; HEADRACE_CONNECT_TIMEOUT and HEADRACE_IDLE_TIMEOUT allow more time.",
        )
    if isinstance(error, exceptions.ServiceRequestError) and _TLS.search(said):
        return StoreUnavailable(
            what,
            f"The TLS connection to {place.endpoint} failed: {said}.",
            "Name the certificate bundle of a private authority in REQUESTS_CA_BUNDLE or SSL_CERT_FILE; check that the endpoint speaks TLS.",
        )
    if isinstance(error, exceptions.ServiceRequestError):
        return StoreUnavailable(
            what,
            f"{place.endpoint} could not be reached: {said}.",
            "Check the account's name, AZURE_STORAGE_ENDPOINT and the network.",
        )
    if isinstance(error, BROKEN) or isinstance(inner, BROKEN):
        return StoreUnavailable(
            what, f"The connection to {place.endpoint} broke: {said}.", "Try again; check the network."
        )
    return None


def _said(error: BaseException) -> str:
    """Return the error's own words without the query of any URL in them, where a signature may be."""
    text = str(error).partition("\n")[0]
    return clean(_QUERY.sub("", re.sub(r"<urllib3[^>]*>: ", "", text))).rstrip(".")
