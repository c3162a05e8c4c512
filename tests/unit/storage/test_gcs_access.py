from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import google.auth
import pytest
import requests
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from headrace.errors import AccessDenied, InvalidSetting, StoreUnavailable
from headrace.storage import StoredObject, parse_uri
from headrace.storage.gcs import GcsStore
from headrace.storage.gcs_access import GcsAccess, GcsOptions, connect_gcs

from .gcs_stub import TRANSPORT, FakeCredentials, document
from .s3_stub import Answer, Asked, S3Stub

Connect = Callable[..., GcsAccess]


@pytest.fixture(scope="module")
def private_key() -> str:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return key.private_bytes(*form).decode()


@pytest.fixture
def key_file(private_key: str, tmp_path: Path) -> Callable[..., Path]:
    """Write the key of a service account whose tokens come from ``token_uri``."""

    def write(token_uri: str, **more: str) -> Path:
        content = {
            "type": "service_account",
            "client_email": "reader@project.iam.gserviceaccount.com",
            "private_key": private_key,
            "private_key_id": "1",
            "project_id": "project",
            "token_uri": token_uri,
        }
        path = tmp_path / "key.json"
        path.write_text(json.dumps({**content, **more}))
        return path

    return write


@pytest.fixture
def connect() -> Any:
    """Connect with the given options; all is closed in the end."""
    made: list[GcsAccess] = []

    def connect_one(**options: Any) -> GcsAccess:
        made.append(connect_gcs("gs://bucket/m", GcsOptions(**options), TRANSPORT))
        return made[-1]

    yield connect_one
    for access in made:
        access.close()


