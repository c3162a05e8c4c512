"""How the blobs of one container are reached: the SDK's client, endpoint, credentials and certificates, taken from one configuration.

What is configured serves the SDK's own calls and the ranged reads alike. A key or a SAS is used as it is, and then azure-identity is not even
imported, since its chain asks metadata services that may not be there.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import certifi
from azure.core.credentials import AzureNamedKeyCredential, AzureSasCredential
from azure.storage.blob import ContainerClient, ExponentialRetry

from headrace.errors import AccessDenied
from headrace.settings import AzureSettings, TransportSettings
from headrace.storage.address import Address
from headrace.storage.azure_errors import SDK_EXCEPTIONS, explain_sdk_error, scrub
from headrace.storage.azure_location import AzureLocation, find_location
from headrace.storage.azure_signing import AzureKey, AzureTarget, find_target, read_key, sign_headers
from headrace.storage.azure_tokens import TokenSource, make_default_credential
from headrace.storage.certificates import check_ca_file, find_system_ca_file
from headrace.storage.credentials import CredentialSource
from headrace.storage.links import end_of_address
from headrace.storage.refusal import Place
from headrace.storage.uri import Uri

_MOST_SDK_RETRIES = 3
_KIND_OF_CREDENTIALS = re.compile(r"^(?:the account key of|the SAS (?:of|in)|a token of) ")
"""What the words for credentials begin with; the rest says where they come from."""
Headers = list[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AzureOptions:
    """What reaching an account takes besides a uri."""

    anonymous: bool = False
    """Send no credentials and look for none: for public containers."""
    verify_tls: bool = True
    """Check the server's certificate."""
    ca_file: str | None = None
    """The certificates to trust, in PEM form; None means the system's."""
    read_settings: Callable[[], AzureSettings] = field(default=AzureSettings.from_environment, repr=False)
    """Gives the account and its credentials; called again where new credentials are needed."""
    new_credential: Callable[..., Any] = field(default=make_default_credential, repr=False)
    """Makes the credential that gives tokens, where there is neither key nor SAS; takes the options of the SDK's connections."""


@dataclass(frozen=True, slots=True)
class AzureAccess:
    """One consistent view of it all; replaced as a whole when the credentials change. At most one of ``key``, ``sas`` and ``tokens`` is there."""

    client: ContainerClient = field(repr=False)
    target: AzureTarget
    location: AzureLocation
    api_version: str
    ca_file: str | None
    key: AzureKey | None = None
    sas: str = field(default="", repr=False)
    tokens: TokenSource | None = field(default=None, repr=False)

    @property
    def endpoint(self) -> str:
        """The URL of the account's blob service."""
        return self.location.url

    @property
    def credentials(self) -> str:
        """The kind of credentials that is shown, in words; empty for anonymous requests."""
        return self.location.credentials if self.key or self.sas or self.tokens else ""

    def authorise(self, path: str, headers: Headers, now: float, version_id: str = "") -> tuple[str, Headers]:
        """Return the target and the headers of a GET of ``path`` that is allowed now, of an older version where one is named. May raise the errors of the token's credential."""
        headers = [*headers, ("x-ms-version", self.api_version)]
        if self.key is not None:
            return path + _version_query(version_id), sign_headers(self.key, path, headers, now, version_id)
        if self.tokens is not None:
            headers.append(("Authorization", f"Bearer {self.tokens.token()}"))
        query = _version_query(version_id)
        if self.sas:
            query += f"{'&' if query else '?'}{self.sas}"
        return path + query, headers

    def describe(self) -> CredentialSource:
        """Return what is shown, for people; where that is a token, one is asked for. May raise the credential's errors."""
        source = _KIND_OF_CREDENTIALS.sub("", self.credentials)
        if self.tokens is not None:
            self.tokens.token()
            return CredentialSource(kind="token", source=source, expires_s=self.tokens.expires_s, renews_itself=True)
        if self.sas:
            # A signature says in its own words when it ends.
            end = end_of_address(Address("https", self.target.host, self.target.port, f"/?{self.sas}"))
            return CredentialSource(kind="shared access signature", source=source, expires_s=end)
        if self.key is not None:
            return CredentialSource(kind="account key", source=source, identity=f"account {self.key.account}")
        return CredentialSource(kind="", source="anonymous access is asked for (HEADRACE_AZURE_ANONYMOUS)")

    def leads_where(self, other: AzureAccess) -> bool:
        """Say whether both lead to the same container of the same account."""
        mine, theirs = self.location, other.location
        return (mine.url, mine.container, mine.prefix) == (theirs.url, theirs.container, theirs.prefix)

    def ask_secret(self) -> object:
        """Return what is shown, for comparison; where that is a token, one is asked for. May raise the credential's errors."""
        return self.tokens.token() if self.tokens is not None else self.last_secret()

    def last_secret(self) -> object:
        """Return what was shown last; None before the first token."""
        return self.tokens.last_token if self.tokens is not None else (self.key, self.sas)

    def close(self) -> None:
        """Close all connections."""
        self.client.close()
        if self.tokens is not None:
            self.tokens.close()


