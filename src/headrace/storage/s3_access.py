"""How the objects of one S3 bucket are reached: botocore's client, endpoint, credentials and certificates, taken from one session.

Everything that the AWS SDK reads is honoured, because the SDK reads it: variables, profiles, config files, SSO, web identity, container and instance
roles; endpoints, regions, addressing styles, certificate bundles. What it finds serves the SDK's own calls and the ranged reads alike.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import botocore
import botocore.session
from botocore.config import Config
from botocore.httpsession import get_cert_path

from headrace.errors import InvalidSetting
from headrace.settings import TransportSettings
from headrace.storage.certificates import check_ca_file, find_system_ca_file
from headrace.storage.refusal import Place
from headrace.storage.sdk_errors import SDK_EXCEPTIONS, explain_sdk_error
from headrace.storage.signing import S3Target, find_target
from headrace.storage.uri import arn_region

_FALLBACK_REGION = "us-east-1"
# The SDK waits up to 20 s before each further attempt, and its commonest reason is an endpoint that is wrong.
_MOST_SDK_ATTEMPTS = 4
_REGIONAL_HOST = re.compile(
    r"(?:^|[.-])s3(?:-accesspoint)?(?:-fips)?[.-](?:dualstack\.)?([a-z]{2,3}(?:-[a-z]+){1,2}-\d)\.(?:vpce\.)?amazonaws\.com(?:\.cn)?$"
)
_STYLES = ("auto", "path", "virtual")


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Options:
    """What the AWS SDK's own configuration does not say, or shall not say."""

    anonymous: bool = False
    """Send no credentials and look for none: for public buckets."""
    addressing_style: str | None = None
    """``path``, ``virtual`` or ``auto`` (path for endpoints of one's own); None takes ``s3.addressing_style`` of the AWS configuration."""
    endpoint: str | None = field(default=None, repr=False)
    """URL of the server; None takes the AWS configuration's, or Amazon's."""
    request_payer: bool = False
    """Say with every request that its sender pays for it: for buckets whose readers do."""
    verify_tls: bool = True
    """Check the server's certificate."""
    new_session: Callable[[], Any] = field(default=botocore.session.Session, repr=False)
    """Makes the botocore session that all is taken from; called again where new credentials are needed."""

    def __post_init__(self) -> None:
        if self.addressing_style is not None and self.addressing_style not in _STYLES:
            raise InvalidSetting(
                f"addressing_style is {self.addressing_style!r}.", f"It must be one of {', '.join(_STYLES)}."
            )
        if self.anonymous and self.request_payer:
            raise InvalidSetting(
                "An anonymous reader cannot pay for requests.",
                "Amazon asks for credentials where readers pay.",
                "Set one of s3_anonymous and s3_request_payer, not both.",
            )


@dataclass(frozen=True, slots=True)
class S3Access:
    """One consistent view of it all; replaced as a whole when the region or the credentials change.

    ``credentials`` are botocore's, which refresh themselves where they can; None without any. ``ca_file`` is for TLS; None over plain HTTP.
    """

    client: Any = field(repr=False)
    target: S3Target
    endpoint: str
    credentials: Any = field(repr=False)
    ca_file: str | None

    @property
    def has_fixed_credentials(self) -> bool:
        """Whether fetching the credentials again is bound to give the same ones."""
        return self.credentials is None or self.credentials.method in ("env", "explicit")

    def freeze_credentials(self) -> Any:
        """Return the credentials of this moment, refreshed if they are about to end; None without any. May raise the SDK's errors."""
        return None if self.credentials is None else self.credentials.get_frozen_credentials()


