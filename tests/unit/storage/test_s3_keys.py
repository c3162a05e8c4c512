"""Keys that pass to and from other S3 clients: what a store lends, and a session over keys that were given."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.errors import AccessDenied
from headrace.storage.s3 import S3Store
from headrace.storage.s3_keys import GivenSession, S3Keys

from .conftest import ACCESS_KEY, SECRET_KEY
from .s3_stub import Asked, S3Stub, listing, signature_is_right


@pytest.mark.parametrize(
    ("bucket", "variables", "endpoint", "by_path"),
    [
        ("my-models", {"AWS_DEFAULT_REGION": "eu-west-1"}, None, False),
        ("my-models", {"AWS_DEFAULT_REGION": "cn-north-1"}, None, False),
        ("dots.in.name", {"AWS_DEFAULT_REGION": "eu-west-1"}, "https://s3.eu-west-1.amazonaws.com", True),
        ("my-models", {"AWS_ENDPOINT_URL": "https://minio.example:9000/"}, "https://minio.example:9000", True),
        ("my-models", {"AWS_ENDPOINT_URL": "http://[::1]:9000/base/"}, "http://[::1]:9000/base", True),
    ],
)
def test_a_store_lends_what_another_client_needs(
    open_s3: Callable[..., S3Store],
    monkeypatch: pytest.MonkeyPatch,
    bucket: str,
    variables: dict[str, str],
    endpoint: str | None,
    by_path: bool,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    lent = open_s3(f"s3://{bucket}/m").lend()
    assert (lent.keys.endpoint, lent.addresses_by_path) == (endpoint, by_path)
    assert (lent.keys.access_key_id, lent.keys.secret_access_key) == (ACCESS_KEY, SECRET_KEY)
    assert lent.keys.session_token is None
    assert lent.keys.region_name == variables.get("AWS_DEFAULT_REGION", "us-east-1")
    assert (lent.ca_file is None) == (endpoint is not None and endpoint.startswith("http:"))


def test_a_virtual_host_of_ones_own_is_lent_without_the_bucket(
    open_s3: Callable[..., S3Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://store.example")
    lent = open_s3("s3://my-models/m", addressing_style="virtual").lend()
    assert (lent.keys.endpoint, lent.addresses_by_path) == ("https://store.example", False)


def test_secrets_are_not_shown(open_s3: Callable[..., S3Store], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "the token")
    lent = open_s3().lend()
    assert lent.keys.session_token == "the token"
    assert SECRET_KEY not in repr(lent)
    assert "the token" not in repr(lent)


def test_anonymous_stores_lend_no_keys(open_s3: Callable[..., S3Store]) -> None:
    assert open_s3(anonymous=True).lend().keys.access_key_id is None


def test_without_credentials_nothing_is_lent(open_s3: Callable[..., S3Store], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(AccessDenied, match="no credentials"):
        open_s3().lend()


def test_given_keys_take_the_place_of_the_environments(
    open_s3: Callable[..., S3Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")

    def answer(asked: Asked) -> object:
        assert signature_is_right(asked, "given secret")
        assert (asked.access_key, asked.region) == ("GIVEN", "eu-north-1")
        return listing({"m/a.safetensors": 8})

    with S3Stub(answer) as stub:  # type: ignore[arg-type]
        keys = S3Keys(
            access_key_id="GIVEN",
            secret_access_key="given secret",
            region_name="eu-north-1",
            endpoint=stub.endpoint,
        )
        store = open_s3(new_session=lambda: GivenSession(keys))
        assert [stored.key for stored in store.list_level().objects] == ["a.safetensors"]
        assert store.endpoint == stub.endpoint
    assert len(stub.asked) == 1


def test_what_is_not_given_comes_from_the_environment(
    open_s3: Callable[..., S3Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://minio.example:9000")
    lent = open_s3(new_session=lambda: GivenSession(S3Keys(region_name="eu-north-1"))).lend()
    assert lent.keys.access_key_id == ACCESS_KEY
    assert (lent.keys.region_name, lent.keys.endpoint) == ("eu-north-1", "https://minio.example:9000")
