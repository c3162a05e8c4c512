from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import botocore.session
import pytest

from headrace.errors import AccessDenied, HeadraceError, InvalidSetting, InvalidUri
from headrace.storage import HttpRange, StoredObject, parse_uri
from headrace.storage.s3 import S3Store
from headrace.storage.s3_access import S3Options

from .s3_stub import Answer, S3Stub, listing

STORED = StoredObject("a b", 10, '"v"')


def place_of(described: HttpRange) -> tuple[str, str, int, str]:
    return described.scheme, described.host, described.port, described.target


@pytest.mark.parametrize(
    ("bucket", "variables", "place", "endpoint"),
    [
        (
            "my-models",
            {"AWS_DEFAULT_REGION": "eu-west-1"},
            ("https", "my-models.s3.eu-west-1.amazonaws.com", 443, "/m/a%20b"),
            "https://my-models.s3.eu-west-1.amazonaws.com",
        ),
        (
            "my-models",
            {"AWS_DEFAULT_REGION": "cn-north-1"},
            ("https", "my-models.s3.cn-north-1.amazonaws.com.cn", 443, "/m/a%20b"),
            "https://my-models.s3.cn-north-1.amazonaws.com.cn",
        ),
        (
            "dots.in.name",
            {"AWS_DEFAULT_REGION": "eu-west-1"},
            ("https", "s3.eu-west-1.amazonaws.com", 443, "/dots.in.name/m/a%20b"),
            "https://s3.eu-west-1.amazonaws.com",
        ),
        (
            "my-models",
            {"AWS_DEFAULT_REGION": "eu-west-1", "AWS_USE_DUALSTACK_ENDPOINT": "true"},
            ("https", "my-models.s3.dualstack.eu-west-1.amazonaws.com", 443, "/m/a%20b"),
            "https://my-models.s3.dualstack.eu-west-1.amazonaws.com",
        ),
        (
            "my-models",
            {"AWS_ENDPOINT_URL": "https://minio.example:9000/"},
            ("https", "minio.example", 9000, "/my-models/m/a%20b"),
            "https://minio.example:9000",
        ),
        (
            "my-models",
            {"AWS_ENDPOINT_URL": "http://wrong", "AWS_ENDPOINT_URL_S3": "http://[::1]:9000/base/"},
            ("http", "::1", 9000, "/base/my-models/m/a%20b"),
            "http://[::1]:9000/base",
        ),
    ],
)
def test_where_requests_go(
    open_s3: Callable[..., S3Store],
    monkeypatch: pytest.MonkeyPatch,
    bucket: str,
    variables: dict[str, str],
    place: tuple[str, str, int, str],
    endpoint: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    store = open_s3(f"s3://{bucket}/m")
    assert place_of(store.describe_range(STORED, 0, 1)) == place
    assert store.endpoint == endpoint


def write_profile(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> None:
    (folder / "config").write_text(text)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(folder / "config"))
    monkeypatch.setenv("AWS_PROFILE", "mine")


def test_a_profile_is_honoured(
    open_s3: Callable[..., S3Store], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = """
        [profile mine]
        region = eu-south-1
        services = here
        aws_access_key_id = PROFILEKEY
        aws_secret_access_key = profilesecret
        s3 =
          addressing_style = virtual
        [services here]
        s3 =
          endpoint_url = http://store.example:9000
    """
    write_profile(monkeypatch, tmp_path, "\n".join(line[8:] for line in text.splitlines()))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    described = open_s3().describe_range(STORED, 0, 1)
    assert place_of(described) == ("http", "bucket.store.example", 9000, "/m/a%20b")
    assert "Credential=PROFILEKEY/" in dict(described.headers)["Authorization"]
    assert "/eu-south-1/s3/" in dict(described.headers)["Authorization"]
    # What is said in code wins.
    described = open_s3(addressing_style="path").describe_range(STORED, 0, 1)
    assert place_of(described) == ("http", "store.example", 9000, "/bucket/m/a%20b")


@pytest.mark.parametrize(
    ("style", "place"),
    [
        ("path", ("http", "store.example", 80, "/bucket/m/a%20b")),
        ("auto", ("http", "store.example", 80, "/bucket/m/a%20b")),
        ("virtual", ("http", "bucket.store.example", 80, "/m/a%20b")),
        (None, ("http", "store.example", 80, "/bucket/m/a%20b")),
    ],
)
def test_styles_of_an_endpoint_of_ones_own(
    open_s3: Callable[..., S3Store], style: str | None, place: tuple[str, str, int, str]
) -> None:
    store = open_s3(endpoint="http://store.example", addressing_style=style)
    assert place_of(store.describe_range(STORED, 0, 1)) == place


def test_an_unknown_style_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="auto, path, virtual"):
        S3Options(addressing_style="hosted")


def test_one_certificate_bundle_for_all(
    open_s3: Callable[..., S3Store], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bundle = tmp_path / "ca.pem"
    bundle.write_text("certificates")
    monkeypatch.setenv("AWS_CA_BUNDLE", str(bundle))
    described = open_s3(endpoint="https://store.example").describe_range(STORED, 0, 1)
    assert (described.ca_file, described.verify_tls) == (str(bundle), True)
    described = open_s3(endpoint="http://store.example").describe_range(STORED, 0, 1)
    assert described.ca_file is None
    described = open_s3(endpoint="https://store.example", verify_tls=False).describe_range(STORED, 0, 1)
    assert described.verify_tls is False

    monkeypatch.delenv("AWS_CA_BUNDLE")
    monkeypatch.setenv("SSL_CERT_FILE", str(bundle))
    described = open_s3(endpoint="https://store.example").describe_range(STORED, 0, 1)
    assert described.ca_file == str(bundle)

    monkeypatch.delenv("SSL_CERT_FILE")
    described = open_s3(endpoint="https://store.example").describe_range(STORED, 0, 1)
    assert described.ca_file is not None
    assert Path(described.ca_file).is_file()


@pytest.mark.parametrize(
    ("variables", "kind", "says"),
    [
        ({"AWS_CA_BUNDLE": "/absent/ca.pem"}, InvalidSetting, "/absent/ca.pem is not a file"),
        ({"AWS_ENDPOINT_URL": "127.0.0.1:8333"}, InvalidSetting, "Invalid endpoint: 127.0.0.1:8333"),
        ({"AWS_ENDPOINT_URL": "not a url"}, InvalidSetting, "not a url"),
        ({"AWS_PROFILE": "absent"}, InvalidSetting, "absent"),
        ({"AWS_DEFAULT_REGION": "no region/"}, InvalidSetting, "no region"),
        ({"AWS_SECRET_ACCESS_KEY": ""}, AccessDenied, "Partial credentials"),
    ],
)
def test_what_is_wrong_with_the_configuration_is_said_at_once(
    open_s3: Callable[..., S3Store],
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    kind: type[HeadraceError],
    says: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(kind) as caught:
        open_s3()
    assert says in str(caught.value)
    assert caught.value.mend
    assert "s3://bucket" in caught.value.what or "bundle" in caught.value.what


@pytest.mark.parametrize("bucket", ["model--usw2-az1--x-s3", "a" * 300])
def test_buckets_that_cannot_be_used(open_s3: Callable[..., S3Store], bucket: str) -> None:
    with pytest.raises(InvalidUri, match=bucket[:20]):
        open_s3(f"s3://{bucket}/m")


def test_public_buckets_are_asked_without_credentials(
    open_s3: Callable[..., S3Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The credential chain is not even asked: it may be slow, and dummy keys in the environment must not be sent."""

    class Session(botocore.session.Session):  # type: ignore[misc]
        def get_credentials(self) -> None:
            raise AssertionError("the credential chain was asked")

    with S3Stub(lambda _: listing({"m/a b": 10})) as stub:
        store = open_s3(endpoint=stub.endpoint, anonymous=True, new_session=Session)
        assert [item.key for item in store.list_level().objects] == ["a b"]
        assert "authorization" not in stub.asked[0].headers
        names = {name for name, _ in store.describe_range(STORED, 0, 1).headers}
        assert names == {"Range", "Accept-Encoding", "If-Match"}


def test_keys_in_the_environment_ask_no_metadata_service(
    open_s3: Callable[..., S3Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    monkeypatch.setenv("AWS_METADATA_SERVICE_NUM_ATTEMPTS", "1")
    with S3Stub(lambda _: Answer(404)) as metadata, S3Stub(lambda _: listing({"m/a b": 10})) as stub:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", metadata.endpoint)
        store = open_s3(endpoint=stub.endpoint)
        store.list_level()
        store.describe_range(STORED, 0, 1)
        assert metadata.asked == []

        # The test's own check: without keys, the chain does reach that service.
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        with pytest.raises(AccessDenied, match="no credentials"):
            open_s3(endpoint=stub.endpoint).describe_range(STORED, 0, 1)
        assert metadata.asked != []


def test_no_environment_is_read_outside_the_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing and describing depend on their arguments alone; a changed variable is seen by a new session only."""
    session = botocore.session.Session()
    session.set_credentials("GIVEN", "secret")
    session.set_config_variable("region", "eu-west-1")
    from headrace.settings import TransportSettings

    store = S3Store(
        parse_uri("s3://bucket/m"), transport=TransportSettings(), options=S3Options(new_session=lambda: session)
    )
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "OTHER")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "other")
    authorization = dict(store.describe_range(STORED, 0, 1).headers)["Authorization"]
    assert "Credential=GIVEN/" in authorization
    assert os.environ["AWS_ACCESS_KEY_ID"] == "OTHER"
    store.close()
