"""What stores say of their credentials: the source, the end, what is wrong with them, and never the secret."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import pytest

from headrace.errors import AccessDenied
from headrace.settings import Settings, TransportSettings
from headrace.storage import open_store
from headrace.storage.credentials import CredentialSource, describe_credentials, last_four
from headrace.storage.s3 import S3Store
from headrace.storage.s3_credentials import describe_s3_configuration

from .azure_stub import KEY, SAS, FakeCredential
from .azure_stub import opened as opened_azure
from .conftest import SECRET_KEY, make_session
from .gcs_stub import FakeCredentials
from .gcs_stub import opened as opened_gcs

ACCESS_KEY = "AKIAIOSFODNN7EXAMPLE"
TOKEN = "the-session-token-of-nobody"


def describe(store: Any, **environment: str) -> CredentialSource:
    found = describe_credentials(store, environment)
    for secret in (SECRET_KEY, TOKEN, KEY, "c2lnbmF0dXJl", "TOKEN-OF-GOOGLE"):
        assert secret not in repr(found)
    return found


def test_keys_of_the_environment(open_s3: Callable[..., S3Store], monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_s3()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    found = describe(open_s3())
    assert (found.kind, found.identity) == ("access key", "access key …MPLE")
    assert found.source == "the variables AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    assert (found.expires_s, found.renews_itself, found.trouble, found.notes) == (None, False, "", ())
    # A short name is hidden whole: its last four letters would be most of it.
    assert describe(store).identity == "access key …"


def test_keys_of_the_environment_win_over_a_profile_and_that_is_said(
    open_s3: Callable[..., S3Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = describe(open_s3(), AWS_PROFILE="work", AWS_WEB_IDENTITY_TOKEN_FILE="/token")
    assert [note.partition(";")[0] for note in found.notes] == [
        "A profile is named too (AWS_PROFILE)",
        "A web identity is there too (AWS_WEB_IDENTITY_TOKEN_FILE)",
    ]


def test_a_profile_is_named(open_s3: Callable[..., S3Store], monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "credentials").write_text(
        f"[work]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "work")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    found = describe(open_s3())
    assert found.source == "the AWS credentials file, profile work"


@pytest.mark.parametrize(
    ("variable", "value", "trouble"),
    [
        ("AWS_SECRET_ACCESS_KEY", f"{SECRET_KEY}\n", "AWS_SECRET_ACCESS_KEY begins or ends with a blank"),
        ("AWS_ACCESS_KEY_ID", f" {ACCESS_KEY}", "AWS_ACCESS_KEY_ID begins or ends with a blank"),
        ("AWS_SESSION_TOKEN", f"{TOKEN} ", "AWS_SESSION_TOKEN begins or ends with a blank"),
        ("AWS_ACCESS_KEY_ID", "ASIAIOSFODNN7EXAMPLE", "its session token is absent"),
    ],
)
def test_a_pair_that_cannot_work_is_trouble(
    open_s3: Callable[..., S3Store], monkeypatch: pytest.MonkeyPatch, variable: str, value: str, trouble: str
) -> None:
    monkeypatch.setenv(variable, value)
    found = describe(open_s3())
    assert trouble in found.trouble
    assert found.mend


def test_temporary_keys(open_s3: Callable[..., S3Store], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ASIAIOSFODNN7EXAMPLE")
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
    assert describe(open_s3()).notes == ("They are temporary ones, and do not say when they end.",)
    end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
    monkeypatch.setenv("AWS_CREDENTIAL_EXPIRATION", end.isoformat())
    found = describe(open_s3())
    assert found.expires_s == pytest.approx(end.timestamp())
    assert not found.renews_itself
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    assert "long-term key" in describe(open_s3()).notes[0]


def test_no_keys_and_anonymous_requests(open_s3: Callable[..., S3Store], monkeypatch: pytest.MonkeyPatch) -> None:
    anonymous = open_s3(anonymous=True)
    assert describe(anonymous).kind == ""
    assert "HEADRACE_S3_ANONYMOUS" in describe(anonymous).source
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(AccessDenied, match="found no credentials"):
        describe(open_s3())


def test_roles_say_whose_they_are_and_renew_themselves(open_s3: Callable[..., S3Store], loader: Any) -> None:
    from botocore.credentials import RefreshableCredentials

    end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)

    def session() -> Any:
        found = make_session(loader)
        found._credentials = RefreshableCredentials(
            "ASIAIOSFODNN7EXAMPLE", SECRET_KEY, TOKEN, end, dict, "assume-role-with-web-identity"
        )
        return found

    role = "arn:aws:iam::123456789012:role/models"
    found = describe(open_s3(new_session=session), AWS_ROLE_ARN=role)
    assert found.identity == f"access key …MPLE of the role {role}"
    assert found.source.startswith("a web identity")
    assert found.renews_itself
    assert found.expires_s == pytest.approx(end.timestamp())


def test_the_configuration_says_where_each_setting_comes_from(
    open_s3: Callable[..., S3Store], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    plain = describe_s3_configuration(open_s3(), {})
    assert (plain.region, plain.endpoint_from, plain.profile, plain.addresses_by_path) == (
        "us-east-1",
        "",
        "default",
        False,
    )
    assert plain.region_from.startswith("nothing names one")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    endpoint = "http://127.0.0.1:9000"
    environment = {"AWS_DEFAULT_REGION": "eu-west-1", "AWS_ENDPOINT_URL": endpoint, "AWS_REGION": "eu-west-1"}
    found = describe_s3_configuration(open_s3(endpoint=endpoint), environment)
    assert (found.region, found.region_from) == ("eu-west-1", "AWS_DEFAULT_REGION")
    assert (found.endpoint_from, found.addresses_by_path) == ("AWS_ENDPOINT_URL", True)
    (tmp_path / "config").write_text("[default]\nregion = ap-south-1\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    found = describe_s3_configuration(open_s3(), {})
    assert (found.region, found.region_from) == ("ap-south-1", "the AWS configuration file")
    assert found.endpoint_from == "the AWS configuration file"


def test_google() -> None:
    with opened_gcs("https://storage.example", credentials=lambda: FakeCredentials("TOKEN-OF-GOOGLE")) as store:
        found = describe(store, GOOGLE_APPLICATION_CREDENTIALS="/keys/reader.json")
    assert (found.kind, found.renews_itself) == ("token", True)
    assert "/keys/reader.json, which GOOGLE_APPLICATION_CREDENTIALS names" in found.source
    assert found.expires_s is not None
    with opened_gcs(credentials=None) as store:
        assert describe(store).kind == ""
    failing = FakeCredentials()
    failing.fails = True
    with opened_gcs("https://storage.example", credentials=lambda: failing) as store, pytest.raises(AccessDenied):
        describe(store)


def test_google_names_the_kinds_of_its_credentials() -> None:
    from google.auth import compute_engine
    from google.oauth2 import credentials as of_users

    from headrace.storage.gcs_access import GcsOptions
    from headrace.storage.gcs_credentials import describe_google_credentials

    machine = describe_google_credentials(compute_engine.Credentials(), GcsOptions(), {})
    assert (machine.source, machine.identity) == ("the metadata service of this machine or pod", "")
    user = describe_google_credentials(of_users.Credentials("TOKEN-OF-GOOGLE"), GcsOptions(), {})
    assert user.source == "the login of gcloud auth application-default login"


def test_azure() -> None:
    endpoint = "http://127.0.0.1:9"
    with opened_azure(endpoint) as store:
        found = describe(store)
        assert (found.kind, found.source, found.identity) == (
            "account key",
            "AZURE_STORAGE_KEY",
            "account acct",
        )
    with opened_azure(endpoint, sas_token=SAS) as store:
        found = describe(store)
        assert found.kind == "shared access signature"
        assert found.expires_s == datetime.datetime(2999, 1, 1, tzinfo=datetime.UTC).timestamp()
    with opened_azure(endpoint, anonymous=True) as store:
        assert "HEADRACE_AZURE_ANONYMOUS" in describe(store).source


def test_azure_tokens() -> None:
    from headrace.settings import AzureSettings
    from headrace.storage.azure import AzureStore
    from headrace.storage.azure_access import AzureOptions
    from headrace.storage.uri import parse_uri

    credential = FakeCredential("TOKEN-OF-GOOGLE", lives_s=600)
    options = AzureOptions(read_settings=lambda: AzureSettings(account="acct"), new_credential=lambda **_: credential)
    store = AzureStore(parse_uri("az://models/m"), transport=TransportSettings(), options=options)
    found = describe(store)
    assert (found.kind, found.renews_itself) == ("token", True)
    assert "azure-identity" in found.source
    assert found.expires_s is not None
    credential.fails = True
    fresh = AzureStore(parse_uri("az://models/m"), transport=TransportSettings(), options=options)
    with pytest.raises(AccessDenied):
        describe(fresh)
    store.close()
    fresh.close()


@pytest.mark.parametrize(
    ("uri", "token", "kind", "expires_s"),
    [
        ("https://host/m", None, "", None),
        ("https://host/m", "0123456789", "token", None),
        ("https://host/m.safetensors?Expires=1700000000&Signature=x", None, "signed address", 1700000000.0),
        ("https://host/m?key=0123456789", None, "query", None),
    ],
)
def test_web_servers(uri: str, token: str | None, kind: str, expires_s: float | None) -> None:
    store = open_store(uri, settings=Settings(http_token=token))
    found = describe_credentials(store, {})
    store.close()
    assert (found.kind, found.expires_s) == (kind, expires_s)
    assert "0123456789" not in repr(found)


def test_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")
    from huggingface_hub import constants

    from headrace.storage import parse_uri
    from headrace.storage.hub_credentials import describe_hub_login, find_hub_login

    assert describe_hub_login("Bearer hf_x", {"HF_TOKEN": "hf_x"}).source == "the variable HF_TOKEN"
    assert "hf auth login" in describe_hub_login("Bearer hf_x", {}).source
    assert "neither HF_TOKEN nor a login" in describe_hub_login(None, {}).source
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    found = find_hub_login(parse_uri("hf://org/name"), TransportSettings(), {"HF_TOKEN": "hf_x"})
    assert found.source.startswith("HF_HUB_DISABLE_IMPLICIT_TOKEN")


def test_a_store_that_says_nothing(tmp_path: Any) -> None:
    assert describe_credentials(open_store(tmp_path, settings=Settings()), {}).kind == ""


def test_names_of_keys_are_cut() -> None:
    assert last_four(ACCESS_KEY) == "…MPLE"
    assert last_four("short") == "…"