def connect_azure(
    uri: Uri, options: AzureOptions, transport: TransportSettings, *, tenant_id: str | None = None
) -> AzureAccess:
    """Return the access to the container of ``uri``. Opens no connection.

    Raises `InvalidUri` and `InvalidSetting` for what cannot be a container of an account, and `AccessDenied` where a token would go over plain HTTP.
    """
    settings = options.read_settings()
    location = find_location(uri, settings)
    ca_file = _find_ca_file(options) if location.url.startswith("https:") else None
    verify: Any = {"connection_verify": (ca_file or True) if options.verify_tls else False}
    key = sas = tokens = None
    credential: Any = None
    if options.anonymous:
        pass
    elif location.key:
        key = read_key(location.account, location.key)
        credential = AzureNamedKeyCredential(location.account, location.key)
    elif location.sas:
        sas = location.sas
        credential = AzureSasCredential(sas)
    else:
        _check_tokens_are_safe(uri, location)
        credential = tokens = TokenSource(options.new_credential(**verify), tenant_id=tenant_id)
    try:
        client = ContainerClient(
            location.url,
            location.container,
            credential=credential,
            retry_policy=_make_retries(transport),
            connection_timeout=transport.connect_timeout_s,
            read_timeout=transport.idle_timeout_s,
            **verify,
        )
    except SDK_EXCEPTIONS as error:
        raise explain_sdk_error(error, Place(str(uri), location.url)) from scrub(error)
    target = find_target(location.url, location.container)
    return AzureAccess(client, target, location, client.api_version, ca_file, key, sas or "", tokens)


def _version_query(version_id: str) -> str:
    return f"?versionid={quote(version_id, safe='')}" if version_id else ""


def _make_retries(transport: TransportSettings) -> ExponentialRetry:
    """Return the SDK's retries; its own begin with a wait of fifteen seconds."""
    first_s = max(1, round(transport.backoff_first_s))
    num_retries = min(transport.max_attempts - 1, _MOST_SDK_RETRIES)
    return ExponentialRetry(
        initial_backoff=first_s, increment_base=2, retry_total=num_retries, random_jitter_range=first_s
    )


def _find_ca_file(options: AzureOptions) -> str:
    """Return the one certificate bundle for the SDKs and for ranged reads: the given one, the system's, or that of the SDK's HTTP library."""
    if options.ca_file is not None:
        return check_ca_file(options.ca_file, "REQUESTS_CA_BUNDLE, SSL_CERT_FILE or the setting ca_file")
    return find_system_ca_file() or certifi.where()


def _check_tokens_are_safe(uri: Uri, location: AzureLocation) -> None:
    """Refuse to send a token over plain HTTP, where it could be copied and used."""
    if location.url.startswith("http:"):
        raise AccessDenied(
            f"{uri} cannot be read.",
            f"There is neither key nor SAS for {location.url}, and a token is not sent over plain HTTP.",
            "Set AZURE_STORAGE_KEY, AZURE_STORAGE_SAS_TOKEN or AZURE_STORAGE_CONNECTION_STRING.",
        )
