"""Where the configuration and the credentials of an S3 store come from, for people. Reads what botocore has found; asks no service but the chain's own.

Names of the chain's links: botocore's ``METHOD`` of each credential provider (1.44). Prefixes of access keys: AWS Identity and Access Management User
Guide, "IAM identifiers", unique identifiers: AKIA is a long-term key, ASIA a temporary one, which is of no use without its session token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.storage.credentials import CredentialSource, last_four
from headrace.storage.s3 import S3Store
from headrace.storage.uri import arn_region

_SOURCES = {
    "env": "the variables AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "shared-credentials-file": "the AWS credentials file",
    "config-file": "the AWS configuration file",
    "assume-role": "a role that the profile names (AssumeRole)",
    "assume-role-with-web-identity": "a web identity (AWS_ROLE_ARN with AWS_WEB_IDENTITY_TOKEN_FILE, as EKS sets them for a service account)",
    "sso": "IAM Identity Center (aws sso login)",
    "login": "the sign-in of the AWS command line (aws login)",
    "custom-process": "the program that credential_process names",
    "container-role": "the container's role (an ECS task role, or EKS Pod Identity)",
    "iam-role": "the machine's role, from its metadata service (IMDS)",
    "explicit": "keys that were given in code or in the settings",
    "boto-config": "an old boto configuration file",
    "ec2-credentials-file": "the file that AWS_CREDENTIAL_FILE names",
}
_OF_A_PROFILE = ("shared-credentials-file", "config-file", "assume-role", "sso", "login", "custom-process")
_FIXED = ("env", "explicit", "shared-credentials-file", "config-file", "boto-config", "ec2-credentials-file")


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Configuration:
    """What the AWS configuration says, and where each of it comes from (a variable's name, or words)."""

    region: str
    region_from: str
    endpoint_from: str
    """Empty where no endpoint is configured."""
    profile: str
    addresses_by_path: bool


def describe_s3_credentials(store: S3Store, environment: Mapping[str, str]) -> CredentialSource:
    """Return what the store signs with. Raises `AccessDenied` where the chain finds nothing, or fails."""
    if store._options.anonymous:
        return CredentialSource(kind="", source="anonymous access is asked for (HEADRACE_S3_ANONYMOUS)")
    access = store._current()
    frozen = store._freeze_credentials(access, store._place(""))
    credentials, method = access.credentials, str(access.credentials.method)
    expires = getattr(credentials, "_expiry_time", None)  # The SDK has no public name for it.
    trouble, mend = _trouble_of(frozen, method)
    return CredentialSource(
        kind="access key",
        source=_source_of(method, store, environment),
        identity=_identity_of(frozen.access_key, method, environment),
        expires_s=None if expires is None else expires.timestamp(),
        renews_itself=expires is not None and method not in _FIXED,
        trouble=trouble,
        mend=mend,
        notes=_notes_on(frozen, method, expires, environment),
    )


def describe_s3_configuration(store: S3Store, environment: Mapping[str, str]) -> S3Configuration:
    """Return which region, endpoint and profile apply. Asks the SDK's configuration anew, which reads variables and files."""
    lent_from, session = store._current(), store._options.new_session()
    region = lent_from.target.region
    path = f"{lent_from.target.path}/"
    return S3Configuration(
        region=region,
        region_from=_region_from(store, session, region, environment),
        endpoint_from=_endpoint_from(store.endpoint, environment),
        profile=str(session.profile or "default"),
        addresses_by_path=path.endswith(f"/{store.uri.bucket}/"),
    )


def _region_from(store: S3Store, session: Any, region: str, environment: Mapping[str, str]) -> str:
    if arn_region(store.uri.bucket) == region:
        return "the access point's ARN"
    for name in ("AWS_DEFAULT_REGION", "AWS_REGION"):
        if environment.get(name, "").strip() == region:
            return name
    if session.get_config_variable("region", methods=("config",)) == region:
        return "the AWS configuration file"
    if f".{region}." in store.endpoint and not store.endpoint.startswith(f"https://{store.uri.bucket}.s3.{region}."):
        return "the endpoint's name"
    return "nothing names one; S3 points to the right one"


def _endpoint_from(endpoint: str, environment: Mapping[str, str]) -> str:
    host = endpoint.rstrip("/")
    for name, value in sorted(environment.items(), key=lambda item: (not item[0].endswith("_S3"), item[0])):
        if ("ENDPOINT" in name or name.startswith("HEADRACE_")) and value and _same_server(value, host):
            return name
    amazon = host.endswith((".amazonaws.com", ".amazonaws.com.cn"))
    return "" if amazon else "the AWS configuration file"


def _same_server(value: str, host: str) -> bool:
    """Say whether a variable names the server of an endpoint, whose host may begin with the bucket's name."""
    value = value.strip().rstrip("/")
    server = value.partition("://")[2]
    return bool(server) and (value == host or host.endswith(f".{server}"))


def _source_of(method: str, store: S3Store, environment: Mapping[str, str]) -> str:
    source = _SOURCES.get(method, f"the AWS SDK's {method}")
    if method in _OF_A_PROFILE:
        profile = store._options.new_session().profile or "default"
        source += f", profile {profile}"
    if method == "container-role" and environment.get("AWS_CONTAINER_CREDENTIALS_FULL_URI"):
        source = "EKS Pod Identity, or another service that AWS_CONTAINER_CREDENTIALS_FULL_URI names"
    return source


def _identity_of(access_key: str, method: str, environment: Mapping[str, str]) -> str:
    identity = f"access key {last_four(access_key)}"
    role = environment.get("AWS_ROLE_ARN", "") if method == "assume-role-with-web-identity" else ""
    return f"{identity} of the role {role}" if role else identity


def _trouble_of(frozen: Any, method: str) -> tuple[str, str]:
    """Return what is certainly wrong with a key pair, and how to mend it; two empty texts where nothing is."""
    named = {"AWS_ACCESS_KEY_ID": frozen.access_key, "AWS_SECRET_ACCESS_KEY": frozen.secret_key}
    named["AWS_SESSION_TOKEN"] = frozen.token or ""
    for name, value in named.items():
        if value != value.strip():
            where = name if method == "env" else f"What stands for {name}"
            return (
                f"{where} begins or ends with a blank or a line end, which becomes a part of it.",
                "Take it out: for a Kubernetes secret encode it with printf %s, or echo -n, before base64.",
            )
    if not frozen.secret_key:
        return "The secret key is empty.", "Set AWS_SECRET_ACCESS_KEY beside AWS_ACCESS_KEY_ID."
    if frozen.access_key.startswith("ASIA") and not frozen.token:
        return (
            "The access key is a temporary one (ASIA…), and its session token is absent.",
            "Set AWS_SESSION_TOKEN as well: the three belong together.",
        )
    return "", ""


def _notes_on(frozen: Any, method: str, expires: Any, environment: Mapping[str, str]) -> tuple[str, ...]:
    notes = []
    if frozen.token and frozen.access_key.startswith("AKIA"):
        notes.append(
            "There is a session token beside a long-term key (AKIA…); it belongs to another key. Unset AWS_SESSION_TOKEN."
        )
    if frozen.token and expires is None:
        notes.append("They are temporary ones, and do not say when they end.")
    if method == "env" and (environment.get("AWS_PROFILE") or environment.get("AWS_DEFAULT_PROFILE")):
        notes.append("A profile is named too (AWS_PROFILE); the variables with the keys win over it.")
    if method == "env" and environment.get("AWS_WEB_IDENTITY_TOKEN_FILE"):
        notes.append("A web identity is there too (AWS_WEB_IDENTITY_TOKEN_FILE); the variables with the keys win.")
    return tuple(notes)
