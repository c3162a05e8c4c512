"""Which settings apply to a uri, where each comes from, and which server they lead to. Opens no connection, asks no credential chain."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from headrace.doctor.finding import Finding, ok, warning
from headrace.doctor.naming import bucket_complaint, describe_host, is_amazon
from headrace.doctor.world import World
from headrace.errors import MissingDependency
from headrace.settings import Settings
from headrace.storage import HttpRange, ObjectStore, StoredObject, Uri
from headrace.storage.address import parse_address
from headrace.transport.connection import Origin
from headrace.transport.proxy import proxy_for

STEP = "settings"

DEFAULT = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Whereabouts:
    """Where a uri leads. ``kind`` is ``file``, ``s3``, ``gs``, ``az``, ``hf`` or ``http``, which the uri's scheme alone does not tell."""

    kind: str
    endpoint: str
    """For people; ``this machine`` for files."""
    origin: Origin | None = None
    """The server; None for files."""
    by_path: bool = True
    """Whether the bucket's name is in the path of each address rather than in the host."""
    is_anonymous: bool = False
    """Whether the settings say that nothing is to be shown."""
    is_offline: bool = False
    """Whether the hub may not be asked."""
    rows: tuple[tuple[str, str], ...] = ()
    """Settings that are this kind's own: label, and value with its source."""


def find_whereabouts(uri: Uri, settings: Settings, world: World) -> Whereabouts:
    """Return where ``uri`` leads with ``settings``. Raises `InvalidUri`, `InvalidSetting` and `MissingDependency` as opening the store does."""
    if uri.scheme == "hf":
        return _find_hub(uri, settings, world.environment)
    # A store that shows nothing also looks for nothing to show; and nobody can pay without saying who it is.
    anonymous = replace(settings, s3_anonymous=True, s3_request_payer=False, gcs_anonymous=True, azure_anonymous=True)
    with contextlib.closing(world.open_store(uri, anonymous)) as store:
        asked = store.describe_range(StoredObject("k", 1, ""), 0, 1)
        if not isinstance(asked, HttpRange):
            return Whereabouts(kind="file", endpoint=store.endpoint)
        found = Whereabouts(kind=_kind_of(store), endpoint=store.endpoint, origin=Origin.of(asked))
        if found.kind == "s3":
            return _with_s3(found, store, settings, world.environment)
    if found.kind == "gs":
        emulator = named_by(world.environment, "STORAGE_EMULATOR_HOST")
        endpoint = sourced(settings, "gcs_endpoint", found.endpoint, otherwise=emulator)
        return replace(found, is_anonymous=settings.gcs_anonymous, rows=(("endpoint", endpoint),))
    if found.kind == "az":
        return replace(found, is_anonymous=settings.azure_anonymous, rows=(("account", found.endpoint),))
    return found


def judge_settings(uri: Uri, found: Whereabouts, settings: Settings, environment: Mapping[str, str]) -> Finding:
    """Return the finding: what applies, and what is odd about it. Raises `InvalidSetting` for a proxy that cannot be used."""
    details = list(found.rows)
    if found.origin is not None:
        details += _network_rows(found.origin, settings, environment)
    connections = sourced(settings, "num_connections", str(settings.transport.num_connections))
    details.append(("connections", connections))
    if settings.transport.bandwidth_bytes_per_s:
        limit = f"{settings.transport.bandwidth_bytes_per_s:,} bytes/s"
        details.append(("bandwidth", sourced(settings, "bandwidth_bytes_per_s", limit)))
    what = f"Requests go to {found.endpoint}." if found.origin is not None else "Files are read from this machine."
    if found.is_offline:
        what = "The hub is not asked (HF_HUB_OFFLINE); only its cache on this machine is used."
    trouble = _trouble_of(uri, found, environment)
    if trouble is not None:
        return warning(STEP, *trouble, details)
    return ok(STEP, what, details)


def sourced(settings: Settings, name: str, value: str, *, otherwise: str = "") -> str:
    """Return a value with the place that it comes from: ``8 (HEADRACE_CONNECTIONS)``; ``otherwise`` is where, if not from a variable of ours."""
    return f"{value} ({settings.sources.get(name) or otherwise or DEFAULT})"


def named_by(environment: Mapping[str, str], *names: str) -> str:
    """Return the first of ``names`` that is set; empty where none is."""
    return next((name for name in names if environment.get(name)), "")


def has_snapshot(uri: Uri | None) -> bool:
    """Say whether the hub's cache on this machine holds anything of an ``hf`` uri's revision."""
    from headrace.storage.hub_access import HubRepository
    from headrace.storage.hub_cache import find_snapshot

    return uri is not None and find_snapshot(HubRepository.of(uri)) is not None


