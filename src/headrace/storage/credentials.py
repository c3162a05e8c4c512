"""What a store is shown to prove who asks: which kind, where it comes from, until when it is good. Never the secret itself.

Each kind of store describes its own; `describe_credentials` picks. Nothing here sends anything to the store, though a credential chain that has not
been asked yet may ask the service that it gets its answers from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from headrace.storage.store import ObjectStore


@dataclass(frozen=True, slots=True, kw_only=True)
class CredentialSource:
    """What can be said of credentials. No field holds a secret; of a key's public name only the last four characters are kept."""

    kind: str
    """``access key``, ``token``, ``account key`` and the like; empty where nothing is shown."""
    source: str
    """Where they come from, as words that follow "from"; where there are none a clause that says why."""
    identity: str = ""
    """Who that is, as far as it is known without asking: ``access key …MPLE``, an e-mail address, a role."""
    expires_s: float | None = None
    """When they end, in seconds since 1970; None where they do not end, or do not say."""
    renews_itself: bool = False
    """Whether new ones are fetched before these end."""
    trouble: str = ""
    """What is certainly wrong with them, as a sentence; empty where nothing is known to be."""
    mend: str = ""
    """How to mend the trouble."""
    notes: tuple[str, ...] = ()
    """What is odd about them, in sentences."""


@runtime_checkable
class DescribesCredentials(Protocol):
    """A store that says what it shows."""

    def describe_credentials(self, environment: Mapping[str, str]) -> CredentialSource:
        """Return what is shown. ``environment`` is looked at only to say which variable it came from. Raises `AccessDenied` where there is nothing."""


def describe_credentials(store: ObjectStore, environment: Mapping[str, str]) -> CredentialSource:
    """Return what ``store`` shows. Raises `AccessDenied` where it needs credentials and there are none."""
    if store.uri.scheme == "s3":  # Such a store has been opened, so the SDK is there.
        from headrace.storage.s3 import S3Store
        from headrace.storage.s3_credentials import describe_s3_credentials

        if isinstance(store, S3Store):
            return describe_s3_credentials(store, environment)
    if isinstance(store, DescribesCredentials):
        return store.describe_credentials(environment)
    return CredentialSource(kind="", source="the store does not say what it shows")


def last_four(name: str) -> str:
    """Return what may be shown of a key's public name: enough to tell two of them apart, as ``aws configure list`` does."""
    return f"…{name[-4:]}" if len(name) >= 16 else "…"
