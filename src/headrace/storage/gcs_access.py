"""How the objects of Google Cloud Storage are reached: the SDK's client, endpoint, tokens and certificates, which serve all requests alike.

What Google's libraries read is honoured, because they read it: application default credentials (a key file, gcloud's, workload identity, the metadata
service), emulators, proxies. Nothing but objects is ever asked for: rights on the bucket itself are not needed.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import google.auth
import requests
from google.auth.credentials import AnonymousCredentials, TokenState
from google.auth.exceptions import GoogleAuthError
from google.auth.transport.requests import Request
from google.cloud import storage
from google.oauth2 import service_account
from requests.adapters import HTTPAdapter

from headrace.errors import InvalidSetting
from headrace.settings import TransportSettings
from headrace.storage.address import Address, parse_address
from headrace.storage.certificates import check_ca_file, find_system_ca_file
from headrace.storage.gcs_errors import SDK_EXCEPTIONS, judge_sdk_error
from headrace.storage.refusal import Place

SCOPES = ("https://www.googleapis.com/auth/devstorage.read_only",)
"""What tokens are asked for: reading, and nothing else."""

_HOST = "https://storage.googleapis.com"
_UNIVERSE = "googleapis.com"
_REFRESH_PAUSE_S = 10.0  # A token service that fails is not asked again for every read while the old token still holds.
_TOKEN_RETRIES = 3  # As Google's own session has it; also for the metadata service.


@dataclass(frozen=True, slots=True, kw_only=True)
class GcsOptions:
    """What the configuration of Google's libraries does not say, or shall not say."""

    anonymous: bool = False
    """Send no token and look for no credentials: for public buckets."""
    credentials_file: Path | None = None
    """The key file of a service account; None asks for application default credentials."""
    endpoint: str | None = None
    """Another endpoint than Google's, such as a private one: ``https://storage-name.p.googleapis.com``."""
    user_project: str | None = None
    """The project that pays, for buckets whose readers do."""
    ca_file: str | None = None
    """The certificates to trust; None takes those of ``REQUESTS_CA_BUNDLE``, ``SSL_CERT_FILE`` or the system."""
    verify_tls: bool = True
    """Check the server's certificate."""
    find_credentials: Callable[[], Any] | None = field(default=None, repr=False)
    """Gives google-auth's credentials in place of all of the above; called again where new ones are needed."""


class Tokens:
    """The headers that authorise requests: fetches a token before the last one ends, and once for all threads."""

    def __init__(self, credentials: Any, request: Any, clock: Callable[[], float] = time.monotonic) -> None:
        """Fetch nothing yet. ``request`` is google-auth's transport."""
        self._credentials = credentials
        self._request = request
        self._clock = clock
        self._lock = threading.Lock()
        self._failed_at = float("-inf")

    @property
    def current(self) -> str | None:
        """The token of this moment, without fetching one. A secret."""
        token: str | None = self._credentials.token
        return token

    @property
    def credentials(self) -> Any:
        """google-auth's credentials, to be described. They hold secrets."""
        return self._credentials

    def headers(self) -> dict[str, str]:
        """Return the headers for a request that is sent now. Raises google-auth's errors where no token can be had."""
        found: dict[str, str] = {}
        with self._lock:
            if not self._credentials.valid:
                self._refresh()
            self._credentials.apply(found)
        return found

    def _refresh(self) -> None:
        # google-auth calls a token old minutes before it ends: time in which the service may fail without harm.
        holds = self._credentials.token_state is TokenState.STALE
        if holds and self._clock() - self._failed_at < _REFRESH_PAUSE_S:
            return
        try:
            self._credentials.refresh(self._request)
        except GoogleAuthError:
            if not holds:
                raise
            self._failed_at = self._clock()


@dataclass(frozen=True, slots=True)
class GcsAccess:
    """One consistent view of it all; replaced as a whole when the credentials change. ``ca_file`` is for TLS; None over plain HTTP."""

    client: Any = field(repr=False)
    address: Address
    endpoint: str
    tokens: Tokens = field(repr=False)
    ca_file: str | None
    token_session: requests.Session = field(repr=False)
    is_anonymous: bool

    def close(self) -> None:
        """Close the SDK's connections."""
        self.client.close()
        self.token_session.close()


def connect_gcs(uri: str, options: GcsOptions, transport: TransportSettings) -> GcsAccess:
    """Return the access to Cloud Storage for ``uri``, which stands in messages only.

    Asks nothing of the store; the credential chain may ask the metadata service. Raises `InvalidSetting` for a configuration that cannot work and
    `AccessDenied` where there are no credentials.
    """
    try:
        ca_file = check_ca_file(options.ca_file, "ca_file") if options.ca_file else _find_ca_file()
        verify = ca_file if options.verify_tls else False
        endpoint, is_emulator = _find_endpoint(options)
        is_anonymous = options.anonymous or (is_emulator and options.find_credentials is None)
        credentials = AnonymousCredentials() if is_anonymous else _find_credentials(options)
        token_session = _Session(verify, max_retries=_TOKEN_RETRIES)
        request = functools.partial(
            Request(token_session), timeout=(transport.connect_timeout_s, transport.idle_timeout_s)
        )
        tokens = Tokens(credentials, request)
        session = _Session(verify, num_connections=transport.num_connections)
        session.auth = _Bearer(tokens)
        session.hooks["response"].append(_check_document)
        endpoint = endpoint or f"https://storage.{credentials.universe_domain}"
        client = _make_client(endpoint, credentials, session)
    except SDK_EXCEPTIONS as error:
        raise judge_sdk_error(error, Place(uri, "Google Cloud Storage"), now=0.0).error from error
    address = parse_address(endpoint)
    return GcsAccess(
        client, address, endpoint, tokens, ca_file if address.scheme == "https" else None, token_session, is_anonymous
    )