def _kind_of(store: ObjectStore) -> str:
    from headrace.storage.http import HttpStore

    if store.uri.scheme in ("s3", "gs", "az"):
        return store.uri.scheme
    return "http" if isinstance(store, HttpStore) else "az"


def _with_s3(found: Whereabouts, store: ObjectStore, settings: Settings, environment: Mapping[str, str]) -> Whereabouts:
    from headrace.storage.s3 import S3Store
    from headrace.storage.s3_credentials import describe_s3_configuration

    assert isinstance(store, S3Store)
    says = describe_s3_configuration(store, environment)
    style = "path" if says.addresses_by_path else "virtual (the bucket's name is in the host)"
    endpoint_from = settings.sources.get("s3_endpoint", says.endpoint_from)
    rows = [
        ("endpoint", f"{found.endpoint} ({endpoint_from or 'Amazon'})"),
        ("region", f"{says.region} ({says.region_from})"),
        ("addressing", sourced(settings, "s3_addressing_style", style, otherwise="as this endpoint wants it")),
        ("profile", says.profile),
    ]
    if settings.s3_request_payer:
        rows.append(("who pays", sourced(settings, "s3_request_payer", "the reader")))
    return replace(found, by_path=says.addresses_by_path, is_anonymous=settings.s3_anonymous, rows=tuple(rows))


def _find_hub(uri: Uri, settings: Settings, environment: Mapping[str, str]) -> Whereabouts:
    try:
        from headrace.storage.hub_access import HubRepository, find_endpoint, is_offline
        from headrace.storage.hub_cache import cache_folder
    except ImportError as error:
        raise MissingDependency(
            f"{uri} cannot be opened: huggingface_hub cannot be imported.",
            f"{error}.",
            'Install it with: pip install "headrace[hub]".',
        ) from error
    HubRepository.of(uri)
    endpoint = find_endpoint()
    address = parse_address(endpoint)
    return Whereabouts(
        kind="hf",
        endpoint=endpoint,
        origin=Origin(address.scheme, address.host, address.port, settings.ca_file, settings.verify_tls),
        is_offline=is_offline(),
        rows=(
            ("endpoint", f"{endpoint} ({named_by(environment, 'HF_ENDPOINT') or DEFAULT})"),
            ("cache", f"{cache_folder()} ({named_by(environment, 'HF_HUB_CACHE', 'HF_HOME') or DEFAULT})"),
        ),
    )


def _network_rows(origin: Origin, settings: Settings, environment: Mapping[str, str]) -> list[tuple[str, str]]:
    rows = []
    kind = describe_host(origin.host)
    if kind:
        rows.append(("endpoint is", kind))
    proxy = proxy_for(origin.scheme, origin.host, origin.port, settings.transport)
    name = "https_proxy" if origin.scheme == "https" else "http_proxy"
    if proxy is not None:
        rows.append(("proxy", sourced(settings, name, f"{proxy.host}:{proxy.port}")))
    elif getattr(settings.transport, name):
        rows.append(("proxy", sourced(settings, "no_proxy", "none for this host")))
    if origin.scheme == "https":
        source = next((one for one in _CA_VARIABLES if environment.get(one) == origin.ca_file), "the system's")
        trusted = f"{origin.ca_file} ({source})" if origin.ca_file else "the certificates of the system"
        rows.append(("trusts", trusted))
    return rows


_CA_VARIABLES = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")


def _trouble_of(uri: Uri, found: Whereabouts, environment: Mapping[str, str]) -> tuple[str, str, str] | None:
    """Return what, why and mend of a setting that does not do what its owner believes; None where there is none."""
    if found.kind != "s3" or found.origin is None:
        return None
    region = environment.get("AWS_REGION", "").strip()
    used = next((value for label, value in found.rows if label == "region"), "")
    if region and used and used.partition(" ")[0] != region:
        return (
            f"The region is {used.partition(' ')[0]}, although AWS_REGION is {region}.",
            "The AWS SDK for Python reads AWS_DEFAULT_REGION and the AWS configuration file, not AWS_REGION.",
            f"Set AWS_DEFAULT_REGION={region}, if that is the bucket's region.",
        )
    if is_amazon(found.origin.host):
        complaint = bucket_complaint(uri.bucket)
        if complaint:
            return (
                f"{uri.bucket} cannot be a bucket of Amazon's.",
                complaint,
                "Check the bucket's name; for another store than Amazon's name its endpoint (AWS_ENDPOINT_URL).",
            )
    return None
