"""Keys that pass between Headrace and another S3 client: those that ours uses, for a client of another library; those that a caller gave, for ours."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import botocore.session

from headrace.storage.s3_access import S3Access

_AMAZON = (".amazonaws.com", ".amazonaws.com.cn")


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Keys:
    """Keys and whereabouts of an S3 server. What is None is found elsewhere."""

    access_key_id: str | None = None
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    region_name: str | None = None
    endpoint: str | None = None
    """The server's URL; None for Amazon's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LentAccess:
    """All that another client needs to read a bucket as a store of ours does, as of one moment: it does not refresh itself."""

    keys: S3Keys
    """Without an access key where requests are anonymous."""
    addresses_by_path: bool
    """Whether the bucket's name is in the path of a URL rather than in its host."""
    ca_file: str | None
    """The certificates to trust; None over plain HTTP."""
    verify_tls: bool


def lend_access(bucket: str, access: S3Access, credentials: Any, *, verify_tls: bool) -> LentAccess:
    """Return ``access`` in a form that another client takes; ``credentials`` are botocore's frozen ones, or None for anonymous requests."""
    target = access.target
    by_path = f"{target.path}/".endswith(f"/{bucket}/")
    host = target.authority.removeprefix(f"{bucket}.")
    # Every client derives Amazon's own hosts from the region.
    is_amazon = target.host.endswith(_AMAZON) and not by_path
    keys = S3Keys(
        access_key_id=credentials and credentials.access_key,
        secret_access_key=credentials and credentials.secret_key,
        session_token=(credentials and credentials.token) or None,
        region_name=target.region,
        endpoint=None if is_amazon else f"{target.scheme}://{host}{target.path.removesuffix(f'/{bucket}')}",
    )
    return LentAccess(keys=keys, addresses_by_path=by_path, ca_file=access.ca_file, verify_tls=verify_tls)


class GivenSession(botocore.session.Session):  # type: ignore[misc]  # botocore has no types
    """A botocore session with ``keys`` in place of what the credential chain finds; what they leave open is still found there."""

    def __init__(self, keys: S3Keys) -> None:
        super().__init__()
        self._endpoint = keys.endpoint
        if keys.access_key_id is not None:
            self.set_credentials(keys.access_key_id, keys.secret_access_key, keys.session_token)
        if keys.region_name is not None:
            self.set_config_variable("region", keys.region_name)

    def create_client(self, service_name: str, *args: Any, **options: Any) -> Any:
        """Return a client as botocore does, for S3 at the endpoint that was given."""
        if self._endpoint is not None and service_name == "s3":
            options.setdefault("endpoint_url", self._endpoint)
        return super().create_client(service_name, *args, **options)
