"""What a uri and a host name are called in the clouds' own words: buckets, access points, private endpoints. Pure.

Rules for bucket names: Amazon S3 User Guide, "General purpose bucket naming rules". Kinds of names and hosts: the same, "Access points",
"Directory buckets", "AWS PrivateLink for Amazon S3", "Dual-stack endpoints", "Transfer Acceleration", "Website endpoints". Google: "Private Service
Connect". Azure: "Use private endpoints for Azure Storage".
"""

from __future__ import annotations

import re

from headrace.storage import Uri

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_ADDRESS = re.compile(r"\d+\.\d+\.\d+\.\d+")
_ARN = re.compile(r"arn:[a-z-]+:(?P<service>s3[a-z-]*):(?P<region>[a-z0-9-]*):\d*:(?P<kind>[a-z]+)[:/](?P<name>[^/]+)")
_PERCENT = re.compile(r"%[0-9A-Fa-f]{2}")
_VPCE = re.compile(r"(?:^|\.)(vpce-[0-9a-z-]+)\.([a-z0-9-]+)\.([a-z0-9-]+)\.vpce\.amazonaws\.com(?:\.cn)?$")
_SUFFIXES = (
    ("--x-s3", "a directory bucket of S3 Express One Zone"),
    ("--xa-s3", "an access point of a directory bucket (S3 Express One Zone)"),
    ("--ol-s3", "the alias of an Object Lambda access point, whose function decides what a range means"),
    ("-s3alias", "the alias of an access point"),
    (".mrap", "the alias of a multi-region access point, which wants signatures of another kind (SigV4A)"),
    ("--table-s3", "a table bucket, which holds no models"),
)
_AMAZON_HOSTS = (
    (re.compile(r"(^|\.)s3-accelerate\."), "an endpoint of S3 Transfer Acceleration"),
    (re.compile(r"(^|\.)s3express-"), "an endpoint of S3 Express One Zone"),
    (re.compile(r"(^|\.)s3-website[.-]"), "a website endpoint, which knows neither TLS nor credentials"),
    (re.compile(r"\.accesspoint\.s3-global\."), "the endpoint of a multi-region access point"),
    (re.compile(r"\.s3-accesspoint(-fips)?\."), "the endpoint of an access point"),
    (re.compile(r"(^|\.)s3-object-lambda\."), "an endpoint of S3 Object Lambda"),
)
_OTHER_HOSTS = (
    (re.compile(r"\.p\.googleapis\.com$"), "an endpoint of Private Service Connect"),
    (re.compile(r"^(restricted|private)\.googleapis\.com$"), "an endpoint of Private Google Access"),
    (re.compile(r"\.privatelink\.(blob|dfs)\."), "a private link of the storage account"),
)


def is_amazon(host: str) -> bool:
    """Say whether a host is one of Amazon's own."""
    return host.endswith((".amazonaws.com", ".amazonaws.com.cn"))


def describe_bucket(name: str) -> str:
    """Return what kind of thing an S3 uri's bucket is, where that is something else than a plain bucket; else an empty text."""
    match = _ARN.match(name)
    if match is not None:
        where = f" in {match['region']}" if match["region"] else " of several regions"
        lambdas = " of Object Lambda" if match["service"] == "s3-object-lambda" else ""
        return f"the access point {match['name']}{lambdas}{where}, named by its ARN"
    return next((kind for suffix, kind in _SUFFIXES if name.endswith(suffix)), "")


def bucket_complaint(name: str) -> str:
    """Return why Amazon can have no bucket of this name, as a sentence; empty where it can. Other stores allow more."""
    if describe_bucket(name):
        return ""
    if not 3 <= len(name) <= 63:
        return f"Amazon's bucket names have 3 to 63 characters, and {name!r} has {len(name)}."
    if name != name.lower():
        return f"Amazon's bucket names have no capital letters, and {name!r} has some."
    if not _BUCKET.fullmatch(name):
        return f"Amazon's bucket names have small letters, digits, dots and dashes only, and begin and end with a letter or digit: {name!r} is none."
    if ".." in name or _ADDRESS.fullmatch(name):
        return f"Amazon's bucket names have no two dots side by side and are no IP addresses: {name!r} is none."
    return ""


def describe_host(host: str) -> str:
    """Return what kind of endpoint a host name is, where that matters; else an empty text."""
    match = _VPCE.search(host)
    if match is not None:
        return f"the interface VPC endpoint {match[1]} for {match[2]} in {match[3]}"
    if is_amazon(host):
        kinds = [kind for pattern, kind in _AMAZON_HOSTS if pattern.search(host)]
        if ".dualstack." in host:
            kinds.append("a dual-stack endpoint (IPv4 and IPv6)")
        if "-fips." in host:
            kinds.append("a FIPS endpoint")
        return ", ".join(kinds)
    return next((kind for pattern, kind in _OTHER_HOSTS if pattern.search(host)), "")


def describe_uri(uri: Uri) -> str:
    """Return a sentence that says how a uri was read."""
    if uri.scheme == "file":
        return f"The local path {uri.key}."
    if uri.scheme == "hf":
        name, _, revision = uri.bucket.partition("@")
        folder = f", folder {uri.key}" if uri.key else ""
        return f"The repository {name} of the hub at {revision or 'main'}{folder}."
    if uri.scheme in ("http", "https"):
        return f"{'/' + uri.key if uri.key else 'The top folder'} on the web server {uri.bucket}."
    container = "Container" if uri.scheme == "az" else "Bucket"
    kind = describe_bucket(uri.bucket) if uri.scheme == "s3" else ""
    return f"{container} {uri.bucket}{f' ({kind})' if kind else ''}, {f'folder {uri.key}' if uri.key else 'its top folder'}."


def remarks_on(uri: Uri) -> list[str]:
    """Return what looks like a slip in a uri that can be read, in sentences."""
    found = []
    if uri.scheme in ("s3", "gs", "az") and _PERCENT.search(uri.key):
        found.append(
            "The folder holds a % and two digits. Keys of buckets are taken as they are written: %20 is three characters, not a blank."
        )
    if uri.key.startswith("/") and uri.scheme != "file":
        found.append(
            "The folder begins with a slash, so its first part is an empty name. Write one slash after the bucket."
        )
    elif "//" in uri.key:
        found.append("The folder holds two slashes side by side, so one of its parts is an empty name.")
    if uri.key != uri.key.strip() or any(part != part.strip() for part in uri.key.split("/")):
        found.append("A part of the folder begins or ends with a blank.")
    if uri.scheme in ("http", "https") and is_amazon(uri.bucket.partition(":")[0]):
        found.append(
            "This is an address of Amazon's, read as a plain web address: without credentials, and without a listing. s3://bucket/folder has both."
        )
    return found
