"""Names in the clouds' own words."""

from __future__ import annotations

import pytest

from headrace.doctor.naming import bucket_complaint, describe_bucket, describe_host, describe_uri, remarks_on
from headrace.storage import Uri, parse_uri


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("models", ""),
        ("reader-abcdefghijklmnopqrstuvwxyz012345-s3alias", "the alias of an access point"),
        ("models--euw1-az1--x-s3", "a directory bucket of S3 Express One Zone"),
        ("m-abc--ol-s3", "the alias of an Object Lambda access point, whose function decides what a range means"),
        (
            "arn:aws:s3:eu-west-1:123456789012:accesspoint/reader",
            "the access point reader in eu-west-1, named by its ARN",
        ),
        (
            "arn:aws:s3:eu-west-1:123456789012:accesspoint:reader",
            "the access point reader in eu-west-1, named by its ARN",
        ),
        (
            "arn:aws:s3::123456789012:accesspoint/mfzwi23gnjvgw.mrap",
            "the access point mfzwi23gnjvgw.mrap of several regions, named by its ARN",
        ),
        (
            "arn:aws:s3-object-lambda:eu-west-1:123456789012:accesspoint/l",
            "the access point l of Object Lambda in eu-west-1, named by its ARN",
        ),
    ],
)
def test_buckets_that_are_something_else(name: str, kind: str) -> None:
    assert describe_bucket(name) == kind
    assert bucket_complaint(name) == ""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("models", ""),
        ("models.of-2024", ""),
        ("Models", "capital"),
        ("mo", "3 to 63"),
        ("m" * 64, "3 to 63"),
        ("my_models", "small letters"),
        ("-models", "small letters"),
        ("a..b", "two dots"),
        ("192.168.1.1", "IP addresses"),
    ],
)
def test_names_that_amazon_has_no_bucket_of(name: str, said: str) -> None:
    complaint = bucket_complaint(name)
    assert said in complaint
    assert bool(complaint) == bool(said)


@pytest.mark.parametrize(
    ("host", "kind"),
    [
        ("bucket.s3.eu-west-1.amazonaws.com", ""),
        (
            "bucket.vpce-0a1b2c3d-4e5f6g.s3.us-east-1.vpce.amazonaws.com",
            "the interface VPC endpoint vpce-0a1b2c3d-4e5f6g for s3 in us-east-1",
        ),
        (
            "vpce-0a1b-4e5f-us-east-1a.s3.us-east-1.vpce.amazonaws.com",
            "the interface VPC endpoint vpce-0a1b-4e5f-us-east-1a for s3 in us-east-1",
        ),
        ("b.s3.dualstack.eu-west-1.amazonaws.com", "a dual-stack endpoint (IPv4 and IPv6)"),
        ("b.s3-fips.dualstack.us-east-1.amazonaws.com", "a dual-stack endpoint (IPv4 and IPv6), a FIPS endpoint"),
        ("b.s3-accelerate.amazonaws.com", "an endpoint of S3 Transfer Acceleration"),
        ("b.s3express-euw1-az1.eu-west-1.amazonaws.com", "an endpoint of S3 Express One Zone"),
        ("b.s3-website.eu-west-1.amazonaws.com", "a website endpoint, which knows neither TLS nor credentials"),
        ("b.s3-website-us-east-1.amazonaws.com", "a website endpoint, which knows neither TLS nor credentials"),
        ("reader-123.s3-accesspoint.eu-west-1.amazonaws.com", "the endpoint of an access point"),
        ("storage-psc.p.googleapis.com", "an endpoint of Private Service Connect"),
        ("restricted.googleapis.com", "an endpoint of Private Google Access"),
        ("acct.privatelink.blob.core.windows.net", "a private link of the storage account"),
        ("minio.example", ""),
    ],
)
def test_hosts(host: str, kind: str) -> None:
    assert describe_host(host) == kind


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("s3://models/llama", "Bucket models, folder llama."),
        ("s3://models", "Bucket models, its top folder."),
        ("s3://r-x-s3alias/m", "Bucket r-x-s3alias (the alias of an access point), folder m."),
        ("az://models/llama", "Container models, folder llama."),
        ("hf://org/name@v2/sub", "The repository org/name of the hub at v2, folder sub."),
        ("hf://org/name", "The repository org/name of the hub at main."),
        ("https://host/llama?X-Amz-Signature=abcdef", "/llama on the web server host."),
        ("/srv/llama", "The local path /srv/llama."),
    ],
)
def test_uris(uri: str, said: str) -> None:
    assert describe_uri(parse_uri(uri)) == said


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("s3://models/llama%203", "%20 is three characters"),
        ("s3://models//llama", "begins with a slash"),
        ("s3://models/a//llama", "two slashes"),
        ("s3://models/a /llama", "blank"),
        ("https://bucket.s3.amazonaws.com/llama", "s3://bucket/folder has both"),
    ],
)
def test_slips(uri: str, said: str) -> None:
    assert any(said in remark for remark in remarks_on(parse_uri(uri)))


@pytest.mark.parametrize("uri", ["s3://models/llama-3.1", "hf://org/name", "https://host/a%20b", "/srv//models"])
def test_no_slips(uri: str) -> None:
    assert remarks_on(parse_uri(uri)) == []
    assert remarks_on(Uri("file", "", "/srv/a b")) == []
