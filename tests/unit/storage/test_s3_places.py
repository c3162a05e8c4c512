"""Where requests go and what is signed, for Amazon's many kinds of endpoint: the SDK's own requests are caught before they are sent, the ranged reads are compared with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from io import BytesIO
from typing import Any
from urllib.parse import urlsplit

import pytest
from botocore.awsrequest import AWSResponse

from headrace.errors import InvalidSetting, InvalidUri
from headrace.settings import Settings
from headrace.storage import HttpRange, StoredObject, open_store
from headrace.storage.s3 import S3Store
from headrace.storage.s3_access import S3Options

from .conftest import SECRET_KEY
from .s3_stub import Answer, Asked, S3Stub, listing, signature_is_right
from .test_signing import send

OpenS3 = Callable[..., S3Store]
STORED = StoredObject("a b", 10, '"v"')
ARN = "arn:aws:s3:eu-west-1:123456789012:accesspoint/models"
VPC = "https://bucket.vpce-0a1b2c3d-5e6f.s3.eu-south-1.vpce.amazonaws.com"


class Caught:
    """Requests of the SDK of one store, none of which is sent: each is answered with an empty listing."""

    def __init__(self, store: S3Store) -> None:
        self.urls: list[str] = []
        self.headers: list[Mapping[str, Any]] = []
        store._access.client.meta.events.register("before-send.s3", self._answer)

    def _answer(self, request: Any, **_: Any) -> AWSResponse:
        self.urls.append(request.url)
        self.headers.append(
            {
                name.lower(): value.decode() if isinstance(value, bytes) else value
                for name, value in request.headers.items()
            }
        )
        raw = BytesIO(listing({}).body)
        raw.stream = lambda *_, **__: iter([listing({}).body])  # type: ignore[attr-defined]
        return AWSResponse(request.url, 200, {"content-type": "application/xml", "content-length": "0"}, raw)


def scope_of(authorization: str) -> str:
    """Return region and service that a request was signed for."""
    return "/".join(authorization.partition("Credential=")[2].split(",")[0].split("/")[2:4])


@pytest.mark.parametrize(
    ("uri", "variables", "host", "path", "region"),
    [
        # Access points: by ARN, in either spelling of its sign, and by alias.
        (f"s3://{ARN}/m", {}, "models-123456789012.s3-accesspoint.eu-west-1.amazonaws.com", "/", "eu-west-1"),
        (
            f"s3://{ARN.replace('accesspoint/', 'accesspoint:')}/m",
            {"AWS_REGION": "us-west-2", "AWS_DEFAULT_REGION": "us-west-2"},
            "models-123456789012.s3-accesspoint.eu-west-1.amazonaws.com",
            "/",
            "eu-west-1",
        ),
        (
            f"s3://{ARN}/m",
            {"AWS_USE_DUALSTACK_ENDPOINT": "true"},
            "models-123456789012.s3-accesspoint.dualstack.eu-west-1.amazonaws.com",
            "/",
            "eu-west-1",
        ),
        (
            "s3://arn:aws-cn:s3:cn-north-1:123456789012:accesspoint/models/m",
            {},
            "models-123456789012.s3-accesspoint.cn-north-1.amazonaws.com.cn",
            "/",
            "cn-north-1",
        ),
        (
            "s3://models-hrzrlukc5m36ft7okagglf3gmwluquse1b-s3alias/m",
            {"AWS_DEFAULT_REGION": "eu-west-1"},
            "models-hrzrlukc5m36ft7okagglf3gmwluquse1b-s3alias.s3.eu-west-1.amazonaws.com",
            "/",
            "eu-west-1",
        ),
        (
            "s3://arn:aws:s3:::my-models/m",
            {"AWS_DEFAULT_REGION": "eu-west-1"},
            "my-models.s3.eu-west-1.amazonaws.com",
            "/",
            "eu-west-1",
        ),
        # Dual stack and FIPS.
        (
            "s3://my-models/m",
            {"AWS_DEFAULT_REGION": "us-gov-west-1", "AWS_USE_FIPS_ENDPOINT": "true"},
            "my-models.s3-fips.us-gov-west-1.amazonaws.com",
            "/",
            "us-gov-west-1",
        ),
        (
            "s3://my-models/m",
            {"AWS_DEFAULT_REGION": "us-east-2", "AWS_USE_FIPS_ENDPOINT": "true", "AWS_USE_DUALSTACK_ENDPOINT": "true"},
            "my-models.s3-fips.dualstack.us-east-2.amazonaws.com",
            "/",
            "us-east-2",
        ),
        # VPC endpoints: the region is in their name, and is taken from there where none is configured.
        ("s3://my-models/m", {"AWS_ENDPOINT_URL_S3": VPC}, VPC.removeprefix("https://"), "/my-models/", "eu-south-1"),
        (
            "s3://my-models/m",
            {"AWS_ENDPOINT_URL": f"{VPC}/"},
            VPC.removeprefix("https://"),
            "/my-models/",
            "eu-south-1",
        ),
        (
            "s3://my-models/m",
            {"AWS_ENDPOINT_URL_S3": VPC, "AWS_DEFAULT_REGION": "eu-west-1"},
            VPC.removeprefix("https://"),
            "/my-models/",
            "eu-west-1",
        ),
        (
            f"s3://{ARN}/m",
            {"AWS_ENDPOINT_URL_S3": VPC.replace("//bucket.", "//accesspoint.").replace("eu-south-1", "eu-west-1")},
            "models-123456789012.accesspoint.vpce-0a1b2c3d-5e6f.s3.eu-west-1.vpce.amazonaws.com",
            "/",
            "eu-west-1",
        ),
        (
            "s3://my-models/m",
            {"AWS_ENDPOINT_URL": "https://s3.ap-southeast-2.amazonaws.com"},
            "s3.ap-southeast-2.amazonaws.com",
            "/my-models/",
            "ap-southeast-2",
        ),
        (
            "s3://my-models/m",
            {"AWS_ENDPOINT_URL": "http://store.example:9000/base/"},
            "store.example:9000",
            "/base/my-models/",
            "us-east-1",
        ),
    ],
)
def test_listing_and_ranges_go_to_the_same_place(
    open_s3: OpenS3,
    monkeypatch: pytest.MonkeyPatch,
    uri: str,
    variables: dict[str, str],
    host: str,
    path: str,
    region: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    store = open_s3(uri)
    caught = Caught(store)
    store.list_level("sub")
    url = urlsplit(caught.urls[0])
    assert (url.netloc, url.path.rstrip("/")) == (host, path.rstrip("/"))
    assert scope_of(caught.headers[0]["authorization"]) == f"{region}/s3"
    described = store.describe_range(STORED, 0, 1)
    assert (described.host, described.target) == (url.hostname, f"{path}m/a%20b")
    assert scope_of(dict(described.headers)["Authorization"]) == f"{region}/s3"


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("s3://arn:aws:s3::123456789012:accesspoint/mfzwi23gnjvgw.mrap/m", "multi-region"),
        ("s3://arn:aws:s3-object-lambda:eu-west-1:123456789012:accesspoint/x/m", "Object Lambda"),
        ("s3://arn:aws:s3-outposts:eu-west-1:123456789012:outpost/op-1/accesspoint/x/m", "Outposts"),
        ("s3://arn:aws:s3:eu-west-1:123456789012:accesspoint", "accesspoint/name/folder"),
        ("s3://arn:nonsense", "accesspoint/name/folder"),
    ],
)
def test_other_arns_are_refused_when_the_uri_is_read(open_s3: OpenS3, uri: str, says: str) -> None:
    with pytest.raises(InvalidUri) as caught:
        open_s3(uri)
    assert says in str(caught.value)


@pytest.mark.parametrize("bucket", ["models-o0-0001--op-s3", "models-abc--ol-s3"])
def test_aliases_of_other_access_points_are_refused(open_s3: OpenS3, bucket: str) -> None:
    with pytest.raises(InvalidUri, match="access point"):
        open_s3(f"s3://{bucket}/m")


def test_an_access_point_is_not_lent(open_s3: OpenS3) -> None:
    with pytest.raises(InvalidSetting, match="alias"):
        open_s3(f"s3://{ARN}/m").lend()


def test_an_access_points_uri_is_read_back_as_it_is_shown(open_s3: OpenS3) -> None:
    store = open_s3(f"s3://{ARN}/m/")
    assert store.uri_of("x/y.json") == f"s3://{ARN}/m/x/y.json"
    again = open_s3(store.uri_of("x"))
    assert (again.uri.bucket, again.uri.key) == (ARN, "m/x")


# Buckets whose readers pay


def test_the_payer_is_named_in_every_request_and_signed(open_s3: OpenS3) -> None:
    store = open_s3(request_payer=True)
    caught = Caught(store)
    store.list_level("sub")
    store.stat("a")
    list(store.open_past())
    for headers in caught.headers:
        assert headers["x-amz-request-payer"] == "requester"
        assert "x-amz-request-payer" in headers["authorization"].partition("SignedHeaders=")[2].partition(",")[0].split(
            ";"
        )
    headers = {name.lower(): value for name, value in store.describe_range(STORED, 0, 1).headers}
    assert headers["x-amz-request-payer"] == "requester"
    assert ";x-amz-request-payer," in headers["authorization"]
    assert len(caught.headers) == 3


@pytest.mark.parametrize("version_id", ["", "3sL4kqtJlcpXroDTDmJ+rmSpXd3dIbrHY", "null"])
def test_a_server_finds_the_signature_of_a_payer_and_of_a_version_right(open_s3: OpenS3, version_id: str) -> None:
    def answer(asked: Asked) -> Answer:
        is_right = signature_is_right(asked, SECRET_KEY) and asked.query.get("versionId", "") == version_id
        return Answer(206 if is_right else 403)

    with S3Stub(answer) as stub:
        store = open_s3(endpoint=stub.endpoint, request_payer=True)
        described = store.describe_range(StoredObject("a b", 10, '"v"', version_id), 2, 5)
        assert send(described) == 206
        assert send(described, x_amz_request_payer="somebody") == 403


def test_nobody_pays_where_it_was_not_asked_for(open_s3: OpenS3) -> None:
    store = open_s3()
    caught = Caught(store)
    store.list_level("sub")
    assert "x-amz-request-payer" not in caught.headers[0]
    assert "x-amz-request-payer" not in {name.lower() for name, _ in store.describe_range(STORED, 0, 1).headers}


def test_an_anonymous_reader_cannot_pay() -> None:
    with pytest.raises(InvalidSetting, match="cannot pay"):
        S3Options(anonymous=True, request_payer=True)


# Settings


def test_settings_lead_to_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AK")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SK")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://the.sdks")
    settings = Settings(s3_endpoint="http://ours:9000/", s3_addressing_style="virtual", s3_request_payer=True)
    store = open_store("s3://bucket/m", settings=settings)
    described = store.describe_range(STORED, 0, 1)
    store.close()
    assert isinstance(described, HttpRange)
    assert (described.host, described.port, described.target) == ("bucket.ours", 9000, "/m/a%20b")
    assert ("x-amz-request-payer", "requester") in [(name.lower(), value) for name, value in described.headers]
