"""Which account and container a uri means, and which of the configured credentials go there. Pure: opens no connection, asks for no token.

az://container/prefix                     where an account is configured
az://account/container/prefix             where none is, and where the configured one is named so
az://container@account/prefix             always; abfss://container@account.dfs.core.windows.net/prefix is the same
https://account.blob.core.windows.net/container/prefix?SAS
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, field, replace
from urllib.parse import parse_qsl, urlsplit

from headrace.errors import InvalidSetting, InvalidUri
from headrace.settings import AzureSettings
from headrace.storage.azure_account import (
    TOKENS,
    AzureAccount,
    account_of_host,
    blob_host,
    clean_sas,
    is_account_host,
    is_account_name,
    read_account,
)
from headrace.storage.uri import Uri

_CONTAINER = re.compile(r"\$?[a-z0-9](?:-?[a-z0-9]){2,62}")
_OTHER = "a token of azure-identity's default chain, since what is configured is for {}"


@dataclass(frozen=True, slots=True)
class AzureLocation:
    """Where a uri leads. ``url`` is that of the account, without a trailing slash; ``prefix`` is the key of the folder, without one too.

    ``key`` and ``sas`` go there; both are empty where a token is to be asked for. ``reading`` is a sentence that says how the uri was read, where
    it could have been read in another way, else empty.
    """

    account: str
    url: str
    container: str
    prefix: str
    key: str = field(repr=False)
    sas: str = field(repr=False)
    credentials: str
    reading: str


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a uri names: an account, its address where the uri has it, container and folder."""

    account: str
    url: str
    container: str
    prefix: str


def is_azure_url(uri: Uri, settings: AzureSettings) -> bool:
    """Say whether an http or https uri leads to a storage account: by its host, or because that is the configured endpoint."""
    if uri.scheme not in ("http", "https"):
        return False
    if is_account_host(uri.bucket, settings.endpoint_suffix):
        return True
    with contextlib.suppress(InvalidSetting):  # Most such uris have nothing to do with Azure.
        return _below_endpoint(uri, read_account(settings)) is not None
    return False


def find_location(uri: Uri, settings: AzureSettings) -> AzureLocation:
    """Return where ``uri`` leads. Raises `InvalidUri`, which names both readings of what is not clear, and `InvalidSetting`."""
    account = read_account(settings)
    if uri.scheme in ("http", "https"):
        return _locate_url(uri, account)
    container, at, host = uri.bucket.partition("@")
    if at:
        name, dot, _ = host.partition(".")
        return _locate(uri, account, _Wanted(name, f"https://{host}" if dot else "", container, uri.key))
    named = account_of_host(uri.bucket)
    if not named and (account.name or account.url) and uri.bucket != account.name:
        location = _locate(uri, account, _Wanted(account.name, account.url, uri.bucket, uri.key))
        return replace(location, reading=_read_as(account, account.name, uri.bucket))
    container, _, prefix = uri.key.partition("/")
    if not container:
        raise _without_container(uri, account)
    if named:
        return _locate(uri, account, _Wanted(named, f"https://{blob_host(uri.bucket)}", container, prefix))
    location = _locate(uri, account, _Wanted(uri.bucket, "", container, prefix))
    return replace(location, reading=_read_as(account, uri.bucket, container))


def _locate(uri: Uri, account: AzureAccount, wanted: _Wanted) -> AzureLocation:
    _check_names(uri, account, wanted)
    is_own = wanted.account == account.name or not (account.name or account.url)
    url = wanted.url or (account.url if is_own else "") or f"https://{wanted.account}.blob.{account.suffix}"
    secret = (account.key, account.sas, account.credentials)
    if not is_own:  # What belongs to one account is not shown to another.
        secret = ("", "", _OTHER.format(account.name or account.url) if account.key or account.sas else TOKENS)
    return AzureLocation(wanted.account, url, wanted.container, wanted.prefix, *secret, reading="")


