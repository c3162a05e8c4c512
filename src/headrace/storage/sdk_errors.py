"""What the AWS SDK's exceptions mean: our errors for all that botocore raises, in the words of the store's own refusals."""

from __future__ import annotations

from urllib.parse import urlsplit

from botocore import exceptions
from botocore.parsers import ResponseParserError

from headrace.errors import AccessDenied, HeadraceError, InvalidSetting, InvalidUri, StorageError, StoreUnavailable
from headrace.storage.refusal import Complaint, Place, clean, judge_complaint, make_complaint

SDK_EXCEPTIONS = (
    exceptions.BotoCoreError,
    exceptions.ClientError,
    ResponseParserError,  # An answer that is not XML.
    OSError,  # A credential program that cannot be started.
    RuntimeError,  # Credentials that are expired even after their refresh.
    ValueError,  # An endpoint that is not a URL.
)
"""Everything that calls of the SDK raise; only such calls stand where these are caught."""

_OWN_OPERATIONS = ("ListObjectsV2", "ListObjects", "ListObjectVersions", "HeadObject", "GetObject")
_NO_CREDENTIALS = (exceptions.NoCredentialsError, exceptions.NoAuthTokenError)
_CREDENTIALS = (
    exceptions.PartialCredentialsError,
    exceptions.CredentialRetrievalError,
    exceptions.TokenRetrievalError,
    exceptions.MetadataRetrievalError,
    exceptions.RefreshWithMFAUnsupportedError,
    exceptions.InvalidConfigError,
    exceptions.SSOError,
    exceptions.UnknownCredentialError,
    RuntimeError,
    OSError,
)
_CONFIGURATION = (
    exceptions.ProfileNotFound,
    exceptions.ConfigParseError,
    exceptions.ConfigNotFound,
    exceptions.InvalidRegionError,
    exceptions.InvalidIMDSEndpointError,
    exceptions.InvalidS3AddressingStyleError,
    exceptions.InvalidRetryConfigurationError,
    exceptions.EndpointProviderError,
    exceptions.BaseEndpointResolverError,
    exceptions.UnsupportedS3ConfigurationError,
    ValueError,
)
_TIMEOUTS = (exceptions.ReadTimeoutError, exceptions.ConnectTimeoutError)


def complaint_of(error: exceptions.ClientError) -> Complaint:
    """Return what the store said, taken out of the SDK's wrapping."""
    said, metadata = error.response.get("Error", {}), error.response.get("ResponseMetadata", {})
    return make_complaint(
        metadata.get("HTTPStatusCode", 0),
        str(said.get("Code", "")),
        str(said.get("Message", "")),
        str(said.get("Region", "")),
        metadata.get("HTTPHeaders", {}),
    )


def is_own_refusal(error: Exception) -> bool:
    """Say whether the store itself refused, rather than a service that gives credentials for it."""
    return isinstance(error, exceptions.ClientError) and error.operation_name in _OWN_OPERATIONS


def explain_sdk_error(error: Exception, place: Place) -> HeadraceError:
    """Return our error for ``error``, one of `SDK_EXCEPTIONS`; the caller raises it from that one."""
    what = f"{place.uri} cannot be read."
    said = clean(str(error)).rstrip(".")
    if isinstance(error, exceptions.ClientError):
        if is_own_refusal(error):
            return judge_complaint(complaint_of(error), place, now=0.0).error
        code = complaint_of(error).code or "no code"
        return AccessDenied(
            what,
            f"The credentials for it come from {error.operation_name}, which was refused: {code}.",
            "Check the role and the profile that the AWS configuration names.",
        )
    connection = _explain_connection(error, place, what, said)
    if connection is not None:  # First, since one of these is an OSError, too.
        return connection
    if isinstance(error, _NO_CREDENTIALS):
        return no_credentials(place)
    if isinstance(error, _CREDENTIALS):
        return AccessDenied(
            what, f"The AWS SDK got no credentials: {said}.", "Check them with: aws sts get-caller-identity."
        )
    if isinstance(error, exceptions.ParamValidationError):
        return InvalidUri(what, f"The AWS SDK refuses its parts: {said}.", "Check bucket and folder.")
    if isinstance(error, _CONFIGURATION):
        return InvalidSetting(
            what,
            f"The AWS configuration is not usable: {said}.",
            "Check the AWS_* variables and the AWS configuration file.",
        )
    if isinstance(error, ResponseParserError):
        return StorageError(what, f"{place.endpoint} does not answer as an S3 server does.", "Check the endpoint.")
    return StorageError(what, f"The AWS SDK failed ({type(error).__name__}): {said}.", "Check the AWS configuration.")


def no_credentials(place: Place) -> AccessDenied:
    """Return the error for a store that wants credentials where there are none."""
    return AccessDenied(
        f"{place.uri} cannot be read.",
        f"The AWS SDK found no credentials for {place.endpoint}.",
        "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; for a public bucket ask for anonymous access.",
    )


def _explain_connection(error: Exception, place: Place, what: str, said: str) -> StoreUnavailable | None:
    endpoint = _endpoint_of(error, place)
    if isinstance(error, exceptions.SSLError):
        return StoreUnavailable(
            what,
            f"The TLS connection to {endpoint} failed: {said}.",
            "Name the certificate bundle of a private authority in AWS_CA_BUNDLE; check that the endpoint speaks TLS.",
        )
    if isinstance(error, exceptions.ProxyConnectionError):
        return StoreUnavailable(
            what, f"The proxy in front of {endpoint} could not be reached.", "Check HTTPS_PROXY and NO_PROXY."
        )
    if isinstance(error, _TIMEOUTS):
        kind = "connection" if isinstance(error, exceptions.ConnectTimeoutError) else "answer"
        return StoreUnavailable(
            what,
            f"No {kind} came from {endpoint} in time.",
            "Check the endpoint and the network; HEADRACE_CONNECT_TIMEOUT and HEADRACE_IDLE_TIMEOUT allow more time.",
        )
    if isinstance(error, exceptions.EndpointConnectionError):
        return StoreUnavailable(
            what,
            f"{endpoint} could not be reached.",
            "Check the endpoint (AWS_ENDPOINT_URL, or the AWS configuration), and that its server runs.",
        )
    if isinstance(error, (exceptions.HTTPClientError, exceptions.ConnectionError, exceptions.IncompleteReadError)):
        return StoreUnavailable(what, f"The connection to {endpoint} broke: {said}.", "Try again; check the network.")
    return None


def _endpoint_of(error: Exception, place: Place) -> str:
    """Return where the failed connection led: to the store, or to a service that gives credentials."""
    parts = urlsplit(str(getattr(error, "kwargs", {}).get("endpoint_url", "")))
    reached = f"{parts.scheme}://{parts.hostname}"
    return place.endpoint if not parts.hostname or place.endpoint.startswith(reached) else reached
