from __future__ import annotations

import builtins
import sys
from pathlib import Path
from typing import Any

import pytest
from azure.core import exceptions

from headrace.errors import (
    AccessDenied,
    HeadraceError,
    InvalidSetting,
    MissingDependency,
    StorageError,
    StoreUnavailable,
)
from headrace.settings import AzureSettings, Settings, TransportSettings
from headrace.storage import StoredObject, open_store, parse_uri
from headrace.storage.azure_access import AzureAccess, AzureOptions, connect_azure
from headrace.storage.azure_errors import explain_sdk_error, scrub
from headrace.storage.refusal import Place

from .azure_stub import KEY, SAS, FakeCredential, opened

STORED = StoredObject("a", 10, '"v"')
PLACE = Place("az://container/m", "https://acct.blob.core.windows.net")


def connect(uri: str = "az://models/m", **given: Any) -> AzureAccess:
    options = {
        name: given.pop(name) for name in ("anonymous", "verify_tls", "ca_file", "new_credential") if name in given
    }
    settings = AzureSettings(**{"account": "acct", **given})
    return connect_azure(parse_uri(uri), AzureOptions(read_settings=lambda: settings, **options), TransportSettings())


@pytest.fixture
def asked_identity(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of azure-identity's modules that are imported from now on."""
    asked: list[str] = []
    real = builtins.__import__

    def watch(name: str, *args: Any, **given: Any) -> Any:
        if name.startswith("azure.identity"):
            asked.append(name)
        return real(name, *args, **given)

    monkeypatch.setattr(builtins, "__import__", watch)
    return asked


@pytest.mark.parametrize(
    "given",
    [
        {"account_key": KEY},
        {"sas_token": SAS},
        {"anonymous": True},
        {"connection_string": f"AccountName=acct;AccountKey={KEY}"},
    ],
)
def test_static_credentials_never_ask_for_a_token(given: dict[str, Any], asked_identity: list[str]) -> None:
    """Its chain asks a metadata service, which on most machines is a long wait for nothing."""
    made: list[Any] = []
    access = connect(new_credential=lambda **options: made.append(options), **given)
    access.authorise("/models/m/a", [], 0.0)
    access.close()
    assert (made, asked_identity) == ([], [])
    access = connect(**given)
    access.close()
    assert asked_identity == []


def test_a_token_is_asked_for_when_it_is_needed_and_not_before() -> None:
    credential = FakeCredential("A")
    access = connect(new_credential=lambda **_: credential)
    assert credential.asked == []
    _, headers = access.authorise("/models/m/a", [], 0.0)
    assert dict(headers)["Authorization"] == "Bearer A"
    assert "A" not in repr(access.tokens)
    assert "default chain" in access.credentials
    access.authorise("/models/m/a", [], 0.0)
    assert len(credential.asked) == 1
    access.close()
    assert credential.is_closed


def test_a_token_is_not_sent_over_plain_http() -> None:
    with pytest.raises(AccessDenied, match="plain HTTP") as caught:
        connect(endpoint="http://127.0.0.1:10000/acct", new_credential=lambda **_: FakeCredential())
    assert "AZURE_STORAGE_KEY" in caught.value.mend


def test_one_certificate_bundle_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = tmp_path / "ca.pem"
    bundle.write_text("certificates")
    taken: list[dict[str, Any]] = []

    def make(**options: Any) -> FakeCredential:
        taken.append(options)
        return FakeCredential()

    access = connect(ca_file=str(bundle), new_credential=make)
    assert access.ca_file == str(bundle)
    assert taken == [{"connection_verify": str(bundle)}]
    assert access.client._config is not None
    access.close()
    access = connect(ca_file=str(bundle), verify_tls=False, new_credential=make)
    assert taken[1] == {"connection_verify": False}
    access.close()
    monkeypatch.setenv("SSL_CERT_FILE", str(bundle))
    access = connect(account_key=KEY)
    assert access.ca_file == str(bundle)
    access.close()
    access = connect(account_key=KEY, endpoint="http://127.0.0.1:10000/acct")
    assert access.ca_file is None
    access.close()
    with pytest.raises(InvalidSetting, match="is not a file"):
        connect(ca_file=str(tmp_path / "absent"), account_key=KEY)


def test_ranges_name_the_bundle_and_the_switch(tmp_path: Path) -> None:
    bundle = tmp_path / "ca.pem"
    bundle.write_text("certificates")
    settings = Settings(azure=AzureSettings(account="acct", account_key=KEY), ca_file=str(bundle), verify_tls=False)
    store = open_store("az://models/m", settings=settings)
    described = store.describe_range(STORED, 0, 1)
    store.close()
    assert (described.ca_file, described.verify_tls) == (str(bundle), False)  # type: ignore[union-attr]
    assert (described.host, described.port) == ("acct.blob.core.windows.net", 443)  # type: ignore[union-attr]


def test_variables_are_read_where_nothing_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "fromenv")
    monkeypatch.setenv("AZURE_STORAGE_KEY", KEY)
    store = open_store("az://models/m", settings=Settings())
    assert store.endpoint == "https://fromenv.blob.core.windows.net"
    store.close()
    store = open_store("https://other.blob.core.windows.net/models/m?" + SAS, settings=Settings())
    assert store.endpoint == "https://other.blob.core.windows.net"
    assert str(store.uri) == "https://other.blob.core.windows.net/models/m"
    store.close()
    given = Settings(azure=AzureSettings(account="given", account_key=KEY))
    store = open_store("az://models/m.safetensors", settings=given)
    assert store.endpoint == "https://given.blob.core.windows.net"
    assert (str(store.uri), store.selected_key) == ("az://models", "m.safetensors")
    store.close()


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "azure.identity", None)
    with pytest.raises(MissingDependency) as caught:
        connect()
    assert "headrace[azure]" in caught.value.mend
    assert "azure.identity" in caught.value.why
    for name in [name for name in sys.modules if name.startswith("headrace.storage.azure")]:
        if not name.endswith(("_account", "_location")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "azure.core", None)
    with pytest.raises(MissingDependency) as caught:
        open_store("az://models/m", settings=Settings())
    assert "headrace[azure]" in caught.value.mend
    assert "azure.core" in caught.value.why