@pytest.fixture
def no_metadata_service(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every attempt to ask the metadata service, or to find out whether there is one."""
    asked: list[str] = []
    for name in ("is_on_gce", "ping", "get"):
        monkeypatch.setattr(
            f"google.auth.compute_engine._metadata.{name}", lambda *_, name=name, **__: asked.append(name)
        )
    return asked


def give_token(asked: Asked) -> Answer:
    return document({"access_token": "GIVEN", "expires_in": 3600})


# Credentials


@pytest.mark.parametrize("named_by", ["settings", "environment"])
def test_a_key_file_is_exchanged_for_a_token_and_nobody_else_is_asked(
    connect: Connect,
    key_file: Callable[..., Path],
    no_metadata_service: list[str],
    monkeypatch: pytest.MonkeyPatch,
    named_by: str,
) -> None:
    with S3Stub(give_token) as stub:
        path = key_file(f"{stub.endpoint}/token")
        if named_by == "environment":
            monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
        access = connect(credentials_file=path if named_by == "settings" else None)
        assert stub.asked == []
        assert access.tokens.headers() == access.tokens.headers() == {"authorization": "Bearer GIVEN"}

        assert [(asked.method, asked.path) for asked in stub.asked] == [("POST", "/token")]
        claims = parse_qs(stub.asked[0].body.decode())["assertion"][0].split(".")[1]
        scope = json.loads(base64.urlsafe_b64decode(claims + "==="))["scope"]
        assert scope == "https://www.googleapis.com/auth/devstorage.read_only"
    assert no_metadata_service == []
    assert access.endpoint == "https://storage.googleapis.com"


@pytest.mark.parametrize("operation", ["stat", "describe"])
def test_a_key_that_was_withdrawn_is_named(key_file: Callable[..., Path], operation: str) -> None:
    answer = document({"error": "invalid_grant", "error_description": "Invalid JWT Signature."}, 400)
    with S3Stub(lambda _: answer) as stub:
        options = GcsOptions(credentials_file=key_file(f"{stub.endpoint}/token"))
        with (
            contextlib.closing(GcsStore(parse_uri("gs://bucket/m"), transport=TRANSPORT, options=options)) as store,
            pytest.raises(AccessDenied, match="invalid_grant: Invalid JWT Signature") as caught,
        ):
            if operation == "stat":
                store.stat("a")
            else:
                store.describe_range(StoredObject("a", 1, "7"), 0, 1)
        assert "gs://bucket/m/a" in caught.value.what
        assert "gcloud" in caught.value.mend


def test_a_machine_without_credentials_is_told_what_to_do(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("google.auth._default._get_gce_credentials", lambda *_, **__: (None, None))
    with pytest.raises(AccessDenied, match="found no credentials") as caught:
        connect()
    assert "gs://bucket/m" in caught.value.what
    assert "gcloud auth application-default login" in caught.value.mend
    assert "HEADRACE_GCS_ANONYMOUS" in caught.value.mend


def test_a_metadata_service_that_is_down_is_no_lack_of_rights(connect: Connect) -> None:
    class Absent(FakeCredentials):
        @property
        def universe_domain(self) -> str:
            raise google.auth.exceptions.TransportError("metadata.google.internal does not answer")

    with pytest.raises(StoreUnavailable, match="does not answer"):
        connect(find_credentials=Absent)


def test_anonymous_access_asks_no_chain(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(google.auth, "default", lambda **_: pytest.fail("the chain was asked"))
    access = connect(anonymous=True)
    assert access.is_anonymous
    assert access.tokens.headers() == {}
    assert access.endpoint == "https://storage.googleapis.com"


@pytest.mark.parametrize("content", [None, "", "{}", '{"private_key": "SECRET"}', "SECRET"])
def test_a_credentials_file_of_no_use_is_named_and_not_quoted(
    connect: Connect, tmp_path: Path, content: str | None
) -> None:
    path = tmp_path / "key.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InvalidSetting) as caught:
        connect(credentials_file=path)
    assert str(path) in caught.value.what
    assert "SECRET" not in str(caught.value)


def test_credentials_of_another_universe_lead_to_its_host(connect: Connect, key_file: Callable[..., Path]) -> None:
    path = key_file("https://oauth2.example.cloud/token", universe_domain="example.cloud")
    access = connect(credentials_file=path)
    assert access.endpoint == "https://storage.example.cloud"
    assert access.address.host == "storage.example.cloud"


# Endpoints


@pytest.mark.parametrize(
    ("given", "endpoint", "host", "port", "base"),
    [
        ("https://storage.googleapis.com/", "https://storage.googleapis.com", "storage.googleapis.com", 443, "/"),
        ("https://x.p.googleapis.com", "https://x.p.googleapis.com", "x.p.googleapis.com", 443, "/"),
        ("https://x.p.googleapis.com/storage/v1/", "https://x.p.googleapis.com", "x.p.googleapis.com", 443, "/"),
        ("https://[::1]:4443/base/", "https://[::1]:4443/base", "::1", 4443, "/base"),
    ],
)
def test_endpoints_are_taken_in_every_form(
    connect: Connect, given: str, endpoint: str, host: str, port: int, base: str
) -> None:
    access = connect(endpoint=given, find_credentials=FakeCredentials)
    assert access.endpoint == endpoint
    assert (access.address.host, access.address.port, access.address.target) == (host, port, base)
    assert not access.is_anonymous


@pytest.mark.parametrize(
    "endpoint", ["localhost:4443", "ftp://host", "https://", "https://me:SECRET@host", "http://h:x"]
)
@pytest.mark.parametrize("named_by", ["HEADRACE_GCS_ENDPOINT", "STORAGE_EMULATOR_HOST"])
def test_what_is_no_endpoint_is_refused(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, endpoint: str, named_by: str
) -> None:
    if named_by == "STORAGE_EMULATOR_HOST":
        monkeypatch.setenv(named_by, endpoint)
    with pytest.raises(InvalidSetting) as caught:
        connect(endpoint=None if named_by == "STORAGE_EMULATOR_HOST" else endpoint)
    assert named_by in caught.value.why
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "options", "is_anonymous"),
    [
        ("http://127.0.0.1:4443", {}, True),
        ("https://127.0.0.1:4443/", {}, True),
        (None, {"endpoint": "http://127.0.0.1:4443"}, True),
        (None, {"endpoint": "https://127.0.0.1:4443"}, False),
    ],
)
def test_no_token_goes_to_emulators_or_over_plain_http(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, variable: str | None, options: dict[str, Any], is_anonymous: bool
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(google.auth, "default", lambda **_: (asked.append(1) or FakeCredentials(), None))
    if variable is not None:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", variable)
    access = connect(**options)
    assert access.endpoint == (variable or options["endpoint"]).rstrip("/")
    assert access.is_anonymous is is_anonymous
    assert bool(asked) is not is_anonymous
    assert (access.tokens.headers() == {}) is is_anonymous


def test_an_endpoint_in_the_settings_wins_over_the_emulator(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1")
    access = connect(endpoint="http://127.0.0.1:2")
    assert access.endpoint == "http://127.0.0.1:2"
    assert access.client.api_endpoint == "http://127.0.0.1:2"


# Certificates


@pytest.mark.parametrize("variable", ["REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE"])
def test_one_bundle_serves_the_sdk_and_the_ranges(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str
) -> None:
    bundle = tmp_path / "ca.pem"
    bundle.write_text("-----BEGIN CERTIFICATE-----\n")
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(bundle))
    access = connect(anonymous=True)
    assert access.ca_file == str(bundle)
    assert verify_of(access.client._http) == verify_of(access.token_session) == str(bundle)


def test_checks_that_are_off_are_off_for_all(connect: Connect, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In requests, the variable would win over verify=False."""
    bundle = tmp_path / "ca.pem"
    bundle.touch()
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(bundle))
    access = connect(anonymous=True, verify_tls=False)
    assert verify_of(access.client._http) is verify_of(access.token_session) is False


def test_a_bundle_in_the_settings_wins(connect: Connect, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bundle = tmp_path / "ca.pem"
    bundle.touch()
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/no/such/bundle.pem")
    access = connect(anonymous=True, ca_file=str(bundle))
    assert access.ca_file == verify_of(access.client._http) == verify_of(access.token_session) == str(bundle)
    with pytest.raises(InvalidSetting, match="ca_file"):
        connect(anonymous=True, ca_file="/no/such/bundle.pem")


def test_a_bundle_that_is_not_there_is_named(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/no/such/bundle.pem")
    with pytest.raises(InvalidSetting, match=r"/no/such/bundle\.pem") as caught:
        connect(anonymous=True)
    assert "REQUESTS_CA_BUNDLE" in caught.value.why


def test_plain_http_needs_no_bundle(connect: Connect) -> None:
    assert connect(endpoint="http://127.0.0.1:4443").ca_file is None


def verify_of(session: requests.Session) -> Any:
    return session.merge_environment_settings("https://storage.googleapis.com", {}, None, None, None)["verify"]


def test_secrets_stay_out_of_reprs(connect: Connect) -> None:
    access = connect(find_credentials=lambda: FakeCredentials("SECRET"))
    access.tokens.headers()
    assert access.tokens.current == "SECRET"
    assert "SECRET" not in repr(access)
    assert "SECRET" not in repr(access.tokens)
