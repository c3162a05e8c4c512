"""What the credentials' description means for a load. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from headrace.doctor.finding import Finding, failed, ok, warning
from headrace.errors import HeadraceError
from headrace.storage.credentials import CredentialSource
from headrace.units import format_seconds

STEP = "credentials"

_SOON_S = 900.0


def judge_credentials(source: CredentialSource, now: float) -> Finding:
    """Return the finding for credentials that are there; ``now`` is in seconds since 1970."""
    details = []
    left_s = None if source.expires_s is None else source.expires_s - now
    if source.expires_s is not None and left_s is not None:
        details.append(("expires", f"{_date(source.expires_s)}, {_left(left_s)}"))
    details += [("note", note) for note in source.notes]
    if not source.kind:
        return ok(STEP, f"None are sent: {source.source}.", details)
    what = f"The {_named(source)} comes from {source.source}."
    if source.trouble:
        return failed(STEP, source.trouble, what, source.mend, details)
    if left_s is not None and left_s <= 0:
        return failed(
            STEP,
            f"The {_named(source)} from {source.source} has expired.",
            f"It was good until {_date(source.expires_s or 0.0)}.",
            _renewal(source.kind),
            details,
        )
    if left_s is not None and left_s < _SOON_S and not source.renews_itself:
        return warning(
            STEP,
            f"The {_named(source)} from {source.source} ends in {format_seconds(left_s)}.",
            "A load that is still running then must find new ones in the same place.",
            _renewal(source.kind),
            details,
        )
    if left_s is not None and source.renews_itself:
        what += " It is renewed before it ends."
    return ok(STEP, what, details)


def describe_source(source: CredentialSource) -> str:
    """Return which credentials are shown, in a few words: for the failure of a request that went with them."""
    if not source.kind:
        return f"nothing ({source.source})"
    return f"the {_named(source)} from {source.source}"


def _named(source: CredentialSource) -> str:
    """Return the kind and whose it is: ``access key …MPLE``, ``token (name@project)``."""
    if source.identity.startswith(source.kind):
        return source.identity
    return f"{source.kind} ({source.identity})" if source.identity else source.kind


def without_credentials(error: HeadraceError, kind: str, environment: Mapping[str, str]) -> Finding:
    """Return the finding for credentials that could not be had, with what the environment shows to be missing."""
    hints = [("looked for", hint) for hint in hints_for(kind, environment)]
    return failed(STEP, _without_uri(error.what), error.why, error.mend, hints)


def hints_for(kind: str, environment: Mapping[str, str]) -> list[str]:
    """Return what the places look like where credentials of this kind usually come from, a sentence each."""
    in_kubernetes = bool(environment.get("KUBERNETES_SERVICE_HOST"))
    if kind == "s3":
        return _s3_hints(environment, in_kubernetes)
    if kind == "gs":
        named = _state_of(environment, "GOOGLE_APPLICATION_CREDENTIALS")
        return [named, "A public bucket is read without any where HEADRACE_GCS_ANONYMOUS is 1."]
    if kind == "az":
        names = ("AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_KEY")
        found = [_state_of(environment, name) for name in names]
        found.append("A public container is read without any where HEADRACE_AZURE_ANONYMOUS is 1.")
        if in_kubernetes:
            found.append(f"For workload identity: {_state_of(environment, 'AZURE_FEDERATED_TOKEN_FILE')}")
        return found
    return []


def _s3_hints(environment: Mapping[str, str], in_kubernetes: bool) -> list[str]:
    found = [_state_of(environment, name) for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE")]
    if in_kubernetes:
        irsa = _state_of(environment, "AWS_WEB_IDENTITY_TOKEN_FILE")
        pod = _state_of(environment, "AWS_CONTAINER_CREDENTIALS_FULL_URI")
        found.append(f"For a role of the pod's service account (IRSA): {irsa}")
        found.append(f"For EKS Pod Identity: {pod}")
        found.append(
            "For the node's role: the metadata service answers pods only where its hop limit is 2 or more (IMDSv2)."
        )
    if environment.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        found.append("AWS_EC2_METADATA_DISABLED is true: the machine's own role is not asked for.")
    found.append("A public bucket is read without any where HEADRACE_S3_ANONYMOUS is 1.")
    return found


def _state_of(environment: Mapping[str, str], name: str) -> str:
    if name not in environment:
        return f"{name} is not set."
    return f"{name} is set." if environment[name].strip() else f"{name} is set, and empty."


def _renewal(kind: str) -> str:
    if kind == "signed address":
        return "Make a new signed address."
    if kind == "shared access signature":
        return "Make a new SAS (az storage container generate-sas) and set it."
    return "Get new ones (aws sso login, a new session token) and set them."


def _without_uri(what: str) -> str:
    return "No credentials could be had." if what.endswith("cannot be read.") else what


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _left(seconds: float) -> str:
    if seconds < 0:
        return f"{_rough(-seconds)} ago"
    return f"in {_rough(seconds)}"


def _rough(seconds: float) -> str:
    if seconds < 7200:
        return format_seconds(seconds)
    return f"{seconds / 3600:.0f} hours" if seconds < 172_800 else f"{seconds / 86400:.0f} days"