class _Session(requests.Session):  # type: ignore[misc]  # requests has no types
    """A session that trusts the certificates it was given: in requests, ``REQUESTS_CA_BUNDLE`` wins over them, and even over no check at all."""

    is_mtls = False
    """Asked for by the SDK: there are no certificates of the client's own."""

    def __init__(self, verify: str | bool, *, max_retries: int = 0, num_connections: int = 1) -> None:
        super().__init__()
        self.verify = verify
        adapter = HTTPAdapter(max_retries=max_retries, pool_maxsize=max(10, num_connections))
        self.mount("https://", adapter)
        self.mount("http://", adapter)

    def merge_environment_settings(self, url: Any, proxies: Any, stream: Any, verify: Any, cert: Any) -> Any:
        """Return what requests makes of the environment, but for the certificates."""
        settings = super().merge_environment_settings(url, proxies, stream, verify, cert)
        return {**settings, "verify": self.verify}


class _Bearer(requests.auth.AuthBase):  # type: ignore[misc]
    """Puts the token of the moment into each request of the SDK."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    def __call__(self, prepared: Any) -> Any:
        prepared.headers.update(self._tokens.headers())
        return prepared


def _check_document(response: Any, **_: Any) -> None:
    """Refuse an answer that is no JSON object where it has to be one; the SDK takes it for granted."""
    if (
        response.status_code == 200
        and "alt=media" not in response.request.url
        and not isinstance(response.json(), dict)
    ):
        raise requests.exceptions.InvalidJSONError("no JSON object")


def _make_client(endpoint: str, credentials: Any, session: requests.Session) -> Any:
    """Return the SDK's client. It wants to be told the universe (Google's public cloud, or another) that the credentials are for."""
    client_options: dict[str, Any] = {"scopes": SCOPES, "api_endpoint": endpoint}
    if credentials.universe_domain != _UNIVERSE:
        client_options["universe_domain"] = credentials.universe_domain
    client = storage.Client(project=None, credentials=credentials, _http=session, client_options=client_options)
    # The client looks each bucket up in a thread of its own, for traces (seen in 3.17). That asks for a right which readers of objects need not have.
    client._bucket_metadata_cache = None
    return client


def _find_endpoint(options: GcsOptions) -> tuple[str | None, bool]:
    """Return the endpoint where it is not Google's, and whether it is an emulator's: one over plain HTTP gets no token, nor one that the SDK calls so."""
    named, is_emulator = "HEADRACE_GCS_ENDPOINT or CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE", False
    endpoint = options.endpoint
    if endpoint is None:
        probe = storage.Client(project=None, credentials=AnonymousCredentials())
        endpoint, named = probe.api_endpoint, "STORAGE_EMULATOR_HOST"
        is_emulator = getattr(probe, "_is_emulator_set", False)
    # gcloud's own setting names the API below the host, too.
    endpoint = endpoint.rstrip("/").removesuffix("/storage/v1")
    if endpoint == _HOST:
        return None, False
    try:
        address = parse_address(endpoint)
    except ValueError:
        address = None
    if address is None or "@" in endpoint or "?" in endpoint:
        raise InvalidSetting(
            "The endpoint of Google Cloud Storage is not a plain URL.",
            f"{named} gives it.",
            "Write scheme, host and port, as in http://127.0.0.1:4443.",
        )
    return endpoint, is_emulator or address.scheme == "http"


def _find_credentials(options: GcsOptions) -> Any:
    if options.find_credentials is not None:
        return options.find_credentials()
    if options.credentials_file is None:
        return google.auth.default(scopes=SCOPES)[0]
    try:
        return service_account.Credentials.from_service_account_file(str(options.credentials_file), scopes=SCOPES)
    except (OSError, ValueError) as error:
        # Not quoted: what cannot be read as a key may still be one.
        raise InvalidSetting(
            f"The credentials file {options.credentials_file} cannot be used.",
            f"It cannot be opened, or does not hold the key of a service account ({type(error).__name__}).",
            "Name a service account's JSON key; all other kinds of credentials go into GOOGLE_APPLICATION_CREDENTIALS.",
        ) from error


def _find_ca_file() -> str:
    """Return the certificate bundle: ``REQUESTS_CA_BUNDLE`` or ``CURL_CA_BUNDLE``, then ``SSL_CERT_FILE`` or the system's, then requests' own."""
    with requests.Session() as session:
        configured = session.merge_environment_settings(_HOST, {}, None, None, None)["verify"]
    if isinstance(configured, str):
        return check_ca_file(configured, "REQUESTS_CA_BUNDLE or CURL_CA_BUNDLE")
    return find_system_ca_file() or str(requests.certs.where())
