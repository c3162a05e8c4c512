"""The configured storage account: its name, its address, and the one of several credentials that is used. Pure.

Connection strings: Microsoft, "Configure Azure Storage connection strings". The order of the credentials is that of the Azure SDK and CLI:
connection string, shared access signature, key, and only without any of these the chain of azure-identity.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import quote, unquote

from headrace.errors import InvalidSetting
from headrace.settings import AzureSettings

TOKENS = "a token of azure-identity's default chain, since neither key nor SAS is configured"
"""The credentials where none are configured, in words."""

_NAME = r"[a-z0-9]{3,24}"
_HOST = rf"({_NAME})(?:-secondary|-ipv6|-dualstack)?(?:\.z\d+)?\.(?:blob|dfs)"
_ANY_HOST = re.compile(rf"{_HOST}\..+")
_KNOWN_HOST = re.compile(
    rf"{_HOST}\.(core\.(windows\.net|chinacloudapi\.cn|usgovcloudapi\.net|cloudapi\.de)|storage\.azure\.net|fabric\.microsoft\.com)"
)
# Published by Microsoft for the emulator: "Use the Azurite emulator for local Azure Storage development".
_EMULATOR = {
    "accountname": "devstoreaccount1",
    "accountkey": "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==",
    "blobendpoint": "http://127.0.0.1:10000/devstoreaccount1",
}


@dataclass(frozen=True, slots=True)
class AzureAccount:
    """The configured account: its name and the URL of its blob service, each empty where it is not known, and at most one of key and SAS.

    ``suffix`` is what follows ``name.blob.`` in the hosts of other accounts. ``credentials`` says in words which key or SAS that is, and ``named_by``
    where the account comes from.
    """

    name: str
    url: str
    suffix: str
    key: str = field(repr=False)
    sas: str = field(repr=False)
    credentials: str
    named_by: str


def read_account(settings: AzureSettings) -> AzureAccount:
    """Return the account and the credentials that are configured. Raises `InvalidSetting`, without repeating what may be a secret."""
    parts = _read_connection_string(settings.connection_string)
    name = parts.get("accountname") or settings.account
    named_by = "AZURE_STORAGE_CONNECTION_STRING" if parts else "AZURE_STORAGE_ACCOUNT"
    suffix = _clean_suffix(parts.get("endpointsuffix") or settings.endpoint_suffix)
    url, sas = _read_endpoint(parts.get("blobendpoint") or ("" if parts else settings.endpoint))
    host, _, path = url.partition("://")[2].partition("/")
    if not url and parts:
        url = f"{parts.get('defaultendpointsprotocol', 'https').lower()}://{name}.blob.{suffix}"
    elif url and name and not path and _holds_no_account(host):
        url = f"{url}/{name}"  # Such hosts serve several accounts, told apart by the first part of the path.
    elif url and not name:
        name = account_of_host(host) or (path.rpartition("/")[2] if _holds_no_account(host) else "")
        named_by = named_by if parts else "AZURE_STORAGE_ENDPOINT"
    if name and not is_account_name(name):
        raise InvalidSetting(
            f"{name!r} is not the name of a storage account.",
            f"{named_by} says so; such names are 3 to 24 lower-case letters and digits.",
            "Give the account's name alone, and its address in AZURE_STORAGE_ENDPOINT.",
        )
    return AzureAccount(name, url, suffix, *_choose_secret(parts, settings, sas), named_by)


def clean_sas(text: str) -> str:
    """Return a shared access signature as it goes into a query: without its question mark, every value encoded once. Raises `InvalidSetting`."""
    pairs = [pair.partition("=") for pair in text.strip().strip("\"'").lstrip("?&").split("&") if pair]
    if not any(name == "sig" and value for name, _, value in pairs):
        raise InvalidSetting(
            "The shared access signature has no signature in it.",
            "It is text such as sv=…&sp=rl&se=…&sig=….",
            "Copy the whole token; in a shell, put it in single quotes, since & ends a command.",
        )
    return "&".join(f"{quote(unquote(name), safe='')}={quote(unquote(value), safe='')}" for name, _, value in pairs)


def is_account_name(name: str) -> bool:
    """Say whether a storage account may have this name."""
    return re.fullmatch(_NAME, name) is not None


def is_account_host(host: str, suffix: str) -> bool:
    """Say whether a host is an account's in one of Microsoft's clouds, or in the one whose suffix is configured."""
    own = rf"{_HOST}\.{re.escape(_clean_suffix(suffix))}"
    return _KNOWN_HOST.fullmatch(host) is not None or re.fullmatch(own, host) is not None


def account_of_host(host: str) -> str:
    """Return the account that a host names, if it is made as Azure's are; else nothing."""
    match = _ANY_HOST.fullmatch(host)
    return match[1] if match else ""