def connect_s3(bucket: str, options: S3Options, transport: TransportSettings, region: str | None = None) -> S3Access:
    """Return the access to ``bucket``, a name or the ARN of an access point.

    Without ``region`` it is the one that the ARN names, the configured one, the one in the name of Amazon's endpoint (a VPC endpoint, for instance), or us-east-1, from
    which S3 points to the right one.

    Opens no connection of its own; the credential chain may. Raises `InvalidSetting` for an AWS configuration that cannot work and `AccessDenied`
    where the credential chain fails.
    """
    try:
        session = options.new_session()
        region = arn_region(bucket) or region or session.get_config_variable("region")
        is_guessed, region = region is None, region or _FALLBACK_REGION
        ca_file = _find_ca_file(session)
        verify = ca_file if options.verify_tls else False
        # For the services that give credentials, too: their clients come from the same session.
        session.set_config_variable("ca_bundle", verify)
        arguments = {"region_name": region, "verify": verify}
        if options.endpoint is not None:
            arguments["endpoint_url"] = options.endpoint
        client = session.create_client("s3", config=_make_config(options, transport, options.anonymous), **arguments)
        locator = session.create_client("s3", config=_make_config(options, transport, True), **arguments)
        with contextlib.closing(locator):
            target = find_target(_locate(locator, bucket), region)
        named = _region_in(target.host) if is_guessed else region
        if named not in (None, region):
            client.close()
            return connect_s3(bucket, options, transport, named)
        credentials = None if options.anonymous else session.get_credentials()
    except SDK_EXCEPTIONS as error:
        raise explain_sdk_error(error, Place(f"s3://{bucket}", "the AWS SDK")) from error
    endpoint = f"{target.scheme}://{target.authority}{target.path.removesuffix(f'/{bucket}')}"
    return S3Access(client, target, endpoint, credentials, ca_file if target.scheme == "https" else None)


class _Located(Exception):
    """Carries a url out of the SDK before anything is sent."""


def _region_in(host: str) -> str | None:
    """Return the region that a host name of Amazon's S3 holds: ``s3.eu-west-1.amazonaws.com``, ``bucket.vpce-0a1b.s3.eu-west-1.vpce.amazonaws.com``."""
    match = _REGIONAL_HOST.search(host)
    return match[1] if match else None


def _locate(client: Any, bucket: str) -> str:
    """Return the url at which the SDK would ask for the object ``k``: its rules for base paths, styles, dual stack, FIPS and partitions are many.

    A presigned url would not do: for most regions those go to the global host, which redirects.
    """

    def stop(request: Any, **_: Any) -> None:
        raise _Located(request.url)

    client.meta.events.register_first("request-created.s3.GetObject", stop)
    try:
        client.get_object(Bucket=bucket, Key="k")
    except _Located as located:
        return str(located.args[0])
    raise AssertionError("the SDK made no request")


def _make_config(options: S3Options, transport: TransportSettings, anonymous: bool) -> Config:
    """Return the SDK's configuration; what it does not set comes from the profile. Unsigned clients never ask the credential chain."""
    return Config(
        signature_version=botocore.UNSIGNED if anonymous else "s3v4",
        s3={} if options.addressing_style is None else {"addressing_style": options.addressing_style},
        # Stores other than Amazon's refuse the checksum headers that newer SDKs add to every request.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        retries={"mode": "standard", "total_max_attempts": min(transport.max_attempts, _MOST_SDK_ATTEMPTS)},
        connect_timeout=transport.connect_timeout_s,
        read_timeout=transport.idle_timeout_s,
        max_pool_connections=max(10, transport.num_connections),
    )


def _find_ca_file(session: Any) -> str:
    """Return the one certificate bundle for the SDK and for ranged reads.

    In this order: ``AWS_CA_BUNDLE`` or ``ca_bundle`` of the profile, ``SSL_CERT_FILE`` or the system's bundle, the one that comes with the SDK.
    """
    configured = session.get_config_variable("ca_bundle")
    if configured:
        return check_ca_file(str(configured), "AWS_CA_BUNDLE, or ca_bundle in the AWS configuration,")
    return find_system_ca_file() or str(get_cert_path(True))