def test_a_credential_that_fails_is_told() -> None:
    credential = FakeCredential()
    credential.fails = True
    with opened("https://127.0.0.1:9", account_key="", new_credential=lambda **_: credential) as store:
        for ask in (lambda: store.describe_range(STORED, 0, 1), store.list_level):
            with pytest.raises(AccessDenied) as caught:
                ask()
            assert "the service says no" in caught.value.why
            assert "az login" in caught.value.mend


# What the SDK raises


class Response:
    """The part of an answer that the SDK's exceptions carry."""

    def __init__(self, url: str, status_code: int, reason: str = "", **headers: str) -> None:
        self.request = type("Request", (), {"url": url, "method": "GET"})()
        self.status_code = status_code
        self.reason = reason
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    def text(self) -> str:
        return ""


SECRET_URL = "https://acct.blob.core.windows.net/models/a?sv=1&sig=aaaabbbbccccdddd%3D"


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (exceptions.ServiceRequestError(f"Max retries exceeded with url: {SECRET_URL} (refused)"), StoreUnavailable, "could not be reached"),
        (exceptions.ServiceRequestError("SSLCertVerificationError: certificate verify failed"), StoreUnavailable, "REQUESTS_CA_BUNDLE"),
        (exceptions.ServiceRequestTimeoutError("x"), StoreUnavailable, "No connection"),
        (exceptions.ServiceResponseTimeoutError("x"), StoreUnavailable, "No answer"),
        (exceptions.ServiceResponseError("Connection aborted."), StoreUnavailable, "broke"),
        (exceptions.HttpResponseError("x", error=exceptions.IncompleteReadError("y")), StoreUnavailable, "broke"),
        (exceptions.DecodeError("XML is invalid"), StorageError, "does not answer as an Azure"),
        (ValueError("Required Content-Range response header is missing"), StorageError, "does not answer as an Azure"),
        (FileNotFoundError("az"), StorageError, "FileNotFoundError"),
        (exceptions.ClientAuthenticationError("AADSTS7000215: Invalid client secret"), AccessDenied, "AADSTS7000215"),
        (
            exceptions.ClientAuthenticationError("no", response=Response("https://login.microsoftonline.com/x", 401)),
            AccessDenied,
            "az login",
        ),
        (
            exceptions.HttpResponseError("x", response=Response(SECRET_URL, 404, x_ms_error_code="ContainerNotFound")),
            StorageError,
            "container that does not exist",
        ),
        (
            exceptions.HttpResponseError(
                "Operation returned an invalid status 'The key is disabled'",
                response=Response(SECRET_URL, 403, "The key is disabled", x_ms_error_code="KeyBasedAuthenticationNotPermitted"),
            ),
            AccessDenied,
            "says: The key is disabled",
        ),
    ],
)  # fmt: skip
def test_what_the_sdk_raises_is_explained(error: Exception, kind: type[HeadraceError], says: str) -> None:
    found = explain_sdk_error(error, PLACE)
    assert isinstance(found, kind)
    assert says in str(found)
    assert "az://container/m" in found.what
    assert found.mend
    for shown in (f"{found!r}", f"{scrub(error)!r}"):
        assert "aaaabbbb" not in shown
    assert type(error).__name__ in str(scrub(error))