def blob_host(host: str) -> str:
    """Return the host of the blob service where ``host`` is that of the same account's file system service."""
    return host.replace(".dfs.", ".blob.", 1) if account_of_host(host) else host


def _choose_secret(parts: Mapping[str, str], settings: AzureSettings, endpoint_sas: str) -> tuple[str, str, str]:
    """Return key, SAS and the words for them; at most one of the two is not empty."""
    string = "AZURE_STORAGE_CONNECTION_STRING"
    if parts.get("accountkey"):
        return parts["accountkey"], "", f"the account key of {string}"
    if parts.get("sharedaccesssignature") or endpoint_sas:
        sas = parts.get("sharedaccesssignature") or endpoint_sas
        return "", clean_sas(sas), f"the SAS of {string if parts else 'AZURE_STORAGE_ENDPOINT'}"
    if settings.sas_token:
        return "", clean_sas(settings.sas_token), "the SAS of AZURE_STORAGE_SAS_TOKEN"
    if settings.account_key:
        return settings.account_key.strip(), "", "the account key of AZURE_STORAGE_KEY"
    return "", "", TOKENS


def _read_connection_string(text: str) -> Mapping[str, str]:
    """Return its parts by lower-case name; none of an empty text."""
    pairs = [part.partition("=") for part in text.strip().strip("\"'").split(";") if part.strip()]
    parts = {name.strip().lower(): value.strip() for name, _, value in pairs}
    if parts.get("usedevelopmentstorage", "").lower() == "true":
        return _EMULATOR
    if pairs and not (parts.get("accountname") or parts.get("blobendpoint")):
        raise InvalidSetting(
            "AZURE_STORAGE_CONNECTION_STRING names neither an account nor an endpoint.",
            "It is text such as AccountName=…;AccountKey=…;EndpointSuffix=core.windows.net.",
            "Copy the whole string; in a shell, put it in single quotes, since ; ends a command.",
        )
    return parts


def _read_endpoint(text: str) -> tuple[str, str]:
    """Return an endpoint's URL without a trailing slash, and the SAS behind it where there is one."""
    url, _, query = text.strip().partition("?")
    if not url:
        return "", ""
    scheme, _, rest = (url if "://" in url else f"https://{url}").rstrip("/").partition("://")
    host, slash, path = rest.partition("/")
    if scheme.lower() not in ("http", "https") or not re.fullmatch(r"[\w.-]+(:\d+)?|\[[\da-fA-F:]+\](:\d+)?", host):
        raise InvalidSetting(
            "The endpoint of the storage account is not an http or https URL.",
            "AZURE_STORAGE_ENDPOINT, or BlobEndpoint in the connection string, names it.",
            "Write https://account.blob.core.windows.net, or http://127.0.0.1:10000/account for an emulator.",
        )
    return f"{scheme.lower()}://{blob_host(host.lower())}{slash}{path}", clean_sas(query) if query else ""


def _holds_no_account(host: str) -> bool:
    """Say whether a host, with or without a port, cannot hold an account's name: an IP address, or a name without dots."""
    return re.fullmatch(r"([\d.]+|\[.*\]|[^.:]+)(:\d+)?", host) is not None


def _clean_suffix(text: str) -> str:
    """Return an endpoint suffix, which may have been given with the service's name before it, without that."""
    return text.strip().lower().lstrip(".").removeprefix("blob.").removeprefix("dfs.")