def _check_names(uri: Uri, account: AzureAccount, wanted: _Wanted) -> None:
    if not _CONTAINER.fullmatch(wanted.container) or (wanted.account and not is_account_name(wanted.account)):
        is_container = not _CONTAINER.fullmatch(wanted.container)
        wrong = (
            f"{wanted.container!r} is not the name of a container"
            if is_container
            else f"{wanted.account!r} is not that of an account"
        )
        raise InvalidUri(
            f"{uri} cannot be read: {wrong}.",
            _read_as(account, wanted.account, wanted.container),
            "Write az://container/folder with AZURE_STORAGE_ACCOUNT set, or az://container@account/folder.",
        )
    host = wanted.url.partition("://")[2]
    if wanted.url not in ("", account.url) and not is_account_host(host, account.suffix):
        raise InvalidUri(
            f"{uri} names the host {host}, which is not one of Azure's.",
            "Credentials are not sent to a host only because a uri names it.",
            "Set AZURE_STORAGE_ENDPOINT_SUFFIX to what follows account.blob., or AZURE_STORAGE_ENDPOINT to the account's URL.",
        )


def _locate_url(uri: Uri, account: AzureAccount) -> AzureLocation:
    below = _below_endpoint(uri, account)
    container, _, prefix = (uri.key if below is None else below).partition("/")
    if not container:
        raise InvalidUri(
            f"{uri} names no container.", "It is the address of a storage account.", f"Write {uri}/container/folder."
        )
    name, url = account.name, account.url
    if below is None:
        name, url = account_of_host(uri.bucket), f"{uri.scheme}://{blob_host(uri.bucket)}"
    location = _locate(uri, account, _Wanted(name, url, container, prefix))
    sas = _sas_of(uri)
    return replace(location, key="", sas=sas, credentials="the SAS in the URL") if sas else location


def _sas_of(uri: Uri) -> str:
    """Return the SAS in the URL's query; empty without a query. Raises `InvalidUri` for any other query."""
    query = urlsplit(uri.text.strip()).query
    names = {name.lower() for name, _ in parse_qsl(query, keep_blank_values=True)}
    if query and ("sig" not in names or names & {"snapshot", "versionid", "comp", "restype"}):
        raise InvalidUri(
            f"The query of {uri} is not a shared access signature.",
            "Snapshots and old versions of blobs cannot be asked for.",
            "Leave the query out, or give a SAS as the portal makes it.",
        )
    return clean_sas(query) if query else ""


def _below_endpoint(uri: Uri, account: AzureAccount) -> str | None:
    """Return the path of ``uri`` below the configured endpoint; None where it is elsewhere."""
    given = f"{uri.scheme}://{uri.bucket}/{uri.key}/"
    below = account.url and given.startswith(f"{account.url}/")
    return given.removeprefix(f"{account.url}/").rstrip("/") if below else None


def _read_as(account: AzureAccount, name: str, container: str) -> str:
    """Return the sentences that say how a uri was read, where the account comes from, and how the other reading is asked for."""
    if account.name or account.url:
        return (
            f"The uri was read as the container {container!r} of the account {(name or account.url)!r}, which {account.named_by} names; "
            "az://container@account/folder leads to another one."
        )
    return (
        f"The uri was read as the container {container!r} of the account {name!r}, since no account is configured; with AZURE_STORAGE_ACCOUNT, "
        f"{name!r} is the container."
    )


def _without_container(uri: Uri, account: AzureAccount) -> InvalidUri:
    name = uri.bucket
    if account.name == name:
        why = f"{name} is the account that {account.named_by} names, so what follows it is the container."
    else:
        why = f"No account is configured, so {name} is read as one: az://account/container/folder."
    return InvalidUri(
        f"{uri} names no container.",
        why,
        f"If {name} is a container, set AZURE_STORAGE_ACCOUNT or write az://{name}@account; if it is an account, write az://{name}/container.",
    )
